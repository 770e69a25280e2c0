"""Generates one choice of a response and streams it as chunks of text.

Request -> engine -> Delta, Delta, ... -> Detokenizer -> ToolCallParser, if the request has tools
                                       -> ChoiceChunk (to `emit`) -> the full choice
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollick.data.chat import ChatCodec
from rollick.episodes.base import EngineAccess
from rollick.infer.engine import Decode
from rollick.infer.stream import stream_deltas
from rollick.serve.request_fields import BadRequest
from rollick.serve.tool_calls import FunctionCall, ReplyPart, ToolCallParser, overlap_length
from rollick.types import FloatArray, IntArray, Request, StopReason, frozen_array

REPLACEMENT = "\ufffd"
"""The character that a tokenizer decodes incomplete UTF-8 sequences to."""
MAX_REPLACEMENTS = 64
"""A run of this many is released unchanged. A shorter one may be incomplete: some tokenizers decode
byte tokens to replacement characters until the last character of the run is complete."""


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceChunk:
    """A streamed piece of a choice, or the full choice. `stop` is set only on the last chunk."""

    index: int
    prompt_ids: IntArray
    text: str
    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    stop: StopReason | None = None
    reply: ReplyPart | None = None
    """The text without its tool calls, and the calls; None if the request has no tools."""

    @property
    def content(self) -> str:
        return self.text if self.reply is None else self.reply.content

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        return () if self.reply is None else self.reply.calls

    @property
    def finish_reason(self) -> str | None:
        if self.stop is StopReason.STOP and self.reply is not None and self.reply.call_count:
            return "tool_calls"
        return None if self.stop is None else self.stop.value


Emit = Callable[[ChoiceChunk], Awaitable[None]]
"""Sends a chunk to the client; applies back-pressure."""


async def generate_choice(
    access: EngineAccess,
    request: Request,
    codec: ChatCodec,
    emit: Emit,
    *,
    index: int = 0,
    parser: ToolCallParser | None = None,
) -> ChoiceChunk:
    """Emit chunks as their tokens arrive, and return the full choice."""
    detokenizer = Detokenizer(codec.decode, stops=request.sampling.stop)
    chunks: list[ChoiceChunk] = []
    async with aclosing(stream_deltas(access, request)) as stream:
        async for delta in stream:
            text = detokenizer.push(delta.token_ids.tolist())
            if delta.stop is StopReason.ABORTED:
                raise BadRequest("the server is shutting down", fix="try again later", status=503)
            if delta.stop is not None:
                text += detokenizer.finish()
            reply = None
            if parser is not None:
                parts = [parser.push(text)]
                if delta.stop is not None:
                    parts.append(parser.finish())
                reply = ReplyPart.join(parts)
            arrays = (delta.token_ids, delta.logprobs, delta.versions)
            chunks.append(ChoiceChunk(index, request.token_ids, text, *arrays, delta.stop, reply))
            await emit(chunks[-1])
    return _join_chunks(chunks)


def _join_chunks(chunks: Sequence[ChoiceChunk]) -> ChoiceChunk:
    replies = [chunk.reply for chunk in chunks if chunk.reply is not None]
    return ChoiceChunk(
        chunks[0].index,
        chunks[0].prompt_ids,
        "".join(chunk.text for chunk in chunks),
        frozen_array(np.concatenate([chunk.token_ids for chunk in chunks]), np.int32),
        frozen_array(np.concatenate([chunk.logprobs for chunk in chunks]), np.float32),
        frozen_array(np.concatenate([chunk.versions for chunk in chunks]), np.int32),
        chunks[-1].stop or StopReason.ABORTED,
        ReplyPart.join(replies) if replies else None,
    )


async def gather_choices(choices: Iterable[Coroutine[Any, Any, ChoiceChunk]]) -> list[ChoiceChunk]:
    """Run all concurrently; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(choice) for choice in choices]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(slots=True, eq=False)
class Detokenizer:
    """Decodes the tokens of one choice as they arrive: `push` and `finish` return pieces of text.

    A token is decoded together with earlier ones, because its text can depend on them (a leading
    space, the rest of a character). Text that may begin a stop string is held back.
    """

    decode: Decode
    stops: Sequence[str] = ()
    stopped: bool = False
    _ids: list[int] = field(default_factory=list[int])
    _context: int = 0
    """Index of the first token that new ones are decoded with."""
    _complete: int = 0
    """Tokens whose text is complete and released."""
    _released: int = 0
    """Released characters of the tokens from `_context` on."""
    _held: str = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the new text that is final. Empty after a stop string."""
        if not token_ids:
            return ""
        self._ids.extend(token_ids)
        text = self.decode(self._ids[self._context :])
        stable = text.rstrip(REPLACEMENT)
        if len(text) - max(len(stable), self._released) >= MAX_REPLACEMENTS:
            stable = text
        new = stable[self._released :]
        if stable == text:
            self._context, self._complete = self._complete, len(self._ids)
            self._released = len(self.decode(self._ids[self._context :]))
        else:
            self._released = max(self._released, len(stable))
        return self._release(new)

    def finish(self) -> str:
        """Returns the remaining text. Call after the last token."""
        decoded = self.decode(self._ids[self._context :])
        text = self._release(decoded[self._released :])
        self._released = len(decoded)
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        matches = [index for stop in self.stops if (index := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            return text[: min(matches)]
        num_kept = max((overlap_length(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - num_kept :]
        return text[: len(text) - num_kept]
