"""Tool calls in a reply: finds the format of the model, and parses calls while the reply streams.

    pieces of text -> ToolCallParser.push ... finish -> ReplyPart: content, calls

A call is sent when it is complete. A call that cannot be parsed stays in the content, and so does
everything that the model writes while it is thinking.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from rollick.data.chat import MARK, ChatCodec, Messages
from rollick.envs.tools.calls import BadCall, CallStyle, ToolCall, read_calls, write_call
from rollick.serve.requests import ChatPrompt

THINK, END_THINK = "<think>", "</think>"
TAGS: Mapping[CallStyle, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", ""),
    "llama": ("<|python_tag|>", ""),
}
"""The tags before and after a call; without an end tag, a call extends to the end of the reply."""
FIRST_CHARACTER: Mapping[CallStyle, str] = {"mistral": "[", "llama": "{"}
"""The first character of a call without tag at the beginning of a reply: a tag that is a special
token is not in the text."""
ID_LENGTH = 9
"""Characters of a call's id: some chat templates accept no other length."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a reply. `index` counts the calls of the reply."""

    index: int
    call: ToolCall
    id: str

    def to_json(self, *, as_text: bool = True) -> dict[str, Any]:
        """OpenAI's form; in the messages of a chat template, the arguments are an object."""
        arguments = dict(self.call.arguments)
        text = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        function = {"name": self.call.name, "arguments": text}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """The content and calls of a piece of a reply, or of all of it, as the client gets them."""

    content: str = ""
    calls: tuple[FunctionCall, ...] = ()
    call_count: int = 0
    """Calls so far, including these."""

    @classmethod
    def join(cls, parts: Sequence[ReplyPart]) -> ReplyPart:
        calls = tuple(call for part in parts for call in part.calls)
        count = max((part.call_count for part in parts), default=0)
        return cls("".join(part.content for part in parts), calls, count)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model calls tools."""

    style: CallStyle
    template_writes_calls: bool
    """Whether the chat template writes the calls of earlier messages."""
    starts_thinking: bool
    """Whether the chat template opens the thinking of a reply."""

    @classmethod
    def of(cls, codec: ChatCodec) -> ToolFormat | None:
        """The format of the codec's chat template; None if it has none that can be parsed."""
        if not codec.reads_tools:
            return None
        thinking = codec.answer_prefix.rstrip().endswith(THINK)
        call = ToolCall("f", {"a": MARK})
        probe = FunctionCall(0, call, "a" * ID_LENGTH).to_json(as_text=False)
        message = {"role": "assistant", "content": "", "tool_calls": [probe]}
        rendered = codec.render_answer(message)
        for style in TAGS:
            if rendered is not None and read_calls(rendered, style, {}) == [call]:
                return cls(style, True, thinking)
        explains_tags = TAGS["hermes"][0] in codec.tools_text
        return cls("hermes", False, thinking) if explains_tags else None

    def make_parser(self, prompt: ChatPrompt) -> ToolCallParser:
        names = {str(tool["function"].get("name")) for tool in prompt.tools}
        return ToolCallParser(self, names, limit=None if prompt.parallel_calls else 1)

    def write_calls(self, messages: Messages) -> Messages:
        """The messages for the template; calls that it leaves out become part of the content."""
        if self.template_writes_calls:
            return messages
        return [self._write_calls(message) for message in messages]

    def _write_calls(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if "tool_calls" not in message:
            return message
        functions = [call["function"] for call in message["tool_calls"]]
        calls = [
            write_call(ToolCall(str(function.get("name")), arguments), self.style)
            for function in functions
            if isinstance(arguments := function["arguments"], Mapping)
        ]
        return {**message, "content": "\n".join([*filter(None, [message["content"]]), *calls])}


class ToolCallParser:
    """Incremental parser of one reply: its content and calls are all that `push` and `finish`
    return. White space before and after calls is left out."""

    def __init__(
        self, tool_format: ToolFormat, tools: Iterable[str], *, limit: int | None = None
    ) -> None:
        """`tools`: names; without tags, only a call of one of these is a call. `limit`: further
        calls are left out."""
        self._style: CallStyle = tool_format.style
        self._begin, self._end = TAGS[self._style]
        self._tools = frozenset(tools)
        self._limit = limit
        self._state: Literal["text", "thinking", "call"]
        self._state = "thinking" if tool_format.starts_thinking else "text"
        self._held = ""
        self._searched = 0
        """Characters of `_held` that hold no beginning of a tag."""
        self._at_start = True
        """Whether the reply so far has only white space and thinking."""
        self._count = 0

    def push(self, text: str) -> ReplyPart:
        """Add text; returns the content and the calls that are final."""
        self._held += text
        parts: list[ReplyPart] = []
        while (part := self._step()) is not None:
            parts.append(part)
        return self._join([*parts, ReplyPart(self._release())])

    def finish(self) -> ReplyPart:
        """Returns the rest. Call after the last piece of text."""
        if self._state == "call":
            return self._join([self._parse(self._held)])
        content = "" if self._count and not self._held.strip() else self._held
        return self._join([ReplyPart(content)])

    def _step(self) -> ReplyPart | None:
        """Parse the held text up to the next tag; None if it has no complete tag."""
        if self._state == "text" and self._begins_untagged():
            self._enter("call", 0)
            return ReplyPart()
        tags = {"text": (THINK, self._begin), "thinking": (END_THINK,), "call": (self._end,)}
        matches = [
            (index, tag)
            for tag in tags[self._state]
            if tag and (index := self._held.find(tag, max(self._searched - len(tag), 0))) >= 0
        ]
        if not matches:
            return None
        index, tag = min(matches)
        if self._state == "call":
            body = self._held[: index + len(tag)]
            self._enter("text", len(body))
            return self._parse(body)
        if tag == self._begin:
            content = self._held[:index].rstrip()
            self._enter("call", index)
            return ReplyPart(content)
        self._at_start = self._at_start and (tag == END_THINK or not self._held[:index].strip())
        content = self._held[: index + len(tag)]
        self._enter("thinking" if tag == THINK else "text", len(content))
        return ReplyPart(content)

    def _enter(self, state: Literal["text", "thinking", "call"], num_consumed: int) -> None:
        self._at_start = self._at_start and state != "call"
        self._state, self._held, self._searched = state, self._held[num_consumed:], 0

    def _begins_untagged(self) -> bool:
        first = FIRST_CHARACTER.get(self._style)
        begin = self._held.lstrip()
        return self._at_start and first is not None and begin.startswith(first)

    def _release(self) -> str:
        """Remove and return held text that cannot be part of a call, a tag, or space before one."""
        self._searched = len(self._held)
        if self._state == "call":
            return ""
        keep = max(overlap_length(self._held, tag) for tag in (THINK, END_THINK, self._begin))
        text = self._held[: len(self._held) - keep].rstrip()
        if text and self._state == "text":
            self._at_start = False
        self._held = self._held[len(text) :]
        self._searched = len(self._held)
        return text

    def _parse(self, body: str) -> ReplyPart:
        """The calls of a text that begins like one; its content if it has none."""
        calls = read_calls(body, self._style, {})
        is_tagged = body.lstrip().startswith(self._begin)
        if isinstance(calls, BadCall) or not calls:
            return ReplyPart(body)
        if not is_tagged and any(call.name not in self._tools for call in calls):
            return ReplyPart(body)
        num_new = len(calls) if self._limit is None else max(self._limit - self._count, 0)
        new_calls = tuple(
            FunctionCall(number, call, secrets.token_hex(ID_LENGTH)[:ID_LENGTH])
            for number, call in enumerate(calls[:num_new], self._count)
        )
        self._count += len(new_calls)
        return ReplyPart("", new_calls)

    def _join(self, parts: Sequence[ReplyPart]) -> ReplyPart:
        return replace(ReplyPart.join(parts), call_count=self._count)


def overlap_length(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)


def call_keys(calls: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Comparison keys of the calls of a message, in a chat template's form: names and arguments.
    Ids are left out, because some agents change them."""
    functions = [cast("Mapping[str, Any]", call["function"]) for call in calls]
    return [[function.get("name"), function.get("arguments")] for function in functions]
