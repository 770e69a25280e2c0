"""Tool calls of a served model, through the real openai client: full responses and streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from fakes import FakeEngine
from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerFast

from rollick.data.chat import ChatCodec
from rollick.envs.tools.calls import CallStyle, ToolCall, write_call
from rollick.episodes.base import SingleEngineAccess
from rollick.infer.engine import Delta
from rollick.serve.gateway import Gateway
from rollick.serve.server import ServeSettings, run_server
from rollick.serve.tool_calls import TAGS, ReplyPart, ToolCallParser, ToolFormat
from rollick.testing.tiny import ALPHABET, tiny_tokenizer
from rollick.types import Request

pytestmark = pytest.mark.asyncio

LETTERS = ALPHABET + '{}[]"_\\éx'
BEGIN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
END = "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
ARGUMENTS = "{{ c['function']['arguments'] | tojson }}"
NAME = "{{ c['function']['name'] }}"
TEMPLATES: dict[str, str] = {
    "hermes": "{{ m['role'] }}:{{ m['content'] }}{% for c in m['tool_calls'] or [] %}\n<tool_call>"
    f'\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>{{% endfor %}}',
    "mistral": "{{ m['role'] }}:{{ m['content'] }}{% if m['tool_calls'] %}[TOOL_CALLS] ["
    "{% for c in m['tool_calls'] %}{% if c['id'] | length != 9 %}{{ raise_exception('id') }}"
    f'{{% endif %}}{{"name": "{NAME}", "arguments": {ARGUMENTS}}}{{% endfor %}}]{{% endif %}}',
    "llama": "{{ m['role'] }}:{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}{{% endfor %}}',
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
QUESTION: Any = [{"role": "user", "content": "weather in Rome?"}]
ROME, ORAN = ToolCall("weather", {"town": "Rome"}), ToolCall("weather", {"town": "Oran", "n": 2})


class StreamingEngine(FakeEngine):
    """Streams its replies, three tokens at a time."""

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        full = await self.generate(request)
        arrays = (full.token_ids, full.logprobs, full.versions)
        for begin in range(0, len(full.token_ids), 3):
            pieces = [array[begin : begin + 3] for array in arrays]
            yield Delta(*pieces, full.stop if begin + 3 >= len(full.token_ids) else None)


def make_codec(style: str, template: str | None = None) -> ChatCodec:
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer(LETTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    body = TEMPLATES[style] if template is None else template
    tokenizer.chat_template = BEGIN + body + END
    return ChatCodec(tokenizer, "chat")


@asynccontextmanager
async def serve_replies(
    replies: Sequence[str], codec: ChatCodec
) -> AsyncGenerator[tuple[AsyncOpenAI, Gateway]]:
    """Run a server whose model returns these replies, one for each request; yields a client."""
    remaining = iter(replies)

    def ids(request: Any) -> list[int]:
        return [*codec.encode_text(next(remaining)).tolist()[1:], 2]

    engine = StreamingEngine(reply=ids)
    gateway = Gateway(codec, model="tiny", max_length=2000, access=SingleEngineAccess(engine))
    async with asyncio.timeout(60), run_server(gateway, ServeSettings(grace_s=2)) as address:
        key, url = address.token, address.base_url
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=30) as client:
            yield client, gateway
    await engine.close()


async def send_chat(client: AsyncOpenAI, **options: Any) -> Any:
    response = await client.chat.completions.create(
        **{"model": "tiny", "messages": QUESTION, "tools": [WEATHER], **options}
    )
    return response.choices[0]


def list_calls(message: Any) -> list[tuple[str, Any]]:
    calls = message.tool_calls or ()
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("style", TAGS)
async def test_a_call_in_the_format_of_the_template_is_returned_as_a_tool_call(style: CallStyle):
    async with serve_replies([write_call(ROME, style)], make_codec(style)) as (client, _):
        choice = await send_chat(client)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert list_calls(choice.message) == [ROME]
    assert choice.message.tool_calls[0].type == "function"


async def test_a_stream_has_the_same_calls_and_content_as_the_full_response():
    reply = f"Let me see.\n{write_call(ROME, 'hermes')}\n{write_call(ORAN, 'hermes')}\n"
    async with serve_replies([reply] * 2, make_codec("hermes")) as (client, _):
        full = await send_chat(client)
        async with client.chat.completions.stream(
            model="tiny", messages=QUESTION, tools=[WEATHER]
        ) as stream:
            async for _event in stream:
                pass
            final = (await stream.get_final_completion()).choices[0]
    assert full.finish_reason == final.finish_reason == "tool_calls"
    assert full.message.content == final.message.content == "Let me see."
    assert list_calls(full.message) == list_calls(final.message) == [ROME, ORAN]
    ids = [call.id for call in final.message.tool_calls or ()]
    assert len(set(ids)) == 2


async def test_the_deltas_of_a_stream_never_show_the_text_of_a_call():
    reply = f"Wait <b> {write_call(ROME, 'hermes')}"
    async with serve_replies([reply], make_codec("hermes")) as (client, _):
        stream = await client.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[WEATHER], stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == "Wait <b>"
    (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert call.index == 0
    assert call.function is not None
    assert (call.function.name, call.function.arguments) == ("weather", '{"town": "Rome"}')
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize(
    ("style", "reply"),
    [
        ("hermes", "It is sunny. "),
        ("hermes", '<tool_call>{"name": "weather", "argum</tool_call>'),
        ("hermes", f"<think>{write_call(ROME, 'hermes')}</think>No."),
        ("llama", '{"name": "Bob", "parameters": {}}'),
        ("mistral", '[{"name": "Bob", "arguments": {}}]'),
        ("mistral", "[1, 2]"),
    ],
)
async def test_a_reply_without_a_valid_call_is_content(style: CallStyle, reply: str):
    async with serve_replies([reply], make_codec(style)) as (client, _):
        choice = await send_chat(client)
    assert choice.message.content == reply
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


async def test_without_tools_the_text_of_a_call_is_content():
    reply = write_call(ROME, "hermes")
    async with serve_replies([reply] * 2, make_codec("hermes")) as (client, _):
        for options in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
            assert (await send_chat(client, **options)).message.content == reply


async def test_parallel_tool_calls_can_be_turned_off():
    reply = write_call(ROME, "hermes") + write_call(ORAN, "hermes")
    async with serve_replies([reply], make_codec("hermes")) as (client, _):
        choice = await send_chat(client, parallel_tool_calls=False)
    assert list_calls(choice.message) == [ROME]


async def test_an_agent_that_sends_its_calls_back_stays_in_one_segment():
    codec = make_codec("hermes")
    replies = [f"Hm. {write_call(ROME, 'hermes')}", "Sunny."]
    async with serve_replies(replies, codec) as (client, gateway):
        session = gateway.open_http_session()
        agent = client.with_options(
            base_url=str(client.base_url).replace("/v1/", session.path), api_key=session.token
        )
        first = (await send_chat(agent)).message
        call = first.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        history = [*QUESTION, first.model_dump(exclude_none=True), result]
        assert (await send_chat(agent, messages=history)).message.content == "Sunny."
        (segment,) = gateway.close_session(session.id)
    assert segment.turns == 2
    assert segment.text == f"{replies[0]}\n{replies[1]}"


async def test_a_template_that_explains_calls_but_leaves_them_out_gets_them_as_content():
    template = "{% if tools %}<tool_call>{% endif %}{{ m['role'] }}:{{ m['content'] }}"
    codec = make_codec("hermes", template)
    call = {"function": {"name": "weather", "arguments": {"town": "Rome"}}}
    message = {"role": "assistant", "content": "Hm.", "tool_calls": [call]}
    tool_format = ToolFormat.of(codec)
    assert tool_format is not None
    assert not tool_format.template_writes_calls
    (written,) = tool_format.write_calls([message])
    assert written["content"] == f"Hm.\n{write_call(ROME, 'hermes')}"


async def test_a_template_whose_calls_cannot_be_parsed_refuses_tools():
    template = "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}call c{% endfor %}"
    async with serve_replies([], make_codec("hermes", template)) as (client, _):
        with pytest.raises(openai.BadRequestError, match="format that is not parsed") as error:
            await send_chat(client)
    assert error.value.code == "unsupported_parameter"


REPLIES = {
    "hermes": f" a < b {write_call(ROME, 'hermes')} \n{write_call(ORAN, 'hermes')} c <tool_",
    "mistral": f"\n{write_call(ROME, 'mistral')}",
    "llama": f" {write_call(ROME, 'llama')} ",
}


@pytest.mark.parametrize("style", TAGS)
async def test_the_parts_of_a_reply_do_not_depend_on_how_it_is_cut(style: CallStyle):
    text = REPLIES[style]
    expected = parse([text], style)
    assert expected[1][0] == ROME
    for size in range(1, len(text)):
        assert parse([text[n : n + size] for n in range(0, len(text), size)], style) == expected


def parse(
    pieces: Sequence[str], style: CallStyle, *, thinking: bool = False
) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(ToolFormat(style, True, thinking), ["weather"])
    part = ReplyPart.join([*(parser.push(piece) for piece in pieces), parser.finish()])
    return part.content, [call.call for call in part.calls]


async def test_a_call_inside_thinking_that_the_template_has_opened_is_not_a_call():
    call = write_call(ROME, "hermes")
    assert parse([f"{call}</think>{call}"], "hermes", thinking=True) == (f"{call}</think>", [ROME])
    assert parse([f"{call}"], "hermes", thinking=True) == (call, [])
    llama = write_call(ROME, "llama")
    assert parse([f"{llama}</think>\n{llama}"], "llama", thinking=True)[1] == [ROME]


async def test_a_long_reply_is_parsed_in_a_single_pass():
    parser = ToolCallParser(ToolFormat("hermes", True, False), [])
    begun = time.perf_counter()
    for _ in range(20_000):
        parser.push("<tool_call>  ")
    parser.finish()
    assert time.perf_counter() - begun < 10
