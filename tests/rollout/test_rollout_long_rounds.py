"""Long rounds: late groups are deferred, restarted together and trained on."""

import asyncio
import json
from collections import Counter

import pytest
from fakes import FakeCodec, step_time
from ledger_audit import check_ledger, ledger_counts

from rollick.config.schema import RolloutConfig
from rollick.episodes.single_turn import single_turn
from rollick.observe.sample_stage import DEFERRED
from rollick.rollout.deps import RolloutDeps, SavedRollout
from rollick.rollout.in_flight import CLOSE_TIMEOUT_S
from rollick.rollout.scheduler import Rollout
from rollick.simulator.engine import SimulatedEngine
from rollick.simulator.run import simulate
from rollick.simulator.scenario import Scenario
from rollick.simulator.virtual_clock import run_virtual
from rollick.testing.fakes import prompt
from rollick.types import PolicyVersion, SampleId, Sampling, Score

LONG = 40
SHORT = 4
STEP = step_time(1.0)
"""Every step takes a second, so each sample gets one token per second."""


class Run:
    """A run with two groups of two samples a step and one surplus group. The first samples of
    groups 1 and 3 are long."""

    def __init__(self, **settings):
        sizes = {"groups_per_step": 2, "group_size": 2, "surplus_groups": 1}
        self.config = RolloutConfig(
            **sizes | {"staleness_rule": "long_rounds", "drop_no_signal": False} | settings
        )
        self.engine = self.new_engine()
        self.events, self.spans, self.reported = [], [], Counter()
        self.streams = Counter()
        self.started = 0

    def new_engine(self):
        return SimulatedEngine(STEP, self.length, slots=64)

    def length(self, request):
        self.streams[request.uid, request.stream] += 1
        return LONG if request.uid in ((1, 0), (3, 0)) else SHORT

    def open(self, *, version=0, saved=None, find_prompt=None):
        deps = RolloutDeps(
            config=self.config,
            next_prompt=self.next_prompt,
            episode=single_turn(FakeCodec(), Sampling(max_tokens=100), seed=1),
            score=self.score,
            stuck_after_s=1000,
            on_group_scored=lambda group: self.reported.update([group.uid]),
            record_event=self.events.append,
            record_span=lambda *span: self.spans.append(span),
            find_prompt=find_prompt,
        )
        return Rollout.open(deps, [self.engine], version=version, saved=saved)

    def next_prompt(self):
        self.started += 1
        return prompt(uid=f"toy/{self.started}")

    async def score(self, sample):
        return Score(float(sample.uid.index))

    async def step(self, rollout):
        groups = await rollout.take()
        version = PolicyVersion(rollout.version + 1)
        rollout.trained(groups, version)
        await self.engine.commit_shared(version)
        rollout.published(version)
        check_ledger(rollout.ledger)
        return [group.uid for group in groups], rollout.stats, groups


def now():
    return asyncio.get_running_loop().time()


def test_late_groups_are_trained_on_in_a_round_of_their_own_with_fresh_tokens():
    async def main():
        run = Run()
        async with run.open() as rollout:
            uids, stats, _ = await run.step(rollout)
            assert (uids, now()) == ([0, 2], 4), "nobody waits for group 1"
            assert (
                stats.metrics["rollout/deferred"],
                stats.metrics["rollout/deferred_waiting"],
                stats.metrics["rollout/long_groups"],
            ) == (1, 1, 0)
            assert stats.metrics["rollout/deferred_tokens"] == SHORT + 4, (
                "one sample had ended, one had four tokens"
            )
            uids, stats, _ = await run.step(rollout)
            assert (uids, stats.metrics["rollout/deferred_waiting"]) == ([4, 5], 2)
            uids, stats, groups = await run.step(rollout)
            assert (uids, now()) == ([1, 3], 8 + LONG), "the long round waits for all"
            assert (
                stats.metrics["rollout/long_groups"],
                stats.metrics["rollout/deferred_waiting"],
                stats.metrics["rollout/deferred"],
            ) == (2, 0, 0)
            assert stats.metrics["rollout/long_length"] == (LONG + SHORT) / 2
            token_versions = {
                v for group in groups for s in group.samples for v in s.versions[s.loss_mask]
            }
            assert token_versions == {2}
            assert (await run.step(rollout))[0] == [6, 7]
        assert set(run.reported.values()) == {1}
        return run

    run = run_virtual(main())
    deferred = [
        (uid, end - begin) for uid, activity, begin, end in run.spans if activity is DEFERRED
    ]
    assert deferred == [((1, 0), 4.0), ((3, 0), 0.0)], "both rounds were over at second 8"
    request_counts = {uid: count for (uid, _), count in run.streams.items()}
    assert request_counts[SampleId(1, 0)] == 2, "the same sample draws with the same random numbers"


def test_with_staleness_a_step_does_not_wait_for_deferred_groups():
    async def main():
        run = Run(max_staleness=1)
        trained = []
        async with run.open() as rollout:
            for _ in range(12):
                uids, stats, _ = await run.step(rollout)
                trained += uids
                assert stats.metrics["rollout/age_max"] <= 1
        counts = ledger_counts(rollout.ledger)
        assert len(trained) == len(set(trained)) == 24
        assert counts.groups.dropped == 0
        assert {1, 3} <= set(trained)

    run_virtual(main())


def test_a_resumed_run_continues_with_deferred_groups():
    async def main():
        run = Run()
        async with run.open() as rollout:
            for _ in range(2):
                await run.step(rollout)
            state, groups = json.loads(json.dumps(rollout.state())), rollout.untrained()
        assert [group["uid"] for group in state["ledger"]["groups"]] == [1, 3]
        run.engine = run.new_engine()
        await run.engine.commit_shared(PolicyVersion(2))
        async with run.open(version=2, saved=SavedRollout(state, groups)) as rollout:
            uids, stats, _ = await run.step(rollout)
            assert (uids, stats.metrics["rollout/long_groups"]) == ([1, 3], 2)
            assert (await run.step(rollout))[0] == [6, 7]

    run_virtual(main())


def test_an_engine_that_ignores_an_abort_delays_a_batch_by_seconds_only():
    async def main():
        run = Run()
        asyncio.get_running_loop().call_at(3.5, run.engine.slow_down, 1e6)
        async with run.open() as rollout:
            await asyncio.sleep(6)
            begun = now()
            assert [group.uid for group in await rollout.take()] == [0, 2]
            assert now() == begun + CLOSE_TIMEOUT_S
            await asyncio.sleep(0)
            assert rollout.fleet.engine_of == {}
            assert rollout._samples.stopping == 0

    run_virtual(main())


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_prompt_is_trained_on_where_first_finished_drops_the_long_ones(staleness):
    scenario = Scenario(steps=40, warmup_steps=0).change(
        rollout={"groups_per_step": 8, "group_size": 4, "max_staleness": staleness},
        work={"lengths": {"median": 50, "tail": 20, "max_tokens": 2000}},
        devices={"generators": 2, "trainers": 2, "slots": 64, "train_token_s": 1e-5},
    )

    def run(rule, surplus):
        rollout = {"staleness_rule": rule, "surplus_groups": surplus}
        return simulate(scenario.change(rollout=rollout))

    first_finished, long_rounds = run("first_finished", 4), run("long_rounds", 4)
    assert not long_rounds.dropped
    assert long_rounds.deferred >= 8 > long_rounds.deferred_waiting
    assert first_finished.length_bias < 2 * long_rounds.length_bias - 0.02
    assert long_rounds.age_max <= staleness
    if not staleness:
        assert long_rounds.step_s < run("must_take", 0).step_s
