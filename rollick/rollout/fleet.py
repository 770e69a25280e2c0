"""The fleet: the engines of a rollout, who waits for one, and who is on which.

    submit (a new sample), ask (one under way) -> RequestQueue -> Router -> launch / answer
    leave -> the place goes to the next request at once

Owns queue and router and no task: what begins on an engine is started by who opened the fleet.
Engines come and go; what was on a lost one is told so by its own error and asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from rollick.errors import EngineLost
from rollick.infer.engine import Engine
from rollick.rollout.queue import Order, RequestQueue, Want
from rollick.rollout.router import Router
from rollick.types import SampleId

LOG = logging.getLogger("rollick")


class Fleet:
    """Sends requests to engines. All methods belong to one event loop."""

    def __init__(
        self,
        engines: Iterable[Engine],
        *,
        launch: Callable[[SampleId, int], None],
        queue: float = 1.0,
        order: Order = "oldest",
    ) -> None:
        """`launch(uid, engine)` begins a sample that was submitted. `queue` and `order`: see
        router.py and queue.py."""
        self.engines: dict[int, Engine] = {}
        self.is_open = False
        self.expects_more: Callable[[], bool] = lambda: False
        """Whether an engine may still join: then requests wait for it, if all others are lost."""
        self._router = Router(queue=queue)
        self._queue = RequestQueue()
        self._order: Order = order
        self._launch = launch
        self._asking: dict[SampleId, asyncio.Future[int]] = {}
        self._on: dict[SampleId, int] = {}
        self._empty = asyncio.Event()
        self._next = 0
        for engine in engines:
            self.add(engine)

    def add(self, engine: Engine) -> int:
        """An engine joins, with the current weights; returns its number."""
        number, self._next = self._next, self._next + 1
        self.engines[number] = engine
        self._router.add(number, engine.load())
        self.pump()
        return number

    def remove(self, number: int, *, why: str = "") -> None:
        """An engine leaves or was lost. What it held must `leave` and ask again."""
        if self.engines.pop(number, None) is None:
            return
        held = self._router.remove(number)
        if why:
            LOG.warning(
                "engine %d is lost (%d are left); its %d requests go there: %s",
                number,
                len(self.engines),
                len(held),
                why,
            )

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def in_flight(self, number: int) -> int:
        """How many requests an engine holds."""
        return self._router.in_flight(number)

    def limit(self, number: int) -> float:
        """How many an engine is to decode at once (see Router.limit)."""
        return self._router.limit(number)

    def on(self) -> dict[SampleId, int]:
        """Who is on which engine now."""
        return dict(self._on)

    def engine_of(self, uid: SampleId) -> int | None:
        return self._on.get(uid)

    def submit(self, uid: SampleId, want: Want) -> None:
        """A new sample waits; `launch` is called when an engine has a place. Call `pump` after."""
        self._queue.push(uid, want, order=self._order)

    async def ask(self, uid: SampleId, want: Want) -> int:
        """A sample under way waits for an engine; returns its number."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asking[uid] = future
        self._queue.push(uid, want, order=self._order, started=True)
        self.pump()
        try:
            return await future
        except asyncio.CancelledError:
            self.withdraw(uid)
            raise

    def withdraw(self, uid: SampleId) -> None:
        """A request that waits is not wanted any more; one that was just granted gives it back."""
        self._asking.pop(uid, None)
        if not self._queue.remove(uid) and uid in self._on:
            self.leave(uid, tokens=0)

    def leave(self, uid: SampleId, *, tokens: int) -> None:
        """A request ended on its engine, after that many tokens; the place goes to the next."""
        number = self._on.pop(uid, None)
        if number is None:
            return
        engine = self.engines.get(number)
        load = None if engine is None else engine.load()
        self._router.release(uid, tokens_drawn=tokens, load=load)
        if not self._on:
            self._empty.set()
        self.pump()

    def end_sample(self, uid: SampleId) -> None:
        """No request of the sample comes any more; what it still has or waits for is given up."""
        self.withdraw(uid)
        self._router.end_session(str(uid))

    def end_group(self, group: int) -> None:
        """No request of the group comes any more."""
        self._router.end_group(group)

    def open(self) -> None:
        self.is_open = True
        self.pump()

    def close(self) -> None:
        """Send nothing more; what is on the engines goes on."""
        self.is_open = False

    def pump(self) -> None:
        """Send what the engines have room for."""
        queue, router = self._queue, self._router
        while self.is_open and len(queue) and router.has_room:
            first = queue.pop()
            if first is None:
                return
            uid, want = first
            number = router.choose(uid, session=want.session, tokens=int(want.tokens))
            assert number is not None, "a router with room gives an engine"
            self._on[uid] = number
            future = self._asking.pop(uid, None)
            if future is None:
                self._launch(uid, number)
            elif not future.done():
                future.set_result(number)

    async def abort_all(self) -> None:
        """Ask every engine to end what it has of ours; those that cannot be reached are passed."""
        await self.abort(self._on)

    async def abort(self, on: Mapping[SampleId, int]) -> None:
        """Ask engines to end these, each on the engine that has it."""
        aborts = [
            self.engines[number].abort(uid) for uid, number in on.items() if number in self.engines
        ]
        # An engine that cannot be reached has failed its requests too, and that is told there.
        await asyncio.gather(*aborts, return_exceptions=True)

    async def until_empty(self) -> None:
        """Waits until no engine holds a request of ours."""
        while self._on:
            self._empty.clear()
            await self._empty.wait()

    def engine(self, number: int) -> Engine:
        """The engine of this number; EngineLost if it is gone."""
        if number not in self.engines:
            raise EngineLost(f"engine {number} is gone")
        return self.engines[number]
