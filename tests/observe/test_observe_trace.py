"""The trace: the spans of every sample, and the timeline that is built from them."""

import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeCodec, FakeEngine

from rollick import LoadedRecipe, RunResult
from rollick.config.schema import RolloutConfig
from rollick.episodes.single_turn import single_turn
from rollick.errors import RollickError
from rollick.observe.metrics import read_metrics
from rollick.observe.sample_stage import (
    BETWEEN_TURNS,
    DEFERRED,
    SCORING,
    WAITING_FOR_ENGINE,
    SampleActivity,
    SampleStage,
    on_engine,
)
from rollick.observe.timeline import (
    ENGINES,
    SAMPLES,
    TRAINER,
    RunTimeline,
    assign_lanes,
    build_timeline,
    stage_span,
    trace_events,
    write_timeline,
)
from rollick.observe.trace import CHUNK, OLDER, TRACE, Trace, read_trace
from rollick.pipelines.checkpoints import PipelineState
from rollick.pipelines.open_run import open_run
from rollick.rollout.deps import RolloutDeps
from rollick.rollout.scheduler import Rollout
from rollick.testing.fakes import prompt
from rollick.types import Sample, SampleId, Sampling, Score

Run = Callable[..., RunResult]


def generating_on(engine: int) -> SampleActivity:
    return on_engine(SampleStage.GENERATING, engine)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def open_trace(folder: Path, *, limit: int = 1_000_000) -> tuple[Trace, Clock]:
    clock = Clock()
    return Trace(folder, clock=clock, limit_bytes=limit, zero=1000.0), clock


def sample_spans(timeline: RunTimeline) -> dict[str, list[tuple[str, str, float, float]]]:
    """The spans of each sample: stage, detail, begin and end in seconds."""
    return {
        str(sample.uid): [(s.stage, s.detail, s.begin / 1e6, s.end / 1e6) for s in sample.spans]
        for sample in timeline.samples
    }


@pytest.fixture
def two_samples(tmp_path: Path) -> Path:
    """The trace of a group of two that is trained in step 1. The second sample ends 2 s later."""
    trace, clock = open_trace(tmp_path)
    for index, seconds in ((0, 1.0), (1, 3.0)):
        uid = SampleId(7, index)
        trace.record_span(uid, WAITING_FOR_ENGINE, 10.0, 11.0)
        trace.record_span(uid, generating_on(4), 11.0, 11.0 + seconds)
        trace.record_span(uid, SCORING, 11.0 + seconds, 11.5 + seconds)
    clock.now = 15.0
    trace.record_batch([SampleId(7, 0), SampleId(7, 1)], step=1)
    trace.record_phase("generate", 10.0, 15.0, step=1)
    trace.record_phase("train", 15.0, 16.0, step=1)
    clock.now = 17.0
    trace.record_training(1, step=1)
    return tmp_path


def test_each_activity_of_a_sample_has_a_stage_in_the_timeline() -> None:
    parts = (SampleStage.QUEUED_ON_ENGINE, SampleStage.PREFILLING, SampleStage.GENERATING)
    search = SampleActivity(SampleStage.IN_ENVIRONMENT, label="tool search")
    engine = [on_engine(stage, 3) for stage in parts]
    activities = [WAITING_FOR_ENGINE, *engine, SCORING, BETWEEN_TURNS, search, DEFERRED]
    stages = [stage_span(activity, 0, 0) for activity in activities]
    assert [s.stage for s in stages] == [
        "queued",
        "queued",
        "prefill",
        "decode",
        "reward",
        "environment",
        "environment",
        "deferred",
    ]
    assert [s.engine for s in stages] == [None, None, 3, 3, None, None, None, None]
    assert stages[-2].detail == "tool search"
    assert stages[1].detail == "on engine 3"


def test_a_sample_waits_for_its_group_then_for_its_batch_and_is_trained(two_samples: Path) -> None:
    timelines = sample_spans(build_timeline(read_trace(two_samples)))
    assert timelines["g7.0"] == [
        ("queued", "", 0, 1),
        ("decode", "", 1, 2),
        ("reward", "", 2, 2.5),
        ("waiting", "for its group", 2.5, 4.5),
        ("waiting", "for its batch", 4.5, 5),
        ("trained", "", 5, 7),
    ]
    assert timelines["g7.1"][3:] == [("waiting", "for its batch", 4.5, 5), ("trained", "", 5, 7)]


def test_the_wait_of_a_batch_that_was_not_trained_ends_with_the_trace(tmp_path: Path) -> None:
    trace, clock = open_trace(tmp_path)
    trace.record_span(SampleId(0, 0), SCORING, 0.0, 1.0)
    clock.now = 2.0
    trace.record_batch([SampleId(0, 0)], step=1)
    trace.flush()
    timeline = build_timeline(read_trace(tmp_path))
    assert sample_spans(timeline) == {
        "g0.0": [("reward", "", 0, 1), ("waiting", "for its batch", 1, 2)],
    }
    assert timeline.num_trained == 0


def test_the_sessions_of_a_run_are_put_on_one_clock(tmp_path: Path) -> None:
    for zero, index in ((1000.0, 0), (1060.0, 1)):
        trace = Trace(tmp_path, clock=Clock(), limit_bytes=10**6, zero=zero)
        trace.record_span(SampleId(0, index), SCORING, 5.0, 6.0)
        trace.flush()
    timelines = sample_spans(build_timeline(read_trace(tmp_path)))
    assert timelines == {"g0.0": [("reward", "", 0, 1)], "g0.1": [("reward", "", 60, 61)]}


def test_the_lowest_lane_that_is_free_is_taken() -> None:
    assert assign_lanes([(0, 4), (1, 2), (2, 3), (2, 9), (4, 5)]) == [1, 2, 2, 3, 1]


def test_disk_and_memory_are_bounded_and_the_newest_is_kept(tmp_path: Path) -> None:
    limit = 40_000
    trace, _ = open_trace(tmp_path, limit=limit)
    for number in range(20 * CHUNK):
        trace.record_span(SampleId(number, 0), WAITING_FOR_ENGINE, number, number + 1.0)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < limit + 60 * CHUNK
    trace.flush()
    kept = [span[0] for row in read_trace(tmp_path) for span in row.get("spans", ())]
    assert kept == list(range(kept[0], 20 * CHUNK))
    assert kept[0] > 0


def test_a_disabled_trace_writes_nothing_and_still_knows_the_last_progress(tmp_path: Path) -> None:
    trace, _ = open_trace(tmp_path, limit=0)
    for number in range(2 * CHUNK):
        trace.record_span(SampleId(number, 0), generating_on(1), 0.0, float(number))
    trace.record_batch([SampleId(0, 0)], step=1)
    trace.record_phase("train", 0.0, 1.0, step=1)
    trace.record_training(1, step=1)
    assert list(tmp_path.iterdir()) == []
    assert trace.last_generation_end[1] == 2 * CHUNK - 1


def test_a_disk_that_refuses_switches_the_trace_off_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace, _ = open_trace(tmp_path / "absent")
    with caplog.at_level(logging.WARNING, "rollick"):
        for number in range(3 * CHUNK):
            trace.record_span(SampleId(number, 0), WAITING_FOR_ENGINE, 0.0, 1.0)
    assert [record.message[:15] for record in caplog.records] == ["tracing stopped"]


def test_a_line_that_a_kill_cut_short_is_left_out(two_samples: Path) -> None:
    complete_rows = read_trace(two_samples)
    with (two_samples / TRACE).open("a") as file:
        file.write('{"step":2,"zero":1000.0,"spans":[[8,0,"wai')
    assert read_trace(two_samples) == complete_rows


def test_rows_of_steps_that_will_be_repeated_are_dropped(tmp_path: Path) -> None:
    trace, _ = open_trace(tmp_path)
    for step in (1, 2, 3):
        trace.record_phase("train", step, step + 0.5, step=step)
        trace.flush()
    (tmp_path / TRACE).rename(tmp_path / OLDER)
    trace.record_phase("train", 4.0, 4.5, step=4)
    trace.flush()
    trace.drop_rows_after(2)
    assert [row["step"] for row in read_trace(tmp_path)] == [1, 2]


def test_the_absence_of_a_trace_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RollickError, match="has no trace"):
        write_timeline(tmp_path, tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []


def test_an_arrow_leads_from_each_sample_to_its_training_step(two_samples: Path) -> None:
    events = list(trace_events(build_timeline(read_trace(two_samples))))
    starts = [event for event in events if event["ph"] == "s"]
    ends = [event for event in events if event["ph"] == "f"]
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == [1, 2]
    [train] = [e for e in events if e["ph"] == "X" and e["name"] == "train 1"]
    for start, end in zip(starts, ends, strict=True):
        [trained_slice] = [e for e in slices_at(events, start) if e["cat"] == "trained"]
        assert trained_slice["args"]["step"] == 1
        assert slices_at(events, end) == [train]


def slices_at(events: list[dict[str, Any]], mark: dict[str, Any]) -> list[dict[str, Any]]:
    """The slices on the track of the mark that contain its time."""
    return [
        event
        for event in events
        if event["ph"] == "X"
        and (event["pid"], event["tid"]) == (mark["pid"], mark["tid"])
        and event["ts"] <= mark["ts"] < event["ts"] + event["dur"]
    ]


def check_format(events: list[dict[str, Any]]) -> None:
    """Check that the events follow the trace event format."""
    lanes: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    process_ids = {e["pid"] for e in events if e["name"] == "process_name"}
    for event in events:
        assert event["ph"] in ("X", "M", "s", "f")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] in process_ids
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lane = lanes[event["pid"], event["tid"]]
            lane.append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        lane.sort()
        pairs = pairwise(lane)
        assert all(end <= begin for (_, end), (begin, _) in pairs)


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_trained_sample_of_a_run_has_its_full_timeline(
    run_toy: Run, tmp_path: Path, staleness: int
) -> None:
    # This reward drops most groups, so the timeline has trained and dropped samples.
    rewards_option = "data.domains.letters.rewards=[rollick.testing.toys:says_letter]"
    options = [f"rollout.max_staleness={staleness}", "devices.generators=cpu:1-2", rewards_option]
    result = run_toy(*options, steps=3)
    timeline = write_timeline(result.folder, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    events = document["traceEvents"]
    check_format(events)
    assert {e["pid"] for e in events} == {TRAINER, SAMPLES, ENGINES, ENGINES + 1}

    trained = [sample for sample in timeline.samples if sample.step is not None]
    assert len(trained) < len(timeline.samples)
    rows = read_metrics(result.folder / "metrics.jsonl")
    for step, row in enumerate(rows, 1):
        assert sum(sample.step == step for sample in trained) == row["rollout/samples"] > 0
    for sample in trained:
        stages = [sample_span.stage for sample_span in sample.spans]
        on_engine = stages[: stages.index("reward")]
        assert on_engine in (
            ["queued", "prefill", "decode"],
            ["queued", "queued", "prefill", "decode"],
        )
        assert stages[-1] == "trained"
        pairs = pairwise(sample.spans)
        assert all(before.end == after.begin for before, after in pairs)
    assert sum(e["ph"] == "s" for e in events) == len(trained)


def test_a_resumed_run_continues_the_same_trace(run_toy: Run) -> None:
    run_toy(name="traced_twice", steps=2)
    result = run_toy(name="traced_twice", steps=4, resume=True)
    timeline = build_timeline(read_trace(result.folder))
    assert sorted({sample.step for sample in timeline.samples if sample.step is not None}) == [
        1,
        2,
        3,
        4,
    ]
    assert [p.step for p in timeline.phases if p.name == "train"] == [1, 2, 3, 4]
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert timeline.num_trained == sum(row["rollout/samples"] for row in rows)


@pytest.mark.parametrize("staleness", [0, 1])
def test_repeated_steps_are_traced_once_and_completely(run_toy: Run, staleness: int) -> None:
    options = [
        f"rollout.max_staleness={staleness}",
        "devices.generators=cpu:1",
        "checkpoint.every=1",
        "checkpoint.keep_last=4",
        "evaluate.every=1",
    ]
    name = f"again{staleness}"
    folder = run_toy(*options, name=name, steps=4).folder
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")
    run_toy(*options, name=name, steps=4, resume=True)
    timeline = build_timeline(read_trace(folder))
    assert [p.step for p in timeline.phases if p.name == "train"] == [1, 2, 3, 4]
    rows = read_metrics(folder / "metrics.jsonl")
    for step, row in enumerate(rows, 1):
        trained = [sample for sample in timeline.samples if sample.step == step]
        assert len(trained) == row["rollout/samples"]
        stages = [[sample_span.stage for sample_span in sample.spans] for sample in trained]
        assert all(
            sample_stages[0] == "queued" and "reward" in sample_stages for sample_stages in stages
        )


async def test_what_a_checkpoint_holds_stays_in_the_trace_when_later_steps_are_forgotten(
    toy: Callable[..., LoadedRecipe],
) -> None:
    async with open_run(toy()) as run:
        run.state.step = 1
        run.telemetry.trace.record_phase("validate", 0.0, 1.0, step=2)
        run.telemetry.trace.record_span(SampleId(5, 0), SCORING, 1.0, 2.0)
        await run.checkpoints.save(PipelineState({}), {})
        run.telemetry.trace.record_span(SampleId(6, 0), SCORING, 3.0, 4.0)
        run.telemetry.trace.flush()
        run.checkpoints.drop_rows_after(1)
        kept = [span[0] for row in read_trace(run.state.folder.path) for span in row["spans"]]
    assert kept == [5]


async def test_a_cancelled_sample_keeps_its_last_span() -> None:
    sample_spans: list[tuple[SampleId, SampleActivity]] = []

    async def score(sample: Sample) -> Score:
        return Score(1.0)

    deps = RolloutDeps(
        config=RolloutConfig(
            groups_per_step=1, group_size=1, spare_samples=1, drop_no_signal=False
        ),
        next_prompt=prompt,
        episode=single_turn(FakeCodec(), Sampling(), seed=0),
        score=score,
        stuck_after_s=5.0,
        record_span=lambda uid, activity, begin, end: sample_spans.append((uid, activity)),
    )
    engine = FakeEngine(seconds=lambda request: inf if request.uid.index else 0.0)
    async with Rollout.open(deps, [engine]) as rollout:
        await rollout.take()
    assert [span_activity for uid, span_activity in sample_spans if uid == (0, 1)] == [
        WAITING_FOR_ENGINE,
        generating_on(0),
    ]


def test_a_run_can_go_without_a_trace(run_toy: Run) -> None:
    result = run_toy("observe.trace_mb=0", steps=1)
    assert not (result.folder / TRACE).exists()
