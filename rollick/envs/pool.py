"""EnvPool: thousands of episodes at once in a few local processes, so that no environment can stop
or slow the run.

    reset() --> the process with the fewest episodes --frames--> child process 1 (child.py)
    step()  --> the process of the episode           --frames--> child process 2
      ^                                                    |     guard: kills the children
      +------------------- Reply, OK or why not -----------+     if this process dies

A lane is a task that reads the answers of one child and watches its deadlines. A call past its
deadline, or a child that dies, ends the episode that was running (TIMEOUT, CRASHED) and loses the
others of that process (LOST); its whole process group is killed and a fresh child takes over.
An episode that raises or answers rubbish ends alone. Every failure is a status and is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import cloudpickle

from rollick.children.nursery import Nursery
from rollick.children.process import Child, ChildLost, encode_frame, pickled
from rollick.envs.base import MakeEnv
from rollick.envs.child import (
    NUMBER,
    Act,
    Call,
    Definitions,
    End,
    EnvStatus,
    Kind,
    Reply,
    Show,
    Start,
    decode_reply,
)
from rollick.errors import EnvError

PROGRAM = "rollick.envs.child"
LOST_TEXT = "another episode of its process hung or died"


@dataclass(slots=True)
class EnvStats:
    """Since the pool was opened. An episode that failed is in exactly one of the failures."""

    episodes: int = 0
    steps: int = 0
    """Answered ones, the failed among them."""
    failures: dict[EnvStatus, int] = field(default_factory=dict[EnvStatus, int])
    restarts: int = 0
    seconds: float = 0.0
    """Inside environments."""

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


@dataclass(frozen=True, slots=True)
class EnvLimits:
    """How long an environment may take, and how many run at once."""

    step_s: float = 60.0
    """A call, from its start in the process."""
    episode_s: float = inf
    """All calls of an episode together; the time that a policy thinks is not counted."""
    episodes: int = 8192
    """Open at once; further resets wait."""


class EnvSession:
    """One episode in a process. `opening` is the reply to its reset; then `step` until it is over.

    `async with` it, or `close()` it, if it may be left before its end.
    """

    def __init__(self, pool: EnvPool, worker: _Worker, number: int) -> None:
        self._pool = pool
        self._worker = worker
        self._answer: asyncio.Future[Reply] | None = None
        self.number = number
        self.opening = Reply(EnvStatus.OK)
        self.status = EnvStatus.OK
        self.over = False
        """Ended by itself, failed, or closed."""
        self.seconds = 0.0
        """Inside the environment, so far."""
        self.opened = False
        """Whether the reply to the reset has come."""

    async def step(self, action: str) -> Reply:
        """One step. Waits for the process; a failure is a reply with a status and ends the episode.

        EnvError if the episode is over: each is played once.
        """
        if self.over and self.status is EnvStatus.LOST:
            # Its process went down between two steps: the policy learns of it here.
            return Reply(EnvStatus.LOST, detail=LOST_TEXT)
        if self.over:
            raise EnvError(
                f"episode {self.number} is over ({self.status})",
                fix="reset() gives a new one; an episode is played once",
            )
        if self._answer is not None:
            raise EnvError(f"episode {self.number} is in a step already", fix="await that first")
        return await self._pool.call(self, Act(action))

    def close(self) -> None:
        """Leave the episode; does not wait. Nothing happens if it is over."""
        if not self.over:
            self._pool.leave(self)

    async def __aenter__(self) -> EnvSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """A child process, its episodes, and what is about to be sent to it."""

    def __init__(self, child: Child) -> None:
        self.sessions: dict[int, EnvSession] = {}
        self.renew(child)

    def renew(self, child: Child) -> None:
        """Begin with a child that knows of no episode."""
        self.child = child
        self.up = True
        self.unsent: list[tuple[int, bytes]] = []
        self.asked: dict[int, float] = {}
        """Episodes with a call under way, and when it was sent."""
        self.started: dict[int, float] = {}
        """Those whose call has begun, and when."""

    def ask(self, number: int, call: Call) -> None:
        """Send it with the others of this turn of the event loop. EnvError if it cannot be sent."""
        payload = _pack(call)
        loop = asyncio.get_running_loop()
        if not self.unsent:
            loop.call_soon(self._flush)
        self.unsent.append((number, payload))
        self.asked[number] = loop.time()

    def _flush(self) -> None:
        calls, self.unsent = self.unsent, []
        pipe = self.child.process.stdin
        if pipe is not None and not pipe.is_closing():
            pipe.write(encode_frame(Kind.CALLS, pickle.dumps(calls, protocol=5)))


class EnvPool:
    """Open it with `async with EnvPool.open(...)`; when that ends, so has every process."""

    def __init__(self, names: Sequence[str], nursery: Nursery, *, limits: EnvLimits) -> None:
        self.stats = EnvStats()
        self.limits = limits
        self._names = names
        self._nursery = nursery
        self._numbers = count()
        self._workers: list[_Worker] = []
        self._ready = asyncio.Event()
        self._room = asyncio.Semaphore(limits.episodes)
        self._broken: EnvError | None = None

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
    ) -> AsyncGenerator[EnvPool, None]:
        """Start the children and wait until each has loaded the environments.

        `environments`: by the name that `reset` uses, a TextEnv class or a reference (a built-in
        name, file.py:Class relative to `base`, module:Class). `threads`: calls that a process runs
        at once, for environments that wait (for a network, say) rather than compute. `output`: a
        file for what environments print; by default the error stream of this process.
        """
        if processes < 1 or threads < 1:
            raise EnvError(f"processes={processes} and threads={threads} must be positive")
        loads = {name: _define(name, env) for name, env in environments.items()}
        definitions = Definitions(loads, base, threads)
        lanes: list[asyncio.Task[None]] = []
        with contextlib.ExitStack() as files:
            log = files.enter_context(output.open("ab")) if output is not None else None
            body, names = cloudpickle.dumps(definitions), ", ".join(environments)
            nursery = Nursery(PROGRAM, "environment", names, body, EnvError, log)
            pool = cls(list(environments), nursery, limits=limits or EnvLimits())
            try:
                for child in await nursery.start_all(processes):
                    worker = _Worker(child)
                    pool._workers.append(worker)
                    lanes.append(asyncio.create_task(pool._serve(worker)))
                    lanes[-1].add_done_callback(pool._notice_end)
                yield pool
            finally:
                await pool._close(lanes)

    @property
    def open_episodes(self) -> int:
        return sum(len(worker.sessions) for worker in self._workers)

    async def reset(
        self, name: str, options: Mapping[str, Any] | None = None, seed: int = 0
    ) -> EnvSession:
        """A new episode. Waits for room, for a process and for the environment's reset; whether
        that went well is in `session.opening`."""
        return await self._open(Start(name, options or {}, seed))

    async def show(
        self, name: str, options: Mapping[str, Any] | None = None, seed: int = 0
    ) -> Reply:
        """The whole episode of the environment's solver, in one reply (see child.show_solution).
        The deadline is that of a step."""
        return (await self._open(Show(name, options or {}, seed))).opening

    async def _open(self, start: Start | Show) -> EnvSession:
        name = start.name
        if name not in self._names:
            raise EnvError(
                f"the environment {name!r} was not given to the pool",
                fix=f"it has: {', '.join(self._names) or 'none'}",
            )
        await self._room.acquire()
        try:
            worker = await self._pick()
            session = EnvSession(self, worker, next(self._numbers))
            worker.sessions[session.number] = session
        except BaseException:
            self._room.release()
            raise
        self.stats.episodes += 1
        try:
            session.opening = await self.call(session, start)
        except BaseException:
            session.close()
            raise
        return session

    async def call(self, session: EnvSession, call: Start | Show | Act) -> Reply:
        """Send a call of an episode and wait for what comes of it."""
        if self._broken is not None:
            raise self._broken
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        session._answer = answer  # pyright: ignore[reportPrivateUsage]
        worker = session._worker  # pyright: ignore[reportPrivateUsage]
        worker.ask(session.number, call)
        try:
            return await answer
        except asyncio.CancelledError:
            # Nobody waits for the answer any more: an episode cannot go on without it.
            self.leave(session)
            raise
        finally:
            session._answer = None  # pyright: ignore[reportPrivateUsage]

    def leave(self, session: EnvSession) -> None:
        """Forget an episode that nobody plays any more."""
        worker = session._worker  # pyright: ignore[reportPrivateUsage]
        if not session.over and session.number in worker.sessions:
            self._forget(session)
            worker.ask(session.number, End())

    async def _pick(self) -> _Worker:
        """The process with the fewest episodes; waits while none is up."""
        while True:
            if self._broken is not None:
                raise self._broken
            if up := [worker for worker in self._workers if worker.up]:
                return min(up, key=lambda worker: len(worker.sessions))
            self._ready.clear()
            await self._ready.wait()

    async def _serve(self, worker: _Worker) -> None:
        """A lane. Reads the answers of its child, watches deadlines, replaces the child."""
        while True:
            failure, blamed = await self._attend(worker)
            worker.up = False
            await self._nursery.end(worker.child)
            self.stats.restarts += 1
            self._blame(worker, failure, blamed)
            worker.renew(await self._nursery.replace(worker.child))
            self._ready.set()

    async def _attend(self, worker: _Worker) -> tuple[Reply, set[int]]:
        """Settle answers until the child hangs or dies: what happened, and to which episodes."""
        now = asyncio.get_running_loop().time
        while True:
            try:
                frames = await worker.child.receive(deadline=self._deadline(worker, now()))
            except TimeoutError:
                ends = {n: at + self._allowed(worker, n) for n, at in worker.started.items()}
                blamed = {number for number, end in ends.items() if end <= now()}
                silent = min(worker.asked.values(), default=inf) + self.limits.step_s <= now()
                if blamed or (silent and not worker.started):
                    return Reply(EnvStatus.TIMEOUT, detail="its process was killed"), blamed
                continue
            except (ChildLost, ConnectionError):
                await worker.child.wait()
                text = f"its process died ({worker.child.exit_text})"
                return Reply(EnvStatus.CRASHED, detail=text), set(worker.started)
            for kind, body in frames:
                if kind == Kind.STARTED:
                    worker.started[NUMBER.unpack(body)[0]] = now()
                else:
                    self._settle(worker, *decode_reply(body))

    def _deadline(self, worker: _Worker, now: float) -> float:
        """When to look again if nothing comes. With nobody running, a whole step's time: a call
        that is not even begun by then is stuck."""
        ends = [at + self._allowed(worker, number) for number, at in worker.started.items()]
        return min(ends, default=now + self.limits.step_s)

    def _allowed(self, worker: _Worker, number: int) -> float:
        """Seconds that the call of an episode may take."""
        session = worker.sessions.get(number)
        spent = session.seconds if session is not None else 0.0
        return min(self.limits.step_s, max(self.limits.episode_s - spent, 0.0))

    def _settle(self, worker: _Worker, number: int, reply: Reply) -> None:
        """An answer has come."""
        worker.asked.pop(number, None)
        worker.started.pop(number, None)
        session = worker.sessions.get(number)
        if session is None:  # Left in the meantime.
            return
        session.seconds += reply.seconds
        self.stats.seconds += reply.seconds
        self.stats.steps += session.opened
        session.opened = True
        if reply.ok and session.seconds > self.limits.episode_s:
            reply = Reply(EnvStatus.TIMEOUT, None, self._late_text(session), reply.seconds)
            worker.ask(number, End())
        self._answer(session, reply)

    def _blame(self, worker: _Worker, failure: Reply, blamed: set[int]) -> None:
        """The child is gone: its culprits get the failure, its other episodes are lost."""
        lost = Reply(EnvStatus.LOST, detail=LOST_TEXT)
        for number, session in list(worker.sessions.items()):
            if number not in blamed:
                self._answer(session, lost)
                continue
            seconds = self._allowed(worker, number) if failure.status is EnvStatus.TIMEOUT else 0.0
            detail = failure.detail
            if failure.status is EnvStatus.TIMEOUT:
                session.seconds += seconds
                detail = f"{self._late_text(session)}; {detail}"
            self.stats.steps += session.opened
            self._answer(session, Reply(failure.status, None, detail, seconds))

    def _late_text(self, session: EnvSession) -> str:
        if session.seconds >= self.limits.episode_s:
            return f"the episode took more than {self.limits.episode_s:g} s"
        return f"no answer within {self.limits.step_s:g} s"

    def _answer(self, session: EnvSession, reply: Reply) -> None:
        """Tell who waits; an episode that failed or ended is forgotten."""
        if not reply.ok:
            session.status = reply.status
            counts = self.stats.failures
            counts[reply.status] = counts.get(reply.status, 0) + 1
        if not reply.ok or (reply.moment is not None and reply.moment.over):
            self._forget(session)
        answer = session._answer  # pyright: ignore[reportPrivateUsage]
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _forget(self, session: EnvSession) -> None:
        session.over = True
        del session._worker.sessions[session.number]  # pyright: ignore[reportPrivateUsage]
        self._room.release()

    def _notice_end(self, lane: asyncio.Task[None]) -> None:
        """A lane ends only by being cancelled; any other end breaks the pool, loudly."""
        if lane.cancelled() or (error := lane.exception()) is None:
            return
        if not isinstance(error, EnvError):
            error = EnvError(f"the pool lost the thread of an environment process: {error!r}")
        self._give_up(error)

    def _give_up(self, error: EnvError) -> None:
        self._broken = error
        self._ready.set()
        for worker in self._workers:
            for session in worker.sessions.values():
                answer = session._answer  # pyright: ignore[reportPrivateUsage]
                if answer is not None and not answer.done():
                    answer.set_exception(error)

    async def _close(self, lanes: Sequence[asyncio.Task[None]]) -> None:
        self._nursery.kill_all()
        for lane in lanes:
            lane.cancel()
        self._give_up(EnvError("the environment pool is closed", fix="play in its `async with`"))
        try:
            await asyncio.gather(*lanes, return_exceptions=True)
        finally:
            await self._nursery.close()


def _define(name: str, environment: MakeEnv | str) -> str | bytes:
    """How a child gets it: a reference stays one; a class is pickled."""
    if isinstance(environment, str):
        return environment
    try:
        return pickled(environment)
    except Exception as error:
        raise EnvError(
            f"the environment {name!r} cannot be sent to another process: {error}",
            fix="keep locks, files and models out of it, or name it as file.py:Class",
        ) from error


def _pack(call: Call) -> bytes:
    """Plain pickle is several times faster, but cannot carry what the user's script defines."""
    with contextlib.suppress(Exception):
        payload = pickle.dumps(call, protocol=5)
        if b"__main__" not in payload:
            return payload
    try:
        return cloudpickle.dumps(call)
    except Exception as error:
        raise EnvError(f"{call} cannot be sent to another process: {error}") from error
