"""The gateway on a real port: the openai client, plain HTTP, agents in sessions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from fakes import FakeEngine
from openai import AsyncOpenAI

from rollick.config.schema import InferConfig, ModelConfig
from rollick.data.chat import ChatCodec
from rollick.episodes.base import SingleEngineAccess
from rollick.errors import ConfigError, EngineError, EngineLost
from rollick.infer.engine import Engine, StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.serve.gateway import Gateway
from rollick.serve.server import ServerAddress, ServeSettings, run_server
from rollick.testing.tiny import tiny_model, tiny_tokenizer
from rollick.types import NOT_SAMPLED, Request, SampleId, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 3000
"""Tokens of a response that is still being generated when its client disconnects."""
HELLO: Any = [{"role": "user", "content": "hi"}]
CODEC = ChatCodec(tiny_tokenizer(), "chat")
CLIENTS: list[AsyncOpenAI] = []
"""The clients of the running test."""


@dataclass(frozen=True)
class Site:
    """A running server with its gateway and engine."""

    served: ServerAddress
    gateway: Gateway
    engine: Any

    def client(self, **options: Any) -> AsyncOpenAI:
        settings = {"base_url": self.served.base_url, "api_key": self.served.token} | options
        client = AsyncOpenAI(**settings, max_retries=0, timeout=30)
        CLIENTS.append(client)
        return client

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Plain HTTP, with the token unless other headers are given."""
        headers = {"authorization": f"Bearer {self.served.token}"} | options.pop("headers", {})
        async with httpx.AsyncClient(base_url=self.served.address, timeout=30) as client:
            return await client.request(method, path, headers=headers, **options)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.send("POST", path, json=body, **options)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def close_clients() -> AsyncGenerator[None]:
    """A client that is garbage-collected open starts a task on the event loop of another test."""
    yield
    while CLIENTS:
        await CLIENTS.pop().close()


@asynccontextmanager
async def run_site(
    engine: Engine, *, max_length: int = 256, **options: Any
) -> AsyncGenerator[Site]:
    gateway = Gateway(
        CODEC, model="tiny", max_length=max_length, access=SingleEngineAccess(engine), **options
    )
    try:
        async with asyncio.timeout(60), run_server(gateway, ServeSettings(grace_s=2)) as served:
            yield Site(served, gateway, engine)
    finally:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny(tiny_folder: Path) -> AsyncGenerator[Site]:
    """The tiny model behind the native engine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = NativeEngine.create(
        InferConfig(slots=8, max_length=LONG + 100),
        ModelConfig(path=str(tiny_folder)),
        stops=StopRules((), CODEC.decode),
    )
    async with run_site(engine, max_length=LONG + 100) as service:
        yield service
    torch.set_num_threads(threads)


@asynccontextmanager
async def run_fake_site(
    reply: str | Callable[[Request], str] = "ok", **options: Any
) -> AsyncGenerator[Site]:
    """Run a site with scripted replies: ids of the tiny tokenizer and its end-of-turn token."""

    def ids(request: Request) -> list[int]:
        text = reply if isinstance(reply, str) else reply(request)
        return [*CODEC.encode_text(text).tolist()[1:], 2]

    limits = {name: options.pop(name) for name in ("max_requests",) if name in options}
    async with run_site(FakeEngine(reply=ids, **options), **limits) as service:
        yield service


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def generate_ids(engine: Engine, text: str, sampling: Sampling, stream: int) -> list[int]:
    request = Request(
        SampleId(10**6, stream % 97), CODEC.encode_text(text), sampling, stream=stream
    )
    return (await engine.generate(request)).token_ids.tolist()


async def test_a_chat_response_has_usage_and_a_finish_reason(tiny: Site):
    response = await tiny.client().chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5
    )
    (choice,) = response.choices
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert response.usage is not None
    assert response.usage.prompt_tokens == 4
    assert response.usage.completion_tokens == 5
    assert response.usage.total_tokens == 9
    assert (response.object, response.model) == ("chat.completion", "tiny")


async def test_greedy_text_equals_the_engines_own(tiny: Site):
    response = await tiny.client().completions.create(
        model="tiny", prompt="ab", temperature=0, max_tokens=6
    )
    expected = await generate_ids(tiny.engine, "ab", Sampling(0.0, 6), 1)
    assert response.choices[0].text == CODEC.decode(expected)


async def test_a_stream_is_the_same_text_in_many_chunks(tiny: Site):
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "seed": 7}
    full = await tiny.client().chat.completions.create(**options)
    stream = await tiny.client().chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *pieces, last = chunks
    texts = [chunk.choices[0].delta.content or "" for chunk in pieces]
    assert "".join(texts) == full.choices[0].message.content
    assert len(pieces) > 10
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + [
        "length"
    ]
    assert last.choices == []
    assert last.usage == full.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_a_completion_streams_too(tiny: Site):
    stream = await tiny.client().completions.create(
        model="tiny", prompt="ab", max_tokens=8, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text async for chunk in stream]
    expected = await generate_ids(tiny.engine, "ab", Sampling(0.0, 8), 1)
    assert "".join(pieces) == CODEC.decode(expected)


async def test_an_engine_that_cannot_stream_sends_one_chunk():
    async with run_fake_site("hello") as service:
        stream = await service.client().chat.completions.create(
            model="tiny", messages=HELLO, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["hello"]
    assert chunks[0].choices[0].finish_reason == "stop"


async def test_the_same_seed_gives_the_same_text_and_another_seed_another_text(tiny: Site):
    async def text(seed: int | None) -> str | None:
        response = await tiny.client().chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=20, seed=seed
        )
        return response.choices[0].message.content

    first, again, other, free = [await text(seed) for seed in (1, 1, 2, None)]
    assert first == again
    assert len({first, other, free}) == 3


async def test_two_choices_of_one_request_differ_and_are_in_order(tiny: Site):
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "n": 2, "seed": 3}
    full = await tiny.client().chat.completions.create(**options)
    texts = [choice.message.content for choice in full.choices]
    assert [choice.index for choice in full.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert full.usage is not None
    assert (full.usage.prompt_tokens, full.usage.completion_tokens) == (4, 40)
    streamed = ["", ""]
    async for chunk in await tiny.client().chat.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


async def test_several_prompts_are_several_choices(tiny: Site):
    response = await tiny.client().completions.create(
        model="tiny", prompt=["a", "b"], n=2, max_tokens=3, temperature=0
    )
    texts = [choice.text for choice in response.choices]
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]


async def test_a_stop_string_ends_the_text_and_is_left_out():
    async with run_fake_site("one;two") as service:
        response = await service.client().chat.completions.create(
            model="tiny", messages=HELLO, stop=[";"]
        )
    assert response.choices[0].message.content == "one"
    assert response.choices[0].finish_reason == "stop"


async def test_the_native_engine_stops_at_a_stop_string(tiny: Site):
    full = await tiny.client().completions.create(model="tiny", prompt="ab", max_tokens=60, seed=5)
    text = full.choices[0].text
    stop = text[20:22]
    cut = await tiny.client().completions.create(
        model="tiny", prompt="ab", max_tokens=60, seed=5, stop=stop
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None
    assert cut.usage.completion_tokens < 60


async def test_token_ids_and_log_probs_come_as_an_extension(tiny: Site):
    response = await tiny.client().chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=6,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    body = response.model_dump()
    (choice,) = body["choices"]
    assert body["prompt_token_ids"] == CODEC.encode_messages(HELLO).tolist()
    assert CODEC.decode(choice["token_ids"]) == choice["message"]["content"]
    assert [row["logprob"] for row in choice["logprobs"]["content"]] == choice["token_logprobs"]
    assert len(choice["token_logprobs"]) == 6
    assert all(value < 0 for value in choice["token_logprobs"])


async def test_streamed_token_ids_equal_those_of_the_full_response(tiny: Site):
    options: Any = {"model": "tiny", "prompt": [1, 5, 6], "max_tokens": 9, "seed": 1}
    extra = {"return_token_ids": True}
    full = await tiny.client().completions.create(**options, extra_body=extra, logprobs=0)
    stream = await tiny.client().completions.create(**options, extra_body=extra, stream=True)
    ids: list[int] = []
    async for chunk in stream:
        ids += chunk.model_dump()["choices"][0]["token_ids"]
    (choice,) = full.model_dump()["choices"]
    assert ids == choice["token_ids"]
    assert choice["prompt_token_ids"] == [1, 5, 6]
    assert choice["logprobs"]["token_logprobs"] == choice["token_logprobs"]


async def test_models_are_listed_and_found_by_name(tiny: Site):
    listed = await tiny.client().models.list()
    assert [model.id for model in listed.data] == ["tiny"]
    assert (await tiny.client().models.retrieve("tiny")).owned_by == "rollick"
    with pytest.raises(openai.NotFoundError):
        await tiny.client().models.retrieve("other")


async def test_two_concurrent_clients_are_batched():
    async with run_fake_site("x" * 10, seconds=0.5) as service:
        create_chat = service.client().chat.completions.create
        await asyncio.gather(*(create_chat(model="tiny", messages=HELLO) for _ in range(2)))
        assert service.engine.peak == 2


@pytest.mark.parametrize("key", ["wrong", "", "Bearer"])
async def test_a_request_without_the_token_is_rejected(tiny: Site, key: str):
    with pytest.raises(openai.AuthenticationError, match="token is missing or wrong"):
        await tiny.client(api_key=key or "-").models.list()
    headers = {"authorization": key}
    response = await tiny.post("/v1/chat/completions", {"messages": HELLO}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


async def test_a_request_with_an_unknown_host_is_rejected_even_with_the_token(tiny: Site):
    for path in ("/v1/models", "/health"):
        response = await tiny.send("GET", path, headers={"host": "evil.example"})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")


async def test_health_needs_no_token_and_reveals_nothing(tiny: Site):
    response = await tiny.send("GET", "/health", headers={"authorization": ""})
    assert response.json() == {"status": "ok"}


async def test_no_response_can_be_rendered_as_a_page(tiny: Site):
    body = {"messages": HELLO, "<script>": 1}
    for response in (
        await tiny.send("GET", "/v1/models"),
        await tiny.post("/v1/completions", body),
    ):
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "tiny", "messages": []}, 400, "messages"),
        ({"messages": HELLO, "temperature": 9}, 400, "temperature"),
        ({"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
        ({"messages": HELLO, "model": "gpt"}, 404, "model"),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, 400, "tools"),
        ({"messages": [{"role": "user", "content": "a" * LONG * 2}]}, 400, "messages"),
        ([], 400, None),
    ],
)
async def test_a_bad_request_gets_an_error_in_openais_format(
    tiny: Site, body: Any, status: int, param: str | None
):
    response = await tiny.post("/v1/chat/completions", body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_an_invalid_token_id_is_rejected_without_affecting_others(tiny: Site):
    with pytest.raises(openai.BadRequestError, match="token id 9999"):
        await tiny.client().completions.create(model="tiny", prompt=[1, 9999])
    with pytest.raises(openai.BadRequestError, match="token id -1"):
        await tiny.client().completions.create(model="tiny", prompt=[[1], [-1]])


async def test_unknown_paths_and_methods_have_the_same_error_format(tiny: Site):
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/completions", 405)):
        response = await tiny.send(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


async def test_a_body_that_is_too_large_is_rejected(tiny: Site):
    response = await tiny.send("POST", "/v1/completions", content=b" " * (5 << 20))
    assert response.status_code == 413


async def test_a_disconnecting_client_aborts_its_request(tiny: Site):
    before = tiny.engine.load().generated_tokens
    with pytest.raises(httpx.ReadTimeout):
        async with httpx.AsyncClient(timeout=httpx.Timeout(20, read=0.2)) as client:
            await client.post(
                f"{tiny.served.base_url}/completions",
                json={"prompt": "a", "max_tokens": LONG},
                headers={"authorization": f"Bearer {tiny.served.token}"},
            )
    await wait_until(lambda: tiny.engine.load().running == 0 and tiny.gateway.running == 0)
    assert tiny.engine.load().generated_tokens - before < LONG


async def test_a_client_that_disconnects_from_a_stream_aborts_all_its_choices(tiny: Site):
    before = tiny.engine.load().generated_tokens
    stream = await tiny.client().completions.create(
        model="tiny", prompt="a", max_tokens=LONG, n=2, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await wait_until(lambda: tiny.engine.load().running == 0 and tiny.gateway.running == 0)
    assert tiny.engine.load().generated_tokens - before < 2 * LONG


async def test_too_many_requests_get_status_429():
    async with run_fake_site(seconds=math.inf, max_requests=2) as service:
        create_chat = service.client().chat.completions.create
        waiting = [asyncio.create_task(create_chat(model="tiny", messages=HELLO)) for _ in range(2)]
        await wait_until(lambda: service.gateway.running == 2)
        with pytest.raises(openai.RateLimitError, match="the limit is 2"):
            await create_chat(model="tiny", messages=HELLO)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await wait_until(lambda: service.gateway.running == 0)


@pytest.mark.parametrize(
    ("error", "status"), [(EngineError("no room"), 500), (EngineLost("gone"), 503)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_failure_is_a_server_error(error: EngineError, status: int, stream: bool):
    async with run_fake_site() as service:
        service.engine.fail_with = error
        with pytest.raises(openai.InternalServerError, match=error.message) as failed:
            await service.client().chat.completions.create(
                model="tiny", messages=HELLO, stream=stream
            )
    assert failed.value.status_code == status


async def test_stopping_lets_running_responses_finish():
    # This client stays open while the site stops.
    async with AsyncOpenAI(api_key="of the site", max_retries=0, timeout=30) as client:
        async with run_fake_site("late", seconds=0.5) as service:
            url, key = service.served.base_url, service.served.token
            chat = client.with_options(base_url=url, api_key=key).chat
            task = asyncio.create_task(chat.completions.create(model="tiny", messages=HELLO))
            await wait_until(lambda: service.gateway.running == 1)
        assert (await task).choices[0].message.content == "late"


async def test_stopping_aborts_responses_that_take_too_long():
    async with run_fake_site(seconds=math.inf) as service:
        task = asyncio.create_task(
            service.client().chat.completions.create(model="tiny", messages=HELLO)
        )
        await wait_until(lambda: service.gateway.running == 1)
    with pytest.raises(openai.APIError):
        await task
    assert service.gateway.running == 0


def compute_logprobs(token_ids: Any, mask: Any) -> Any:
    """Log-probs of the masked tokens by one plain forward over the full sequence."""
    model = tiny_model(len(tiny_tokenizer())).eval()
    ids = torch.from_numpy(token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    actual = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
    return actual[mask[1:]]


async def run_agent(client: AsyncOpenAI, *questions: str) -> list[str]:
    """Run an agent that knows only a base URL and keeps its own message history."""
    messages: Any = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        response = await client.chat.completions.create(
            model="some-model", messages=messages, max_tokens=5
        )
        messages.append(response.choices[0].message)
    return [message.content for message in messages[1::2]]


async def test_an_agents_session_becomes_one_token_exact_segment(tiny: Site):
    session = tiny.gateway.open_session(SampleId(7, 1), SingleEngineAccess(tiny.engine), seed=1)
    client = tiny.client(base_url=tiny.served.address + session.path, api_key=session.token)
    texts = await run_agent(client, "a", "b", "c")
    (segment,) = tiny.gateway.close_session(session.id)
    sampled = segment.token_ids[segment.loss_mask].tolist()
    assert len(sampled) == 15
    assert segment.turns == 3
    assert CODEC.decode(sampled) == "".join(texts)
    assert segment.versions[segment.loss_mask].tolist() == [0] * 15
    assert (segment.versions[~segment.loss_mask] == NOT_SAMPLED).all()
    again = compute_logprobs(segment.token_ids, segment.loss_mask)
    np.testing.assert_allclose(segment.logprobs[segment.loss_mask], again, atol=1e-4)


async def test_a_sessions_sampling_is_the_trainers_not_the_agents():
    async with run_fake_site("x" * 50) as service:
        session_sampling = Sampling(temperature=0.8, max_tokens=6, stop=("!",))
        session = service.gateway.open_session(
            SampleId(3, 0), SingleEngineAccess(service.engine), sampling=session_sampling
        )
        client = service.client(base_url=service.served.address + session.path)
        await client.chat.completions.create(
            model="m", messages=HELLO, temperature=0.1, top_p=0.5, max_tokens=90, stop="?", seed=5
        )
        await client.chat.completions.create(model="m", messages=HELLO, max_tokens=2)
    first, second = (request for request in service.engine.requests)
    assert first.sampling == Sampling(temperature=0.8, max_tokens=6, stop=("!", "?"))
    assert second.sampling.max_tokens == 2
    assert first.uid == second.uid == SampleId(3, 0)
    assert first.stream != second.stream


async def test_concurrent_requests_of_an_agent_run_one_after_the_other():
    async with run_fake_site("ok", seconds=0.05) as service:
        session = service.gateway.open_session(SampleId(3, 0), SingleEngineAccess(service.engine))
        client = service.client(base_url=service.served.address + session.path)
        create_chat = client.chat.completions.create
        await asyncio.gather(*(create_chat(model="m", messages=HELLO) for _ in range(3)))
        assert service.engine.peak == 1
        assert len(service.gateway.close_session(session.id)) == 3


async def test_a_response_that_the_agent_did_not_wait_for_is_not_recorded():
    async with run_fake_site(seconds=math.inf) as service:
        session = service.gateway.open_session(SampleId(3, 0), SingleEngineAccess(service.engine))
        client = service.client(base_url=service.served.address + session.path)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(
                model="m", messages=HELLO
            )
        await wait_until(lambda: service.gateway.running == 0)
        assert service.gateway.close_session(session.id) == ()


async def test_a_sessions_token_gives_access_to_that_session_only(tiny: Site):
    own, other = (
        tiny.gateway.open_session(SampleId(n, 0), SingleEngineAccess(tiny.engine)) for n in range(2)
    )
    headers = {"authorization": f"Bearer {own.token}"}
    paths = [f"{own.path}/models", f"{other.path}/models", "/v1/models", f"/sessions/{own.id}"]
    statuses = [(await tiny.send("GET", path, headers=headers)).status_code for path in paths]
    assert statuses == [200, 401, 401, 401]
    for session in (own, other):
        tiny.gateway.close_session(session.id)


async def test_sessions_can_be_opened_read_and_closed_over_http():
    async with run_fake_site("yo") as service:
        opened = (await service.send("POST", "/sessions")).json()
        client = service.client(base_url=opened["base_url"], api_key=opened["token"])
        await run_agent(client, "a", "b")
        shown = (await service.send("GET", f"/sessions/{opened['id']}")).json()
        closed = (await service.send("DELETE", f"/sessions/{opened['id']}")).json()
        gone = await service.send("GET", f"/sessions/{opened['id']}")
    assert shown == closed
    (segment,) = closed["segments"]
    assert [key for key, value in segment.items() if isinstance(value, list)] == [
        "token_ids",
        "logprobs",
        "versions",
        "loss_mask",
    ]
    assert sum(segment["loss_mask"]) == 6
    assert gone.status_code == 404


async def test_a_session_records_one_choice_at_a_time(tiny: Site):
    opened = (await tiny.send("POST", "/sessions")).json()
    client = tiny.client(base_url=opened["base_url"])
    with pytest.raises(openai.BadRequestError, match="one choice for one prompt"):
        await client.chat.completions.create(model="m", messages=HELLO, n=2)
    tiny.gateway.close_session(opened["id"])


async def test_a_gateway_without_an_engine_serves_sessions_only():
    engine = FakeEngine(reply=lambda request: [5, 2])
    gateway = Gateway(CODEC, model="tiny", max_length=64)
    async with asyncio.timeout(30), run_server(gateway, ServeSettings()) as served:
        service = Site(served, gateway, engine)
        session = gateway.open_session(SampleId(0, 0), SingleEngineAccess(engine))
        with pytest.raises(openai.NotFoundError, match="sessions only"):
            await service.client().chat.completions.create(model="tiny", messages=HELLO)
        assert await run_agent(service.client(base_url=served.address + session.path), "a") == ["1"]


async def test_a_port_in_use_raises_a_clear_error():
    gateway = Gateway(CODEC, model="tiny", max_length=64)
    async with run_server(gateway, ServeSettings()) as served:
        port = int(served.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
            async with run_server(gateway, ServeSettings(port=port)):
                pass


async def test_a_response_to_an_unexpected_error_cannot_be_rendered_as_a_page():
    async with run_fake_site() as service:
        service.engine.fail_with = ZeroDivisionError("secret")
        response = await service.post("/v1/chat/completions", {"messages": HELLO})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert response.headers["cache-control"] == "no-store"


async def test_the_policy_version_of_each_token_comes_with_the_token_ids():
    async with run_fake_site("ok", version=7) as service:
        body = {"messages": HELLO, "return_token_ids": True}
        full = (await service.post("/v1/chat/completions", body)).json()["choices"][0]
        plain = (await service.post("/v1/chat/completions", {"messages": HELLO})).json()
        stream = await service.client().chat.completions.create(
            model="tiny", messages=HELLO, stream=True, extra_body={"return_token_ids": True}
        )
        streamed = [chunk.model_dump()["choices"][0] async for chunk in stream]
    assert full["token_versions"] == [7] * len(full["token_ids"]) == [7, 7, 7]
    assert [v for choice in streamed for v in choice["token_versions"]] == [7, 7, 7]
    assert "token_versions" not in plain["choices"][0]
