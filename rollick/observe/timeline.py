"""From a trace to a picture: trace events that Perfetto and Chrome's tracing page open.

    rows (trace.py) -> lives (each sample's stretches, in order) -> tracks -> events (JSON)

Pure but for the writing. Tracks are "processes" with "threads" (the format's words):

    trainer      a thread for each phase: generate (waits for a batch), annotate, train, publish …
    samples      a sample has a lane from queued to trained: its whole timeline, stage by stage
    engine N     the same generations, by engine: how full it was, and with whom

On one lane nothing overlaps: a lane is given to the next sample when the one before has ended. A
flow (an arrow) goes from each trained sample to the training step that it was trained in.
Stages: queued (for an engine, then on it), prefill (to the first token) and decode (on an engine;
one stretch, decode, where the engine does not tell them apart), environment, reward, parked (put
off to a long round), waiting (for its group, then for its batch), trained.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from rollick.errors import RollickError
from rollick.observe.trace import read_trace
from rollick.types import SampleId

Event = dict[str, Any]

TRAINER, SAMPLES, ENGINES = 1, 2, 100
"""Process numbers; engine n is ENGINES + n."""

TRAINING = "train"
"""The phase that flows lead to."""

AFTER_A_STEP = frozenset({"validate"})
"""Phases that belong to the step before the one under way."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a sample's life; times in microseconds."""

    stage: str
    begin: int
    end: int
    detail: str = ""
    engine: int | None = None


@dataclass(slots=True)
class Life:
    """All stretches of a sample, in order; `step` is the one that it was trained in."""

    uid: SampleId
    stretches: list[Stretch] = field(default_factory=list[Stretch])
    step: int | None = None

    @property
    def begin(self) -> int:
        return self.stretches[0].begin

    @property
    def end(self) -> int:
        return self.stretches[-1].end


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the controller."""

    name: str
    step: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run's trace, put in order; times in microseconds since its first event."""

    lives: Sequence[Life]
    phases: Sequence[Phase]

    @property
    def trained(self) -> int:
        return sum(life.step is not None for life in self.lives)

    @property
    def seconds(self) -> float:
        ends = [life.end for life in self.lives] + [phase.end for phase in self.phases]
        return max(ends, default=0) / 1e6


@dataclass(frozen=True, slots=True)
class _Batch:
    step: int
    taken: int
    members: Sequence[SampleId]


def stage_of(what: str) -> Stretch:
    """A stretch (without times) for what the rollout says that a sample does."""
    if what == "waiting for an engine":
        return Stretch("queued", 0, 0)
    if what.startswith("queued on engine "):
        return Stretch("queued", 0, 0, detail=what.removeprefix("queued "))
    if what == "being scored":
        return Stretch("reward", 0, 0)
    if what == "parked":
        return Stretch("parked", 0, 0)
    for words, stage in (
        ("generating on engine ", "decode"),
        ("prefilling on engine ", "prefill"),
    ):
        if what.startswith(words):
            return Stretch(stage, 0, 0, engine=int(what.removeprefix(words)))
    return Stretch("environment", 0, 0, detail=what.removeprefix("in "))


def build_timeline(rows: Sequence[Mapping[str, Any]]) -> Timeline:
    """Lives and phases of the rows of a trace (see trace.py)."""
    zero = _first_time(rows)
    lives: dict[SampleId, Life] = {}
    phases: list[Phase] = []
    batches: list[_Batch] = []
    trained: dict[int, int] = {}
    for row in rows:
        at = round(row["zero"] * 1e6) - zero
        for group, index, what, begin, end in row.get("spans", ()):
            uid, kind = SampleId(group, index), stage_of(what)
            stretch = Stretch(kind.stage, begin + at, end + at, kind.detail, kind.engine)
            lives.setdefault(uid, Life(uid)).stretches.append(stretch)
        for step, name, begin, end in row.get("phases", ()):
            phases.append(Phase(name, step, begin + at, end + at))
        for step, when, members in row.get("taken", ()):
            batches.append(_Batch(step, when + at, [SampleId(*member) for member in members]))
        for step, when, _ in row.get("trained", ()):
            trained[step] = when + at
    for life in lives.values():
        life.stretches.sort(key=lambda stretch: (stretch.begin, stretch.end))
    for batch in batches:
        _end_lives(lives, batch, trained.get(batch.step))
    return Timeline(sorted(lives.values(), key=lambda life: (life.begin, life.uid)), phases)


def _first_time(rows: Sequence[Mapping[str, Any]]) -> int:
    """The wall clock's microsecond of the earliest event."""
    first: list[int] = []
    for row in rows:
        times = [span[3] for span in row.get("spans", ())]
        times += [phase[2] for phase in row.get("phases", ())]
        times += [taken[1] for taken in row.get("taken", ())]
        times += [trained[1] for trained in row.get("trained", ())]
        if times:
            first.append(round(row["zero"] * 1e6) + min(times))
    return min(first, default=0)


def _end_lives(lives: Mapping[SampleId, Life], batch: _Batch, trained: int | None) -> None:
    """Add what no sample's own task sees: the waits for group and batch, and the training."""
    groups: defaultdict[int, list[Life]] = defaultdict(list)
    for uid in batch.members:
        if uid in lives:
            groups[uid.group].append(lives[uid])
    for members in groups.values():
        complete = max(life.end for life in members)
        for life in members:
            if complete > life.end:
                life.stretches.append(Stretch("waiting", life.end, complete, "for its group"))
            taken = max(batch.taken, complete)
            life.stretches.append(Stretch("waiting", life.end, taken, "for its batch"))
            if trained is not None:
                life.stretches.append(Stretch("trained", taken, max(trained, taken)))
                life.step = batch.step


def assign_lanes(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """For intervals ordered by their begin: the lowest lane that is free, counted from 1."""
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


def trace_events(timeline: Timeline) -> Iterator[Event]:
    """All events, tracks named first."""
    engines = {s.engine for life in timeline.lives for s in life.stretches if s.engine is not None}
    yield from _name_process(TRAINER, "trainer")
    yield from _name_process(SAMPLES, "samples")
    for engine in sorted(engines):
        yield from _name_process(ENGINES + engine, f"engine {engine}")
    tracks = {name: n for n, name in enumerate(dict.fromkeys(p.name for p in timeline.phases), 1)}
    for name, track in tracks.items():
        yield _named("thread_name", TRAINER, track, name=name)
    for phase in timeline.phases:
        step = phase.step - (phase.name in AFTER_A_STEP)
        about = {"pid": TRAINER, "tid": tracks[phase.name], "args": {"step": step}}
        yield _slice(f"{phase.name} {step}", phase.name, phase.begin, phase.end) | about
    yield from _sample_events(timeline, track=tracks.get(TRAINING, 0))
    yield from _engine_events(timeline)


def _sample_events(timeline: Timeline, *, track: int) -> Iterator[Event]:
    steps = {phase.step: phase for phase in timeline.phases if phase.name == TRAINING}
    lanes = assign_lanes((life.begin, life.end) for life in timeline.lives)
    flow = 0
    for life, lane in zip(timeline.lives, lanes, strict=True):
        place = {"pid": SAMPLES, "tid": lane}
        for stretch in life.stretches:
            yield _slice_of(life, stretch) | place
        phase = steps.get(life.step) if life.step is not None else None
        if phase is not None:
            flow += 1
            said = {"name": f"group {life.uid.group}", "cat": "trained", "id": flow}
            yield {"ph": "s", "ts": life.stretches[-1].begin, **said, **place}
            at = {"ph": "f", "bp": "e", "ts": phase.begin, "pid": TRAINER, "tid": track}
            yield at | said


def _engine_events(timeline: Timeline) -> Iterator[Event]:
    on: defaultdict[int, list[tuple[Stretch, Life]]] = defaultdict(list)
    for life in timeline.lives:
        for stretch in life.stretches:
            if stretch.engine is not None:
                on[stretch.engine].append((stretch, life))
    for engine, runs in sorted(on.items()):
        runs.sort(key=lambda run: (run[0].begin, run[1].uid))
        lanes = assign_lanes((stretch.begin, stretch.end) for stretch, _ in runs)
        for (stretch, life), lane in zip(runs, lanes, strict=True):
            yield _slice_of(life, stretch) | {"pid": ENGINES + engine, "tid": lane}


def _slice_of(life: Life, stretch: Stretch) -> Event:
    event = _slice(f"{stretch.stage} {life.uid}", stretch.stage, stretch.begin, stretch.end)
    about: dict[str, Any] = {"sample": str(life.uid), "group": life.uid.group}
    if stretch.detail:
        about["what"] = stretch.detail
    if stretch.engine is not None:
        about["engine"] = stretch.engine
    if life.step is not None:
        about["step"] = life.step
    return event | {"args": about}


def _slice(name: str, category: str, begin: int, end: int) -> Event:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin}


def _name_process(process: int, name: str) -> Iterator[Event]:
    yield _named("process_name", process, 0, name=name)
    yield _named("process_sort_index", process, 0, sort_index=process)


def _named(kind: str, process: int, thread: int, **said: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": said}


def write_timeline(run: Path, out: Path) -> Timeline:
    """Write a run's trace as trace events; RollickError if it has none."""
    timeline = build_timeline(read_trace(run))
    if not timeline.lives and not timeline.phases:
        raise RollickError(
            f"{run} has no trace", fix="run it with observe.trace_mb above 0 (the default is 64)"
        )
    with out.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(timeline)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    return timeline
