"""The gateway without a port: sessions that stop, long texts, clients that do not read."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest

from rollick.data.chat import ChatCodec
from rollick.infer.engine import Delta
from rollick.rollout.episode import OneEngine
from rollick.serve import app
from rollick.serve.app import Admission, make_app
from rollick.serve.asked import Ask, Refused, read_chat, read_completion
from rollick.serve.gateway import LONG_TEXT, Answer, Gateway, Piece
from rollick.serve.guard import Hosts
from rollick.testing.fakes import FakeEngine
from rollick.testing.tiny import tiny_tokenizer
from rollick.types import Completion, IntArray, Request, SampleId, frozen_array

MAX_LENGTH = 256
HELLO = [{"role": "user", "content": "hi"}]


class WatchedCodec(ChatCodec):
    """Notes the thread in which each text is encoded."""

    def __init__(self) -> None:
        super().__init__(tiny_tokenizer(), "chat")
        self.threads: list[threading.Thread] = []

    def _tokenized(self, text: str) -> IntArray:
        self.threads.append(threading.current_thread())
        return super()._tokenized(text)


def gateway_of(
    engine: Any, codec: ChatCodec | None = None, max_length: int = MAX_LENGTH
) -> Gateway:
    codec = codec or ChatCodec(tiny_tokenizer(), "chat")
    return Gateway(codec, model="tiny", max_length=max_length, access=OneEngine(engine))


async def ignore(piece: Piece, prompts: Sequence[IntArray]) -> None: ...


async def ask(gateway: Gateway, asked: Ask | None = None, session: Any = None) -> Answer:
    async with asyncio.timeout(20):
        return await gateway.answer(
            asked or read_chat({"messages": HELLO}), ignore, session=session
        )


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_closing_a_session_ends_the_request_under_way_and_those_that_wait():
    engine = FakeEngine(seconds=math.inf)
    gateway = gateway_of(engine)
    session = gateway.open_session(SampleId(3, 0), OneEngine(engine))
    asked = [asyncio.create_task(ask(gateway, session=session)) for _ in range(3)]
    await until(lambda: len(engine.requests) == 1)
    assert gateway.close_session(session.id) == ()
    for task in asked:
        with pytest.raises(Refused, match="session was closed") as refused:
            await task
        assert refused.value.status == 410
    assert len(engine.requests) == 1
    assert engine.load().running == 0
    assert (gateway.running, session.segments) == (0, ())


async def test_a_session_that_is_closed_between_two_answers_refuses_the_next():
    engine = FakeEngine(reply=lambda _: [5, 2])
    gateway = gateway_of(engine)
    session = gateway.open_session(SampleId(3, 0), OneEngine(engine))
    await ask(gateway, session=session)
    assert len(gateway.close_session(session.id)) == 1
    with pytest.raises(Refused, match="session was closed"):
        await ask(gateway, session=session)
    assert len(session.segments) == 1


async def test_a_caller_that_is_cancelled_in_a_closed_session_stays_cancelled():
    engine = FakeEngine(seconds=math.inf)
    gateway = gateway_of(engine)
    session = gateway.open_session(SampleId(3, 0), OneEngine(engine))
    asked = asyncio.create_task(ask(gateway, session=session))
    await until(lambda: len(engine.requests) == 1)
    gateway.close_session(session.id)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


@pytest.mark.parametrize("in_a_session", [False, True])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(in_a_session: bool):
    codec = WatchedCodec()
    gateway = gateway_of(FakeEngine(reply=lambda _: [5, 2]), codec)
    session = gateway.open_own_session() if in_a_session else None
    most = MAX_LENGTH * codec.longest_token
    codec.threads.clear()
    for asked, param in (
        (read_chat({"messages": [{"role": "user", "content": "a" * (most + 1)}]}), "messages"),
        (read_completion({"prompt": "a" * (most + 1)}), "prompt"),
    ):
        with pytest.raises(Refused, match=f"{most + 1} characters") as refused:
            await ask(gateway, asked, session)
        assert (refused.value.status, refused.value.param) == (400, param)
        assert refused.value.code == "context_length_exceeded"
    assert codec.threads == []


@pytest.mark.parametrize("in_a_session", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_a_long_text_is_encoded_in_another_thread_and_a_short_one_here(
    chat: bool, in_a_session: bool
):
    codec = WatchedCodec()
    gateway = gateway_of(FakeEngine(reply=lambda _: [5, 2]), codec, 4 * LONG_TEXT)
    session = gateway.open_own_session() if in_a_session else None
    for text, here in (("a", True), ("a" * (LONG_TEXT + 1), False)):
        codec.threads.clear()
        body: Any = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        await ask(gateway, read_chat(body) if chat else read_completion(body), session)
        assert codec.threads
        assert {thread is threading.main_thread() for thread in codec.threads} == {here}


async def test_more_likeliest_tokens_than_there_are_tokens_are_refused():
    gateway = gateway_of(FakeEngine(reply=lambda _: [5, 2]), None)
    size = gateway.codec.vocabulary_size
    with pytest.raises(Refused, match=f"{size} tokens") as refused:
        await ask(gateway, read_chat({"messages": HELLO, "top_k": 2**63}))
    assert (refused.value.status, refused.value.param) == (400, "top_k")
    await ask(gateway, read_chat({"messages": HELLO, "top_k": size}))


class Endless:
    """An Access whose answers never end; says whether somebody still listens."""

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
async def test_a_client_that_does_not_read_its_answer_is_gone_after_a_while(
    monkeypatch: pytest.MonkeyPatch, reads: int
):
    monkeypatch.setattr(app, "SEND_DEADLINE_S", 0.1)
    access: Any = Endless()
    codec = ChatCodec(tiny_tokenizer(), "chat")
    gateway = Gateway(codec, model="tiny", max_length=MAX_LENGTH, access=access)
    served = make_app(gateway, Admission("secret", Hosts.of("127.0.0.1")))
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if asked:
            return asked.pop()
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
        await served(scope, receive, send)
    assert len(sent) == reads
    assert (access.listened, gateway.running) == (False, 0)
