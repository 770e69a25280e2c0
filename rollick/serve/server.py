"""Runs a gateway on a port until the caller stops it.

Stopping accepts no new connections, waits `grace_s` seconds for running responses, then aborts.
Connections are bounded, so that half-open ones do not shut out others:

connected -- head within HEAD_DEADLINE_S --> request, response --> waits for the next head
    |                                                                      |
    +------ too late, or the oldest when there are too many --> closed <---+
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from rollick.errors import ConfigError
from rollick.serve.access_control import AllowedHosts
from rollick.serve.app import make_app
from rollick.serve.gateway import Gateway

HEAD_DEADLINE_S = 15.0
"""Time for a client to send the head of a request."""
MAX_CONNECTIONS = 4096


def connection_limit() -> int:
    """Leaves a quarter of the open files to the engine and others."""
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max_files * 3 // 4)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Address and access. The defaults accept requests from this machine only."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 chooses a free port."""
    token: str = ""
    """The API key of clients; a random one if empty."""
    allow_hosts: Sequence[str] = ()
    """Accepted names in a Host header, besides `host`."""
    grace_s: int = 10


@dataclass(frozen=True, slots=True)
class ServerAddress:
    address: str
    """http://HOST:PORT, without a trailing slash."""
    token: str

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self.address}/v1"


@asynccontextmanager
async def run_server(gateway: Gateway, settings: ServeSettings) -> AsyncGenerator[ServerAddress]:
    token = settings.token or secrets.token_urlsafe(24)
    with _open_listener(settings) as listener:
        port = listener.getsockname()[1]
        hosts = AllowedHosts.of(settings.host, settings.allow_hosts)
        app = make_app(gateway, token, hosts)
        config = uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False
        )
        config.server_header = config.proxy_headers = False
        config.timeout_graceful_shutdown = settings.grace_s
        server = _Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
        try:
            ready = asyncio.create_task(server.ready.wait())
            await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if running.done():
                running.result()
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            yield ServerAddress(f"http://{host}:{port}", token)
        finally:
            server.should_exit = True
            await running


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the caller and sets `ready` when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _open_listener(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family)
    except (OSError, OverflowError) as error:
        text = f"cannot listen on {settings.host} port {settings.port}: {error}"
        fix = "choose another --port (0 chooses a free one) or --host"
        raise ConfigError(text, fix=fix) from error


class BoundedProtocol(H11Protocol):
    """A connection of uvicorn's server. It is closed if its next request takes too long, or if it
    has waited longest for one when there are too many connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting_since: float | None = None
        """When the wait for the head of a request began; None during a request."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > connection_limit():
            # This connection is the newest: it is closed only if all others have a request.
            peers = [cast("BoundedProtocol", peer) for peer in self.connections]
            waiting = [(p.waiting_since, p) for p in peers if p.waiting_since is not None]
            min(waiting, key=lambda pair: pair[0])[1].transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete:
            self._end_wait()

    def on_response_complete(self) -> None:
        self._wait_for_head()
        super().on_response_complete()

    def _wait_for_head(self) -> None:
        self._end_wait()
        self.waiting_since = self.loop.time()
        self._deadline = self.loop.call_later(HEAD_DEADLINE_S, self.transport.abort)

    def _end_wait(self) -> None:
        self.waiting_since = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
