"""Laws of the ledger under any order of events (Hypothesis)."""

import json
from math import ceil

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollick.rollout.ledger import GroupState, Ledger, SampleState
from rollick.testing.fakes import prompt
from rollick.types import PolicyVersion, SampleId

NEXT = {
    SampleState.WAITING: "sample_started",
    SampleState.RUNNING: "sample_finished",
    SampleState.SCORING: "sample_scored",
}


class LedgerMachine(RuleBasedStateMachine):
    """Starts, runs, drops, takes, trains, skips and restores in any order."""

    @initialize(
        groups=st.integers(1, 3),
        size=st.integers(1, 2),
        staleness=st.sampled_from([0, 0.5, 1, 2, 2.5]),
        drops_allowed=st.sampled_from([None, 0, 2]),
    )
    def begin(self, groups, size, staleness, drops_allowed):
        self.shape = (groups, size, staleness)
        self.drops_allowed = drops_allowed
        self.ledger = Ledger(*self.shape, drops_allowed=drops_allowed)
        self.horizon = ceil(staleness)
        self.version = 0
        self.batch: list[int] = []
        self.seen: set[int] = set()
        self.ended: set[int] = set()

    def open_groups(self):
        return [group for group in self.ledger.live() if group.state is GroupState.OPEN]

    @rule()
    def start(self):
        while self.ledger.may_start():
            uid = self.ledger.start_group(prompt(), PolicyVersion(self.version))
            assert uid not in self.seen
            self.seen.add(uid)

    @precondition(lambda self: self.open_groups())
    @rule(data=st.data(), whole=st.booleans())
    def advance(self, data, whole):
        group = data.draw(st.sampled_from(self.open_groups()))
        todo = [n for n, state in enumerate(group.samples) if state in NEXT]
        for index in todo if whole else todo[:1]:
            while group.samples[index] in NEXT:
                move = getattr(self.ledger, NEXT[group.samples[index]])
                move(SampleId(group.uid, index))
                if not whole:
                    break
        if group.done == len(group.samples):
            self.ledger.complete(group.uid)

    @precondition(lambda self: self.open_groups())
    @rule(data=st.data())
    def drop(self, data):
        group = data.draw(st.sampled_from(self.open_groups()))
        could_start, drops = self.ledger.may_start(), self.ledger.drops_in_step
        self.ledger.drop(group.uid, "no_signal")
        self.ended.add(group.uid)
        if not could_start and not self.ledger.held_until:
            refilled = self.drops_allowed is None or drops < self.drops_allowed
            assert self.ledger.may_start() == refilled

    @precondition(lambda self: not self.batch)
    @rule()
    def take(self):
        version = PolicyVersion(self.version)
        live = {group.uid: group for group in self.ledger.live()}
        batch = self.ledger.take(version)
        if batch is None:
            waits = self.ledger.waits_for(version)
            assert waits or self.ledger.may_start() or self.ledger.held_until or not live
            return
        assert len(batch) <= self.shape[0], "a batch is never larger than a step"
        must = {u for u, group in live.items() if group.started <= self.version - self.horizon}
        assert must <= set(batch)
        assert all(self.version - live[uid].started <= self.horizon for uid in batch)
        assert batch == sorted(batch)
        assert not self.ended & set(batch)
        self.batch = batch

    @precondition(lambda self: self.batch)
    @rule(skipped=st.booleans())
    def train(self, skipped):
        self.version += not skipped
        self.ledger.trained(self.batch, PolicyVersion(self.version))
        self.ended |= set(self.batch)
        self.batch = []
        self.ledger.published(PolicyVersion(self.version))

    @precondition(lambda self: not self.batch)
    @rule()
    def kill_and_restore(self):
        restored = Ledger(*self.shape, drops_allowed=self.drops_allowed)
        restored.restore(json.loads(json.dumps(self.ledger.state())))
        restored.published(PolicyVersion(self.version))
        assert [g.uid for g in restored.live()] == [g.uid for g in self.ledger.live()]
        assert restored.complete_groups == self.ledger.complete_groups
        self.ledger = restored

    @invariant()
    def nothing_is_lost(self):
        self.ledger.check()
        counts = self.ledger.counts().groups
        assert counts.submitted == len(self.seen)
        assert counts.trained + counts.dropped == len(self.ended)

    @invariant()
    def the_budget_holds(self):
        assert len(self.ledger.live()) <= self.shape[0] * (1 + self.horizon)
        assert len(self.ledger.live()) <= self.ledger.places

    @invariant()
    def no_live_group_is_older_than_the_bound(self):
        if not self.batch:
            starts = [group.started for group in self.ledger.live()]
            assert all(self.version - start <= self.horizon for start in starts)


LedgerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_the_laws_hold_under_any_order_of_events = LedgerMachine.TestCase
