"""Invariants of the complete rollout on the virtual clock, under random histories by Hypothesis.

A history is a shape (rule, sizes, lengths, failures) and a list of moves: steps, publishes that
move samples, engines that are lost and join, pauses, checkpoints and kills. After each move the
invariants are checked from outside: on the samples that the rollout returns and on its log.
"""

import asyncio
import json
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import pytest
from fakes import step_time
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_audit import audit, check_ledger, effective_events, ledger_counts

from rollick.config.schema import RolloutConfig
from rollick.episodes.single_turn import make_sample
from rollick.errors import NoSignalError
from rollick.rollout.deps import RolloutDeps, SavedRollout
from rollick.rollout.ledger.events import (
    CheckpointMarked,
    GroupDeferred,
    GroupDropped,
    GroupRestarted,
    GroupStarted,
    RunRestored,
)
from rollick.rollout.ledger.log import LogContents, started_since
from rollick.rollout.ledger.staleness import SURPLUS_RULES, StalenessRule
from rollick.rollout.scheduler import Rollout
from rollick.simulator.engine import SimulatedEngine
from rollick.simulator.virtual_clock import run_virtual
from rollick.simulator.workload import Latencies, Lengths, SimulatedReward, log_normal, uniform
from rollick.testing.fakes import prompt
from rollick.types import PolicyVersion, Request, Sampling, frozen_array

HISTORIES = 500
"""Number over all rules in the quick tests; the slow tests have ten times as many. Another 1000
test the ledger alone (test_ledger_invariants.py)."""
MAX_TOKENS = 24
PROMPT = frozen_array([1, 2, 3, 4], np.int32)
SAMPLING = Sampling(max_tokens=MAX_TOKENS)
MOVES = {
    "step": 8,
    "step and move": 2,
    "skip": 1,
    "wait": 3,
    "interrupt": 1,
    "pause": 1,
    "lose": 2,
    "join": 2,
    "save": 3,
    "kill": 1,
    "kill with a batch": 1,
    "kill before the publish": 1,
}


@dataclass(frozen=True)
class Shape:
    rule: StalenessRule
    groups: int
    size: int
    spares: int
    staleness: float
    surplus: int
    drops: float
    drops_allowed: int
    failed: float
    turns: int
    engines: int
    slots: int
    kv_capacity: int
    longest_first: bool
    tail: float
    seed: int
    keeps_cache: bool = False
    """Whether caches are kept at a publish."""

    @property
    def config(self):
        return RolloutConfig(
            groups_per_step=self.groups,
            group_size=self.size,
            max_staleness=self.staleness,
            staleness_rule=self.rule.value,
            surplus_groups=self.surplus,
            spare_samples=self.spares,
            longest_first=self.longest_first,
            max_drops_per_step=self.drops_allowed,
            max_failed_scores=1,
        )


def shapes(rule):
    return st.builds(
        Shape,
        rule=st.just(rule),
        groups=st.integers(1, 3),
        size=st.integers(1, 3),
        spares=st.integers(0, 2),
        staleness=st.sampled_from([0, 0.5, 1, 2, 3]),
        surplus=st.integers(0, 2) if rule in SURPLUS_RULES else st.just(0),
        drops=st.sampled_from([0, 0.2, 0.5]),
        drops_allowed=st.sampled_from([0, 2]),
        failed=st.sampled_from([0, 0.3]),
        turns=st.integers(1, 3),
        engines=st.integers(1, 3),
        slots=st.integers(1, 4),
        kv_capacity=st.sampled_from([0, 128]),
        longest_first=st.booleans(),
        tail=st.sampled_from([1, 4, 20]),
        seed=st.integers(0, 1000),
        keeps_cache=st.booleans(),
    )


def moves():
    names = [name for name, weight in MOVES.items() for _ in range(weight)]
    # Hypothesis favours some numbers of a range. The factor spreads them over all moves.
    name = st.integers(0, 2**16).map(lambda number: names[number * 7919 % len(names)])
    return st.lists(st.tuples(name, st.integers(0, 7)), min_size=4, max_size=12)


class Killed(Exception):
    """The run ends here, as if by a kill -9."""


@dataclass
class RolloutModel:
    """The expected state of the run. A kill sets it back to the checkpoint."""

    version: int
    step: int
    trained: list[int]


class History:
    def __init__(self, shape):
        self.shape = shape
        self.horizon = ceil(shape.staleness)
        self.drops = shape.drops
        self.lengths = Lengths(shape.seed, log_normal(4, shape.tail), MAX_TOKENS)
        self.environment = Latencies(shape.seed, log_normal(0.5, 10))
        rewards = Latencies(shape.seed, log_normal(0.3, 10), "reward")
        self.reward = SimulatedReward(rewards, seed=shape.seed, failed=shape.failed)
        self.events = []
        self.batches = []
        self.model = RolloutModel(0, 0, [])
        self.saved = (None, [], deepcopy(self.model))
        self.prompt_of: dict[int, str] = {}
        self.engines = []
        self.restarts = self.drawn = self.refills_due = 0
        self.is_killed = True
        self.rollout = None
        self.seen = Counter()

    async def play(self, moves):
        """Make all moves; restore the rollout after each kill. Returns events, batches and time."""
        remaining = list(moves)
        while remaining:
            try:
                await self.live(remaining)
            except Killed:
                self.prepare_restart()
        await self.drain()
        return self.events, self.batches, asyncio.get_running_loop().time()

    async def live(self, remaining):
        """Make moves until one of them kills the run."""
        async with self.open_rollout():
            while remaining:
                name, number = remaining.pop(0)
                self.seen[name] += 1
                await getattr(self, name.replace(" ", "_"))(number)
                self.check()

    async def drain(self):
        """Check for deadlocks: if no further group is dropped, three more batches can be taken."""
        self.drops = 0.0
        for _ in range(2):
            try:
                async with self.open_rollout():
                    for _ in range(3):
                        await self.step(1)
                        self.check()
                    return
            except Killed:
                # The step of the checkpoint had reached its drop limit.
                self.prepare_restart()
        raise AssertionError("no batch comes any more")

    def open_rollout(self):
        """Open the rollout from the last checkpoint, until the next kill."""
        state, groups, model = self.saved
        self.model = deepcopy(model)
        self.engines = [self.new_engine() for _ in range(self.shape.engines)]
        started = started_since(LogContents(tuple(self.events)), model.step)
        self.record(RunRestored(model.step))
        return OpenRollout(
            self,
            Rollout.open(
                self.deps(),
                self.engines,
                version=model.version,
                saved=SavedRollout(None if state is None else json.loads(state), groups, started),
            ),
        )

    def deps(self):
        return RolloutDeps(
            config=self.shape.config,
            next_prompt=self.next_prompt,
            episode=self.episode,
            score=self.reward.score,
            stuck_after_s=1000,
            drop_reason=self.find_drop_reason,
            find_prompt=lambda uid: prompt(uid=uid),
            record_event=self.record,
        )

    def new_engine(self):
        return SimulatedEngine(
            step_time(0.1, per_sequence_s=0.01, per_prefill_token_s=0.001),
            lambda request: self.lengths.tokens(request.uid, request.stream),
            slots=self.shape.slots,
            kv_capacity=self.shape.kv_capacity,
            speed=1 + len(self.engines) % 3,
            version=self.model.version,
        )

    def next_prompt(self):
        self.drawn += 1
        return prompt(uid=f"restart {self.restarts}, draw {self.drawn}")

    async def episode(self, uid, sample_prompt, access):
        """Generate the turns, with an environment call between them. The ids of the sample and the
        turn determine its length."""
        drawn = []
        for turn in range(self.shape.turns):
            if turn:
                with access.activity("environment"):
                    await asyncio.sleep(self.environment.seconds(uid, turn))
            before = np.concatenate([PROMPT, *(part.token_ids for part in drawn)], dtype=np.int32)
            request = Request(uid, before, SAMPLING, stream=turn, group=uid.group)
            drawn.append(await access.generate(request))
        joined_completion = replace(
            drawn[-1],
            token_ids=np.concatenate([part.token_ids for part in drawn]),
            logprobs=np.concatenate([part.logprobs for part in drawn]),
            versions=np.concatenate([part.versions for part in drawn]),
            kept_cache=self.check_flags(drawn),
        )
        return make_sample(
            sample_prompt, PROMPT, completion=joined_completion, temperature=1.0, text=""
        )

    def check_flags(self, drawn):
        """Join the kept_cache flags of all turns. A turn starts with a cache of its own version, so
        only tokens of later versions may be flagged."""
        for turn in drawn:
            if turn.kept_cache is not None:
                assert self.shape.keeps_cache
                assert len(turn.kept_cache) == len(turn.versions)
                assert (turn.versions[turn.kept_cache] > turn.versions[0]).all()
        self.seen["flagged"] += any(turn.kept_cache is not None for turn in drawn)
        flags = [
            np.zeros(len(t.token_ids), bool) if t.kept_cache is None else t.kept_cache
            for t in drawn
        ]
        return np.concatenate(flags)

    def find_drop_reason(self, group):
        chance = uniform(self.shape.seed, "drop", group.uid)
        return "no_signal" if chance < self.drops else None

    def record(self, event):
        """Append an event to the log. A killed run records nothing; a restore may start groups.
        Checks that a dropped group is refilled before any other event."""
        if self.is_killed and not isinstance(event, RunRestored | GroupStarted | GroupRestarted):
            return
        self.events.append(event)
        self.seen["dropped as " + event.reason if isinstance(event, GroupDropped) else ""] += 1
        match event:
            case GroupStarted(group, name):
                assert self.prompt_of.setdefault(group, name) == name, "a kill changed a prompt"
                self.refills_due = max(0, self.refills_due - 1)
            case GroupRestarted():
                # A deferred group may restart in the slot of the dropped one.
                self.refills_due = max(0, self.refills_due - 1)
            case GroupDropped(_, "no_signal"):
                ledger = self.rollout.ledger
                allowed = self.shape.config.drops_allowed
                refills = self.rollout.fleet.is_open and not ledger.in_long_round
                self.refills_due += ledger.state()["drops_in_step"] < allowed and refills
            case _:
                assert self.refills_due == 0, "a dropped group was not refilled at once"

    async def step(self, number, *, moves=False, skips=False):
        try:
            groups = await self.take(None if number else 1)
        except NoSignalError:
            await self.give_up()
        new_version = PolicyVersion(self.model.version + (not skips))
        await asyncio.sleep(0.3 * number)
        if moves:
            await self.rollout.interrupt()
            assert self.rollout.fleet.engine_of == {}
        self.rollout.trained(groups, new_version)
        await self.publish(new_version)
        self.model.trained += [group.uid for group in groups]
        if moves:
            self.rollout.resume_admission()

    async def publish(self, version):
        for engine in self.engines:
            await engine.commit_shared(version, keep_cache=self.shape.keeps_cache)
        self.rollout.published(version)
        self.model.version = version

    async def give_up(self):
        """Save and restart, as a pipeline does when no group has a signal."""
        self.rollout.reset_step_counters()
        await self.save(0)
        raise Killed

    async def take(self, count=None):
        groups = await self.rollout.take(count)
        self.batches.append([(group.uid, [s.uid.index for s in group.samples]) for group in groups])
        self.check_batch(groups, count)
        return groups

    async def step_and_move(self, number):
        await self.step(number, moves=True)

    async def skip(self, number):
        await self.step(number, skips=True)

    async def wait(self, number):
        await asyncio.sleep(0.7 * number)

    async def interrupt(self, number):
        await self.rollout.interrupt()
        assert self.rollout.fleet.engine_of == {}
        await asyncio.sleep(0.3 * number)
        self.rollout.resume_admission()

    async def pause(self, number):
        self.rollout.pause_admission()
        before = ledger_counts(self.rollout.ledger).groups.submitted
        await asyncio.sleep(0.3 * number)
        assert ledger_counts(self.rollout.ledger).groups.submitted == before
        self.rollout.resume_admission()

    async def lose(self, number):
        if len(self.engines) > 1:
            lost = self.engines.pop(number % len(self.engines))
            lost.fail_at(asyncio.get_running_loop().time())
            await asyncio.sleep(0)

    async def join(self, number):
        if len(self.engines) < 4:
            engine = self.new_engine()
            self.engines.append(engine)
            self.rollout.fleet.add(engine)

    async def save(self, number):
        self.model.step += 1
        state = self.rollout.state()
        self.events.append(CheckpointMarked(self.model.step, state["ledger"]["next"]))
        self.saved = (json.dumps(state), self.rollout.untrained(), deepcopy(self.model))

    async def kill(self, number):
        await asyncio.sleep(0.7 * number)
        raise Killed

    async def kill_with_a_batch(self, number):
        try:
            await self.take()
        except NoSignalError:
            await self.give_up()
        raise Killed

    async def kill_before_the_publish(self, number):
        try:
            groups = await self.take()
        except NoSignalError:
            await self.give_up()
        self.rollout.trained(groups, PolicyVersion(self.model.version + 1))
        await asyncio.sleep(0.3 * number)
        raise Killed

    def prepare_restart(self):
        self.restarts += 1
        self.refills_due = 0

    def check_batch(self, groups, count):
        """Check that the batch is complete and that no token is too old."""
        shape, version = self.shape, self.model.version
        uids = [group.uid for group in groups]
        assert uids == sorted(set(uids))
        assert not set(uids) & set(self.model.trained), "a group is trained once"
        full = len(groups) >= (count or shape.groups)
        assert full or self.rollout.ledger.held_until is not None, "a batch is whole"
        assert len(groups) <= shape.groups
        for group in groups:
            assert len(group.members) == shape.size
            assert len({s.uid.index for s in group.samples}) == shape.size
            for member in group.members:
                self.check_sample(group, member, oldest=version - self.horizon)
        stats = self.rollout.stats
        assert stats.metrics["rollout/age_max"] <= self.horizon
        self.seen["long groups"] += stats.metrics["rollout/long_groups"]
        assert (
            stats.metrics["rollout/long_groups"] in (0, len(groups))
            or self.horizon
            or self.shape.drops
        )

    def check_sample(self, group, member, *, oldest):
        sample = member.sample
        assert sample.uid.group == group.uid
        turns = range(self.shape.turns)
        expected = sum(self.lengths.tokens(sample.uid, turn) for turn in turns)
        assert sample.response_length == expected, "aborts and losses neither cut nor double"
        versions = sample.versions[len(PROMPT) :]
        assert (np.diff(versions) >= 0).all()
        assert versions.max() <= self.model.version
        trained = sample.versions[sample.loss_mask]
        self.seen["drawn by two versions"] += len(set(versions)) > 1
        self.seen["as old as it may be"] += self.horizon > 0 and oldest in trained
        assert (trained >= oldest).all(), "a token is too old"
        if self.shape.rule is not StalenessRule.MASK_STALE_TOKENS:
            assert len(trained) == (expected if member.score.ok else 0)

    def check(self):
        """Check the conservation law in the ledger and in the log, and that all slots are used."""
        ledger = self.rollout.ledger
        check_ledger(ledger)
        counts = ledger_counts(ledger)
        model = audit(LogContents(tuple(self.events)))
        assert model.groups == counts.groups
        assert model.dropped_samples == counts.dropped_samples
        assert (
            model.samples.trained
            == counts.samples.trained
            == (len(self.model.trained) * self.shape.size)
        )
        assert len(ledger.active_groups()) <= ledger.policy.slots
        assert not (self.rollout.fleet.is_open and ledger.may_start()), "a place is empty"
        if self.shape.rule is StalenessRule.LONG_ROUNDS:
            self.check_rounds(counts)
        unfinished_uids = sorted(
            uid for live in ledger.active_groups() for uid in live.unfinished()
        )
        assert sorted(self.rollout._samples.activities(unfinished_uids)) == unfinished_uids
        assert (
            set(self.rollout.fleet.engine_of) <= set(unfinished_uids) | self.find_leaving_samples()
        )

    def check_rounds(self, counts):
        """Check that late groups are deferred once, not dropped, and restart when they can."""
        ledger, samples = self.rollout.ledger, self.rollout._samples
        assert set(counts.dropped_by_reason) <= {"no_signal"}
        events = effective_events(LogContents(tuple(self.events)))
        defer_counts = Counter(event.group for event in events if isinstance(event, GroupDeferred))
        assert set(defer_counts.values()) <= {1}
        deferred = ledger.deferred_groups()
        if self.rollout.fleet.is_open and ledger.may_restart_deferred():
            assert not samples.has_stopped(deferred[0].uid), "a long round is not begun"
        assert len(deferred) < self.shape.groups or ledger.in_long_round

    def find_leaving_samples(self):
        """Cancelled or deferred samples that are still on their engine."""
        names = {task.get_name() for task in asyncio.all_tasks() if task.cancelling()}
        has_stopped = self.rollout._samples.has_stopped
        engine_numbers = self.rollout.fleet.engine_of
        return {uid for uid in engine_numbers if str(uid) in names or not has_stopped(uid.group)}


class OpenRollout:
    """The context of a rollout between two kills. Its exit stops the recording of events."""

    def __init__(self, history, rollout):
        self.history = history
        self.rollout_context = rollout

    async def __aenter__(self):
        history = self.history
        history.rollout = await self.rollout_context.__aenter__()
        history.is_killed = False
        history.check()

    async def __aexit__(self, *error):
        history = self.history
        history.is_killed = True
        await self.rollout_context.__aexit__(*error)
        assert history.rollout.fleet.engine_of == {}
        assert asyncio.all_tasks() == {asyncio.current_task()}


def play(shape, moves):
    """Run a history on the virtual clock. Returns its result and counts of what occurred in it."""
    history = History(shape)
    return run_virtual(history.play(moves)), history.seen


def draw_histories(rule, count, run):
    hypothesis_settings = settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
    )
    hypothesis_settings(given(shape=shapes(rule), moves=moves())(run))()


def play_histories(rule, count):
    """Run `count` histories and check that every move and situation occurred in one of them."""
    seen = Counter()
    draw_histories(rule, count, lambda shape, moves: seen.update(play(shape, moves)[1]))
    expected = {*MOVES, "drawn by two versions", "as old as it may be", "dropped as no_signal"}
    expected |= {"flagged"}
    reasons = {
        StalenessRule.DROP_STALE: "dropped as stale",
        StalenessRule.FIRST_FINISHED: "dropped as surplus",
    }
    expected |= {reasons[rule]} if rule in reasons else set()
    expected |= {"long groups"} if rule is StalenessRule.LONG_ROUNDS else set()
    assert expected - {name for name, times in seen.items() if times} == set()


@pytest.mark.parametrize("rule", StalenessRule)
def test_a_rollout_keeps_its_invariants_in_every_history(rule):
    play_histories(rule, HISTORIES // len(StalenessRule))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rule", StalenessRule)
def test_a_rollout_keeps_its_invariants_in_ten_times_as_many_histories(rule):
    play_histories(rule, 10 * HISTORIES // len(StalenessRule))


def test_a_rollout_that_restarts_a_deferred_group_when_it_opens_keeps_its_invariants():
    shape = Shape(
        rule=StalenessRule.LONG_ROUNDS,
        groups=1,
        size=1,
        spares=0,
        staleness=0.5,
        surplus=1,
        drops=0,
        drops_allowed=0,
        failed=0,
        turns=1,
        engines=1,
        slots=1,
        kv_capacity=0,
        longest_first=False,
        tail=1,
        seed=0,
    )
    play(shape, [("step", 0), ("step", 0), ("save", 0), ("step", 0)])


@pytest.mark.parametrize("rule", StalenessRule)
def test_the_same_history_twice_is_identical(rule):
    def run(shape, moves):
        assert play(shape, moves) == play(shape, moves)

    draw_histories(rule, HISTORIES // 40, run)


def test_without_staleness_the_batches_are_those_of_a_plain_synchronous_loop():
    """Compares ids and their order. Some groups are dropped and refilled, some samples are slow."""
    shape = Shape(
        rule=StalenessRule.MUST_TAKE,
        groups=4,
        size=3,
        spares=0,
        staleness=0,
        surplus=0,
        drops=0.4,
        drops_allowed=0,
        failed=0.1,
        turns=2,
        engines=3,
        slots=2,
        kv_capacity=0,
        longest_first=True,
        tail=20,
        seed=7,
    )
    history = History(shape)
    steps = [("step", number % 3 + 1) for number in range(20)]
    _, batches, _ = run_virtual(history.play(steps))

    sync_batches, uid = [], 0
    for _ in range(20):
        batch = []
        while len(batch) < shape.groups:
            if uniform(shape.seed, "drop", uid) >= shape.drops:
                batch.append((uid, [*range(shape.size)]))
            uid += 1
        sync_batches.append(batch)
    assert batches[:20] == sync_batches
    assert history.seen["dropped as no_signal"] > 20
    assert history.seen["drawn by two versions"] == 0
