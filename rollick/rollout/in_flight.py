"""The samples in flight: what each of them is doing, since when, and the task that runs it.

    episode -> SampleAccess -> Fleet.acquire ... Fleet.release
                     +-> InFlightSample: what the sample does, what its requests need

The scheduler owns the tasks. A sample is in flight from its submission to the fleet until it is
scored, cancelled or deferred; a deferred one is submitted again when its first task has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice

from rollick.errors import EngineLost
from rollick.observe.sample_stage import (
    BETWEEN_TURNS,
    CANCELLED,
    DEFERRED,
    WAITING_FOR_ENGINE,
    SampleActivity,
    SampleStage,
    on_engine,
)
from rollick.rollout.deps import RecordSpan
from rollick.rollout.fleet import Fleet
from rollick.rollout.ledger.ledger import Ledger
from rollick.rollout.lengths import LengthPredictor
from rollick.rollout.request_queue import RequestNeeds
from rollick.types import Completion, Prompt, Request, SampleId, StopReason

CLOSE_TIMEOUT_S = 5.0
"""How long engines have to end aborted requests before the tasks are cancelled."""
MAX_NAMED = 4
"""Samples that a message about a wait names; the others are counted."""


@dataclass(slots=True, eq=False)
class InFlightSample:
    """One sample in flight; its SampleAccess reports what it does."""

    uid: SampleId
    prompt: Prompt
    _samples: InFlightSamples
    since: float
    task: asyncio.Task[None] | None = None
    activity: SampleActivity = WAITING_FOR_ENGINE
    ends_by: float = 0.0
    """When its activity ends by itself, if it has a limit."""
    generate_s: float = 0.0
    tokens: int = 0
    has_begun: bool = False
    """Whether its task has run its first statement."""
    is_cancelled: bool = False
    """Deferred samples are cancelled too."""
    is_deferred: bool = False
    _completion: Completion | None = None
    _lost_engine: bool = False

    @property
    def should_continue(self) -> bool:
        """False when the rollout closes or the sample is cancelled: nothing more is generated."""
        return not (self._samples.closing or self.is_cancelled)

    def set_activity(self, activity: SampleActivity, ends_by: float = 0.0) -> None:
        """`ends_by`: the time of the event loop by which the activity ends by itself."""
        now, record_span = self._samples.record_progress(), self._samples.record_span
        if self.activity.stage is SampleStage.GENERATING:
            self.generate_s += now - self.since
        if record_span is not None:
            self._record_spans(record_span, now)
        self.activity = activity
        self.since = now
        self.ends_by = ends_by

    def assigned(self, engine: int) -> None:
        """An engine is reserved for it."""
        if self._lost_engine and not self.is_cancelled:
            self._lost_engine = False
            self._samples.ledger.sample_started(self.uid)
        self.set_activity(on_engine(SampleStage.GENERATING, engine))

    def engine_lost(self) -> None:
        if not self.is_cancelled:
            self._lost_engine = True
            self._samples.ledger.sample_lost(self.uid)

    def completed(self, request: Request, completion: Completion) -> None:
        earlier = request.continue_from
        self.tokens += len(completion.token_ids) - (len(earlier.token_ids) if earlier else 0)
        self._completion = completion

    def needs_of(self, request: Request) -> RequestNeeds:
        """What a request needs. Its KV cache is on the engine of the last one, unless that was
        aborted: then its tokens are prefilled again on any engine with room."""
        tokens = len(request.token_ids) + self._samples.predict(self.prompt)
        session = str(self.uid) if request.continue_from is None else None
        return RequestNeeds(self._samples.ledger.deadline(self.uid.group), tokens, session)

    def _record_spans(self, record: RecordSpan, now: float) -> None:
        """Record the activity that ends now; a generation in the parts that its engine reports."""
        activity, begin = self.activity, self.since
        completion, self._completion = self._completion, None
        if completion is not None and activity.stage is SampleStage.GENERATING:
            assert activity.engine is not None
            queued = (SampleStage.QUEUED_ON_ENGINE, completion.queued_s)
            prefill = (SampleStage.PREFILLING, completion.prefill_s)
            for stage, seconds in (queued, prefill):
                end = min(begin + seconds, now)
                if end > begin:
                    record(self.uid, on_engine(stage, activity.engine), begin, end)
                begin = end
        record(self.uid, activity, begin, now)


@dataclass(slots=True)
class SampleAccess:
    """The EngineAccess of an episode. It comes with a reservation on engine `reserved`."""

    uid: SampleId
    fleet: Fleet
    reserved: int | None
    tracker: InFlightSample
    """Tracks what the sample does, and what its requests need."""
    _enclosing: tuple[SampleActivity, float] | None = None
    """The activity that the generations of an agent are part of, and by when it ends."""

    async def generate(self, request: Request) -> Completion:
        """Waits for an engine and for the whole response, on another engine if the first is lost.
        Raises CancelledError if the sample is cancelled."""
        while self.tracker.should_continue:
            engine = await self._acquire(request)
            completion = await self._generate_on(engine, request)
            if completion is None:
                continue
            if completion.stop is not StopReason.ABORTED:
                if self._enclosing is not None:
                    self.tracker.set_activity(*self._enclosing)
                return completion
            request = replace(request, continue_from=completion)
        raise asyncio.CancelledError(f"{self.uid} is cancelled")

    @contextmanager
    def activity(self, label: str, *, limit_s: float = 0.0) -> Generator[None]:
        """See EngineAccess.activity; also releases an unused reservation."""
        if self.reserved is not None:
            self.reserved = None
            self.fleet.release(self.uid, tokens=0)
        activity = SampleActivity(SampleStage.IN_ENVIRONMENT, label=label)
        self._enclosing = activity, asyncio.get_running_loop().time() + limit_s
        self.tracker.set_activity(*self._enclosing)
        yield
        self._enclosing = None
        self.tracker.set_activity(BETWEEN_TURNS)

    async def _acquire(self, request: Request) -> int:
        engine, self.reserved = self.reserved, None
        if engine is not None:
            return engine
        self.tracker.set_activity(WAITING_FOR_ENGINE)
        engine = await self.fleet.acquire(self.uid, self.tracker.needs_of(request))
        self.tracker.assigned(engine)
        return engine

    async def _generate_on(self, number: int, request: Request) -> Completion | None:
        """None if the request must be sent again: the engine was lost, or admission was closed (or
        the sample deferred) after the reservation, when an abort could not reach the request."""
        tokens = 0
        try:
            if not (self.fleet.is_open and self.tracker.should_continue):
                return None
            completion = await self.fleet.engine(number).generate(request)
            tokens = len(completion.token_ids)
            self.tracker.completed(request, completion)
            self.fleet.completed(number, request, completion)
            return completion
        except EngineLost as error:
            self.fleet.remove(number, reason=str(error))
            if not (self.fleet.engines or self.fleet.may_gain_engine()):
                raise
            self.tracker.engine_lost()
            return None
        finally:
            self.fleet.release(self.uid, tokens=tokens)


class InFlightSamples:
    """All samples in flight, by id."""

    def __init__(
        self, ledger: Ledger, fleet: Fleet, lengths: LengthPredictor, record_span: RecordSpan | None
    ) -> None:
        self.ledger = ledger
        self.record_span = record_span
        self.closing = False
        self._progress_at = 0.0
        self._generated_tokens = 0
        self._fleet = fleet
        self._lengths = lengths
        self._clock = asyncio.get_running_loop().time
        self._samples: dict[SampleId, InFlightSample] = {}
        # Deferred samples of each group whose task has not ended.
        self._stopping: Counter[int] = Counter()
        self._deferred_since: dict[SampleId, float] = {}
        self.record_progress()

    def __getitem__(self, uid: SampleId) -> InFlightSample:
        return self._samples[uid]

    def record_progress(self) -> float:
        """Note that there is progress now; returns the current time."""
        self._progress_at = self._clock()
        return self._progress_at

    def last_progress(self) -> float:
        """When a sample last changed its activity, or when the engines were last seen to have
        generated tokens."""
        engines = self._fleet.engines.values()
        tokens = sum(engine.load().generated_tokens for engine in engines)
        if tokens != self._generated_tokens:
            self._generated_tokens = tokens
            self.record_progress()
        return self._progress_at

    def stuck_at(
        self, uids: Iterable[SampleId], *, limit_s: float, score_limit_s: float = 0.0
    ) -> float:
        """When a wait for these samples is stuck: `limit_s` after the last progress, but not
        before an activity with a limit of its own has ended, or a reward may have ended."""
        samples = [self._samples[uid] for uid in uids if uid in self._samples]
        if any(sample.activity.stage is SampleStage.SCORING for sample in samples):
            limit_s += score_limit_s
        return max([self.last_progress() + limit_s, *(sample.ends_by for sample in samples)])

    def predict(self, prompt: Prompt) -> float:
        return self._lengths.predict(prompt.uid, prompt.domain)

    def submit(self, uids: Iterable[SampleId], prompt: Prompt) -> None:
        tokens = self.predict(prompt)
        now = self.record_progress()
        for uid in uids:
            self._samples[uid] = InFlightSample(uid, prompt, self, now)
            since = self._deferred_since.pop(uid, None)
            if since is not None and self.record_span is not None:
                self.record_span(uid, DEFERRED, since, now)
            self._fleet.submit(uid, RequestNeeds(self.ledger.deadline(uid.group), tokens, str(uid)))

    def end(self, sample: InFlightSample) -> None:
        """The task of the sample ends: release what it holds on the fleet."""
        if self._samples.get(sample.uid) is sample:
            del self._samples[sample.uid]
        self._fleet.end_sample(sample.uid)
        if sample.is_deferred:
            self._stopping -= Counter([sample.uid.group])  # Removes groups at 0.

    def cancel(self, uids: Iterable[SampleId]) -> None:
        """Remove these from the queue, or cancel their tasks."""
        removed = [self._samples.pop(uid) for uid in uids if uid in self._samples]
        # Queued ones first: a release by the others must not dispatch one of them.
        for sample in sorted(removed, key=lambda sample: sample.task is not None):
            sample.is_cancelled = True
            sample.set_activity(CANCELLED)
            if sample.task is not None:
                sample.task.cancel()
            # A task that is cancelled before its first statement never runs, nor its `finally`.
            if not sample.has_begun:
                self._fleet.end_sample(sample.uid)

    def defer(self, uids: Iterable[SampleId]) -> list[InFlightSample]:
        """Remove these from the queue, or stop them. Returns those on engines, for
        `abort_deferred`: so their tokens are counted."""
        on_engines: list[InFlightSample] = []
        removed = [self._samples.pop(uid) for uid in uids]
        for sample in sorted(removed, key=lambda sample: sample.task is not None):
            sample.is_cancelled = True
            sample.set_activity(DEFERRED)
            self._deferred_since[sample.uid] = sample.since
            if sample.task is None:
                self._fleet.end_sample(sample.uid)
                continue
            sample.is_deferred = True
            self._stopping[sample.uid.group] += 1
            # A task that is cancelled before its first statement never runs, nor its `finally`.
            if sample.uid not in self._fleet.engine_of and sample.has_begun:
                sample.task.cancel()
            else:
                on_engines.append(sample)
        return on_engines

    async def abort_deferred(self, samples: Iterable[InFlightSample]) -> None:
        """Aborts these on their engines and waits for their tasks; then cancels the others."""
        tasks = {sample.uid: sample.task for sample in samples if sample.task is not None}
        engine_of = {uid: n for uid, n in self._fleet.engine_of.items() if uid in tasks}
        await self._abort(engine_of, list(tasks.values()))

    async def close(self) -> None:
        """Aborts all requests, cancels the other tasks, and waits for those of the requests."""
        self.closing = True
        engine_of = dict(self._fleet.engine_of)
        tasks = {uid: sample.task for uid, sample in self._samples.items() if sample.task}
        for uid, task in tasks.items():
            if uid not in engine_of:
                task.cancel()
        await self._abort(engine_of, list(tasks.values()))

    async def _abort(
        self, engine_of: Mapping[SampleId, int], tasks: Sequence[asyncio.Task[None]]
    ) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._fleet.abort(engine_of)
                if tasks:
                    await asyncio.wait(tasks)
        for task in tasks:
            task.cancel()

    @property
    def stopping(self) -> int:
        """Deferred samples whose task has not ended."""
        return self._stopping.total()

    def has_stopped(self, group: int) -> bool:
        """Whether all tasks of a deferred group have ended."""
        return not self._stopping[group]

    def activities(self, uids: Iterable[SampleId]) -> dict[SampleId, tuple[SampleActivity, float]]:
        samples = (self._samples[uid] for uid in uids if uid in self._samples)
        return {sample.uid: (sample.activity, sample.since) for sample in samples}


def describe_activities(
    activities: Mapping[SampleId, tuple[SampleActivity, float]], *, now: float
) -> str:
    """`group 37: sample 3 in tool search for 310 s, sample 5 being scored for 12 s`."""
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for uid, (activity, since) in islice(activities.items(), MAX_NAMED):
        seconds = f"{now - since:.3g}" if now - since < 100 else f"{now - since:.0f}"
        groups[uid.group].append(f"sample {uid.index} {activity.text} for {seconds} s")
    parts = [f"group {group}: {', '.join(samples)}" for group, samples in groups.items()]
    if len(activities) > MAX_NAMED:
        parts.append(f"and {len(activities) - MAX_NAMED} more samples")
    return "; ".join(parts)
