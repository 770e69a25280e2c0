"""What a client asks for: the JSON of OpenAI's endpoints, read and checked. Pure.

Owns which parameters exist, their ranges, and the refusal of what this server cannot do: a
parameter that would change the answer is never ignored.

    bytes -> read_json -> read_chat / read_completion -> Ask
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from rollick.errors import RollickError
from rollick.infer.engine import LEAST_TEMPERATURE
from rollick.types import Sampling

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LETTERS = 256
MAX_TEMPERATURE = 2.0
MAX_DEPTH = 64
"""Objects and lists inside each other; far deeper ones would end the program that looks at them."""

ROLES = {"system": "system", "developer": "system"} | {n: n for n in ("user", "assistant", "tool")}
"""What a message may call its speaker, and what chat templates call it."""

HARMLESS = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier"}
    | {"store", "user"}
)
"""Parameters that change nothing in the answer of a server like this one."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters that are not supported, with the values that ask for nothing."""


class Refused(RollickError):
    """A request that is answered with an error, in the shape of OpenAI's."""

    def __init__(
        self,
        message: str,
        *,
        fix: str = "",
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, fix=fix)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """Messages for the chat template, and the tools that it is told of."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()


RawPrompt = str | tuple[int, ...]
"""A text or token ids to go on with, without a template."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One checked request. `max_tokens` None asks for as many as there is room for."""

    content: Conversation | tuple[RawPrompt, ...]
    model: str | None
    choices: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    max_tokens: int | None
    seed: int | None
    stream: bool
    stream_usage: bool
    logprobs: bool
    token_ids: bool

    @property
    def chat(self) -> bool:
        return isinstance(self.content, Conversation)

    def sampling(self, room: int) -> Sampling:
        """How to draw where `room` tokens still fit behind the prompt."""
        most = room if self.max_tokens is None else min(room, self.max_tokens)
        return Sampling(self.temperature, most, self.top_p, self.top_k, self.stop)


def read_json(body: bytes) -> Mapping[str, Any]:
    """The body as an object; numbers that JSON does not have are refused."""
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}", fix="send a JSON object") from error
    if not isinstance(found, dict):
        raise Refused("the body is not a JSON object", fix="send a JSON object")
    _check_depth(found, "the body")
    return cast(dict[str, Any], found)


def read_chat(body: Mapping[str, Any]) -> Ask:
    """The request of /v1/chat/completions."""
    fields = _Fields(body)
    messages = tuple(
        _message(value, f"messages[{number}]")
        for number, value in enumerate(fields.array("messages"))
    )
    if not messages:
        fields.refuse("messages", "is missing or empty", fix="give at least one message")
    conversation = Conversation(messages, _tools(fields))
    longest = fields.integer("max_completion_tokens", None, low=1)
    older = fields.integer("max_tokens", None, low=1)
    limit = older if longest is None else longest
    return _ask(fields, conversation, limit=limit, logprobs=fields.flag("logprobs"))


def read_completion(body: Mapping[str, Any]) -> Ask:
    """The request of /v1/completions."""
    fields = _Fields(body)
    prompts = _prompts(fields)
    limit = fields.integer("max_tokens", 16, low=1)
    count = fields.integer("logprobs", None, low=0)
    if count:
        fields.refuse(
            "logprobs",
            f"is {count}, and only the log-prob of the token that was drawn is known",
            fix="send logprobs=0",
            code="unsupported_parameter",
        )
    return _ask(fields, prompts, limit=limit, logprobs=count is not None)


def _ask(
    fields: _Fields,
    content: Conversation | tuple[RawPrompt, ...],
    *,
    limit: int | None,
    logprobs: bool,
) -> Ask:
    options = fields.mapping("stream_options")
    ask = Ask(
        content=content,
        model=fields.text("model"),
        choices=fields.integer("n", 1, low=1, high=MAX_CHOICES) or 1,
        temperature=fields.number("temperature", 1.0, low=0.0, high=MAX_TEMPERATURE),
        top_p=fields.number("top_p", 1.0, low=0.0, high=1.0),
        top_k=max(fields.integer("top_k", 0, low=-1) or 0, 0),
        stop=_stops(fields),
        max_tokens=limit,
        seed=fields.integer("seed", None),
        stream=fields.flag("stream"),
        stream_usage=options.get("include_usage") is True,
        logprobs=logprobs,
        token_ids=fields.flag("return_token_ids"),
    )
    if 0 < ask.temperature < LEAST_TEMPERATURE:
        fields.refuse(
            "temperature",
            f"is {ask.temperature:g}",
            fix=f"send 0, which is greedy, or at least {LEAST_TEMPERATURE:g}",
        )
    if ask.top_p == 0:
        fields.refuse("top_p", "is 0, which leaves no token", fix="send a value above 0")
    fields.refuse_the_rest()
    return ask


class _Fields:
    """A body that is read field by field; null is the same as absent."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def refuse(self, param: str, problem: str, *, fix: str, code: str | None = None) -> NoReturn:
        raise Refused(f"{param} {problem}", fix=fix, param=param, code=code)

    def raw(self, name: str) -> Any:
        return self._left.pop(name, None)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, f"is {_shown(value)}, not a number", fix="send a number")
        if not low <= value <= high:
            self.refuse(name, f"is {_shown(value)}", fix=f"send {low:g} to {high:g}")
        return float(value)

    def integer(
        self, name: str, default: int | None, *, low: float = -math.inf, high: float = math.inf
    ) -> int | None:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, f"is {_shown(value)}, not a whole number", fix="send an integer")
        if not low <= value <= high:
            limit = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            self.refuse(name, f"is {_shown(value)}", fix=f"send {limit}")
        return value

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, f"is {_shown(value)}", fix="send true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        return None if value is None else _text(value, name)

    def array(self, name: str) -> list[Any]:
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(name, f"is {_shown(value)}, not a list", fix="send a list")
        return cast(list[Any], value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.raw(name)
        if value is None:
            return {}
        return _mapping(value, name)

    def refuse_the_rest(self) -> None:
        """What nobody has read is harmless, asks for nothing, or is refused."""
        for name, value in self._left.items():
            if name in HARMLESS or any(value == neutral for neutral in NEUTRAL.get(name, ())):
                continue
            known = name in NEUTRAL
            self.refuse(
                name,
                f"is {_shown(value)}, which is not supported" if known else "is not a parameter",
                fix="leave it out",
                code="unsupported_parameter" if known else "unknown_parameter",
            )


def _stops(fields: _Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    given = cast(list[Any], value) if isinstance(value, list) else [value]
    stops = tuple(_text(stop, "stop") for stop in given)
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_LETTERS for stop in stops):
        fields.refuse(
            "stop",
            f"has {len(stops)} strings of {[len(stop) for stop in stops[:4]]} letters",
            fix=f"send at most {MAX_STOPS} strings of 1 to {MAX_STOP_LETTERS} letters",
        )
    return stops


def _prompts(fields: _Fields) -> tuple[RawPrompt, ...]:
    """One text, one list of ids, or a list of either."""
    value = fields.raw("prompt")
    given = cast(list[Any], value) if isinstance(value, list) else [value]
    if given and all(_is_id(part) for part in given):
        return (tuple(given),)
    prompts: list[RawPrompt] = []
    for number, part in enumerate(given):
        if isinstance(part, list):
            ids = cast(list[Any], part)
            if not all(_is_id(token) for token in ids):
                fields.refuse("prompt", f"[{number}] holds what is no id", fix="send token ids")
            prompts.append(tuple(ids))
        elif isinstance(part, str):
            prompts.append(_text(part, "prompt"))
        else:
            fields.refuse("prompt", f"is {_shown(value)}", fix="send a text or token ids")
    if not prompts or len(prompts) > MAX_CHOICES:
        fields.refuse("prompt", f"has {len(prompts)} parts", fix=f"send 1 to {MAX_CHOICES}")
    return tuple(prompts)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tools(fields: _Fields) -> tuple[Mapping[str, Any], ...]:
    tools = [
        _mapping(tool, f"tools[{number}]") for number, tool in enumerate(fields.array("tools"))
    ]
    choice = fields.raw("tool_choice")
    if choice not in (None, "auto", "none"):
        fields.refuse(
            "tool_choice",
            f"is {_shown(choice)}, and the model cannot be forced to call a tool",
            fix="send auto or none",
            code="unsupported_parameter",
        )
    for number, tool in enumerate(tools):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            fields.refuse(f"tools[{number}]", "is no function", fix='send {"type": "function", …}')
    return () if choice == "none" else tuple(tools)


def _message(value: Any, where: str) -> Mapping[str, Any]:
    """As chat templates read it: content is text, a tool call's arguments are an object."""
    given = {name: part for name, part in _mapping(value, where).items() if part is not None}
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(
            f"{where}.role is {_shown(role)}", fix=f"use one of {', '.join(ROLES)}", param=where
        )
    message: dict[str, Any] = {"role": ROLES[role], "content": _content(given, where)}
    for name in ("name", "tool_call_id"):
        if name in given:
            message[name] = _text(given[name], f"{where}.{name}")
    if given.get("tool_calls"):
        message["tool_calls"] = _tool_calls(given["tool_calls"], f"{where}.tool_calls")
    return message


def _content(given: Mapping[str, Any], where: str) -> str:
    content = given.get("content", "")
    if not isinstance(content, list):
        return _text(content, f"{where}.content")
    texts: list[str] = []
    for part in cast(list[Any], content):
        piece = _mapping(part, f"{where}.content")
        if piece.get("type") != "text":
            raise Refused(
                f"{where}.content has a part of type {_shown(piece.get('type'))}",
                fix="send text only",
                param=where,
                code="unsupported_content",
            )
        texts.append(_text(piece.get("text"), f"{where}.content"))
    return "".join(texts)


def _tool_calls(value: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise Refused(f"{where} is {_shown(value)}, not a list", fix="send a list", param=where)
    calls: list[Mapping[str, Any]] = []
    for number, part in enumerate(cast(list[Any], value)):
        place = f"{where}[{number}]"
        call = _mapping(part, place)
        function = _mapping(call.get("function"), f"{place}.function")
        arguments: Any = function.get("arguments", "{}")
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            parsed = arguments
        except RecursionError as error:
            raise _too_deep(f"{place}.function.arguments") from error
        _check_depth(parsed, f"{place}.function.arguments")
        calls.append({**call, "function": {**function, "arguments": parsed}})
    return calls


def _check_depth(value: Any, where: str) -> None:
    """Level by level: a function that calls itself would need the depth that is refused."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [part for outer in level for part in _inside(outer)]
        if not level:
            return
    raise _too_deep(where)


def _inside(value: Any) -> list[Any]:
    """The objects and lists that this one holds."""
    if isinstance(value, dict):
        held = list(cast(dict[str, Any], value).values())
    else:
        held = cast(list[Any], value) if isinstance(value, list) else []
    return [part for part in held if isinstance(part, dict | list)]


def _too_deep(where: str) -> Refused:
    return Refused(
        f"{where} has more than {MAX_DEPTH} objects and lists inside each other", fix="send fewer"
    )


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{where} is {_shown(value)}, not an object", fix="send one", param=where)
    return cast(dict[str, Any], value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{where} is {_shown(value)}, not a text", fix="send a text", param=where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refused(
            f"{where} has half of a surrogate pair at {error.start}", fix="send text", param=where
        ) from error
    return value


def _shown(value: Any) -> str:
    """The value in an error message, short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
