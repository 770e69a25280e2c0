"""A network to a server of a test that can fail: a TCP proxy in a thread.

with Proxy(port) as proxy:
    ...                        # connect to proxy.port instead
    proxy.refuse()             # connections end, and no new one is accepted
    proxy.hold()               # connections are accepted, but nothing is passed on
    proxy.restore()            # as before; what was held is passed on
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class Proxy:
    """`delay_s`: how late everything arrives, in both directions."""

    def __init__(self, target: int, *, delay_s: float = 0.0) -> None:
        self.target = target
        self.delay_s = delay_s
        self.connections = 0
        """Those accepted so far."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._tasks = set[asyncio.Task[None]]()
        self._listening: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._run(self._restore())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run(self._refuse())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def refuse(self) -> None:
        self._run(self._refuse())

    def hold(self) -> None:
        self._loop.call_soon_threadsafe(self._open.clear)

    def restore(self) -> None:
        self._run(self._restore())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _refuse(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _restore(self) -> None:
        self._open.set()
        if self._listening is None:
            self._listening = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes from either side, until both have ended."""
        far_writer: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, far_writer))
                group.create_task(self._pass_on(far_reader, writer))
        except (OSError, ExceptionGroup):
            pass
        finally:
            for each in (writer, far_writer):
                if each is not None:
                    each.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
