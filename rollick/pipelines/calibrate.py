"""From a recorded run to a scenario: what a simulation of other runs learns from this one.

    engine_steps.jsonl  the engines' steps, lengths, training   -+
    trace.jsonl         phases, rewards, the way to an engine   -+-> Calibration -> Scenario
    metrics.jsonl       groups without signal, failed scores    -+

Owns the lines of engine_steps.jsonl (observe.engine_steps), written by the RL pipeline and read
here. A recipe says batch, staleness and devices; the run says how long things take. The fits
themselves are in rollout/workload.py. Only runs of single turns can be calibrated on.

A line holds a training step:

    {"step", "engines": [[engine, the fields of a StepRecord]],
     "answers": [[group, sample, seconds on the engine]],
     "samples": [[group, sample, prompt tokens, drawn tokens]], "train": [seconds, fixed seconds]}
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rollick.config.devices import parse_devices
from rollick.config.load import load_recipe
from rollick.config.scenario import Scenario, scenario_of, scenario_of_recipe
from rollick.config.schema import Recipe
from rollick.errors import DataError
from rollick.observe.metrics import read_metrics
from rollick.observe.timeline import Timeline, build_timeline
from rollick.observe.trace import read_trace
from rollick.pipelines.folder import ENGINE_STEPS
from rollick.rollout.simulate import simulate
from rollick.rollout.workload import (
    Fit,
    TrainFit,
    TrainRecord,
    estimate_group_share,
    fit_step_time,
    fit_train_time,
)
from rollick.types import Group, SampleId, StepRecord
from rollick.workers.generator import EngineRecord
from rollick.workers.learner import TrainReport

WARMUP_STEPS = 2
"""Training steps at the beginning of a run that are left out: memory is got, kernels are chosen."""

LATENCIES = 1000
"""Recorded latencies that a scenario gets; of more, evenly spaced quantiles."""

STEPS_TO_COMPARE = 50
"""Engine steps that there must be with and without a learner at work to compare them."""

FITS = 6
"""Fits of the engine's steps until their contention is known to a per cent."""

CHECK_STEPS = 30
"""Simulated steps when the run itself is predicted."""

Row = Mapping[str, Any]


def record_row(
    step: int,
    groups: Sequence[Group],
    *,
    train: TrainReport | None,
    engines: Sequence[EngineRecord],
) -> dict[str, Any]:
    """A training step as a line of engine_steps.jsonl."""
    return {
        "step": step,
        "engines": [
            [number, *astuple(step)]
            for number, record in enumerate(engines)
            for step in record.steps
        ],
        "answers": [
            [uid.group, uid.index, round(seconds, 6)]
            for record in engines
            for uid, seconds in record.answers
        ],
        "samples": [
            [s.uid.group, s.uid.index, s.length - s.response_length, s.response_length]
            for group in groups
            for s in group.samples
        ],
        "train": [train.seconds, train.optimizer_seconds] if train else None,
    }


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a run says of the time that things take. Seconds are means over its steps."""

    run: Path
    recipe: Recipe
    steps: int
    """Training steps that it stands on."""
    step_s: float
    """As measured."""
    engine: Fit
    """While the learner does not train."""
    train: TrainFit
    """While no engine computes."""
    publish_s: float
    held_s: float
    """Of that, what an engine loses of its time."""
    controller_s: float
    """From the end of a publish until the next batch is waited for."""
    call_s: float
    """A request's and its answer's way."""
    contention: float
    """How many times longer an engine's step takes while the learner trains."""
    rewards_s: tuple[float, ...]
    lengths: tuple[int, ...]
    group_share: float
    prompt_tokens: int
    flat: float
    failed_scores: float

    def apply(self, scenario: Scenario) -> Scenario:
        """The scenario with this run's lengths and times."""
        trainers = len(parse_devices(self.recipe.devices.policy))
        said = {
            "work": {
                "lengths": {"trace": self.lengths, "prompt_share": self.group_share},
                "prompt_tokens": self.prompt_tokens,
                "reward": {"trace": self.rewards_s},
                "flat": self.flat,
                "failed_scores": self.failed_scores,
            },
            "devices": {
                "step_time": asdict(self.engine.step_time),
                "train_base_s": self.train.base_s,
                "train_token_s": self.train.token_s * trainers,
                "transfer_s": self.publish_s - self.held_s,
                "publish_s": self.held_s,
                "controller_s": self.controller_s,
                "call_s": self.call_s,
                "contention": self.contention,
            },
        }
        return scenario_of(said, origin=str(self.run), base=scenario)

    def simulate_itself(self) -> float:
        """Seconds of a step of the run's own recipe, simulated: what the fit alone gets wrong."""
        scenario = self.apply(scenario_of_recipe(self.recipe))
        return simulate(scenario.change(steps=CHECK_STEPS)).step_s

    def describe(self) -> list[tuple[str, str]]:
        """For people: what was found, and how well it fits."""
        time, found = self.engine.step_time, self.simulate_itself()
        lengths = f"{fmean(self.lengths):.4g} tokens, at most {max(self.lengths)}"
        return [
            ("calibrated on", f"{self.run}: {self.steps} steps of {self.step_s:.4g} s"),
            ("  itself", f"{found:.4g} s simulated, {found / self.step_s - 1:+.1%}"),
            (
                "  engine step",
                f"{time.base_s:.3g} s + {time.per_sequence_s:.3g} a sequence + "
                f"{time.per_kv_token_s:.3g} a cached token, a prefill {time.prefill_base_s:.3g} + "
                f"{time.per_prefill_token_s:.3g} a token; {_errors(self.engine)} of "
                f"{self.engine.records} steps",
            ),
            (
                "  training",
                f"{self.train.base_s:.3g} s + {self.train.token_s:.3g} a token; "
                f"{_errors(self.train)}",
            ),
            (
                "  besides",
                f"publish {self.publish_s:.3g} s, of which an engine loses {self.held_s:.3g}, "
                f"controller {self.controller_s:.3g}, "
                f"a call {self.call_s:.3g}, a reward {fmean(self.rewards_s):.3g}; "
                f"engine and learner at once: {self.contention:.3g} times as long",
            ),
            ("  answers", f"{lengths}; {self.group_share:.0%} of the spread is the prompt's"),
        ]


def _errors(fit: Fit | TrainFit) -> str:
    return f"off by {fit.mean_error:.1%} in the mean, {fit.worst_error:.1%} at worst"


def calibrate_run(run: Path) -> Calibration:
    """Read a run's records and fit them; says which option a run without records lacks."""
    if not (run / "recipe.yaml").is_file():
        raise DataError(f"{run} is not a run's folder", fix="give a folder with recipe.yaml")
    recipe = load_recipe(run / "recipe.yaml", check=False).recipe
    rows = _read_rows(run)
    trace = read_trace(run)
    if not trace:
        raise DataError(f"{run} has no trace", fix="run with observe.trace_mb=64")
    times = _step_times(trace, rows)
    timeline = build_timeline(trace)
    _refuse_turns(timeline, run)
    used = [rows[time.step] for time in times]
    samples = [sample for row in used for sample in row["samples"]]
    steps = _engine_steps(used, run)
    contention = _contention(steps, times)
    engine = fit_step_time(_alone(steps, times, contention=contention), keep_total=True)
    metrics = read_metrics(run / "metrics.jsonl")
    return Calibration(
        run=run,
        recipe=recipe,
        steps=len(times),
        step_s=fmean(time.step_s for time in times),
        engine=engine,
        train=fit_train_time(_train_records(times, rows, steps, contention=contention)),
        publish_s=fmean(time.publish_s for time in times),
        held_s=_held_s(steps, times, engine),
        controller_s=median(time.rest_s for time in times),
        call_s=_call_s(timeline, used),
        contention=contention,
        rewards_s=_reward_times(timeline),
        lengths=tuple(max(1, drawn) for _, _, _, drawn in samples),
        group_share=estimate_group_share(_by_group(samples)),
        prompt_tokens=round(fmean(prompt for _, _, prompt, _ in samples)),
        flat=_flat(metrics),
        failed_scores=fmean(row.get("rollout/failed_scores", 0.0) for row in metrics),
    )


def _read_rows(run: Path) -> dict[int, Row]:
    """The lines of engine_steps.jsonl by step; those without training are left out."""
    path = run / ENGINE_STEPS
    if not path.exists():
        raise DataError(
            f"{run} has no record of its engines' steps",
            fix="make a run with observe.engine_steps=true",
        )
    rows: list[dict[str, Any]] = [dict(row) for row in read_metrics(path)]
    return {row["step"]: row for row in rows if row["train"] and row["samples"]}


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """When a step's parts began, in the wall clock's seconds."""

    step: int
    begun: float
    """It waits for its batch."""
    taken: float
    """From the batch to the new weights, with all that is computed for it."""
    trained: float
    published: float
    rest_s: float
    """After that, until the next step; without a validation."""

    @property
    def train_s(self) -> float:
        return self.trained - self.taken

    @property
    def publish_s(self) -> float:
        return self.published - self.trained

    @property
    def step_s(self) -> float:
        return self.published - self.begun + self.rest_s


def _step_times(trace: Sequence[Row], rows: Mapping[int, Row]) -> list[_StepTimes]:
    """The steps after the warm-up that are in the trace from their batch to the next one's."""
    phases: defaultdict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
    for line in trace:
        for step, name, begin, end in line.get("phases", ()):
            phases[step][name] = (begin / 1e6 + line["zero"], end / 1e6 + line["zero"])
    found: list[_StepTimes] = []
    for step, after in pairwise(sorted(phases)):
        parts, following = phases[step], phases[after]
        whole = {"generate", "train", "publish"} <= parts.keys() and after == step + 1
        if step <= WARMUP_STEPS or step not in rows or not whole or "generate" not in following:
            continue
        (begun, taken), (trained, published) = parts["generate"], parts["publish"]
        # A validation belongs to the step before the one that its phase is counted to.
        validated = following.get("validate", (0.0, 0.0))
        rest = following["generate"][0] - published - (validated[1] - validated[0])
        found.append(_StepTimes(step, begun, taken, trained, published, max(0.0, rest)))
    if not found:
        raise DataError(
            f"there are records of {len(rows)} steps, none whole after the first {WARMUP_STEPS}",
            fix=f"calibrate on a run of {WARMUP_STEPS + 2} steps or more",
        )
    return found


def _contention(steps: Sequence[StepRecord], times: Sequence[_StepTimes]) -> float:
    """How many times longer an engine's step takes while the learner trains. 1 where steps with or
    without that are hardly there.

    What a step has to do differs between the phases, too. So each kind is compared with what the
    fit of all says of it, and the fit is made anew without what was found, until it is the same.
    """
    shares = [_training_share(step, times) for step in steps]
    kinds = {
        trains: [
            step
            for step, share in zip(steps, shares, strict=True)
            if share is not None and (share > 0.99 if trains else share < 0.01)
        ]
        for trains in (True, False)
    }
    if min(map(len, kinds.values())) < STEPS_TO_COMPARE:
        return 1.0
    found = 1.0
    for _ in range(FITS):
        fitted = fit_step_time(_alone(steps, times, contention=found), keep_total=True).step_time
        took = {
            trains: sum(step.seconds for step in kind) / sum(map(fitted.of, kind))
            for trains, kind in kinds.items()
        }
        found = max(1.0, took[True] / took[False])
    return found


def _held_s(steps: Sequence[StepRecord], times: Sequence[_StepTimes], engine: Fit) -> float:
    """How much of a publish an engine loses, in the mean of those that find one at work: its time,
    less what its steps in there would have taken elsewhere. All of it where none was at work."""
    lost: list[float] = []
    for time in times:
        inside = [s for s in steps if s.at < time.published and s.at + s.seconds > time.trained]
        at_work = sum(step.at <= time.trained for step in inside)
        if at_work:
            worked = sum(engine.step_time.of(s) * _overlap(s, time) / s.seconds for s in inside)
            lost.append(max(0.0, time.publish_s - worked / at_work))
    return fmean(lost) if lost else fmean(time.publish_s for time in times)


def _overlap(step: StepRecord, time: _StepTimes) -> float:
    """Seconds of an engine's step inside a publish."""
    return min(step.at + step.seconds, time.published) - max(step.at, time.trained)


def _training_share(record: StepRecord, times: Sequence[_StepTimes]) -> float | None:
    """The part of an engine's step in which the learner trained; None while it published, and
    where it is not known."""
    place = bisect(times, record.at, key=lambda time: time.begun) - 1
    if place < 0:
        return None
    time, end = times[place], record.at + record.seconds
    if end > time.trained:
        return None
    return max(0.0, end - max(time.taken, record.at)) / record.seconds


def _alone(
    steps: Sequence[StepRecord], times: Sequence[_StepTimes], *, contention: float
) -> list[StepRecord]:
    """The steps as if the learner had not trained meanwhile."""
    shares = [_training_share(step, times) or 0.0 for step in steps]
    return [
        replace(step, seconds=step.seconds / (1 + (contention - 1) * share))
        for step, share in zip(steps, shares, strict=True)
    ]


def _train_records(
    times: Sequence[_StepTimes],
    rows: Mapping[int, Row],
    steps: Sequence[StepRecord],
    *,
    contention: float,
) -> list[TrainRecord]:
    """Training steps as if no engine had computed meanwhile: the learner is taken to lose as much
    as the engines do."""
    records: list[TrainRecord] = []
    for time in times:
        row = rows[time.step]
        tokens = sum(prompt + drawn for _, _, prompt, drawn in row["samples"])
        busy_s = sum(
            max(0.0, min(time.trained, s.at + s.seconds) - max(time.taken, s.at)) for s in steps
        )
        slowdown = 1 + (contention - 1) * min(1.0, busy_s / time.train_s)
        fixed_s = min(row["train"][1], time.train_s)
        records.append(TrainRecord(tokens, time.train_s / slowdown, fixed_s / slowdown))
    return records


def _refuse_turns(timeline: Timeline, run: Path) -> None:
    if any(part.stage == "environment" for life in timeline.lives for part in life.stretches):
        raise DataError(
            f"the samples of {run} have several turns, which no calibration knows",
            fix="describe its work in a file and give it with --load",
        )


def _engine_steps(rows: Sequence[Row], run: Path) -> list[StepRecord]:
    steps = [StepRecord(*step) for row in rows for _, *step in row["engines"]]
    if not steps:
        raise DataError(
            f"the engines of {run} told of no steps",
            fix="calibrate on a run with infer.engine=native",
        )
    return steps


def _call_s(timeline: Timeline, rows: Sequence[Row]) -> float:
    """A sample's time with its engine as the controller sees it, less what the engine says."""
    on_engine: defaultdict[SampleId, float] = defaultdict(float)
    for row in rows:
        for group, index, seconds in row["answers"]:
            on_engine[SampleId(group, index)] += seconds
    ways: list[float] = []
    for life in timeline.lives:
        seen = sum(part.end - part.begin for part in life.stretches if part.engine is not None)
        # Samples of a validation have ids like others; those cannot be told apart.
        if 0 < on_engine.get(life.uid, 0.0) <= seen / 1e6:
            ways.append(seen / 1e6 - on_engine[life.uid])
    return fmean(ways) if ways else 0.0


def _reward_times(timeline: Timeline) -> tuple[float, ...]:
    """Seconds with the rewards; of many, quantiles."""
    seconds = sorted(
        (part.end - part.begin) / 1e6
        for life in timeline.lives
        for part in life.stretches
        if part.stage == "reward"
    )
    if len(seconds) <= LATENCIES:
        return tuple(seconds) or (0.0,)
    return tuple(seconds[int((n + 0.5) / LATENCIES * len(seconds))] for n in range(LATENCIES))


def _by_group(samples: Sequence[Sequence[int]]) -> list[list[int]]:
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for group, _, _, drawn in samples:
        groups[group].append(drawn)
    return list(groups.values())


def _flat(metrics: Sequence[Mapping[str, float]]) -> float:
    """Share of the groups without signal."""
    flat = sum(row.get("rollout/dropped/no_signal", 0.0) for row in metrics)
    trained = sum(row.get("rollout/groups", 0.0) for row in metrics)
    return flat / (flat + trained) if flat else 0.0
