"""Invariants of the ledger under any order of events: random histories by Hypothesis.

A history is a shape of ledger and a string of bytes. Two bytes are one move: the first selects one
of the possible moves, the second its argument. Starts, completions, losses, drops, deferrals,
takes, trainings, publishes, saves and kills come in any order. A model apart from the ledger tracks
the version of every token.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_audit import audit, check_ledger, count_complete, ledger_counts

from rollick.rollout.ledger.events import CheckpointMarked, RunRestored
from rollick.rollout.ledger.group_record import GroupState, SampleState
from rollick.rollout.ledger.ledger import Ledger
from rollick.rollout.ledger.log import LogContents, started_since
from rollick.rollout.ledger.staleness import SURPLUS_RULES, StalenessPolicy, StalenessRule
from rollick.testing.fakes import prompt
from rollick.types import PolicyVersion, SampleId

HISTORIES = 1000
"""Number over all rules in the quick tests; the slow tests have ten times as many."""
TRANSITIONS = {
    SampleState.WAITING: "sample_started",
    SampleState.RUNNING: "sample_finished",
    SampleState.SCORING: "sample_scored",
}


@dataclass(frozen=True)
class Shape:
    rule: StalenessRule
    groups: int
    size: int
    spares: int
    staleness: float
    surplus: int
    drops_allowed: int | None


def shapes(rule):
    return st.builds(
        Shape,
        rule=st.just(rule),
        groups=st.integers(1, 3),
        size=st.integers(1, 2),
        spares=st.integers(0, 2),
        staleness=st.sampled_from([0, 0.5, 1, 2, 2.5]),
        surplus=st.integers(0, 2) if rule in SURPLUS_RULES else st.just(0),
        drops_allowed=st.sampled_from([None, 0, 2]),
    )


@dataclass
class LedgerModel:
    """The expected state of the run. A kill sets it back to the checkpoint."""

    version: int
    step: int
    started: int
    ended: dict[int, str]
    first_token: dict[SampleId, int]
    completed: list[int]
    deferred: set[int]


class History:
    def __init__(self, shape):
        self.shape = shape
        self.horizon = ceil(shape.staleness)
        self.events = []
        self.ledger = self.new_ledger()
        self.model = LedgerModel(0, 0, 0, {}, {}, [], set())
        self.batch: list[int] = []
        self.trained_version: int | None = None  # not published yet
        self.prompt_of: dict[int, str] = {}
        self.restarts = 0
        self.saved = (json.dumps(self.ledger.state()), deepcopy(self.model))

    def new_ledger(self):
        shape = self.shape
        return Ledger(
            StalenessPolicy(
                shape.groups, shape.staleness, StalenessRule(shape.rule), shape.surplus
            ),
            shape.size,
            spares=shape.spares,
            drops_allowed=shape.drops_allowed,
            record=self.events.append,
        )

    def play(self, moves):
        for choice, argument in zip(moves[::2], moves[1::2], strict=False):
            possible_moves = self.possible_moves()
            possible_moves[choice % len(possible_moves)](argument)
            self.check()
        self.check_log()
        self.drain()

    def possible_moves(self):
        ledger, idle = self.ledger, not self.batch and self.trained_version is None
        moves = []
        if ledger.may_start():
            moves += [self.start] * 6
        if self.open_groups():
            moves += [self.advance] * 12 + [self.drop]
            moves += [self.defer] if self.shape.rule is not StalenessRule.LONG_ROUNDS else []
        if self.running():
            moves += [self.lose]
        if idle:
            moves += [self.take] * 4
        if self.batch:
            moves += [self.train] * 6
        if self.trained_version is not None:
            moves += [self.publish] * 6
        if ledger.may_restart_deferred():
            moves += [self.resume]
        return [*moves, self.save, self.kill]

    def open_groups(self):
        return [group for group in self.ledger.active_groups() if group.state is GroupState.OPEN]

    def running(self):
        return [
            SampleId(group.uid, index)
            for group in self.open_groups()
            for index, state in enumerate(group.samples)
            if state is SampleState.RUNNING
        ]

    def start(self, argument):
        for _ in range(1 + argument % 8):
            if not self.ledger.may_start():
                break
            name = (
                self.ledger.next_prompt_uid
                or f"restart {self.restarts}, group {self.model.started}"
            )
            uid = self.ledger.start_group(prompt(uid=name), PolicyVersion(self.model.version))
            assert uid == self.model.started, "an id was left out or used again"
            assert self.prompt_of.setdefault(uid, name) == name, "a kill changed a group's prompt"
            self.model.started += 1

    def advance(self, argument):
        groups = self.open_groups()
        finish_group, choice = argument % 2, argument // 2
        group = groups[choice % len(groups)]
        unfinished_uids = group.unfinished()
        order = (
            unfinished_uids[choice % len(unfinished_uids) :]
            + unfinished_uids[: choice % len(unfinished_uids)]
        )
        for uid in order if finish_group else order[:1]:
            while group.samples[uid.index] in TRANSITIONS:
                self.step_sample(group, uid)
                if not finish_group:
                    break
            if group.state is not GroupState.OPEN:
                return

    def step_sample(self, group, uid):
        move = TRANSITIONS[group.samples[uid.index]]
        if move == "sample_started":
            self.model.first_token.setdefault(uid, self.model.version)
        is_full = getattr(self.ledger, move)(uid)
        if not is_full:
            return
        unfinished_uids = group.unfinished()
        assert len(unfinished_uids) == self.shape.spares or group.was_reported
        assert self.ledger.complete(group.uid) == unfinished_uids
        assert not set(self.ledger.group(group.uid).unfinished()) & set(unfinished_uids)
        self.model.completed.append(group.uid)

    def lose(self, argument):
        running = self.running()
        uid = running[argument % len(running)]
        self.ledger.sample_lost(uid)
        assert self.ledger.group(uid.group).samples[uid.index] is SampleState.WAITING

    def drop(self, argument):
        ledger, allowed = self.ledger, self.shape.drops_allowed
        groups = [group for group in ledger.active_groups() if group.state is not GroupState.TAKEN]
        group = groups[argument % len(groups)]
        could_start, drops = ledger.may_start(), ledger.state()["drops_in_step"]
        full = len(ledger.active_groups()) == ledger.policy.slots and not ledger.in_long_round
        unfinished_uids = group.unfinished()
        assert ledger.drop(group.uid, "no_signal") == unfinished_uids
        self.end(group.uid, "no_signal")
        if full:
            refilled = allowed is None or drops < allowed
            assert ledger.may_start() == refilled, "the refill is one for one"
        assert could_start <= (ledger.may_start() or ledger.may_restart_deferred())

    def defer(self, argument):
        groups = self.open_groups()
        group = groups[argument % len(groups)]
        unfinished_uids = group.unfinished()
        assert self.ledger.defer(group.uid) == unfinished_uids
        assert group.state is GroupState.DEFERRED
        self.restart(group)

    def restart(self, group):
        for index in range(len(group.samples)):
            self.model.first_token.pop(SampleId(group.uid, index), None)
        if group.uid in self.model.completed:
            self.model.completed.remove(group.uid)

    def resume(self, argument):
        waiting = [group.uid for group in self.ledger.deferred_groups()]
        version = PolicyVersion(self.model.version)
        resumed = self.ledger.restart_deferred(
            version, is_ready=waiting[: 1 + argument % 2].__contains__
        )
        assert list(resumed) == waiting[: len(resumed)]
        assert resumed
        assert all(self.ledger.group(uid).start_version == version for uid in resumed)

    def take(self, argument):
        ledger, version = self.ledger, PolicyVersion(self.model.version)
        count = 1 if argument % 4 == 0 else None
        active = {group.uid: group for group in ledger.active_groups()}
        unfinished_uids = {uid: group.unfinished() for uid, group in active.items()}
        complete = count_complete(ledger)
        taken = ledger.take(version, count)
        if taken is None:
            may_progress = (
                ledger.may_start()
                or ledger.may_restart_deferred()
                or ledger.awaited_samples(version, count)
            )
            assert may_progress or ledger.exhausted
            if self.shape.rule in (StalenessRule.MASK_STALE_TOKENS, StalenessRule.FIRST_FINISHED):
                assert complete < (count or self.shape.groups), "nothing waits for the old"
            return
        batch = list(taken.uids)
        assert 0 < len(batch) <= self.shape.groups
        assert batch == sorted(batch)
        if len(batch) < (count or self.shape.groups):
            assert self.shape.drops_allowed is not None
            assert complete == len(batch)
        dropped = [uid for uid, _ in taken.removed.dropped]
        removed = [*dropped, *taken.removed.deferred]
        assert taken.removed.unfinished == tuple(
            uid for removed_uid in removed for uid in unfinished_uids[removed_uid]
        )
        self.check_rule(batch, removed, active)
        assert not set(taken.removed.deferred) & self.model.deferred, "a group is deferred once"
        self.model.deferred |= set(taken.removed.deferred)
        for uid in taken.removed.deferred:
            self.restart(active[uid])
        for uid, reason in taken.removed.dropped:
            self.end(uid, reason)
        self.batch = batch

    def check_rule(self, batch, removed, active):
        oldest = self.model.version - self.horizon
        due = {uid for uid, group in active.items() if group.start_version <= oldest}
        if self.shape.rule is StalenessRule.MUST_TAKE:
            assert due <= set(batch)
        if self.shape.rule is StalenessRule.FIRST_FINISHED:
            assert batch == sorted(self.model.completed[: len(batch)])
        if self.shape.rule is StalenessRule.LONG_ROUNDS:
            assert due & self.model.deferred <= set(batch), "a long round is waited for"
            urgent = [uid for uid in self.model.completed if uid in due]
            assert len(urgent) > len(batch) or set(urgent) <= set(batch)
        if self.shape.rule in SURPLUS_RULES:
            assert set(removed) == due - set(batch)
        else:
            assert not removed, "what is stale was dropped when the version was published"
        if self.shape.rule is not StalenessRule.MASK_STALE_TOKENS:
            first_versions = [
                first for uid, first in self.model.first_token.items() if uid.group in batch
            ]
            assert all(first >= oldest for first in first_versions), "a token is too old"

    def train(self, argument):
        self.trained_version = self.model.version + (argument % 4 != 0)
        self.ledger.trained(self.batch, PolicyVersion(self.trained_version))
        for uid in self.batch:
            self.end(uid, "trained")
        self.batch = []

    def publish(self, argument):
        trained_version, self.trained_version = self.trained_version, None
        active = {group.uid: group for group in self.ledger.active_groups()}
        unfinished_uids = {uid: group.unfinished() for uid, group in active.items()}
        removed = self.ledger.published(PolicyVersion(trained_version))
        self.model.version = trained_version
        stale = [
            uid
            for uid, group in active.items()
            if group.start_version < trained_version - self.horizon
        ]
        expected = stale if self.shape.rule is StalenessRule.DROP_STALE else []
        assert removed.dropped == tuple((uid, "stale") for uid in expected)
        assert removed.unfinished == tuple(
            uid for removed_uid in expected for uid in unfinished_uids[removed_uid]
        )
        for uid in expected:
            self.end(uid, "stale")
        assert self.ledger.held_until is None, "with a version, its places open"

    def end(self, uid, outcome):
        assert uid not in self.model.ended, "a group ends once"
        self.model.ended[uid] = outcome
        if uid in self.model.completed:
            self.model.completed.remove(uid)

    def save(self, argument):
        if self.batch or self.trained_version is not None:
            return
        self.model.step += 1
        state = self.ledger.state()
        self.events.append(CheckpointMarked(self.model.step, state["next"]))
        self.saved = (json.dumps(state), deepcopy(self.model))

    def kill(self, argument):
        """Restore the checkpoint; the groups that the log has after it start again."""
        self.check_log()
        state, model = json.loads(self.saved[0]), deepcopy(self.saved[1])
        resumed = started_since(LogContents(tuple(self.events)), model.step)
        after = range(state["next"], len(self.prompt_of))
        assert resumed[-len(after) or len(resumed) :] == tuple(
            (uid, self.prompt_of[uid]) for uid in after
        )
        self.events.append(RunRestored(model.step))
        self.ledger = self.new_ledger()
        self.ledger.restore(state, started=resumed)
        self.ledger.published(PolicyVersion(model.version))
        self.model, self.batch, self.trained_version = model, [], None
        self.restarts += 1
        done = {
            SampleId(group.uid, index)
            for group in self.ledger.active_groups()
            for index, state in enumerate(group.samples)
            if state is SampleState.DONE
        }
        model.first_token = {uid: model.first_token[uid] for uid in done}
        assert ledger_counts(self.ledger).samples.running == 0, "what was in flight waits again"

    def check(self):
        ledger = self.ledger
        check_ledger(ledger)
        counts = ledger_counts(ledger)
        assert counts.groups.submitted == self.model.started
        assert counts.samples.submitted == self.model.started * (
            self.shape.size + self.shape.spares
        )
        trained = sum(outcome == "trained" for outcome in self.model.ended.values())
        assert counts.groups.trained == trained
        assert counts.samples.trained == trained * self.shape.size
        assert counts.groups.dropped == len(self.model.ended) - trained
        assert len(ledger.active_groups()) <= ledger.policy.slots
        if self.shape.rule is not StalenessRule.MASK_STALE_TOKENS and not self.batch:
            starts = [group.start_version for group in ledger.active_groups()]
            assert all(self.model.version - start <= self.horizon for start in starts)

    def check_log(self):
        """Check that the log, and the checkpoint with the later log, give the ledger's counts."""
        log, counts = LogContents(tuple(self.events)), ledger_counts(self.ledger)
        since_checkpoint = audit(log, step=self.saved[1].step, state=json.loads(self.saved[0]))
        for model in (audit(log), since_checkpoint):
            assert model.groups == counts.groups
            assert model.dropped_by_reason == counts.dropped_by_reason
            assert model.dropped_samples == counts.dropped_samples
            assert model.samples.trained == counts.samples.trained
            assert model.samples.waiting == counts.samples.waiting + counts.samples.running

    def drain(self):
        """Check for deadlocks: if all samples end and no group is dropped, three batches follow."""
        batches = 0
        for _ in range(40):
            if self.batch:
                self.train(1)
            if self.trained_version is not None:
                self.publish(0)
            if self.ledger.exhausted:
                self.ledger.reset_drops()
            while self.ledger.may_restart_deferred():
                self.resume(1)
            self.start(7)
            for _ in self.open_groups():
                self.advance(1)
            self.take(1)
            self.check()
            batches += bool(self.batch)
            if batches == 3:
                return
        raise AssertionError("no batch comes any more")


def play_histories(rule, count):
    @settings(max_examples=count, derandomize=True, database=None, deadline=None)
    @given(shape=shapes(rule), moves=st.binary(min_size=60, max_size=200))
    def play(shape, moves):
        History(shape).play(moves)

    play()


@pytest.mark.parametrize("rule", StalenessRule)
def test_the_invariants_hold_in_every_history(rule):
    play_histories(rule, HISTORIES // len(StalenessRule))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", StalenessRule)
def test_the_invariants_hold_in_ten_times_as_many_histories(rule):
    play_histories(rule, 10 * HISTORIES // len(StalenessRule))
