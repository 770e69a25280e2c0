"""A gateway on a port: opens the socket, runs until it is told to stop, stops with grace.

Stopping takes no new connections, gives running answers `grace_s` seconds, and aborts the rest.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import uvicorn

from rollick.errors import ConfigError
from rollick.serve.app import Admission, make_app
from rollick.serve.gateway import Gateway
from rollick.serve.guard import Hosts


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Where to listen and whom to answer. The defaults answer this machine only."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    token: str = ""
    """What clients send as their API key; none makes one."""
    allow_hosts: Sequence[str] = ()
    """Names besides `host` that a Host header may have."""
    max_body_bytes: int = 4 << 20
    grace_s: int = 10


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers."""

    address: str
    """http://HOST:PORT, without a slash at the end."""
    token: str

    @property
    def base_url(self) -> str:
        """What OpenAI's clients take."""
        return f"{self.address}/v1"


@asynccontextmanager
async def serving(gateway: Gateway, settings: ServeSettings) -> AsyncGenerator[Served]:
    """The gateway on its port, from here to the end of the block."""
    token = settings.token or secrets.token_urlsafe(24)
    with _listening(settings) as listener:
        port = listener.getsockname()[1]
        hosts = Hosts.of(settings.host, settings.allow_hosts)
        app = make_app(gateway, Admission(token, hosts, settings.max_body_bytes))
        server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=settings.grace_s,
            )
        )
        running = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
        try:
            ready = asyncio.create_task(server.ready.wait())
            await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if running.done():
                running.result()
            shown = f"[{settings.host}]" if ":" in settings.host else settings.host
            yield Served(f"http://{shown}:{port}", token)
        finally:
            server.should_exit = True
            await running


class _Server(uvicorn.Server):
    """Signals are the caller's, and somebody waits for the start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextmanager
def _listening(settings: ServeSettings) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error}",
            fix="choose another --port (0 takes a free one) or --host",
        ) from error
    with listener:
        yield listener
