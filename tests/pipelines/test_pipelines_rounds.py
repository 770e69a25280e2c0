"""Long rounds and kept caches in real runs: every group is accounted for, every flag arrives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollick.config.load import LoadedRecipe
from rollick.observe.metrics import read_metrics
from rollick.pipelines.base import RunResult, open_session
from rollick.pipelines.rlvr import open_pipeline
from rollick.rollout.events import Parked, Trained, Unparked
from rollick.rollout.log import audit, read_log

Toy = Callable[..., LoadedRecipe]
RunToy = Callable[..., RunResult]

LONG_ROUNDS = (
    "rollout.staleness_rule=long_rounds",
    "rollout.surplus_groups=2",
    "rollout.drop_no_signal=false",
    "sampling.max_tokens=12",
)


def test_what_is_parked_is_trained_on_and_what_is_left_at_the_end_is_told(
    run_toy: RunToy, caplog: pytest.LogCaptureFixture
) -> None:
    result = run_toy(*LONG_ROUNDS, name="rounds", steps=4)
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert [row["rollout/deferred"] for row in rows] == [2, 2, 0, 2]
    assert [row["rollout/long_groups"] for row in rows] == [0, 0, 4, 0]
    assert rows[-1]["rollout/parked"] == 2
    assert sum(row["rollout/deferred_tokens"] for row in rows) > 0
    assert "rollout/long_length" in rows[2]
    assert "rollout/other_length" not in rows[2], "there were no others"
    assert "2 groups were put off to a long round and are not trained on" in caplog.text
    resumed = run_toy(*LONG_ROUNDS, name="rounds", steps=6, resume=True)
    events = read_log(resumed.folder / "ledger.jsonl")
    counts = audit(events)
    assert (counts.groups.trained, counts.groups.dropped) == (24, 0)
    parked = [event.group for event in events.events if isinstance(event, Parked)]
    assert len(parked) == len(set(parked))
    again = {event.group for event in events.events if isinstance(event, Unparked)}
    trained = {g for event in events.events if isinstance(event, Trained) for g in event.groups}
    assert again <= trained


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
    async with open_session(loaded) as session, open_pipeline(session) as pipeline:
        for _ in range(6):
            report = await pipeline.step()
            samples = [sample for group in report.groups for sample in group.samples]
            kept = sum(sample.kept_cache_tokens for sample in samples)
            assert pipeline.measure(report)["rollout/kept_cache_tokens"] == kept
            flagged += kept
            for sample in samples:
                if sample.kept_cache is not None:
                    assert (sample.versions[sample.kept_cache] > sample.oldest_version).all()
    assert flagged > 0


def test_by_default_nothing_is_flagged(run_toy: RunToy) -> None:
    result = run_toy("rollout.max_staleness=1", steps=2)
    assert result.metrics["rollout/kept_cache_tokens"] == 0
