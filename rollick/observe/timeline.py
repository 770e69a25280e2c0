"""Converts a run's trace to the trace events of Perfetto and Chrome.

Tracks are "processes" with "threads" (the format's terms):

    trainer      a thread for each phase: generate (waits for a batch), annotate, train, publish …
    samples      one lane for each sample from queued to trained, stage by stage
    engine N     the same generations by engine: its load, and which samples

Spans on one lane do not overlap: a lane is reused when its sample has ended. A flow (an arrow)
leads from each trained sample to its training step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from rollick.errors import RollickError, writing_to
from rollick.observe.sample_stage import SampleActivity, SampleStage
from rollick.observe.trace import read_trace
from rollick.types import SampleId

TraceEvent = dict[str, Any]

TRAINER, SAMPLES, ENGINES = 1, 2, 100
"""Process numbers; engine n is ENGINES + n."""

TRAINING = "train"
"""The phase that flows lead to."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One stage of a sample; times in microseconds since the run's first event."""

    stage: str
    begin: int
    end: int
    detail: str = ""
    engine: int | None = None


@dataclass(slots=True)
class SampleTimeline:
    """All spans of a sample, in order; `step` is its training step."""

    uid: SampleId
    spans: list[StageSpan] = field(default_factory=list[StageSpan])
    step: int | None = None

    @property
    def begin(self) -> int:
        return self.spans[0].begin

    @property
    def end(self) -> int:
        return self.spans[-1].end


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    name: str
    step: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RunTimeline:
    samples: Sequence[SampleTimeline]
    phases: Sequence[PhaseSpan]

    @property
    def num_trained(self) -> int:
        return sum(sample.step is not None for sample in self.samples)

    @property
    def seconds(self) -> float:
        ends = [sample.end for sample in self.samples] + [phase.end for phase in self.phases]
        return max(ends, default=0) / 1e6


def stage_span(activity: SampleActivity, begin: int, end: int) -> StageSpan:
    stage, engine, label = activity
    if stage is SampleStage.QUEUED_ON_ENGINE:
        # The engine's track shows what it computes; its queue is shown on the sample's lane only.
        return StageSpan(stage.span, begin, end, detail=f"on engine {engine}")
    detail = stage.text if stage is SampleStage.BETWEEN_TURNS else label
    return StageSpan(stage.span, begin, end, detail, engine)


def build_timeline(rows: Sequence[Mapping[str, Any]]) -> RunTimeline:
    first_us = _first_time(rows)
    samples: dict[SampleId, SampleTimeline] = {}
    phases: list[PhaseSpan] = []
    batches: list[tuple[int, int, list[SampleId]]] = []
    trained_at: dict[int, int] = {}
    for row in rows:
        offset = round(row["zero"] * 1e6) - first_us
        for columns in row.get("spans", ()):
            uid, span = _read_span(columns, offset)
            samples.setdefault(uid, SampleTimeline(uid)).spans.append(span)
        for step, name, begin, end in row.get("phases", ()):
            phases.append(PhaseSpan(name, step, begin + offset, end + offset))
        for step, when, members in row.get("taken", ()):
            batches.append((step, when + offset, [SampleId(*member) for member in members]))
        for step, when, _ in row.get("trained", ()):
            trained_at[step] = when + offset
    for sample in samples.values():
        sample.spans.sort(key=lambda span: (span.begin, span.end))
    for step, when, members in batches:
        batch = [samples[uid] for uid in members if uid in samples]
        _add_final_spans(batch, step=step, taken_at=when, trained_at=trained_at.get(step))
    ordered = sorted(samples.values(), key=lambda sample: (sample.begin, sample.uid))
    return RunTimeline(ordered, phases)


def _read_span(columns: Sequence[Any], offset: int) -> tuple[SampleId, StageSpan]:
    if len(columns) != 7:
        raise RollickError(
            f"trace.jsonl has a span of {len(columns)} columns, {columns}; a span has 7: "
            "[group, sample, stage, engine, label, begin, end]",
            fix="an older version of rollick wrote this trace; repeat the run",
        )
    group, index, stage, engine, label, begin, end = columns
    activity = SampleActivity(SampleStage(stage), engine, label)
    return SampleId(group, index), stage_span(activity, begin + offset, end + offset)


def _first_time(rows: Sequence[Mapping[str, Any]]) -> int:
    """The earliest event, in microseconds of the wall clock."""
    columns = {"spans": -2, "phases": 2, "taken": 1, "trained": 1}
    times = (
        round(row["zero"] * 1e6) + entry[column]
        for row in rows
        for kind, column in columns.items()
        for entry in row.get(kind, ())
    )
    return min(times, default=0)


def _add_final_spans(
    batch: Sequence[SampleTimeline], *, step: int, taken_at: int, trained_at: int | None
) -> None:
    """Add the spans that are known only later: waits for group and batch, and the training."""
    group_ends: dict[int, int] = {}
    for sample in batch:
        group_ends[sample.uid.group] = max(group_ends.get(sample.uid.group, 0), sample.end)
    for sample in batch:
        group_end = group_ends[sample.uid.group]
        if group_end > sample.end:
            sample.spans.append(StageSpan("waiting", sample.end, group_end, "for its group"))
        begin = max(taken_at, group_end)
        sample.spans.append(StageSpan("waiting", sample.end, begin, "for its batch"))
        if trained_at is not None:
            sample.spans.append(StageSpan("trained", begin, max(trained_at, begin)))
            sample.step = step


def assign_lanes(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """The lowest free lane, from 1, for each interval; intervals are ordered by begin."""
    lanes: list[int] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for begin, end in intervals:
        while busy and busy[0][0] <= begin:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy) + 1
        heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def trace_events(timeline: RunTimeline) -> Iterator[TraceEvent]:
    """All events, after the names of the tracks."""
    spans = [span for sample in timeline.samples for span in sample.spans]
    engines = sorted({span.engine for span in spans if span.engine is not None})
    names = {ENGINES + engine: f"engine {engine}" for engine in engines}
    for process, name in {TRAINER: "trainer", SAMPLES: "samples", **names}.items():
        yield _metadata_event("process_name", process, 0, name=name)
        yield _metadata_event("process_sort_index", process, 0, sort_index=process)
    tracks = {name: n for n, name in enumerate(dict.fromkeys(p.name for p in timeline.phases), 1)}
    for name, track in tracks.items():
        yield _metadata_event("thread_name", TRAINER, track, name=name)
    for phase in timeline.phases:
        step = phase.step - (phase.name == "validate")  # It belongs to the step before.
        ids = {"pid": TRAINER, "tid": tracks[phase.name], "args": {"step": step}}
        yield _complete_event(f"{phase.name} {step}", phase.name, phase.begin, phase.end) | ids
    yield from _sample_events(timeline, track=tracks.get(TRAINING, 0))
    yield from _engine_events(timeline)


def _sample_events(timeline: RunTimeline, *, track: int) -> Iterator[TraceEvent]:
    steps = {phase.step: phase for phase in timeline.phases if phase.name == TRAINING}
    lanes = assign_lanes((sample.begin, sample.end) for sample in timeline.samples)
    for flow, (sample, lane) in enumerate(zip(timeline.samples, lanes, strict=True), start=1):
        track_ids = {"pid": SAMPLES, "tid": lane}
        for span in sample.spans:
            yield _span_event(sample, span) | track_ids
        phase = steps.get(sample.step) if sample.step is not None else None
        if phase is not None:
            flow_event = {"name": f"group {sample.uid.group}", "cat": "trained", "id": flow}
            yield {"ph": "s", "ts": sample.spans[-1].begin, **flow_event, **track_ids}
            end = {"ph": "f", "bp": "e", "ts": phase.begin, "pid": TRAINER, "tid": track}
            yield end | flow_event


def _engine_events(timeline: RunTimeline) -> Iterator[TraceEvent]:
    by_engine: defaultdict[int, list[tuple[StageSpan, SampleTimeline]]] = defaultdict(list)
    for sample in timeline.samples:
        for span in sample.spans:
            if span.engine is not None:
                by_engine[span.engine].append((span, sample))
    for engine, spans in sorted(by_engine.items()):
        spans.sort(key=lambda entry: (entry[0].begin, entry[1].uid))
        lanes = assign_lanes((span.begin, span.end) for span, _ in spans)
        for (span, sample), lane in zip(spans, lanes, strict=True):
            yield _span_event(sample, span) | {"pid": ENGINES + engine, "tid": lane}


def _span_event(sample: SampleTimeline, span: StageSpan) -> TraceEvent:
    event = _complete_event(f"{span.stage} {sample.uid}", span.stage, span.begin, span.end)
    optional = {"what": span.detail or None, "engine": span.engine, "step": sample.step}
    arguments = {key: value for key, value in optional.items() if value is not None}
    return event | {"args": {"sample": str(sample.uid), "group": sample.uid.group, **arguments}}


def _complete_event(name: str, category: str, begin: int, end: int) -> TraceEvent:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin}


def _metadata_event(kind: str, process: int, thread: int, **arguments: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}


def write_timeline(run: Path, out: Path) -> RunTimeline:
    """Write a run's trace as trace events. Raises RollickError if it has none."""
    timeline = build_timeline(read_trace(run))
    if not timeline.samples and not timeline.phases:
        raise RollickError(
            f"{run} has no trace", fix="run it with observe.trace_mb above 0 (the default is 64)"
        )
    with writing_to(out), out.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(timeline)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    return timeline
