"""The gateway without a port: sessions that stop, long texts, clients that do not read."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine

from rollick.data.chat import ChatCodec
from rollick.episodes.base import SingleEngineAccess
from rollick.infer.engine import Delta
from rollick.serve import app
from rollick.serve.access_control import AllowedHosts
from rollick.serve.app import make_app
from rollick.serve.choices import ChoiceChunk
from rollick.serve.gateway import LONG_TEXT, Gateway
from rollick.serve.request_fields import BadRequest
from rollick.serve.requests import ApiRequest, read_chat, read_completion
from rollick.testing.tiny import tiny_tokenizer
from rollick.types import Completion, IntArray, Request, SampleId, frozen_array

MAX_LENGTH = 256
HELLO = [{"role": "user", "content": "hi"}]


class WatchedCodec(ChatCodec):
    """Records the thread in which each text is encoded."""

    def __init__(self) -> None:
        super().__init__(tiny_tokenizer(), "chat")
        self.threads: list[threading.Thread] = []

    def _tokenize(self, text: str) -> IntArray:
        self.threads.append(threading.current_thread())
        return super()._tokenize(text)


def make_gateway(
    engine: Any, codec: ChatCodec | None = None, max_length: int = MAX_LENGTH
) -> Gateway:
    codec = codec or ChatCodec(tiny_tokenizer(), "chat")
    return Gateway(codec, model="tiny", max_length=max_length, access=SingleEngineAccess(engine))


async def ignore(chunk: ChoiceChunk) -> None: ...


async def send(
    gateway: Gateway, request: ApiRequest | None = None, session: Any = None
) -> Sequence[ChoiceChunk]:
    async with asyncio.timeout(20):
        return await gateway.respond(
            request or read_chat({"messages": HELLO}), ignore, session=session
        )


async def wait_until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_closing_a_session_cancels_its_running_and_waiting_requests():
    engine = FakeEngine(seconds=math.inf)
    gateway = make_gateway(engine)
    session = gateway.open_session(SampleId(3, 0), SingleEngineAccess(engine))
    tasks = [asyncio.create_task(send(gateway, session=session)) for _ in range(3)]
    await wait_until(lambda: len(engine.requests) == 1)
    assert gateway.close_session(session.id) == ()
    for task in tasks:
        with pytest.raises(BadRequest, match="session was closed") as rejected:
            await task
        assert rejected.value.status == 410
    assert len(engine.requests) == 1
    assert engine.load().running == 0
    assert (gateway.running, session.segments) == (0, ())


async def test_a_session_that_is_closed_between_two_requests_rejects_the_next():
    engine = FakeEngine(reply=lambda _: [5, 2])
    gateway = make_gateway(engine)
    session = gateway.open_session(SampleId(3, 0), SingleEngineAccess(engine))
    await send(gateway, session=session)
    assert len(gateway.close_session(session.id)) == 1
    with pytest.raises(BadRequest, match="session was closed"):
        await send(gateway, session=session)
    assert len(session.segments) == 1


async def test_a_cancelled_caller_in_a_closed_session_stays_cancelled():
    engine = FakeEngine(seconds=math.inf)
    gateway = make_gateway(engine)
    session = gateway.open_session(SampleId(3, 0), SingleEngineAccess(engine))
    task = asyncio.create_task(send(gateway, session=session))
    await wait_until(lambda: len(engine.requests) == 1)
    gateway.close_session(session.id)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("in_a_session", [False, True])
async def test_a_text_that_cannot_fit_is_rejected_before_it_is_encoded(in_a_session: bool):
    codec = WatchedCodec()
    gateway = make_gateway(FakeEngine(reply=lambda _: [5, 2]), codec)
    session = gateway.open_http_session() if in_a_session else None
    max_characters = MAX_LENGTH * codec.max_token_length
    codec.threads.clear()
    for request, param in (
        (
            read_chat({"messages": [{"role": "user", "content": "a" * (max_characters + 1)}]}),
            "messages",
        ),
        (read_completion({"prompt": "a" * (max_characters + 1)}), "prompt"),
    ):
        with pytest.raises(BadRequest, match=f"{max_characters + 1} characters") as rejected:
            await send(gateway, request, session)
        assert (rejected.value.status, rejected.value.param) == (400, param)
        assert rejected.value.code == "context_length_exceeded"
    assert codec.threads == []


@pytest.mark.parametrize("in_a_session", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_a_long_text_is_encoded_in_another_thread_and_a_short_one_here(
    chat: bool, in_a_session: bool
):
    codec = WatchedCodec()
    gateway = make_gateway(FakeEngine(reply=lambda _: [5, 2]), codec, 4 * LONG_TEXT)
    session = gateway.open_http_session() if in_a_session else None
    for text, here in (("a", True), ("a" * (LONG_TEXT + 1), False)):
        codec.threads.clear()
        body: Any = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        await send(gateway, read_chat(body) if chat else read_completion(body), session)
        assert codec.threads
        assert {thread is threading.main_thread() for thread in codec.threads} == {here}


async def test_top_k_above_the_vocabulary_size_is_rejected():
    gateway = make_gateway(FakeEngine(reply=lambda _: [5, 2]), None)
    size = gateway.codec.vocabulary_size
    with pytest.raises(BadRequest, match=f"{size} tokens") as rejected:
        await send(gateway, read_chat({"messages": HELLO, "top_k": 2**63}))
    assert (rejected.value.status, rejected.value.param) == (400, "top_k")
    await send(gateway, read_chat({"messages": HELLO, "top_k": size}))


class EndlessEngine:
    """An EngineAccess whose responses never end; records whether a client still listens."""

    listened = False

    async def generate(self, request: Request) -> Completion:
        raise AssertionError

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        self.listened = True
        one = frozen_array([5], np.int32)
        try:
            while True:
                yield Delta(one, one.astype(np.float32), one)
                await asyncio.sleep(0)
        finally:
            self.listened = False


@pytest.mark.parametrize("reads", [0, 1, 5])
async def test_a_client_that_does_not_read_its_response_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, reads: int
):
    monkeypatch.setattr(app, "SEND_DEADLINE_S", 0.1)
    access: Any = EndlessEngine()
    codec = ChatCodec(tiny_tokenizer(), "chat")
    gateway = Gateway(codec, model="tiny", max_length=MAX_LENGTH, access=access)
    asgi_app = make_app(gateway, "secret", AllowedHosts.of("127.0.0.1"))
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if len(sent) == reads:
            assert access.listened
            await asyncio.Event().wait()
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer secret")]
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
    }
    async with asyncio.timeout(20):
        await asgi_app(scope, receive, send)
    assert len(sent) == reads
    assert (access.listened, gateway.running) == (False, 0)
