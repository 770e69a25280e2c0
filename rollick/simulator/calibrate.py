"""Calibration: from a recorded run to a scenario with the run's lengths and times.

    engine_steps.jsonl  the engines' steps, lengths, training   -+
    trace.jsonl         phases, rewards, calls to the engines   -+-> Calibration -> Scenario
    metrics.jsonl       groups without signal, failed scores    -+

The recipe gives batch, staleness and devices; the run gives lengths and times. Its samples must
have one turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from rollick.config.devices import parse_devices
from rollick.config.load import load_recipe
from rollick.config.schema import Recipe
from rollick.errors import DataError
from rollick.observe.metrics import read_metrics
from rollick.observe.timeline import RunTimeline, build_timeline
from rollick.observe.trace import read_trace
from rollick.simulator.run import simulate
from rollick.simulator.run_records import (
    Row,
    StepPhases,
    parse_engine_steps,
    parse_step_phases,
    read_training_rows,
    training_share,
)
from rollick.simulator.scenario import (
    DeviceConfig,
    LatencyConfig,
    LengthConfig,
    Scenario,
    WorkConfig,
    build_scenario,
    recipe_scenario,
)
from rollick.simulator.step_time import (
    StepTimeFit,
    TrainRecord,
    TrainTimeFit,
    estimate_prompt_share,
    fit_step_time,
    fit_train_time,
)
from rollick.types import SampleId, StepRecord

MAX_LATENCIES = 1000
"""Maximum recorded latencies in a scenario; of more, evenly spaced quantiles are taken."""

MIN_STEPS_TO_COMPARE = 50
"""Engine steps needed of each kind, with and without a training learner, to compare them."""

CONTENTION_FITS = 6
"""Iterations of the contention's fit; it then has converged to 1 %."""

CHECK_STEPS = 30
"""Simulated steps of the comparison with the run itself."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The lengths and times of a run."""

    run: Path
    recipe: Recipe
    steps: int
    """Number of training steps used."""
    step_s: float
    """Measured seconds of a step."""
    engine: StepTimeFit
    """Step time while the learner does not train."""
    train: TrainTimeFit
    """Training time while no engine computes."""
    devices: DeviceConfig
    """Only the values measured in the run: mean times of its steps, and the contention."""
    work: WorkConfig
    """Only the values measured in the run."""

    def apply(self, scenario: Scenario) -> Scenario:
        sections = {"work": self.work, "devices": self.devices}
        values = {name: config.model_dump(exclude_unset=True) for name, config in sections.items()}
        return build_scenario(values, origin=str(self.run), base=scenario)

    def simulate_run(self) -> float:
        """Simulated seconds of a step of the run's own recipe: shows the error of the fit."""
        scenario = self.apply(recipe_scenario(self.recipe))
        return simulate(scenario.change(steps=CHECK_STEPS)).step_s

    def describe(self) -> list[tuple[str, str]]:
        step_time, simulated_s = self.engine.step_time, self.simulate_run()
        work, devices, train = self.work, self.devices, self.train
        lengths = work.lengths.trace
        return [
            ("calibrated on", f"{self.run}: {self.steps} steps of {self.step_s:.4g} s"),
            ("  simulated", f"steps of {simulated_s:.4g} s, {simulated_s / self.step_s - 1:+.1%}"),
            (
                "  engine step",
                f"{step_time.base_s:.3g} s + {step_time.per_sequence_s:.3g} per sequence + "
                f"{step_time.per_kv_token_s:.3g} per cached token; prefill "
                f"{step_time.prefill_base_s:.3g} s + {step_time.per_prefill_token_s:.3g} per token"
                f"; {_format_errors(self.engine)} over {self.engine.records} steps",
            ),
            (
                "  training",
                f"{train.base_s:.3g} s + {train.token_s:.3g} per token; {_format_errors(train)}",
            ),
            (
                "  other times",
                f"publish {devices.transfer_s + devices.publish_s:.3g} s, of which engines pause "
                f"{devices.publish_s:.3g} s; controller {devices.controller_s:.3g} s, "
                f"call {devices.call_s:.3g} s, reward {fmean(work.reward.trace):.3g} s; steps take "
                f"{devices.contention:.3g}x as long while engines and learner both compute",
            ),
            (
                "  responses",
                f"{fmean(lengths):.4g} tokens, at most {max(lengths)}; "
                f"{work.lengths.prompt_share:.0%} of the variance is between prompts",
            ),
        ]


def _format_errors(fit: StepTimeFit | TrainTimeFit) -> str:
    return f"mean error {fit.mean_error:.1%}, worst {fit.worst_error:.1%}"


def calibrate_run(run: Path) -> Calibration:
    """Read a run's records and fit them. Raises DataError if the run lacks any of them."""
    if not (run / "recipe.yaml").is_file():
        raise DataError(f"{run} is not a run's folder", fix="give a folder with recipe.yaml")
    recipe = load_recipe(run / "recipe.yaml", check=False).recipe
    rows = read_training_rows(run)
    trace = read_trace(run)
    if not trace:
        raise DataError(f"{run} has no trace", fix="run with observe.trace_mb=64")
    phases = parse_step_phases(trace, rows)
    timeline = build_timeline(trace)
    if any(span.stage == "environment" for sample in timeline.samples for span in sample.spans):
        message = f"the samples of {run} have several turns, which a calibration cannot model"
        raise DataError(message, fix="describe the work in a file and pass it with --load")
    used_rows = [rows[step.step] for step in phases]
    steps = parse_engine_steps(used_rows, run)
    contention = _fit_contention(steps, phases)
    engine = fit_step_time(_remove_contention(steps, phases, contention), keep_total=True)
    train = fit_train_time(_make_train_records(phases, rows, steps, contention=contention))
    pause_s = _estimate_pause_s(steps, phases, engine)
    devices = DeviceConfig(
        step_time=engine.step_time,
        train_base_s=train.base_s,
        train_token_s=train.token_s * len(parse_devices(recipe.devices.policy)),
        transfer_s=max(0.0, fmean(step.publish_s for step in phases) - pause_s),
        publish_s=pause_s,
        controller_s=median(step.rest_s for step in phases),
        call_s=_measure_call_s(timeline, used_rows),
        contention=contention,
    )
    return Calibration(
        run=run,
        recipe=recipe,
        steps=len(phases),
        step_s=fmean(step.step_s for step in phases),
        engine=engine,
        train=train,
        devices=devices,
        work=_measure_work(used_rows, timeline, read_metrics(run / "metrics.jsonl")),
    )


def _measure_work(
    rows: Sequence[Row], timeline: RunTimeline, metrics: Sequence[Mapping[str, float]]
) -> WorkConfig:
    samples: list[Sequence[int]] = [sample for row in rows for sample in row["samples"]]
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for group, _, _, sampled in samples:
        groups[group].append(sampled)
    no_signal = sum(row.get("rollout/dropped/no_signal", 0.0) for row in metrics)
    trained = sum(row.get("rollout/groups", 0.0) for row in metrics)
    lengths = tuple(max(1, sampled) for _, _, _, sampled in samples)
    prompt_share = estimate_prompt_share(list(groups.values()))
    return WorkConfig(
        lengths=LengthConfig(trace=lengths, prompt_share=prompt_share),
        prompt_tokens=round(fmean(prompt for _, _, prompt, _ in samples)),
        reward=LatencyConfig(trace=_measure_reward_s(timeline)),
        flat=no_signal / (no_signal + trained) if no_signal else 0.0,
        failed_scores=fmean(row.get("rollout/failed_scores", 0.0) for row in metrics),
    )


def _fit_contention(steps: Sequence[StepRecord], phases: Sequence[StepPhases]) -> float:
    """How many times longer an engine's step takes while the learner trains; 1 if unknown.

    Steps with and without training also differ in their work. So the measured time of each kind is
    divided by the prediction of a fit of all steps. The fit is repeated with the new contention."""
    shares = [(step, training_share(step, phases)) for step in steps]
    while_training = [step for step, share in shares if share is not None and share > 0.99]
    alone = [step for step, share in shares if share is not None and share < 0.01]
    contention = 1.0
    if min(len(while_training), len(alone)) < MIN_STEPS_TO_COMPARE:
        return contention
    for _ in range(CONTENTION_FITS):
        corrected = _remove_contention(steps, phases, contention)
        fitted = fit_step_time(corrected, keep_total=True).step_time
        ratio_training, ratio_alone = (
            sum(step.seconds for step in compared) / sum(map(fitted.predict, compared))
            for compared in (while_training, alone)
        )
        contention = max(1.0, ratio_training / ratio_alone)
    return contention


def _remove_contention(
    steps: Sequence[StepRecord], phases: Sequence[StepPhases], contention: float
) -> list[StepRecord]:
    """The steps as if the learner had not trained at the same time."""
    shares = [(step, training_share(step, phases) or 0.0) for step in steps]
    extra = contention - 1
    return [replace(step, seconds=step.seconds / (1 + extra * share)) for step, share in shares]


def _estimate_pause_s(
    steps: Sequence[StepRecord], phases: Sequence[StepPhases], fit: StepTimeFit
) -> float:
    """Mean time that an engine pauses during a publish: the publish time minus the predicted time
    of the engine's steps, over publishes with a busy engine. The full publish time if there is
    none."""
    pauses_s: list[float] = []
    predict = fit.step_time.predict
    for phase in phases:
        during = [s for s in steps if s.at < phase.published and s.at + s.seconds > phase.trained]
        num_busy = sum(step.at <= phase.trained for step in during)
        if num_busy:
            busy_s = sum(predict(s) * phase.publish_overlap(s) / s.seconds for s in during)
            pauses_s.append(max(0.0, phase.publish_s - busy_s / num_busy))
    return fmean(pauses_s) if pauses_s else fmean(phase.publish_s for phase in phases)


def _make_train_records(
    phases: Sequence[StepPhases],
    rows: Mapping[int, Row],
    steps: Sequence[StepRecord],
    *,
    contention: float,
) -> list[TrainRecord]:
    """Training times without contention, which slows the learner as much as the engines."""
    records: list[TrainRecord] = []
    for phase in phases:
        row = rows[phase.step]
        tokens = sum(prompt + sampled for _, _, prompt, sampled in row["samples"])
        overlaps = (min(phase.trained, s.at + s.seconds) - max(phase.ready, s.at) for s in steps)
        busy_s = sum(max(0.0, seconds) for seconds in overlaps)
        slowdown = 1 + (contention - 1) * min(1.0, busy_s / phase.train_s)
        fixed_s = min(row["train"][1], phase.train_s)
        records.append(TrainRecord(tokens, phase.train_s / slowdown, fixed_s / slowdown))
    return records


def _measure_call_s(timeline: RunTimeline, rows: Sequence[Row]) -> float:
    """Mean overhead of a call: a sample's engine time as the controller measures it, minus the
    engine's own measurement."""
    on_engine: defaultdict[SampleId, float] = defaultdict(float)
    for row in rows:
        for group, index, seconds in row["answers"]:
            on_engine[SampleId(group, index)] += seconds
    overheads_s: list[float] = []
    for sample in timeline.samples:
        measured = sum(span.end - span.begin for span in sample.spans if span.engine is not None)
        # A validation sample may have the same id. It is skipped if its time is too short to match.
        if 0 < on_engine.get(sample.uid, 0.0) <= measured / 1e6:
            overheads_s.append(measured / 1e6 - on_engine[sample.uid])
    return fmean(overheads_s) if overheads_s else 0.0


def _measure_reward_s(timeline: RunTimeline) -> tuple[float, ...]:
    """Seconds in the rewards; if there are more than MAX_LATENCIES, their quantiles."""
    spans = (span for sample in timeline.samples for span in sample.spans)
    seconds = sorted((span.end - span.begin) / 1e6 for span in spans if span.stage == "reward")
    if len(seconds) <= MAX_LATENCIES:
        return tuple(seconds) or (0.0,)
    count = len(seconds)
    return tuple(seconds[int((n + 0.5) / MAX_LATENCIES * count)] for n in range(MAX_LATENCIES))
