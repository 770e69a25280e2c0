"""Long rounds and kept caches in complete runs: groups are accounted for, tokens are flagged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ledger_audit import audit

from rollick.config.load import LoadedRecipe
from rollick.observe.metrics import read_metrics
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import open_rl
from rollick.pipelines.state import RunResult
from rollick.rollout.ledger.events import BatchTrained, GroupDeferred, GroupRestarted
from rollick.rollout.ledger.log import read_log

Toy = Callable[..., LoadedRecipe]
RunToy = Callable[..., RunResult]

LONG_ROUNDS = (
    "rollout.staleness_rule=long_rounds",
    "rollout.surplus_groups=2",
    "rollout.drop_no_signal=false",
    "sampling.max_tokens=12",
)


def test_deferred_groups_are_trained_on_and_those_left_at_the_end_are_warned_about(
    run_toy: RunToy, caplog: pytest.LogCaptureFixture
) -> None:
    result = run_toy(*LONG_ROUNDS, name="rounds", steps=4)
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert [row["rollout/deferred"] for row in rows] == [2, 2, 0, 2]
    assert [row["rollout/long_groups"] for row in rows] == [0, 0, 4, 0]
    assert rows[-1]["rollout/deferred_waiting"] == 2
    assert sum(row["rollout/deferred_tokens"] for row in rows) > 0
    assert "rollout/long_length" in rows[2]
    assert "rollout/other_length" not in rows[2], "there were no others"
    assert "2 groups were deferred to a long round and are not trained on" in caplog.text
    resumed = run_toy(*LONG_ROUNDS, name="rounds", steps=6, resume=True)
    events = read_log(resumed.folder / "ledger.jsonl")
    counts = audit(events)
    assert (counts.groups.trained, counts.groups.dropped) == (24, 0)
    deferred = [event.group for event in events.events if isinstance(event, GroupDeferred)]
    assert len(deferred) == len(set(deferred))
    restarted = {event.group for event in events.events if isinstance(event, GroupRestarted)}
    trained = {
        g for event in events.events if isinstance(event, BatchTrained) for g in event.groups
    }
    assert restarted <= trained


async def test_tokens_over_a_kept_cache_are_flagged_from_engine_to_batch(toy: Toy) -> None:
    loaded = toy(
        "rollout.max_staleness=2",
        "rollout.at_publish=keep",
        "rollout.drop_no_signal=false",
        "devices.generators=cpu:1",
        "sampling.max_tokens=48",
        "infer.slots=4",
        steps=9,
    )
    flagged = 0
    async with open_run(loaded) as run, open_rl(run) as pipeline:
        for _ in range(6):
            report = await pipeline.step()
            samples = [sample for group in report.groups for sample in group.samples]
            kept_tokens = sum(sample.kept_cache_tokens for sample in samples)
            assert pipeline.measure(report)["rollout/kept_cache_tokens"] == kept_tokens
            flagged += kept_tokens
            for sample in samples:
                if sample.kept_cache is not None:
                    oldest = sample.versions[sample.versions >= 0].min()
                    assert (sample.versions[sample.kept_cache] > oldest).all()
    assert flagged > 0


def test_by_default_nothing_is_flagged(run_toy: RunToy) -> None:
    result = run_toy("rollout.max_staleness=1", steps=2)
    assert result.metrics["rollout/kept_cache_tokens"] == 0
