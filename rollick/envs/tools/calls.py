"""How a policy calls a tool, and how the call is read from what it wrote.

    hermes    <tool_call>{"name": "search", "arguments": {"query": "ice"}}</tool_call>
    llama     {"name": "search", "parameters": {"query": "ice"}}
    mistral   [TOOL_CALLS] [{"name": "search", "arguments": {"query": "ice"}}]
    tag       <search>ice</search>

The first is that of Qwen's and SmolLM's templates, too; the last has one argument and is for small
models.

Owns text only. A reply without a call is an answer; a call that cannot be read is a BadCall, which
the policy is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

CallStyle = Literal["hermes", "llama", "mistral", "tag"]
STYLES: tuple[CallStyle, ...] = ("hermes", "llama", "mistral", "tag")

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    """A tool by name, and what it is asked."""

    name: str
    arguments: Mapping[str, Any]


class BadCall(NamedTuple):
    """Something that was meant as a call."""

    reason: str


def read_calls(
    text: str, style: CallStyle, *, tools: Mapping[str, str]
) -> list[ToolCall] | BadCall:
    """The calls of a reply, in order; none: it is an answer. `tools`: names, and the name of the
    first parameter of each."""
    if style == "tag":
        names = "|".join(map(re.escape, tools))
        found = re.findall(rf"<({names})>(.*?)</\1>", text, re.DOTALL) if tools else []
        return [ToolCall(name, {tools[name]: said.strip()}) for name, said in found]
    if style == "hermes":
        return _all([part.strip() for part in _HERMES.findall(text)])
    if style == "mistral":
        # The marker is a special token, which decoding leaves out.
        body = text.partition("[TOOL_CALLS]")[2] or text
        return _all([body.strip()]) if body.strip().startswith("[") else []
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return _all([body]) if body.startswith("{") else []


def write_call(call: ToolCall, style: CallStyle) -> str:
    """A call as a policy should write it."""
    if style == "tag":
        return f"<{call.name}>{' '.join(map(str, call.arguments.values()))}</{call.name}>"
    key = "parameters" if style == "llama" else "arguments"
    body = json.dumps({"name": call.name, key: dict(call.arguments)})
    if style == "hermes":
        return f"<tool_call>{body}</tool_call>"
    return f"[TOOL_CALLS] [{body}]" if style == "mistral" else body


def parameters_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Tools, as chat templates and clients write them, by name; and what each is asked for."""
    functions = [schema["function"] for schema in schemas]
    return {of["name"]: list(of.get("parameters", {}).get("properties", {})) for of in functions}


def first_parameters(schemas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The same with the first one of each, which is all that the style `tag` can say."""
    return {name: next(iter(of), "text") for name, of in parameters_of(schemas).items()}


def describe_tools(schemas: Sequence[Mapping[str, Any]], style: CallStyle) -> str:
    """What a policy is told about the tools on offer."""
    shown = [
        write_call(ToolCall(name, dict.fromkeys(names, "...")), style)
        for name, names in parameters_of(schemas).items()
    ]
    lines = "\n".join(json.dumps(schema) for schema in schemas)
    return f"You can use tools:\n{lines}\nCall one like this: {' or '.join(shown)}"


def _all(parts: Sequence[str]) -> list[ToolCall] | BadCall:
    calls: list[ToolCall] = []
    for part in parts:
        try:
            said = json.loads(part)
        except (ValueError, RecursionError) as error:
            return BadCall(f"the call is not JSON: {error}")
        for entry in cast("list[Any]", said) if isinstance(said, list) else [said]:
            call = _call_of(entry)
            if isinstance(call, BadCall):
                return call
            calls.append(call)
    return calls


def _call_of(entry: Any) -> ToolCall | BadCall:
    if not isinstance(entry, Mapping):
        return BadCall("a call must be an object with a name and arguments")
    said = cast("Mapping[str, Any]", entry)
    name = said.get("name")
    arguments: Any = said.get("arguments", said.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return BadCall("a call must have a name, and arguments by name")
    return ToolCall(name, cast("Mapping[str, Any]", arguments))
