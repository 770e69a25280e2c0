"""A sample's way to the engines: places on them, and generations that survive aborts and losses.

Owns the place that a sample has between being granted and given back. Which engine it is on is the
fleet's to decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from rollick.errors import EngineLost
from rollick.rollout.fleet import Fleet, Want
from rollick.rollout.waits import BETWEEN_TURNS, WAITING
from rollick.types import Completion, Request, SampleId, StopReason


class Follower(Protocol):
    """Who follows the sample: is told where it is, and says what its requests ask for."""

    @property
    def goes_on(self) -> bool:
        """False when the rollout closes or nobody wants the sample: nothing more is generated."""
        ...

    def want(self, request: Request) -> Want: ...

    def note(self, what: str) -> None: ...

    def placed(self, engine: int) -> None: ...

    def drawn(self, request: Request, completion: Completion) -> None: ...

    def lost(self) -> None: ...


class SampleAccess:
    """What an episode gets (see episode.Access). Its first place is given with it."""

    def __init__(self, uid: SampleId, fleet: Fleet, *, granted: int, follower: Follower) -> None:
        self._uid = uid
        self._fleet = fleet
        self._granted: int | None = granted
        self._follower = follower

    async def generate(self, request: Request) -> Completion:
        """Goes on, elsewhere if need be, until the generation ends by itself."""
        while self._follower.goes_on:
            number = await self._place(request)
            completion = await self._run(number, request)
            if completion is None:
                continue
            if completion.stop is not StopReason.ABORTED:
                return completion
            request = replace(request, continue_from=completion)
        raise asyncio.CancelledError(f"{self._uid} is not to go on")

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        """Between two generations; a place that was not used yet is given back."""
        if self._granted is not None:
            self._granted = None
            self._fleet.leave(self._uid, tokens=0)
        self._follower.note(f"in {what}")
        yield
        self._follower.note(BETWEEN_TURNS)

    async def _place(self, request: Request) -> int:
        number, self._granted = self._granted, None
        if number is not None:
            return number
        self._follower.note(WAITING)
        number = await self._fleet.ask(self._uid, self._follower.want(request))
        self._follower.placed(number)
        return number

    async def _run(self, number: int, request: Request) -> Completion | None:
        """None if it is to be asked for again: the engine was lost, or admission has closed (or
        the sample was put off) since the place was granted, so that an abort would not find it."""
        drawn = 0
        try:
            if not (self._fleet.is_open and self._follower.goes_on):
                return None
            completion = await self._fleet.engine(number).generate(request)
            drawn = len(completion.token_ids)
            self._follower.drawn(request, completion)
            return completion
        except EngineLost as error:
            self._fleet.remove(number, why=str(error))
            if not (self._fleet.engines or self._fleet.expects_more()):
                raise
            self._follower.lost()
            return None
        finally:
            self._fleet.leave(self._uid, tokens=drawn)
