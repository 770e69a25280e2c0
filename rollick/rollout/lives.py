"""The samples under way: what each of them does, since when, and the task that follows it.

Owns no task: it knows them, so that one can be cancelled. A life begins when its sample waits for
an engine and ends when the sample is scored, not wanted any more, or put off: a sample that was put
off begins another life later, when nothing of the one before is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from rollick.rollout.fleet import Fleet, Want
from rollick.rollout.ledger import Ledger
from rollick.rollout.lengths import LengthPredictor
from rollick.rollout.waits import (
    GENERATING,
    PARKED,
    WAITING,
    Doing,
    generating,
    parts_of_generating,
)
from rollick.rollout.wiring import Span
from rollick.types import Completion, Prompt, Request, SampleId


class Life:
    """One sample under way; what its access tells (see access.Follower)."""

    __slots__ = (
        "_answer",
        "_lives",
        "_lost",
        "doing",
        "generate_s",
        "is_followed",
        "is_put_off",
        "prompt",
        "task",
        "tokens",
        "uid",
        "unwanted",
    )

    def __init__(self, uid: SampleId, prompt: Prompt, lives: Lives, *, doing: Doing) -> None:
        self.uid = uid
        self.prompt = prompt
        self.task: asyncio.Task[None] | None = None
        self.doing = doing
        self.generate_s = 0.0
        self.tokens = 0
        self.is_followed = False
        self.is_put_off = False
        self.unwanted = False
        self._answer: Completion | None = None
        self._lives = lives
        self._lost = False

    @property
    def goes_on(self) -> bool:
        return not (self._lives.closing or self.unwanted)

    def note(self, what: str) -> None:
        """The sample does something else from now on."""
        lives, before = self._lives, self.doing
        now = lives.now()
        if before.what.startswith(GENERATING):
            self.generate_s += now - before.since
        if lives.span is not None:
            self._tell(lives.span, before, now)
        self.doing = Doing(what, now)

    def placed(self, engine: int) -> None:
        """It has a place on an engine."""
        if self._lost and not self.unwanted:
            self._lost = False
            self._lives.ledger.sample_started(self.uid)
        self.note(generating(engine))

    def lost(self) -> None:
        """Its engine is gone: it waits for another."""
        if self.unwanted:
            return
        self._lost = True
        self._lives.ledger.sample_lost(self.uid)

    def drawn(self, request: Request, completion: Completion) -> None:
        """An engine has answered a request."""
        earlier = request.continue_from
        self.tokens += len(completion.token_ids) - (len(earlier.token_ids) if earlier else 0)
        self._answer = completion

    def _tell(self, span: Span, before: Doing, now: float) -> None:
        """A stretch has ended; one on an engine in the parts that the engine tells apart."""
        what, begin = before.what, before.since
        answer, self._answer = self._answer, None
        if answer is not None and what.startswith(GENERATING):
            lasting = answer.queued_s, answer.prefill_s
            for part, seconds in zip(parts_of_generating(what), lasting, strict=True):
                end = min(begin + seconds, now)
                if end > begin:
                    span(self.uid, part, begin, end)
                begin = end
        span(self.uid, what, begin, now)

    def want(self, request: Request) -> Want:
        """What a request asks for. Its cache is where the last one was, unless that was aborted:
        then its tokens are computed anew wherever there is room."""
        tokens = len(request.token_ids) + self._lives.predict(self.prompt)
        session = str(self.uid) if request.continue_from is None else None
        return Want(self._lives.ledger.deadline(self.uid.group), tokens, session)


class Lives:
    """All lives, by sample. `last_event` is when one of them last did something else."""

    def __init__(
        self, ledger: Ledger, fleet: Fleet, *, lengths: LengthPredictor, span: Span | None
    ) -> None:
        self.ledger = ledger
        self.span = span
        self.closing = False
        self.last_event = 0.0
        self._fleet = fleet
        self._lengths = lengths
        self._clock = asyncio.get_running_loop().time
        self._of: dict[SampleId, Life] = {}
        # Samples of each group that were put off and are still somewhere.
        self._leaving: Counter[int] = Counter()
        self._parked_since: dict[SampleId, float] = {}
        self.now()

    def __getitem__(self, uid: SampleId) -> Life:
        return self._of[uid]

    def now(self) -> float:
        """The time, which is that of the last event from now on."""
        self.last_event = self._clock()
        return self.last_event

    def predict(self, prompt: Prompt) -> float:
        """Tokens that an answer is expected to have."""
        return self._lengths.predict(prompt.uid, prompt.domain)

    def begin(self, uids: Iterable[SampleId], prompt: Prompt) -> None:
        """These samples of a group wait for an engine."""
        tokens = self.predict(prompt)
        waiting = Doing(WAITING, self.now())
        for uid in uids:
            self._of[uid] = Life(uid, prompt, self, doing=waiting)
            since = self._parked_since.pop(uid, None)
            if since is not None and self.span is not None:
                self.span(uid, PARKED, since, waiting.since)
            self._fleet.submit(uid, Want(self.ledger.deadline(uid.group), tokens, str(uid)))

    def end(self, life: Life) -> None:
        """It is over; a place that it still has goes to the next."""
        if self._of.get(life.uid) is life:
            del self._of[life.uid]
        self._fleet.end_sample(life.uid)
        if life.is_put_off:
            self._leaving[life.uid.group] -= 1
            if not self._leaving[life.uid.group]:
                del self._leaving[life.uid.group]

    def cancel(self, uids: Iterable[SampleId]) -> None:
        """These are not wanted any more: out of the queue, or from wherever they are."""
        ended = [self._of.pop(uid) for uid in uids if uid in self._of]
        # All are out of the queue before the first gives a place back, which goes to the next.
        for life in sorted(ended, key=lambda life: life.task is not None):
            life.unwanted = True
            life.note("not wanted any more")
            if life.task is not None:
                life.task.cancel()
            # A task that is cancelled before its first turn never runs, not even its end.
            if not life.is_followed:
                self._fleet.end_sample(life.uid)

    def put_off(self, uids: Iterable[SampleId]) -> list[Life]:
        """These wait for a new start: out of the queue, or from wherever they are. Returns those on
        engines, which are to be aborted there: what they drew is counted that way."""
        on_engines: list[Life] = []
        ended = [self._of.pop(uid) for uid in uids]
        for life in sorted(ended, key=lambda life: life.task is not None):
            life.unwanted = True
            life.note(PARKED)
            self._parked_since[life.uid] = life.doing.since
            if life.task is None:
                self._fleet.end_sample(life.uid)
                continue
            life.is_put_off = True
            self._leaving[life.uid.group] += 1
            # A task that is cancelled before its first turn never runs, not even its end.
            if self._fleet.engine_of(life.uid) is None and life.is_followed:
                life.task.cancel()
            else:
                on_engines.append(life)
        return on_engines

    async def let_go(self, lives: Iterable[Life], *, within_s: float) -> None:
        """Aborts these on their engines and waits for them to end; cancels those that do not."""
        tasks = {life.uid: life.task for life in lives if life.task is not None}
        on = {uid: number for uid, number in self._fleet.on().items() if uid in tasks}
        try:
            async with asyncio.timeout(within_s):
                await self._fleet.abort(on)
                await asyncio.wait(tasks.values())
        except TimeoutError:
            pass
        for task in tasks.values():
            task.cancel()

    @property
    def leaving(self) -> int:
        """Samples that were put off and are still somewhere."""
        return self._leaving.total()

    def has_left(self, group: int) -> bool:
        """Whether nothing is left anywhere of the samples of a group that was put off."""
        return group not in self._leaving

    def tasks(self) -> dict[SampleId, asyncio.Task[None]]:
        """Those that are followed now."""
        return {uid: life.task for uid, life in self._of.items() if life.task is not None}

    def doing(self, uids: Iterable[SampleId]) -> dict[SampleId, Doing]:
        """What each of these does."""
        return {uid: self._of[uid].doing for uid in uids if uid in self._of}
