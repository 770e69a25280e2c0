"""The samples under way: what each of them does, since when, and the task that follows it.

Owns no task: it knows them, so that one can be cancelled. A life begins when its sample waits for
an engine and ends when the sample is scored, or not wanted any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rollick.rollout.fleet import Fleet, Want
from rollick.rollout.ledger import Ledger
from rollick.rollout.lengths import LengthPredictor
from rollick.rollout.waits import GENERATING, WAITING, Doing, generating
from rollick.rollout.wiring import Span
from rollick.types import Prompt, Request, SampleId


class Life:
    """One sample under way; what its access tells (see access.Follower)."""

    __slots__ = (
        "_lives",
        "_lost",
        "doing",
        "generate_s",
        "is_followed",
        "prompt",
        "task",
        "uid",
        "unwanted",
    )

    def __init__(self, uid: SampleId, prompt: Prompt, lives: Lives) -> None:
        self.uid = uid
        self.prompt = prompt
        self.task: asyncio.Task[None] | None = None
        self.doing = Doing(WAITING, lives.now())
        self.generate_s = 0.0
        self.is_followed = False
        self.unwanted = False
        self._lives = lives
        self._lost = False

    @property
    def goes_on(self) -> bool:
        return not self._lives.closing

    def note(self, what: str) -> None:
        """The sample does something else from now on."""
        lives, before = self._lives, self.doing
        now = lives.now()
        if before.what.startswith(GENERATING):
            self.generate_s += now - before.since
        if lives.span is not None:
            lives.span(self.uid, before.what, before.since, now)
        self.doing = Doing(what, now)

    def placed(self, engine: int) -> None:
        """It has a place on an engine."""
        if self._lost:
            self._lost = False
            self._lives.ledger.sample_started(self.uid)
        self.note(generating(engine))

    def lost(self) -> None:
        """Its engine is gone: it waits for another."""
        self._lost = True
        self._lives.ledger.sample_lost(self.uid)

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
        for uid in uids:
            self._of[uid] = Life(uid, prompt, self)
            self._fleet.submit(uid, Want(self.ledger.deadline(uid.group), tokens, str(uid)))

    def end(self, life: Life) -> None:
        """It is over; a place that it still has goes to the next."""
        if self._of.get(life.uid) is life:
            del self._of[life.uid]
        self._fleet.end_sample(life.uid)

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

    def tasks(self) -> dict[SampleId, asyncio.Task[None]]:
        """Those that are followed now."""
        return {uid: life.task for uid, life in self._of.items() if life.task is not None}

    def doing(self, uids: Iterable[SampleId]) -> dict[SampleId, Doing]:
        """What each of these does."""
        return {uid: self._of[uid].doing for uid in uids if uid in self._of}
