"""Bounds the connections of the server: half-open ones must not shut out others.

connected -- head within HEAD_DEADLINE_S --> request, response --> waits for the next head
    |                                                                      |
    +------ too late, or the oldest when there are too many --> closed <---+
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, Protocol, cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_DEADLINE_S = 15.0
"""Time for a client to send the head of a request."""
MAX_CONNECTIONS = 4096


def connection_limit() -> int:
    """As many as the limit of open files allows; a quarter of it is for the engine and others."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files * 3 // 4)
    )


class _Connection(Protocol):
    waits_since: float | None
    transport: asyncio.Transport


class BoundedProtocol(H11Protocol):
    """A connection of uvicorn's server that is closed if it waits too long for a request."""

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waits_since: float | None = None
        """When the wait for the head of a request began; None during a request."""
        self._max_connections = max_connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self._max_connections:
            # This one is the youngest: it is closed only if all others have a request.
            others = [cast("_Connection", each) for each in self.connections]
            waiting = [(each.waits_since, each) for each in others if each.waits_since is not None]
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
        self.waits_since = self.loop.time()
        self._deadline = self.loop.call_later(HEAD_DEADLINE_S, self.transport.abort)

    def _end_wait(self) -> None:
        self.waits_since = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
