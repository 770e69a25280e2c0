"""The fleet: the engines of a rollout, the waiting requests, and the engine of each request.

    submit (new sample), acquire (running sample) -> RequestQueue -> Router -> launch / resume it
    release -> the next request is dispatched immediately

The owner's `launch` starts the task of a new sample. Engines may join and leave; a request on a
lost engine gets an EngineLost error and acquires another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from rollick.errors import EngineLost
from rollick.infer.engine import InferenceClient
from rollick.rollout.relative_speeds import RelativeSpeeds
from rollick.rollout.request_queue import QueueOrder, RequestNeeds, RequestQueue
from rollick.rollout.router import Router
from rollick.rollout.unchecked import UncheckedSamples
from rollick.types import Completion, Request, SampleId

LOG = logging.getLogger("rollick")


class Fleet:
    """Sends requests to engines. All methods belong to one event loop."""

    def __init__(
        self,
        engines: Iterable[InferenceClient],
        launch: Callable[[SampleId, int], None],
        *,
        engine_queue: float = 1.0,
        order: QueueOrder = "oldest",
        checks: bool = True,
    ) -> None:
        """`launch(uid, engine)` starts a submitted sample. `engine_queue`: see Router. `checks`:
        whether samples are recorded for `check_engines`."""
        self.engines: dict[int, InferenceClient] = {}
        self.is_open = False
        self.may_gain_engine: Callable[[], bool] = lambda: False
        """Whether an engine may still join: then requests wait for it if all others are lost."""
        self.on_activity_change: Callable[[], None] = lambda: None
        """Called when the first engine joins or the last leaves, and when the first request gets an
        engine or the last one ends."""
        self._activity = (False, False)
        self.router = Router(engine_queue=engine_queue)
        self.speeds = RelativeSpeeds()
        self.unchecked = UncheckedSamples()
        self.queue = RequestQueue()
        self._order: QueueOrder = order
        self._checks = checks
        self._launch = launch
        self._acquiring: dict[SampleId, asyncio.Future[int]] = {}
        self.engine_of: dict[SampleId, int] = {}
        """The engine of every sample that has one."""
        self._empty = asyncio.Event()
        self._next_number = 0
        for engine in engines:
            self.add(engine)

    @property
    def is_generating(self) -> bool:
        """Whether an engine has a request."""
        return bool(self.engines and self.engine_of)

    def add(self, engine: InferenceClient) -> int:
        """Add an engine that has the current weights; returns its number."""
        number, self._next_number = self._next_number, self._next_number + 1
        self.engines[number] = engine
        self.speeds.add(number)
        if self._checks:
            self.unchecked.add(number, engine)
        self.router.add(number, engine.load())
        self.dispatch()
        return number

    def remove(self, number: int, *, reason: str = "") -> None:
        """Remove an engine. Its requests must `release` and `acquire` again."""
        if self.engines.pop(number, None) is None:
            return
        self.speeds.remove(number)
        rerouted = self.router.remove(number)
        self._report_activity()
        if reason:
            text = "engine %d is lost, %d engines left; rerouting %d requests; reason: %s"
            LOG.warning(text, number, len(self.engines), len(rerouted), reason)

    def submit(self, uid: SampleId, needs: RequestNeeds) -> None:
        """Queue a new sample; `launch` is called when an engine has room. Call `dispatch` after."""
        self.queue.push(uid, needs, order=self._order)

    async def acquire(self, uid: SampleId, needs: RequestNeeds) -> int:
        """Waits for an engine for a running sample; returns its number."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._acquiring[uid] = future
        self.queue.push(uid, needs, order=self._order, started=True)
        self.dispatch()
        try:
            return await future
        except asyncio.CancelledError:
            self.withdraw(uid)
            raise

    def withdraw(self, uid: SampleId) -> None:
        """Remove a waiting request; release it if it was just dispatched."""
        self._acquiring.pop(uid, None)
        if not self.queue.remove(uid) and uid in self.engine_of:
            self.release(uid, tokens=0)

    def release(self, uid: SampleId, *, tokens: int) -> None:
        """A request ended on its engine with that many tokens; dispatches the next."""
        number = self.engine_of.pop(uid, None)
        if number is None:
            return
        engine = self.engines.get(number)
        self.router.release(uid, tokens=tokens, load=engine.load() if engine else None)
        if not self.engine_of:
            self._empty.set()
        self.dispatch()

    def completed(self, number: int, request: Request, completion: Completion) -> None:
        """Record a request that ended with tokens: its sample is unchecked, and its time counts
        for the speed of its engine."""
        self.unchecked.record(number, request.uid)
        earlier = request.continue_from
        # The first token is that of the prefill.
        tokens = len(completion.token_ids) - (len(earlier.token_ids) if earlier else 0) - 1
        seconds = completion.seconds - completion.queued_s - completion.prefill_s
        self.speeds.observe(number, tokens=tokens, seconds=seconds)

    async def check_engines(self) -> set[int]:
        """Check the weights of the engines; a damaged one leaves. Returns the groups of its samples
        since its last check."""
        lost, damaged = await self.unchecked.check()
        for number, error in lost.items():
            self.remove(number, reason=str(error))
        return {uid.group for uid in damaged}

    def end_step(self) -> list[int]:
        """Give each engine work by its speed; returns those that have become slow."""
        newly_slow = self.speeds.end_step()
        for number in self.engines:
            self.router.set_weight(number, self.speeds.weight(number))
        for number in newly_slow:
            text = "engine %d decodes at %.0f%% of the median speed; it gets less work"
            LOG.warning(text, number, 100 * self.speeds.relative_speed(number))
        return newly_slow

    def end_sample(self, uid: SampleId) -> None:
        """The sample makes no more requests; withdraws or releases the one that it has."""
        self.withdraw(uid)
        self.router.end_session(str(uid))

    def open(self) -> None:
        self.is_open = True
        self.dispatch()

    def close(self) -> None:
        """Dispatch nothing more; requests on engines continue."""
        self.is_open = False

    def dispatch(self) -> None:
        queue, router = self.queue, self.router
        while self.is_open and router.has_room and (first := queue.pop()):
            uid, needs = first
            number = router.choose(uid, session=needs.session, tokens=int(needs.tokens))
            assert number is not None, "a router with room gives an engine"
            self.engine_of[uid] = number
            future = self._acquiring.pop(uid, None)
            if future is None:
                self._launch(uid, number)
            elif not future.done():
                future.set_result(number)
        self._report_activity()

    def _report_activity(self) -> None:
        activity = (bool(self.engines), bool(self.engine_of))
        if activity != self._activity:
            self._activity = activity
            self.on_activity_change()

    async def abort(self, engine_of: Mapping[SampleId, int]) -> None:
        """Abort these samples' requests, each on the engine that has it."""
        engines = self.engines
        aborts = [engines[n].abort(uid) for uid, n in engine_of.items() if n in engines]
        # An engine that cannot be reached fails its requests, and each of them raises that.
        await asyncio.gather(*aborts, return_exceptions=True)

    async def wait_until_empty(self) -> None:
        """Waits until no engine holds a request of ours."""
        while self.engine_of:
            self._empty.clear()
            await self._empty.wait()

    def engine(self, number: int) -> InferenceClient:
        """The engine with this number; raises EngineLost if it was removed."""
        if number not in self.engines:
            raise EngineLost(f"engine {number} left the fleet")
        return self.engines[number]
