"""Runs a gateway on a port until the caller stops it.

Stopping accepts no new connections, waits `grace_s` seconds for running responses, then aborts.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn

from rollick.errors import ConfigError
from rollick.serve.access_control import AllowedHosts
from rollick.serve.app import make_app
from rollick.serve.connections import BoundedProtocol, connection_limit
from rollick.serve.gateway import Gateway


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
    max_body_bytes: int = 4 << 20
    max_connections: int = field(default_factory=connection_limit)
    """Further connections replace the oldest one that has no request."""
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
        app = make_app(gateway, token, hosts, settings.max_body_bytes)
        protocol: Any = partial(BoundedProtocol, max_connections=settings.max_connections)
        config = uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False
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
    """A uvicorn server that leaves signals to the caller and has an event for its start."""

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
