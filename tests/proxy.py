"""A TCP proxy in a thread: a network between a test and its server that can fail.

with Proxy(port) as proxy:
    ...                        # connect to proxy.port instead
    proxy.refuse()             # connections end, and no new one is accepted
    proxy.hold()               # connections are accepted, but no data is forwarded
    proxy.restore()            # as before; held data is forwarded
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class Proxy:
    """`delay_s`: the latency in each direction."""

    def __init__(self, target: int, *, delay_s: float = 0.0) -> None:
        self.target = target
        self.delay_s = delay_s
        self.connections = 0
        """Number accepted so far."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._tasks = set[asyncio.Task[None]]()
        self._server: asyncio.Server | None = None
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
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _restore(self) -> None:
        self._open.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward data in both directions, until both sides have ended."""
        far_writer: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far_writer))
                group.create_task(self._forward(far_reader, writer))
        except (OSError, ExceptionGroup):
            pass
        finally:
            for open_writer in (writer, far_writer):
                if open_writer is not None:
                    open_writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
