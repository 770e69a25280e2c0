"""Tool calls in a policy's text: parsing and writing.

    hermes    <tool_call>{"name": "search", "arguments": {"query": "ice"}}</tool_call>
    llama     {"name": "search", "parameters": {"query": "ice"}}
    mistral   [TOOL_CALLS] [{"name": "search", "arguments": {"query": "ice"}}]
    tag       <search>ice</search>

Qwen's and SmolLM's templates also use `hermes`. `tag` has one argument and is for small models.

A reply without a call is an answer. A call that cannot be parsed becomes a BadCall, whose reason is
shown to the policy. With `llama` and `mistral`, a reply that starts with { or [ counts as a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

CallStyle = Literal["hermes", "llama", "mistral", "tag"]
STYLES: tuple[CallStyle, ...] = ("hermes", "llama", "mistral", "tag")

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


class BadCall(NamedTuple):
    reason: str


def read_calls(text: str, style: CallStyle, tools: Mapping[str, str]) -> list[ToolCall] | BadCall:
    """The calls of a reply, in order; empty if the reply is an answer. `tools` maps the name of
    each tool to the name of its first parameter."""
    if style == "tag":
        return [ToolCall(name, {tools[name]: content}) for name, content in _find_tags(text, tools)]
    if style == "hermes":
        return _parse_all([part.strip() for part in _HERMES.findall(text)])
    if style == "mistral":
        # [TOOL_CALLS] may be missing: it is a special token, and decoding removes those.
        body = text.partition("[TOOL_CALLS]")[2] or text
        return _parse_all([body.strip()]) if body.strip().startswith("[") else []
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return _parse_all([body]) if body.startswith("{") else []


def _find_tags(text: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, content) of each tag that is closed, in one pass: a tag that is never closed is not
    searched again at each of its repetitions."""
    open_names = dict.fromkeys(names)
    position = 0
    while open_names:
        opening = re.compile(rf"<({'|'.join(map(re.escape, open_names))})>").search(text, position)
        if opening is None:
            return
        name, begin = opening[1], opening.end()
        end = text.find(f"</{name}>", begin)
        if end < 0:
            del open_names[name]
            position = begin
        else:
            yield name, text[begin:end].strip()
            position = end + len(f"</{name}>")


def write_call(call: ToolCall, style: CallStyle) -> str:
    if style == "tag":
        return f"<{call.name}>{' '.join(map(str, call.arguments.values()))}</{call.name}>"
    key = "parameters" if style == "llama" else "arguments"
    body = json.dumps({"name": call.name, key: dict(call.arguments)})
    if style == "hermes":
        return f"<tool_call>{body}</tool_call>"
    return f"[TOOL_CALLS] [{body}]" if style == "mistral" else body


def parameters_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Parameter names of each tool. `schemas` are OpenAI tool definitions, as in chat templates."""
    functions = [schema["function"] for schema in schemas]
    return {of["name"]: list(of.get("parameters", {}).get("properties", {})) for of in functions}


def first_parameters(schemas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name of the first parameter of each tool; style `tag` can pass only this one."""
    return {name: next(iter(names), "text") for name, names in parameters_of(schemas).items()}


def describe_tools(schemas: Sequence[Mapping[str, Any]], style: CallStyle) -> str:
    parameters = parameters_of(schemas).items()
    calls = [ToolCall(name, dict.fromkeys(names, "...")) for name, names in parameters]
    examples = [write_call(call, style) for call in calls]
    lines = "\n".join(json.dumps(schema) for schema in schemas)
    return f"You can use tools:\n{lines}\nCall one like this: {' or '.join(examples)}"


def _parse_all(parts: Sequence[str]) -> list[ToolCall] | BadCall:
    calls: list[ToolCall] = []
    for part in parts:
        try:
            parsed = json.loads(part)
        except (ValueError, RecursionError) as error:
            return BadCall(f"the call is not JSON: {error}")
        for entry in cast("list[Any]", parsed) if isinstance(parsed, list) else [parsed]:
            call = _parse_call(entry)
            if isinstance(call, BadCall):
                return call
            calls.append(call)
    return calls


def _parse_call(entry: Any) -> ToolCall | BadCall:
    if not isinstance(entry, Mapping):
        return BadCall("a call must be an object with a name and arguments")
    fields = cast("Mapping[str, Any]", entry)
    name = fields.get("name")
    arguments: Any = fields.get("arguments", fields.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return BadCall("a call must have a name, and arguments by name")
    return ToolCall(name, cast("Mapping[str, Any]", arguments))
