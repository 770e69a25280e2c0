"""Connections that never finish a request, next to those of normal clients, on a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from fakes import FakeEngine

from rollick.data.chat import ChatCodec
from rollick.episodes.base import SingleEngineAccess
from rollick.serve import server
from rollick.serve.gateway import Gateway
from rollick.serve.server import ServerAddress, ServeSettings, run_server
from rollick.testing.tiny import tiny_tokenizer

pytestmark = pytest.mark.asyncio

INCOMPLETE_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def serve_fake_engine(seconds: float = 0.0) -> AsyncGenerator[ServerAddress]:
    codec = ChatCodec(tiny_tokenizer(), "chat")
    engine = FakeEngine(reply=lambda request: [5, 2], seconds=seconds)
    gateway = Gateway(codec, model="tiny", max_length=100, access=SingleEngineAccess(engine))
    options = ServeSettings(grace_s=1)
    async with asyncio.timeout(60), run_server(gateway, options) as address:
        yield address
    await engine.close()


class RawConnection:
    """A connection that sends bytes and reports when the server closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, address: ServerAddress, first: bytes = INCOMPLETE_HEAD) -> RawConnection:
        host, port = address.address.removeprefix("http://").split(":")
        connection = cls(*await asyncio.open_connection(host, int(port)))
        connection.writer.write(first)
        return connection

    async def is_closed(self, within_s: float) -> bool:
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(within_s):
                while await self.reader.read(1 << 16):
                    pass
                return True
        return self.reader.at_eof() or self.reader.exception() is not None

    def close(self) -> None:
        self.writer.transport.abort()


async def chat(address: ServerAddress) -> int:
    headers = {"authorization": f"Bearer {address.token}"}
    async with httpx.AsyncClient(timeout=20) as client:
        response = await client.post(
            f"{address.base_url}/chat/completions", json=CHAT, headers=headers
        )
    return response.status_code


async def test_half_open_connections_do_not_shut_out_a_client(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "connection_limit", lambda: 8)
    async with serve_fake_engine() as address:
        half_open = [await RawConnection.open(address) for _ in range(30)]
        assert await chat(address) == 200
        closed = [await each.is_closed(within_s=0.2) for each in half_open[:20]]
        assert all(closed)
        for each in half_open:
            each.close()


async def test_a_running_request_is_not_closed_for_new_connections(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(server, "connection_limit", lambda: 4)
    async with serve_fake_engine(seconds=1.0) as address:
        running = asyncio.create_task(chat(address))
        await asyncio.sleep(0.4)
        half_open = [await RawConnection.open(address) for _ in range(12)]
        assert await running == 200
        for each in half_open:
            each.close()


@pytest.mark.parametrize(
    "first",
    [
        b"",
        INCOMPLETE_HEAD,
        # Without the token, the server responds before it has the body, which then never ends.
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{",
    ],
)
async def test_a_head_that_does_not_arrive_in_time_ends_its_connection(
    first: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "HEAD_DEADLINE_S", 0.5)
    async with serve_fake_engine() as address:
        slow = await RawConnection.open(address, first)

        async def drip() -> None:
            with suppress(ConnectionError):
                while first:
                    await asyncio.sleep(0.1)
                    slow.writer.write(b"a")

        dripping = asyncio.create_task(drip())
        assert await slow.is_closed(within_s=3)
        dripping.cancel()
        slow.close()


async def test_a_response_may_take_longer_than_the_deadline_of_a_head(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(server, "HEAD_DEADLINE_S", 0.3)
    async with serve_fake_engine(seconds=1.0) as address:
        assert await chat(address) == 200


async def test_the_limit_of_connections_leaves_files_for_others():
    assert 0 < server.connection_limit() <= server.MAX_CONNECTIONS
