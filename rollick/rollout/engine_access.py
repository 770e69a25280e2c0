"""A sample's access to the engines: generations that continue after an abort or a lost engine.

Owns the engine reservation that a sample holds between `Fleet.acquire` and `Fleet.release`. Which
engine it gets is decided by the fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rollick.errors import EngineLost
from rollick.observe.sample_stage import (
    BETWEEN_TURNS,
    WAITING_FOR_ENGINE,
    SampleActivity,
    SampleStage,
)
from rollick.rollout.fleet import Fleet
from rollick.rollout.in_flight import InFlightSample
from rollick.types import Completion, Request, SampleId, StopReason


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
    def activity(self, what: str, *, limit_s: float = 0.0) -> Generator[None]:
        """See EngineAccess.activity; also releases an unused reservation."""
        if self.reserved is not None:
            self.reserved = None
            self.fleet.release(self.uid, tokens=0)
        activity = SampleActivity(SampleStage.IN_ENVIRONMENT, label=what)
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
