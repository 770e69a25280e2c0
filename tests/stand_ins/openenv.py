"""A replacement for the client of openenv, which cannot be installed with the tests: it requires
older versions of other packages. Same calls, messages, timeouts and exceptions as openenv 0.10."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any, NamedTuple

from websockets.asyncio.client import ClientConnection, connect


class StepResult(NamedTuple):
    observation: dict[str, Any]
    reward: float | None
    done: bool


class GenericEnvClient:
    def __init__(
        self, base_url: str, connect_timeout_s: float = 10.0, message_timeout_s: float = 60.0
    ) -> None:
        self._url = base_url.replace("http", "ws", 1) + "/ws"
        self._connect_timeout = connect_timeout_s
        self._message_timeout = message_timeout_s
        self._socket: ClientConnection | None = None

    def sync(self) -> SyncEnvClient:
        return SyncEnvClient(self)

    async def connect(self) -> None:
        try:
            self._socket = await connect(self._url, open_timeout=self._connect_timeout)
        except Exception as error:
            raise ConnectionError(f"Failed to connect to {self._url}: {error}") from error

    async def call(self, kind: str, data: dict[str, Any]) -> StepResult:
        assert self._socket is not None
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        text = await asyncio.wait_for(self._socket.recv(), timeout=self._message_timeout)
        reply = json.loads(text)
        if reply["type"] == "error":
            raise RuntimeError(f"Server error: {reply['data']}")
        data = reply["data"]
        return StepResult(data["observation"], data.get("reward"), data.get("done", False))

    async def disconnect(self) -> None:
        if self._socket is not None:
            await self._socket.close()


class SyncEnvClient:
    """Runs the client in its own event loop, in a thread."""

    def __init__(self, client: GenericEnvClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def connect(self) -> SyncEnvClient:
        self._run(self._client.connect())
        return self

    def reset(self, **arguments: Any) -> StepResult:
        return self._run(self._client.call("reset", arguments))

    def step(self, action: dict[str, Any]) -> StepResult:
        return self._run(self._client.call("step", action))

    def close(self) -> None:
        self._run(self._client.disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
