"""Request parsing: every parameter is applied, accepted without effect, or rejected by name."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.serve.request_fields import BadRequest, read_json
from rollick.serve.requests import ApiRequest, ChatPrompt, read_chat, read_completion
from rollick.types import Sampling

HELLO = [{"role": "user", "content": "hi"}]


def parse_chat(**body: Any) -> ApiRequest:
    return read_chat({"messages": HELLO, **body})


def parse_messages(*messages: dict[str, Any]) -> tuple[Any, ...]:
    chat_prompt = read_chat({"messages": list(messages)}).prompt
    assert isinstance(chat_prompt, ChatPrompt)
    return chat_prompt.messages


def test_a_request_with_only_messages_has_openais_defaults():
    request = parse_chat()
    assert request.choices_per_prompt == 1
    assert (request.stream, request.return_logprobs, request.return_token_ids) == (
        False,
        False,
        False,
    )
    assert request.sampling(available=7) == Sampling(temperature=1.0, max_tokens=7)


def test_sampling_parameters_reach_the_engine():
    request = parse_chat(
        temperature=0.5, top_p=0.9, top_k=4, stop=["a", "b"], max_tokens=3, seed=-1
    )
    assert request.sampling(available=7) == Sampling(0.5, 3, 0.9, 4, ("a", "b"))
    assert request.seed == -1


def test_max_tokens_never_exceeds_the_rest_of_the_context():
    assert parse_chat(max_tokens=9).sampling(available=7).max_tokens == 7


def test_max_completion_tokens_overrides_max_tokens():
    assert parse_chat(max_tokens=9, max_completion_tokens=2).max_tokens == 2


def test_null_is_the_same_as_absent():
    assert parse_chat(temperature=None, stop=None, logit_bias=None, n=None).choices_per_prompt == 1


def test_one_stop_string_need_not_be_a_list():
    assert parse_chat(stop="\n").stop == ("\n",)


def test_content_parts_are_one_text_and_a_developer_is_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages({"role": "developer", "content": parts}) == (
        {"role": "system", "content": "ab"},
    )


def test_a_tool_calls_arguments_become_an_object_for_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (message,) = parse_messages({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_tool_choice_none_leaves_the_tools_out():
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompts = [parse_chat(tools=tools, tool_choice=choice).prompt for choice in ("auto", "none")]
    assert [
        len(chat_prompt.tools) for chat_prompt in prompts if isinstance(chat_prompt, ChatPrompt)
    ] == [1, 0]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ("ab",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(prompt: Any, expected: Any):
    assert read_completion({"prompt": prompt}).prompt == expected


def test_a_completion_has_sixteen_tokens_by_default():
    assert read_completion({"prompt": "a"}).max_tokens == 16


def test_logprobs_zero_of_a_completion_gives_those_of_the_sampled_tokens():
    assert read_completion({"prompt": "a", "logprobs": 0}).return_logprobs


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "missing or empty"),
    ({"messages": "hi"}, "messages", "not a list"),
    ({"messages": [1]}, "messages[0]", "not an object"),
    ({"messages": [{"role": "critic", "content": "a"}]}, "messages[0]", '"critic"'),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "not a string"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "image"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": "hot"}, "temperature", "not a number"),
    ({"temperature": True}, "temperature", "not a number"),
    ({"top_p": 0}, "top_p", "no token"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": 1.5}, "max_tokens", "not an integer"),
    ({"n": 0}, "n", "0"),
    ({"n": 1000}, "n", "1000"),
    ({"stop": [""]}, "stop", "characters"),
    ({"stop": ["a"] * 17}, "stop", "17"),
    ({"stream": "yes"}, "stream", "yes"),
    ({"top_logprobs": 3}, "top_logprobs", "not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"logit_bias": {"1": 2}}, "logit_bias", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "forced"),
    ({"tools": [{"type": "search"}]}, "tools[0]", "not a function"),
    ({"temprature": 1}, "temprature", "not a parameter"),
]


@pytest.mark.parametrize(("body", "param", "part"), BAD_CHATS)
def test_a_bad_chat_request_names_the_parameter(body: dict[str, Any], param: str, part: str):
    with pytest.raises(BadRequest, match=param.replace("[", r"\[")) as rejected:
        parse_chat(**body)
    assert rejected.value.status == 400
    assert rejected.value.param == param
    assert part in str(rejected.value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": "a", "logprobs": 5}, "logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
    ],
)
def test_a_bad_completion_request_names_the_parameter(body: dict[str, Any], param: str):
    with pytest.raises(BadRequest) as rejected:
        read_completion(body)
    assert rejected.value.param == param


def test_parameters_without_effect_are_accepted():
    parse_chat(
        user="me", metadata={}, presence_penalty=0, logit_bias={}, response_format={"type": "text"}
    )


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_a_json_object_is_rejected(body: bytes):
    with pytest.raises(BadRequest, match="body is not"):
        read_json(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = ["messages", "prompt", "stop", "n", "tools", "stream_options", "model", "tool_choice", "x"]


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_json_is_parsed_or_rejected(body: dict[str, Any]):
    for read in (read_chat, read_completion):
        with suppress(BadRequest):
            assert isinstance(read(read_json(json.dumps(body).encode())), ApiRequest)


@pytest.mark.parametrize("temperature", [1e-40, 1e-5, 9.99e-4])
def test_a_temperature_that_is_too_small_to_divide_by_is_rejected(temperature: float):
    with pytest.raises(BadRequest, match=r"at least 0\.001") as rejected:
        parse_chat(temperature=temperature)
    assert rejected.value.param == "temperature"
    assert parse_chat(temperature=1e-3).temperature == 1e-3
    assert parse_chat(temperature=0).temperature == 0


def nest_lists(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [64, 300, 900, 100_000])
def test_json_that_is_nested_too_deep_is_rejected(depth: int):
    body = f'{{"messages": [], "x": {nest_lists(depth)}}}'
    with pytest.raises(BadRequest) as rejected:
        read_json(body.encode())
    assert rejected.value.status == 400


def test_json_with_usual_nesting_is_accepted():
    assert read_json(f'{{"x": {nest_lists(30)}}}'.encode())


@pytest.mark.parametrize("depth", [65, 900, 100_000])
def test_a_tool_calls_arguments_may_not_be_nested_too_deep_either(depth: int):
    call = {"type": "function", "function": {"name": "f", "arguments": nest_lists(depth)}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(BadRequest, match="arguments is nested more than 64") as rejected:
        parse_messages(message)
    assert rejected.value.status == 400


@pytest.mark.parametrize("key", ["messages", "prompt", "stop", "tools", "x"])
def test_a_body_of_a_million_empty_lists_is_refused_at_once(key: str):
    body = b'{"%s": [%s[]]}' % (key.encode(), b"[]," * 999_999)
    begun = time.perf_counter()
    with pytest.raises(BadRequest, match=r"1000002 objects and lists\. send at most 50000"):
        read_json(body)
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize("part", [b'\\"', b'a\\"', b"\\", b'"', b'"[', b'\\"{'])
def test_a_text_that_is_never_closed_is_refused_at_once(part: bytes):
    body = b'{"messages": "' + part * 200_000 + b"\\"
    begun = time.perf_counter()
    with pytest.raises(BadRequest, match="the body is not"):
        read_json(body)
    assert time.perf_counter() - begun < 1


def test_brackets_inside_texts_do_not_count():
    text = '[{"a": [1, 2]}, "\\\\", {}]' * 10_000
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    assert read_json(body)["messages"][0]["content"] == text
