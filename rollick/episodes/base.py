"""Interfaces of episodes: engine access, codecs, random streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from rollick.infer.engine import Delta, InferenceClient
from rollick.infer.stream import stream_deltas
from rollick.types import (
    Completion,
    IntArray,
    Prompt,
    Request,
    Sample,
    SampleId,
    Sampling,
    Turn,
    stable_hash,
)


class EngineAccess(Protocol):
    """Generates for an episode. An episode occupies an engine only while it generates."""

    async def generate(self, request: Request) -> Completion:
        """Waits for an engine and for the complete generation. An aborted generation continues
        with the tokens it has, possibly on another engine."""
        ...

    def activity(self, label: str, *, limit_s: float = 0.0) -> AbstractContextManager[None]:
        """Names what the sample does between generations (`tool search`), for the trace. `limit_s`:
        it ends by itself within this time, so until then the run is not stuck."""
        ...


RunEpisode = Callable[[SampleId, Prompt, EngineAccess], Awaitable[Sample]]
SamplingFor = Callable[[Prompt], Sampling]
"""Sampling parameters of a prompt."""


@dataclass(frozen=True, slots=True)
class SingleEngineAccess:
    """Access to one engine, without a queue. An aborted generation ends there."""

    engine: InferenceClient

    async def generate(self, request: Request) -> Completion:
        return await self.engine.generate(request)

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Tokens as they are sampled, if the engine can stream."""
        return stream_deltas(self.engine, request)

    @contextmanager
    def activity(self, label: str, *, limit_s: float = 0.0) -> Generator[None]:
        yield


class PromptCodec(Protocol):
    """Text to token ids and back. Implemented by rollick.data.chat."""

    def encode_prompt(self, turns: Sequence[Turn]) -> IntArray: ...
    def decode(self, token_ids: Any, /) -> str: ...


class ConversationCodec(PromptCodec, Protocol):
    """A codec that can also extend a tokenised conversation. Implemented by rollick.data.chat."""

    def append_turns(self, token_ids: Any, turns: Sequence[Turn], /) -> IntArray: ...
    def append_text(self, token_ids: Any, text: str, /) -> IntArray: ...
    def encode_answer(self, text: str, /) -> IntArray: ...


class CachingCodec:
    """Encodes the prompt of a group once: a chat template is slower than scheduling a sample."""

    def __init__(self, codec: PromptCodec) -> None:
        self._encode = lru_cache(1024)(codec.encode_prompt)
        self.decode = codec.decode

    def encode_prompt(self, turns: Sequence[Turn]) -> IntArray:
        return self._encode(tuple(turns))


def random_stream(seed: int, purpose: str, uid: SampleId) -> int:
    """The key of a sample's random numbers; equal for an id before and after a resume."""
    return stable_hash(seed, purpose, uid.group, uid.index)
