"""Parses and checks the request bodies of OpenAI's endpoints.

    bytes -> read_json -> read_chat / read_completion -> ApiRequest

Rejects what this server cannot do: a parameter that would change the response is never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rollick.infer.engine import MIN_TEMPERATURE
from rollick.serve.request_fields import (
    UNSUPPORTED,
    BadRequest,
    RequestFields,
    check_depth,
    nesting_error,
    read_value,
    reject,
    show_value,
)
from rollick.types import Sampling

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_TEMPERATURE = 2.0
ROLES = {"system": "system", "developer": "system"} | {n: n for n in ("user", "assistant", "tool")}
"""Roles of messages, and their names in chat templates."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    parallel_calls: bool = True
    """Whether a reply may have several tool calls."""


RawPrompt = str | tuple[int, ...]
"""A text or token ids to complete, without a chat template."""
AnyPrompt = ChatPrompt | tuple[RawPrompt, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ApiRequest:
    """One checked request. `max_tokens` None allows the rest of the context."""

    prompt: AnyPrompt
    model: str | None
    choices_per_prompt: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    max_tokens: int | None
    seed: int | None
    stream: bool
    stream_usage: bool
    return_logprobs: bool
    return_token_ids: bool

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, ChatPrompt)

    @property
    def prompt_count(self) -> int:
        return 1 if isinstance(self.prompt, ChatPrompt) else len(self.prompt)

    def sampling(self, available: int) -> Sampling:
        """The sampling parameters if `available` tokens fit after the prompt."""
        limit = available if self.max_tokens is None else min(available, self.max_tokens)
        return Sampling(self.temperature, limit, self.top_p, self.top_k, self.stop)


def read_chat(body: Mapping[str, Any]) -> ApiRequest:
    fields = RequestFields(body)
    values: list[Any] = fields.read("messages", list, [])
    messages = tuple(_read_message(value, f"messages[{n}]") for n, value in enumerate(values))
    if not messages:
        reject("messages", "is missing or empty", fix="give at least one message")
    prompt = ChatPrompt(
        messages, _read_tools(fields), parallel_calls=fields.read("parallel_tool_calls", bool, True)
    )
    max_completion = fields.read_number("max_completion_tokens", int, None, low=1)
    max_tokens = fields.read_number("max_tokens", int, None, low=1)
    limit = max_tokens if max_completion is None else max_completion
    return _read_common(fields, prompt, limit=limit, logprobs=fields.read("logprobs", bool, False))


def read_completion(body: Mapping[str, Any]) -> ApiRequest:
    fields = RequestFields(body)
    prompts = _read_prompts(fields)
    limit = fields.read_number("max_tokens", int, 16, low=1)
    num_logprobs = fields.read_number("logprobs", int, None, low=0)
    if num_logprobs:
        problem = f"is {num_logprobs}, but only the log-prob of the sampled token is known"
        reject("logprobs", problem, fix="send logprobs=0", code=UNSUPPORTED)
    return _read_common(fields, prompts, limit=limit, logprobs=num_logprobs is not None)


def _read_common(
    fields: RequestFields, prompt: AnyPrompt, *, limit: int | None, logprobs: bool
) -> ApiRequest:
    options: dict[str, Any] = fields.read("stream_options", dict, {})
    request = ApiRequest(
        prompt=prompt,
        model=fields.read("model", str, None),
        choices_per_prompt=fields.read_number("n", int, 1, low=1, high=MAX_CHOICES),
        temperature=float(fields.read_number("temperature", float, 1, low=0, high=MAX_TEMPERATURE)),
        top_p=float(fields.read_number("top_p", float, 1, low=0, high=1)),
        top_k=max(fields.read_number("top_k", int, 0, low=-1), 0),
        stop=_read_stops(fields),
        max_tokens=limit,
        seed=fields.read("seed", int, None),
        stream=fields.read("stream", bool, False),
        stream_usage=options.get("include_usage") is True,
        return_logprobs=logprobs,
        return_token_ids=fields.read("return_token_ids", bool, False),
    )
    if 0 < request.temperature < MIN_TEMPERATURE:
        fix = f"send 0, which is greedy, or at least {MIN_TEMPERATURE:g}"
        reject("temperature", f"is {request.temperature:g}", fix=fix)
    if request.top_p == 0:
        reject("top_p", "is 0, which leaves no token", fix="send a value above 0")
    fields.reject_unread()
    return request


def _read_stops(fields: RequestFields) -> tuple[str, ...]:
    value = fields.pop("stop")
    values = [] if value is None else _as_list(value)
    stops = tuple(read_value(stop, str, "stop") for stop in values)
    lengths = [len(stop) for stop in stops]
    if len(stops) > MAX_STOPS or not all(0 < length <= MAX_STOP_LENGTH for length in lengths):
        problem = f"has {len(stops)} strings of {lengths[:4]} characters"
        fix = f"send at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
        reject("stop", problem, fix=fix)
    return stops


def _read_prompts(fields: RequestFields) -> tuple[RawPrompt, ...]:
    """A text, a list of token ids, or a list of either."""
    value = fields.pop("prompt")
    parts = _as_list(value)
    if parts and all(_is_token_id(part) for part in parts):
        return (tuple(parts),)
    prompts: list[RawPrompt] = []
    for number, part in enumerate(parts):
        if isinstance(part, list):
            ids = cast(list[Any], part)
            if not all(_is_token_id(token) for token in ids):
                reject("prompt", f"[{number}] is not a list of token ids", fix="send token ids")
            prompts.append(tuple(ids))
        elif isinstance(part, str):
            prompts.append(read_value(part, str, "prompt"))
        else:
            reject("prompt", f"is {show_value(value)}", fix="send a text or token ids")
    if not 0 < len(prompts) <= MAX_CHOICES:
        reject("prompt", f"has {len(prompts)} parts", fix=f"send 1 to {MAX_CHOICES}")
    return tuple(prompts)


def _as_list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else [value]


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_tools(fields: RequestFields) -> tuple[Mapping[str, Any], ...]:
    tools: list[Any] = fields.read("tools", list, [])
    choice = fields.pop("tool_choice")
    if choice not in (None, "auto", "none"):
        problem = f"is {show_value(choice)}, but the model cannot be forced to call a tool"
        reject("tool_choice", problem, fix="send auto or none", code=UNSUPPORTED)
    for number, tool in enumerate(tools):
        function: Any = read_value(tool, dict, f"tools[{number}]").get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            reject(f"tools[{number}]", "is not a function", fix='send {"type": "function", …}')
    return () if choice == "none" else tuple(tools)


def _read_message(value: Any, param: str) -> Mapping[str, Any]:
    """A message for chat templates: content is text, a tool call's arguments are an object."""
    fields = read_value(value, dict, param).items()
    message_fields: dict[str, Any] = {name: part for name, part in fields if part is not None}
    role = message_fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        text = f"{param}.role is {show_value(role)}"
        raise BadRequest(text, fix=f"use one of {', '.join(ROLES)}", param=param)
    message: dict[str, Any] = {"role": ROLES[role], "content": _read_content(message_fields, param)}
    for name in ("name", "tool_call_id"):
        if name in message_fields:
            message[name] = read_value(message_fields[name], str, f"{param}.{name}")
    if message_fields.get("tool_calls"):
        calls: list[Any] = read_value(message_fields["tool_calls"], list, f"{param}.tool_calls")
        numbered = enumerate(calls)
        message["tool_calls"] = [_read_call(c, f"{param}.tool_calls[{n}]") for n, c in numbered]
    return message


def _read_content(message_fields: Mapping[str, Any], param: str) -> str:
    content = message_fields.get("content", "")
    path = f"{param}.content"
    if not isinstance(content, list):
        return read_value(content, str, path)
    texts: list[str] = []
    for part in cast(list[Any], content):
        kind = read_value(part, dict, path).get("type")
        if kind != "text":
            text, code = f"{path} has a part of type {show_value(kind)}", "unsupported_content"
            raise BadRequest(text, fix="send text only", param=param, code=code)
        texts.append(read_value(part.get("text"), str, path))
    return "".join(texts)


def _read_call(value: Any, param: str) -> Mapping[str, Any]:
    call: dict[str, Any] = read_value(value, dict, param)
    function: dict[str, Any] = read_value(call.get("function"), dict, f"{param}.function")
    arguments: Any = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except RecursionError as error:
            raise nesting_error(f"{param}.function.arguments") from error
        except ValueError:  # not JSON: the template gets the text
            pass
    check_depth(arguments, f"{param}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}
