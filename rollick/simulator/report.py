"""The report of a simulated run: step time, utilisation, causes of idle time, bias.

The trainer's idle time is attributed to the sample that it waited for last: to the stages of that
sample (generating, in an environment, being scored) while the trainer waited. The engines' idle
time is their empty slots, by the trainer's phase:

    generate   the batch is not complete, and nothing may start: the tail of a step
    train      groups may start only when the next version is published: the staleness budget
    publish    engines pause while weights change
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import pairwise
from operator import sub
from typing import Any, Literal, TypeVar

from rollick.observe.sample_stage import SampleActivity, SampleStage
from rollick.rollout.stats import RolloutStats
from rollick.simulator.batching import EngineUsage
from rollick.simulator.scenario import Scenario
from rollick.simulator.workload import SampleWork
from rollick.types import SampleId

TrainerPhase = Literal["generate", "train", "publish", "done"]

_PhaseBegin = tuple[float, TrainerPhase]

TIMELINE_POINTS = 800

_Name = TypeVar("_Name", bound=str)
_Span = tuple[SampleId, SampleActivity, float, float]
"""A sample's activity, its begin and its end."""


@dataclass(frozen=True, slots=True)
class PhaseSnapshot:
    """The run's totals when a phase begins. `done` ends a step and lists its trained samples."""

    phase: TrainerPhase
    at_s: float
    usage: EngineUsage
    trainer_busy_s: float
    trained: tuple[SampleId, ...]
    tokens: int
    stats: RolloutStats
    waited: Mapping[SampleStage, float]


class WaitAttribution:
    """Attributes the trainer's waiting time to the stages of the last sample.
    `add_span` is the RolloutDeps.record_span of the run."""

    def __init__(self) -> None:
        self.waits: defaultdict[SampleStage, float] = defaultdict(float)
        self._spans: defaultdict[int, list[_Span]] = defaultdict(list)
        self._last: SampleId | None = None

    def add_span(self, uid: SampleId, activity: SampleActivity, begin: float, end: float) -> None:
        self._spans[uid.group].append((uid, activity, begin, end))
        if activity.stage is SampleStage.SCORING:
            self._last = uid

    def add_wait(self, begin: float, end: float) -> None:
        """The trainer waited for a batch, whose last sample is the one that ended last."""
        last = self._last
        if last is None or end <= begin:
            return
        for uid, activity, span_begin, span_end in self._spans[last.group]:
            overlap = min(end, span_end) - max(begin, span_begin)
            if uid == last and overlap > 0:
                self.waits[activity.stage] += overlap

    def forget(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._spans.pop(group, None)


def length_bias(
    work: SampleWork, trained: Sequence[SampleId], started: Sequence[SampleId]
) -> float:
    """Mean length of the trained samples over that of all started samples of ended groups, minus 1:
    -0.1 is 10 % too short. Started samples include cancelled ones, since the length of a simulated
    sample is known in advance."""
    tokens, all_tokens = (sum(sum(work.tokens(uid)) for uid in uids) for uids in (trained, started))
    return tokens / len(trained) / (all_tokens / len(started)) - 1 if trained else 0.0


@dataclass(slots=True)
class SlotTimeline:
    """The points of a plot. Every second point is removed when there are too many."""

    every_s: float = 0.01
    points: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    """(time, running samples, waiting samples)"""
    phases: list[_PhaseBegin] = field(default_factory=list[_PhaseBegin])
    """(begin, phase of the trainer)"""

    def add(self, at_s: float, *, running: int, waiting: int) -> None:
        self.points.append((at_s, running, waiting))
        if len(self.points) >= 2 * TIMELINE_POINTS:
            self.points = self.points[::2]
            self.every_s *= 2


@dataclass(frozen=True, slots=True)
class Report:
    """Means over the measured steps of a run, and sums of counts."""

    steps: int
    seconds: float
    """Virtual seconds of all measured steps."""
    step_s: float
    rollout_share: float
    """Share of a step in which the trainer waited for a batch."""
    samples: int
    """Trained samples."""
    tokens: int
    """Their tokens, prompts included."""
    samples_per_s: float
    bound_s: float
    """Seconds of the same work if no device waited and every slot were always in use."""
    of_bound: float
    """bound_s / seconds."""
    trainer_busy: float
    """Share of the time in which the trainer trained."""
    engines_busy: float
    """Share of the time in which an engine computed."""
    slots_used: float
    """Share of the slots in use, over all time."""
    trainer_waited_s: Mapping[SampleStage, float]
    """Waiting for a batch, by the stage of the last sample."""
    slots_empty_s: Mapping[str, float]
    """Slot-seconds without a sample, by the trainer's phase."""
    age_mean: float
    """Mean staleness of the trained tokens, in policy versions."""
    age_max: int
    length_bias: float
    """Mean length of the trained samples relative to the started ones, minus 1."""
    score_bias: float
    dropped: Mapping[str, int]
    """Groups, by reason."""
    deferred: int
    """Groups deferred to a long round."""
    deferred_tokens: int
    """Their discarded tokens."""
    deferred_waiting: int
    """Groups that still wait for a long round; the bias counts them."""
    cancelled: int
    preempted: int
    recomputed: float
    """Tokens prefilled again, relative to those generated."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_report(
    scenario: Scenario, snapshots: Sequence[PhaseSnapshot], *, work: SampleWork, bias: float
) -> Report:
    step_ends = [snapshot for snapshot in snapshots if snapshot.phase == "done"]
    done = step_ends[scenario.warmup_steps :]
    first = step_ends[scenario.warmup_steps - 1] if scenario.warmup_steps else snapshots[0]
    last = done[-1]
    seconds = last.at_s - first.at_s
    bound_s = _ideal_device_s(scenario, done, work) / scenario.devices.count
    waits = {name: last.waited[name] - first.waited.get(name, 0.0) for name in last.waited}
    waited_s = sum(snapshot.stats.wait_seconds for snapshot in done)
    usage = _difference(first.usage, last.usage)
    samples = sum(len(snapshot.trained) for snapshot in done)
    metrics = [snapshot.stats.metrics for snapshot in done]
    dropped: Counter[str] = Counter()
    for snapshot in done:
        dropped.update(snapshot.stats.dropped)
    return Report(
        steps=len(done),
        seconds=seconds,
        step_s=seconds / len(done),
        rollout_share=waited_s / seconds,
        samples=samples,
        tokens=sum(snapshot.tokens for snapshot in done),
        samples_per_s=samples / seconds,
        bound_s=bound_s,
        of_bound=bound_s / seconds,
        trainer_busy=(last.trainer_busy_s - first.trainer_busy_s) / seconds,
        engines_busy=usage.busy_share,
        slots_used=usage.slot_share,
        trainer_waited_s={name: s for name, s in waits.items() if s > 0},
        slots_empty_s=_empty_slots(snapshots, since=first.at_s),
        age_mean=sum(step["rollout/age_mean"] for step in metrics) / len(done),
        age_max=int(max(step["rollout/age_max"] for step in metrics)),
        length_bias=bias,
        score_bias=sum(step["rollout/bias/score"] for step in metrics) / len(done),
        dropped=dict(dropped),
        deferred=int(sum(step["rollout/deferred"] for step in metrics)),
        deferred_tokens=int(sum(step["rollout/deferred_tokens"] for step in metrics)),
        deferred_waiting=int(metrics[-1]["rollout/deferred_waiting"]),
        cancelled=int(sum(step["rollout/cancelled"] for step in metrics)),
        preempted=usage.preempted,
        recomputed=usage.recomputed_tokens / max(1, usage.generated_tokens),
    )


def _ideal_device_s(scenario: Scenario, done: Sequence[PhaseSnapshot], work: SampleWork) -> float:
    """Device-seconds of the trained samples: generation with every slot in use, and training."""
    devices, config = scenario.devices, scenario.work
    step_time = devices.step_time
    uids = [uid for snapshot in done for uid in snapshot.trained]
    generation = sum(work.generation_s(uid, step_time, slots=devices.slots) for uid in uids)
    groups = len({uid.group for uid in uids})
    prefill = groups * config.prompt_tokens * step_time.per_prefill_token_s
    tokens = sum(snapshot.tokens for snapshot in done)
    training = tokens * devices.train_token_s + len(done) * devices.train_base_s * devices.trainers
    return generation + prefill + training


def _empty_slots(snapshots: Sequence[PhaseSnapshot], *, since: float) -> dict[str, float]:
    empty: defaultdict[str, float] = defaultdict(float)
    for begin, end in pairwise(snapshots):
        if begin.at_s >= since and begin.phase != "done":
            usage = _difference(begin.usage, end.usage)
            empty[begin.phase] += usage.capacity_s - usage.slot_s
    return dict(empty)


def _difference(before: EngineUsage, after: EngineUsage) -> EngineUsage:
    return EngineUsage(*map(sub, astuple(after), astuple(before)))


def describe(report: Report) -> list[tuple[str, str]]:
    """The report as text: (name, value), the most important first."""
    r, total = report, sum(report.slots_empty_s.values())
    waited = [
        f"a sample {stage.text} {seconds / r.steps:.3g} s of {r.seconds / r.steps:.3g}"
        for stage, seconds in _descending(r.trainer_waited_s)
    ]
    empty = [
        f"{seconds / total:.0%} while the trainer {_PHASE_TEXT[phase]}"
        for phase, seconds in _descending(r.slots_empty_s)
    ]
    dropped = ", ".join(f"{reason} {count}" for reason, count in r.dropped.items())
    deferred = f"{r.deferred} groups, with {r.deferred_tokens} tokens discarded"
    return [
        ("step", f"{r.step_s:.4g} s ({r.steps} steps, {r.samples_per_s:.4g} samples/s)"),
        ("of the bound", f"{r.of_bound:.1%} of the speed without any idle time"),
        ("trainer", f"{r.trainer_busy:.1%} busy, {r.rollout_share:.1%} waiting for a batch"),
        ("  waited for", ", ".join(waited) or "nothing"),
        ("engines", f"{r.engines_busy:.1%} busy, {r.slots_used:.1%} of their slots in use"),
        ("  empty slots", ", ".join(empty) or "none"),
        ("staleness", f"mean {r.age_mean:.2f}, at most {r.age_max} versions"),
        ("bias", f"length {r.length_bias:+.2%}, score {r.score_bias:+.3g}"),
        ("dropped groups", dropped or "none"),
        ("deferred", f"{deferred}; {r.deferred_waiting} still wait"),
        ("cancelled", f"{r.cancelled} samples; {r.preempted} preemptions"),
        ("recomputed", f"{r.recomputed:.1%} of the generated tokens"),
    ]


_PHASE_TEXT = {"generate": "waited for a batch", "train": "trained", "publish": "published"}


def _descending(parts: Mapping[_Name, float]) -> list[tuple[_Name, float]]:
    return sorted(((name, s) for name, s in parts.items() if s > 0), key=lambda item: -item[1])
