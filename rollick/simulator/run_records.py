"""The records of a run that a calibration reads: engine steps and phases.

Owns the lines of engine_steps.jsonl (observe.engine_steps), which the RL pipeline writes. A line
holds a training step:

    {"step", "engines": [[engine, the fields of a StepRecord]],
     "answers": [[group, sample, seconds on the engine]],
     "samples": [[group, sample, prompt tokens, sampled tokens]], "train": [seconds, fixed seconds]}
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollick.errors import DataError
from rollick.observe.row_file import read_rows
from rollick.roles.reports import EngineRecord, TrainReport
from rollick.run_folder import ENGINE_STEPS
from rollick.types import Group, StepRecord

WARMUP_STEPS = 2
"""Training steps at the beginning that are ignored: they allocate memory, compile and tune."""

Row = Mapping[str, Any]


def record_row(
    step: int,
    groups: Sequence[Group],
    *,
    train: TrainReport | None,
    engines: Sequence[EngineRecord],
) -> dict[str, Any]:
    """A training step as a line of engine_steps.jsonl."""
    steps = [(number, record) for number, engine in enumerate(engines) for record in engine.steps]
    answers = [answer for engine in engines for answer in engine.answers]
    samples = [sample for group in groups for sample in group.samples]
    return {
        "step": step,
        "engines": [[number, *astuple(record)] for number, record in steps],
        "answers": [[*uid, round(seconds, 6)] for uid, seconds in answers],
        "samples": [[*s.uid, s.length - s.response_length, s.response_length] for s in samples],
        "train": [train.seconds, train.optimizer_seconds] if train else None,
    }


def read_training_rows(run: Path) -> dict[int, Row]:
    """The lines of engine_steps.jsonl by step, without steps that did not train."""
    path = run / ENGINE_STEPS
    if not path.exists():
        fix = "run with observe.engine_steps=true"
        raise DataError(f"{run} has no record of its engines' steps", fix=fix)
    return {row["step"]: row for row in read_rows(path) if row["train"] and row["samples"]}


def parse_engine_steps(rows: Sequence[Row], run: Path) -> list[StepRecord]:
    steps = [StepRecord(*step) for row in rows for _, *step in row["engines"]]
    if not steps:
        fix = "calibrate on a run with infer.engine=native"
        raise DataError(f"the engines of {run} recorded no steps", fix=fix)
    return steps


@dataclass(frozen=True, slots=True)
class StepPhases:
    """The phases of a training step, in seconds of the wall clock."""

    step: int
    started: float
    """When the wait for its batch began."""
    ready: float
    """When its batch was complete, and training began."""
    trained: float
    """When training ended, and the publish began."""
    published: float
    """When the publish ended."""
    rest_s: float
    """Seconds from then until the next step, without validation."""

    @property
    def train_s(self) -> float:
        return self.trained - self.ready

    @property
    def publish_s(self) -> float:
        return self.published - self.trained

    @property
    def step_s(self) -> float:
        return self.published - self.started + self.rest_s

    def publish_overlap(self, step: StepRecord) -> float:
        """Seconds of an engine's step inside the publish phase."""
        return min(step.at + step.seconds, self.published) - max(step.at, self.trained)


def parse_step_phases(trace: Sequence[Row], rows: Mapping[int, Row]) -> list[StepPhases]:
    """The steps after the warm-up whose phases are all in the trace, with the next step's first."""
    phases: defaultdict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
    for line in trace:
        for step, name, begin, end in line.get("phases", ()):
            phases[step][name] = (begin / 1e6 + line["zero"], end / 1e6 + line["zero"])
    steps: list[StepPhases] = []
    for step, next_step in pairwise(sorted(phases)):
        spans, next_spans = phases[step], phases[next_step]
        is_complete = {"generate", "train", "publish"} <= spans.keys() and next_step == step + 1
        is_complete = is_complete and "generate" in next_spans
        if step <= WARMUP_STEPS or step not in rows or not is_complete:
            continue
        (started, ready), (trained, published) = spans["generate"], spans["publish"]
        # The trace has the validation of a step in the phases of the next one.
        validation = next_spans.get("validate", (0.0, 0.0))
        rest_s = next_spans["generate"][0] - published - (validation[1] - validation[0])
        steps.append(StepPhases(step, started, ready, trained, published, max(0.0, rest_s)))
    if not steps:
        message = f"none of {len(rows)} recorded steps is complete after the first {WARMUP_STEPS}"
        raise DataError(message, fix=f"calibrate on a run of {WARMUP_STEPS + 2} steps or more")
    return steps


def training_share(record: StepRecord, steps: Sequence[StepPhases]) -> float | None:
    """Share of an engine's step in which the learner trained; None in a publish or if unknown."""
    index = bisect(steps, record.at, key=lambda step: step.started) - 1
    if index < 0:
        return None
    step, end = steps[index], record.at + record.seconds
    if end > step.trained:
        return None
    return max(0.0, end - max(step.ready, record.at)) / record.seconds
