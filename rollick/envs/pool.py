"""EnvPool: runs thousands of concurrent episodes in a few local processes, isolated from the run.

    reset() --> the process with the fewest episodes --frames--> child process 1 (child.py)
    step()  --> the process of the episode           --frames--> child process 2
      ^                                                    |     watchdog: kills the children
      +------------------- EnvCallResult (status, response) -------+     if this process dies

A call past its deadline, or one that crashes its child, ends its episode (TIMEOUT, CRASHED) and the
other episodes of that process (LOST). A child that was killed or stopped from outside loses all of
its episodes; episodes/environment.py restarts lost episodes. The process group is killed and a
new child starts. An episode that raises or returns an invalid response ends alone. Every failure is
counted.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from rollick.children.child_loop import ChildSetup
from rollick.children.process import Child, ChildLost, FrameKind, encode_frame, pickle_payload
from rollick.children.supervisor import ChildSupervisor, pickle_definitions
from rollick.envs.base import MakeEnv
from rollick.envs.child import (
    Call,
    DropEpisode,
    EnvCallResult,
    EnvStatus,
    StartEpisode,
    StepEpisode,
    decode_result,
)
from rollick.errors import EnvError, RollickError
from rollick.observe.faults import FaultLog

PROGRAM = "rollick.envs.child"
LOST_TEXT = "another episode of its process hung or died"


@dataclass(slots=True)
class EnvStats:
    """Counts since the pool was opened. A failed episode counts in exactly one failure."""

    failures: Counter[EnvStatus] = field(default_factory=Counter[EnvStatus])
    restarts: int = 0
    episode_restarts: int = 0
    """Episodes that were restarted because their process was lost or their server unavailable."""
    seconds: float = 0.0
    """Time inside environments."""


@dataclass(frozen=True, slots=True)
class EnvLimits:
    """Time limits of environments, and the maximum of concurrent episodes."""

    step_s: float = 60.0
    """Limit of a call, from its start in the process."""
    episode_s: float = inf
    """Limit of all calls of an episode together, without generation time."""
    episodes: int = 8192
    """Maximum of open episodes; further resets wait."""


@dataclass(slots=True, eq=False)
class EnvSession:
    """One episode in a process. `opening` is the result of its reset; call `step` until it is done.
    Use `contextlib.closing` if you may stop earlier."""

    pool: EnvPool
    worker: _Worker
    number: int
    opening: EnvCallResult = field(init=False)
    status: EnvStatus = EnvStatus.OK
    done: bool = False
    """Ended, failed, or closed."""
    seconds: float = 0.0
    """Time inside the environment so far."""
    pending: asyncio.Future[EnvCallResult] | None = None
    """The result of the call in flight."""

    async def step(self, action: str) -> EnvCallResult:
        """Run one step. Waits for the process; a failure is a result with a status and ends the
        episode. Raises EnvError if the episode is over."""
        if self.done and self.status is EnvStatus.LOST:
            # Its process died between two steps.
            return EnvCallResult(EnvStatus.LOST, detail=LOST_TEXT)
        if self.done:
            text = f"episode {self.number} is over ({self.status})"
            raise EnvError(text, fix="start a new episode with reset()")
        if self.pending is not None:
            raise EnvError(f"a step of episode {self.number} is in flight", fix="await it first")
        return await self.pool.call(self, StepEpisode(action))

    def close(self) -> None:
        """Drop the episode if it is not done; does not wait."""
        if not self.done:
            self.pool.drop(self)
            self.worker.send(self.number, DropEpisode())


class _Worker:
    """A child process, its episodes, and its unsent calls."""

    def __init__(self, child: Child, rank: int) -> None:
        self.rank = rank
        self.sessions: dict[int, EnvSession] = {}
        self.attach(child)

    def attach(self, child: Child) -> None:
        """Use a new child, which has no episodes yet."""
        self.child = child
        self.up = True
        self.unsent: list[tuple[int, bytes]] = []
        self.sent: dict[int, float] = {}
        """Send time of the call in flight, by episode."""
        self.started: dict[int, float] = {}
        """Start time of the running call, by episode."""

    def send(self, number: int, call: Call) -> None:
        """Send a call, in one frame with the others of this event loop iteration."""
        try:
            payload = pickle_payload(call)
        except Exception as error:
            raise EnvError(f"{call} cannot be sent to another process: {error}") from error
        loop = asyncio.get_running_loop()
        if not self.unsent:
            loop.call_soon(self._flush)
        self.unsent.append((number, payload))
        self.sent[number] = loop.time()

    def _flush(self) -> None:
        calls, self.unsent = self.unsent, []
        pipe = self.child.process.stdin
        if pipe is not None and not pipe.is_closing():
            pipe.write(encode_frame(FrameKind.WORK, pickle.dumps(calls, protocol=5)))


class EnvPool:
    """Open it with `async with EnvPool.open(...)`, which ends its processes on exit."""

    def __init__(self, supervisor: ChildSupervisor, *, limits: EnvLimits) -> None:
        self.stats = EnvStats()
        self.limits = limits
        self._names = list(supervisor.setup.definitions)
        self._supervisor = supervisor
        self._episode_numbers = count()
        self._workers: list[_Worker] = []
        self._ready = asyncio.Event()
        self._slots = asyncio.Semaphore(limits.episodes)
        self._broken: RollickError | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        environments: Mapping[str, MakeEnv | str],
        *,
        processes: int = 2,
        threads: int = 1,
        limits: EnvLimits | None = None,
        base: Path | None = None,
        output: Path | None = None,
        faults: FaultLog | None = None,
    ) -> AsyncGenerator[EnvPool, None]:
        """Start the children and wait until each has loaded the environments.

        `environments`: maps a name to a TextEnv class or a reference (a built-in name,
        file.py:Class relative to `base`, module:Class). `threads`: concurrent calls in a process,
        for environments that wait for I/O. `output`: their output; default: stderr. `faults`:
        records processes that were replaced."""
        if processes < 1 or threads < 1:
            raise EnvError(f"processes={processes} and threads={threads} must be positive")
        definitions = pickle_definitions("environment", environments, EnvError)
        setup = ChildSetup(definitions, base, threads)
        supervisor = ChildSupervisor(PROGRAM, "environment", setup, EnvError, output, faults=faults)
        pool = cls(supervisor, limits=limits or EnvLimits())
        async with supervisor.run(processes, pool._add_worker, pool._give_up):
            yield pool

    def _add_worker(self, child: Child, rank: int) -> Coroutine[Any, Any, None]:
        worker = _Worker(child, rank)
        self._workers.append(worker)
        return self._serve(worker)

    async def reset(
        self, name: str, options: Mapping[str, Any] | None = None, seed: int = 0
    ) -> EnvSession:
        """Start an episode. Waits for a free slot, a process and the environment's reset.
        `session.opening` is the result of the reset."""
        limit_s = self.limits.step_s
        return await self._open(StartEpisode(name, options or {}, seed, step_timeout_s=limit_s))

    async def solve(self, name: str, options: Mapping[str, Any], seed: int) -> EnvCallResult:
        """Run an episode with the environment's solver (see child.solve_episode). The deadline is
        that of a step."""
        return (await self._open(StartEpisode(name, options, seed, with_solver=True))).opening

    async def _open(self, start: StartEpisode) -> EnvSession:
        if start.name not in self._names:
            text = f"the pool has no environment {start.name!r}"
            raise EnvError(text, fix=f"it has: {', '.join(self._names) or 'none'}")
        await self._slots.acquire()
        try:
            worker = await self._pick_worker()
            session = EnvSession(self, worker, next(self._episode_numbers))
            worker.sessions[session.number] = session
        except BaseException:
            self._slots.release()
            raise
        try:
            session.opening = await self.call(session, start)
        except BaseException:
            session.close()
            raise
        return session

    async def call(self, session: EnvSession, call: StartEpisode | StepEpisode) -> EnvCallResult:
        """Send a call of an episode and wait for its result."""
        if self._broken is not None:
            raise self._broken
        session.pending = asyncio.get_running_loop().create_future()
        session.worker.send(session.number, call)
        try:
            return await session.pending
        except asyncio.CancelledError:
            # The caller never sees this result, so the episode cannot continue.
            session.close()
            raise
        finally:
            session.pending = None

    async def _pick_worker(self) -> _Worker:
        """The process with the fewest episodes; waits while none is up."""
        while True:
            if self._broken is not None:
                raise self._broken
            if up := [worker for worker in self._workers if worker.up]:
                return min(up, key=lambda worker: len(worker.sessions))
            self._ready.clear()
            await self._ready.wait()

    async def _serve(self, worker: _Worker) -> None:
        """Read the results of a child, check deadlines, replace the child if it fails."""
        while True:
            failure, blamed = await self._read_results(worker)
            worker.up = False
            await self._supervisor.kill_and_wait(worker.child)
            self.stats.restarts += 1
            self._fail_episodes(worker, failure, blamed)
            timed_out, cause = failure.status is EnvStatus.TIMEOUT, failure.detail
            child = await self._supervisor.replace(
                worker.child, rank=worker.rank, timed_out=timed_out, cause=cause
            )
            worker.attach(child)
            self._ready.set()

    async def _read_results(self, worker: _Worker) -> tuple[EnvCallResult, set[int]]:
        """Deliver results until the child hangs or dies. Returns the failure and its episodes."""
        now = asyncio.get_running_loop().time
        while True:
            try:
                # A call that has not started within the limit of a step is stuck.
                sent_at = min(worker.sent.values(), default=now())
                ends = self._call_ends(worker).values()
                deadline = min(ends, default=sent_at + self.limits.step_s)
                frames = await worker.child.receive(deadline=deadline)
            except TimeoutError:
                blamed = {n for n, end in self._call_ends(worker).items() if end <= now()}
                unstarted = min(worker.sent.values(), default=inf) + self.limits.step_s <= now()
                if blamed or (unstarted and not worker.started):
                    began = [worker.started[n] for n in blamed] or worker.sent.values()
                    worker.child.failed_at = time.time() - (now() - min(began))
                    return EnvCallResult(EnvStatus.TIMEOUT, detail="its process was killed"), blamed
                continue
            except (ChildLost, ConnectionError):
                await worker.child.wait()
                text = f"its process died ({worker.child.exit_text})"
                if worker.child.was_killed_externally:
                    return EnvCallResult(EnvStatus.LOST, detail=text), set(worker.sessions)
                return EnvCallResult(EnvStatus.CRASHED, detail=text), set(worker.started)
            for kind, body in frames:
                if kind == FrameKind.STARTED:
                    worker.started[int(body)] = now()
                else:
                    self._record(worker, *decode_result(body))

    def _call_ends(self, worker: _Worker) -> dict[int, float]:
        """The deadline of each running call, by episode."""
        return {n: begin + self._call_limit(worker, n) for n, begin in worker.started.items()}

    def _call_limit(self, worker: _Worker, number: int) -> float:
        """Time limit of the episode's current call, in seconds."""
        session = worker.sessions.get(number)
        used_s = session.seconds if session is not None else 0.0
        return min(self.limits.step_s, max(self.limits.episode_s - used_s, 0.0))

    def _record(self, worker: _Worker, number: int, result: EnvCallResult) -> None:
        """Record a result and deliver it."""
        worker.sent.pop(number, None)
        worker.started.pop(number, None)
        session = worker.sessions.get(number)
        if session is None:  # Dropped in the meantime.
            return
        session.seconds += result.seconds
        self.stats.seconds += result.seconds
        if result.ok and session.seconds > self.limits.episode_s:
            text = self._timeout_text(session)
            result = EnvCallResult(EnvStatus.TIMEOUT, None, text, result.seconds)
            worker.send(number, DropEpisode())
        self._deliver(session, result)

    def _fail_episodes(self, worker: _Worker, failure: EnvCallResult, blamed: set[int]) -> None:
        """End the episodes of a dead child: `blamed` with the failure, the others as LOST."""
        lost = EnvCallResult(EnvStatus.LOST, detail=LOST_TEXT)
        for number, session in list(worker.sessions.items()):
            result = failure if number in blamed else lost
            if result.status is EnvStatus.TIMEOUT:
                seconds = self._call_limit(worker, number)
                session.seconds += seconds
                detail = f"{self._timeout_text(session)}; {failure.detail}"
                result = replace(failure, detail=detail, seconds=seconds)
            self._deliver(session, result)

    def _timeout_text(self, session: EnvSession) -> str:
        if session.seconds >= self.limits.episode_s:
            return f"the episode took more than {self.limits.episode_s:g} s"
        return f"no answer within {self.limits.step_s:g} s"

    def _deliver(self, session: EnvSession, result: EnvCallResult) -> None:
        """Deliver a result to its caller; drop the episode if it failed or ended."""
        if not result.ok:
            session.status = result.status
            self.stats.failures[result.status] += 1
        if not result.ok or (result.response is not None and result.response.done):
            self.drop(session)
        if session.pending is not None and not session.pending.done():
            session.pending.set_result(result)

    def drop(self, session: EnvSession) -> None:
        """Mark an episode as done and free its slot; sends nothing to its process."""
        session.done = True
        del session.worker.sessions[session.number]
        self._slots.release()

    def _give_up(self, error: RollickError) -> None:
        self._broken = error
        self._ready.set()
        for worker in self._workers:
            for session in worker.sessions.values():
                if session.pending is not None and not session.pending.done():
                    session.pending.set_exception(error)
