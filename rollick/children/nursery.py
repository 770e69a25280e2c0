"""Starts, replaces and ends the children of a pool, all of one program that loads the same things.

    Nursery.start() --LOAD--> child <-- READY or BROKEN      every child is known to the guard

Owns that nothing is left behind and that a child which cannot load is an error with a reason. What
the children do, and when one is to be replaced, is the pool's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

from rollick.children.process import Child, ChildLost, Guard
from rollick.errors import RollickError

LOAD, READY, BROKEN = 1, 3, 4
"""Kinds of frames that every program of a pool uses for its start."""
START_SECONDS = 120.0
"""For a child to import what it needs; user code may import large libraries."""
MAX_STARTS = 3
"""Starts in a row that may fail."""


@dataclass(slots=True, eq=False)
class Nursery:
    """The children of a pool. `what` they run (reward, environment) and its names are for people;
    `definitions` is the body of their LOAD frame."""

    program: str
    what: str
    names: str
    definitions: bytes
    error: type[RollickError]
    output: IO[bytes] | None = None
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables that the children get besides those of this process."""
    said: bytes = b""
    """What the last of them said when it was ready."""
    _children: set[Child] = field(default_factory=set[Child])
    _guard: Guard | None = None

    async def start_all(self, count: int) -> list[Child]:
        """The guard and the first children. Waits for all of them, then raises the first error."""
        self._guard = await Guard.spawn()
        starts = (self.start() for _ in range(count))
        results = await asyncio.gather(*starts, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Child)]

    async def start(self) -> Child:
        """A child that has loaded everything; an error of the pool's kind if it cannot."""
        assert self._guard is not None
        child = await Child.spawn(self.program, self.output, secrets=self.secrets)
        self._children.add(child)
        self._guard.watch(child)
        try:
            await self._load(child)
        except RollickError:
            await self.end(child)
            raise
        return child

    async def replace(self, child: Child) -> Child:
        """End one and start another in its place."""
        await self.end(child)
        for failed_starts in range(MAX_STARTS):
            try:
                return await self.start()
            except RollickError:
                if failed_starts + 1 == MAX_STARTS:
                    raise
        raise AssertionError("the last failed start raises")

    async def end(self, child: Child) -> None:
        assert self._guard is not None
        child.kill()
        await child.wait()
        self._guard.forget(child)
        self._children.discard(child)

    def kill_all(self) -> None:
        for child in self._children:
            child.kill()

    async def close(self) -> None:
        """Wait until all are gone, the guard last."""
        try:
            await asyncio.gather(*(self.end(child) for child in list(self._children)))
        finally:
            if self._guard is not None:
                await self._guard.close()

    async def _load(self, child: Child) -> None:
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        what, names = self.what, self.names
        try:
            await child.send(LOAD, self.definitions, deadline=deadline)
            [(kind, body)] = await child.receive(deadline=deadline)
        except TimeoutError:
            raise self.error(
                f"{_a(what)} process did not load {names} within {START_SECONDS:g} s",
                fix=f"look for slow imports or downloads at the top of the {what}'s file",
            ) from None
        except (ChildLost, ConnectionError):
            await child.wait()
            raise self.error(
                f"{_a(what)} process died while loading {names} ({child.exit_text})",
                fix=f"import the {what}'s file in a plain Python to see why",
            ) from None
        if kind == BROKEN:
            problem = json.loads(body)
            raise self.error(f"cannot load {names}: {problem['message']}", fix=problem["fix"])
        self.said = body


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
