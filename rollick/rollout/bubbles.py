"""What a simulated run shows: step time, utilisation, who waited for whom, staleness, bias. Pure.

A *bubble* is time in which a role could work and does not. The trainer's bubbles are laid at the
door of the sample that it waited for last: what that sample did while the trainer waited (it
generated, was in an environment, was scored). The engines' bubbles are empty slots, by what the
trainer did meanwhile:

    generate   the batch is not complete, and there is nothing to start: the tail of a step
    train      groups may start only when the next version is published: the staleness budget
    publish    engines pause while weights change
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from rollick.config.scenario import Scenario
from rollick.rollout.stats import RolloutStats
from rollick.rollout.usage import Usage
from rollick.rollout.waits import SCORING, kind_of
from rollick.rollout.work import Work, step_time_of
from rollick.types import SampleId

Phase = Literal["generate", "train", "publish", "done"]

TIMELINE_POINTS = 800


@dataclass(frozen=True, slots=True)
class Mark:
    """All sums at the beginning of a phase; `done` ends a step, with what it trained on."""

    phase: Phase
    at_s: float
    usage: Usage
    trainer_busy_s: float
    trained: tuple[SampleId, ...]
    tokens: int
    stats: RolloutStats
    waited: Mapping[str, float]


class Bubbles:
    """Collects the stretches of samples that are not trained yet, and whom the trainer waited for.

    `span` is told every stretch of a sample's life by the Rollout.
    """

    def __init__(self) -> None:
        self.waits: defaultdict[str, float] = defaultdict(float)
        self._spans: defaultdict[int, list[tuple[SampleId, str, float, float]]] = defaultdict(list)
        self._last: SampleId | None = None

    def span(self, uid: SampleId, what: str, begin: float, end: float) -> None:
        self._spans[uid.group].append((uid, what, begin, end))
        if what == SCORING:
            self._last = uid

    def waited(self, begin: float, end: float) -> None:
        """The trainer waited for a batch; the sample that ended last is the one it waited for."""
        last = self._last
        if last is None or end <= begin:
            return
        for uid, what, since, until in self._spans[last.group]:
            overlap = min(end, until) - max(begin, since)
            if uid == last and overlap > 0:
                self.waits[kind_of(what)] += overlap

    def forget(self, groups: Iterable[int]) -> None:
        for uid in groups:
            self._spans.pop(uid, None)


class Bias:
    """Lengths of the trained samples against those of all that were started in ended groups.

    A simulated sample's length is known even if it was cancelled, so this is the whole bias.
    """

    def __init__(self, work: Work, *, size: int) -> None:
        self._work = work
        self._size = size
        self.kept = self.kept_tokens = self.all = self.all_tokens = 0

    def trained(self, uids: Iterable[SampleId]) -> None:
        groups = set[int]()
        for uid in uids:
            groups.add(uid.group)
            self.kept += 1
            self.kept_tokens += sum(self._work.tokens(uid))
        self.ended(groups)

    def ended(self, groups: Iterable[int]) -> None:
        """Groups that were trained or dropped."""
        for group in groups:
            for index in range(self._size):
                self.all += 1
                self.all_tokens += sum(self._work.tokens(SampleId(group, index)))

    @property
    def length(self) -> float:
        """Mean length of the trained over that of all, minus 1: -0.1 is 10 % too short."""
        if not self.kept:
            return 0.0
        return self.kept_tokens / self.kept / (self.all_tokens / self.all) - 1


@dataclass(slots=True)
class Timeline:
    """Points for a picture. When there are too many, every second is left out from then on."""

    every_s: float = 0.01
    points: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    """(time, running samples, waiting samples)"""
    phases: list[tuple[float, Phase]] = field(default_factory=list[tuple[float, Phase]])
    """(begin, what the trainer does)"""

    def add(self, at_s: float, *, running: int, waiting: int) -> None:
        self.points.append((at_s, running, waiting))
        if len(self.points) >= 2 * TIMELINE_POINTS:
            self.points = self.points[::2]
            self.every_s *= 2


@dataclass(frozen=True, slots=True)
class Report:
    """The measured steps of a run: means over them, and sums where the name says so."""

    steps: int
    seconds: float
    """Virtual seconds of all measured steps."""
    step_s: float
    rollout_share: float
    """Part of a step in which a batch was waited for."""
    samples: int
    """Trained samples."""
    tokens: int
    """Their tokens, prompts included."""
    samples_per_s: float
    bound_s: float
    """Seconds that the same work takes if no device ever waits and every slot is always in use."""
    of_bound: float
    """bound_s / seconds."""
    trainer_busy: float
    """Share of the time in which the trainer trained."""
    engines_busy: float
    """Share of the time in which an engine computed."""
    slots_used: float
    """Share of the slots in use, over all time."""
    trainer_waited_s: Mapping[str, float]
    """For a batch, by what the sample did that was waited for last."""
    slots_empty_s: Mapping[str, float]
    """Slot-seconds without a sample, by what the trainer did."""
    age_mean: float
    """Of trained tokens, in versions."""
    age_max: int
    length_bias: float
    """Mean length of what was trained, relative to what was started, minus 1."""
    score_bias: float
    dropped: Mapping[str, int]
    """Groups, by reason."""
    deferred: int
    """Groups put off to a long round."""
    deferred_tokens: int
    """Tokens that they had drawn."""
    parked: int
    """Groups that still wait for one; they count in the bias."""
    cancelled: int
    preempted: int
    recomputed: float
    """Tokens whose cache was computed again, as a part of those generated."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_report(scenario: Scenario, marks: Sequence[Mark], *, work: Work, bias: Bias) -> Report:
    """Of the steps after the warm-up."""
    ends = [mark for mark in marks if mark.phase == "done"]
    done = ends[scenario.warmup_steps :]
    first = ends[scenario.warmup_steps - 1] if scenario.warmup_steps else marks[0]
    last = done[-1]
    seconds = last.at_s - first.at_s
    bound_s = _work_s(scenario, done, work) / scenario.devices.count
    spent = {name: last.waited[name] - first.waited.get(name, 0.0) for name in last.waited}
    waited_s = sum(mark.stats.wait_seconds for mark in done)
    used = _difference(first.usage, last.usage)
    samples = sum(len(mark.trained) for mark in done)
    dropped: Counter[str] = Counter()
    for mark in done:
        dropped.update(mark.stats.dropped)
    return Report(
        steps=len(done),
        seconds=seconds,
        step_s=seconds / len(done),
        rollout_share=waited_s / seconds,
        samples=samples,
        tokens=sum(mark.tokens for mark in done),
        samples_per_s=samples / seconds,
        bound_s=bound_s,
        of_bound=bound_s / seconds,
        trainer_busy=(last.trainer_busy_s - first.trainer_busy_s) / seconds,
        engines_busy=used.busy_share,
        slots_used=used.slot_share,
        trainer_waited_s={name: s for name, s in spent.items() if s > 0},
        slots_empty_s=_empty_slots(marks, since=first.at_s),
        age_mean=sum(mark.stats.age_mean for mark in done) / len(done),
        age_max=max(mark.stats.age_max for mark in done),
        length_bias=bias.length,
        score_bias=sum(mark.stats.score_bias for mark in done) / len(done),
        dropped=dict(dropped),
        deferred=sum(mark.stats.deferred for mark in done),
        deferred_tokens=sum(mark.stats.deferred_tokens for mark in done),
        parked=last.stats.parked,
        cancelled=sum(mark.stats.cancelled for mark in done),
        preempted=used.preempted,
        recomputed=used.recomputed_tokens / max(1, used.generated_tokens),
    )


def _work_s(scenario: Scenario, done: Sequence[Mark], work: Work) -> float:
    """Device-seconds of what was trained on: generation with every slot in use, and training."""
    devices, config = scenario.devices, scenario.work
    step_time = step_time_of(devices.step_time)
    uids = [uid for mark in done for uid in mark.trained]
    generation = sum(work.generation_s(uid, step_time, slots=devices.slots) for uid in uids)
    groups = len({uid.group for uid in uids})
    prefill = groups * config.prompt_tokens * step_time.per_prefill_token_s
    tokens = sum(mark.tokens for mark in done)
    training = tokens * devices.train_token_s + len(done) * devices.train_base_s * devices.trainers
    return generation + prefill + training


def _empty_slots(marks: Sequence[Mark], *, since: float) -> dict[str, float]:
    empty: defaultdict[str, float] = defaultdict(float)
    for begin, end in pairwise(marks):
        if begin.at_s >= since and begin.phase != "done":
            used = _difference(begin.usage, end.usage)
            empty[begin.phase] += used.capacity_s - used.slot_s
    return dict(empty)


def _difference(before: Usage, after: Usage) -> Usage:
    names = Usage.__dataclass_fields__
    return Usage(**{name: getattr(after, name) - getattr(before, name) for name in names})


def describe(report: Report) -> list[tuple[str, str]]:
    """The report for people: names and values, in the order of interest."""
    waited = _parts(report.trainer_waited_s, report.seconds / report.steps, report.steps)
    total = sum(report.slots_empty_s.values())
    empty = [
        f"{s / total:.0%} while the trainer {_DOES[p]}" for p, s in _most(report.slots_empty_s)
    ]
    dropped = ", ".join(f"{reason} {count}" for reason, count in report.dropped.items())
    return [
        (
            "step",
            f"{report.step_s:.4g} s ({report.steps} steps, {report.samples_per_s:.4g} samples/s)",
        ),
        ("of the bound", f"{report.of_bound:.1%} of what the devices could do without any wait"),
        (
            "trainer",
            f"{report.trainer_busy:.1%} busy, {report.rollout_share:.1%} waiting for a batch",
        ),
        ("  waited for", waited or "nobody"),
        (
            "engines",
            f"{report.engines_busy:.1%} busy, {report.slots_used:.1%} of their slots in use",
        ),
        ("  empty slots", ", ".join(empty) or "none"),
        ("staleness", f"mean {report.age_mean:.2f}, most {report.age_max} versions"),
        ("bias", f"length {report.length_bias:+.2%}, score {report.score_bias:+.3g}"),
        ("dropped groups", dropped or "none"),
        (
            "put off",
            f"{report.deferred} groups, with {report.deferred_tokens} tokens drawn in vain; "
            f"{report.parked} still wait",
        ),
        ("cancelled", f"{report.cancelled} samples; {report.preempted} thrown out of a cache"),
        ("recomputed", f"{report.recomputed:.1%} of the generated tokens"),
    ]


_DOES = {"generate": "waited for a batch", "train": "trained", "publish": "published"}


def _most(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(((name, s) for name, s in parts.items() if s > 0), key=lambda item: -item[1])


def _parts(parts: Mapping[str, float], step_s: float, steps: int) -> str:
    """Seconds of a step by what a sample did."""
    named = [f"a sample {name} {s / steps:.3g} s of {step_s:.3g}" for name, s in _most(parts)]
    return ", ".join(named)
