"""One sample's life: prompt -> generations, with whatever lies between -> Sample.

An episode is a coroutine that asks for generations one after another. It occupies an engine only
while it generates: between two turns, in an environment or a tool, the place is another's. Owns how
a prompt becomes token ids and how drawn tokens become a Sample. Does not score, count or choose
engines; those it asks for through an Access.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from rollick.infer.engine import Delta, Engine
from rollick.infer.stream import deltas
from rollick.types import (
    NOT_SAMPLED,
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


class Access(Protocol):
    """What an episode may ask of the rollout."""

    async def generate(self, request: Request) -> Completion:
        """Waits for an engine and for the whole generation: one that somebody aborts goes on,
        perhaps elsewhere, with the tokens that it has."""
        ...

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Names what the sample does between generations (`tool search`), for who waits for it."""
        ...


Episode = Callable[[SampleId, Prompt, Access], Awaitable[Sample]]
SamplingOf = Callable[[Prompt], Sampling]
"""How the samples of a prompt are drawn."""


class OneEngine:
    """Access to one engine and nothing else: no queue, and an aborted generation ends there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: Request) -> Completion:
        return await self._engine.generate(request)

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Its tokens as they are drawn, where the engine can tell."""
        return deltas(self._engine, request)

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        yield


class ChatCodec(Protocol):
    """Text to token ids and back. The real one is rollick.data.chat."""

    def encode_prompt(self, turns: Sequence[Turn]) -> IntArray: ...

    def decode(self, token_ids: Any, /) -> str: ...


class RememberingCodec:
    """A codec that encodes a group's prompt once: a chat template costs more than a schedule."""

    def __init__(self, codec: ChatCodec, *, prompts: int = 1024) -> None:
        self._encode = lru_cache(prompts)(codec.encode_prompt)
        self._decode = codec.decode

    def encode_prompt(self, turns: Sequence[Turn]) -> IntArray:
        return self._encode(tuple(turns))

    def decode(self, token_ids: Any) -> str:
        return self._decode(token_ids)


def stream_of(seed: int, purpose: str, uid: SampleId) -> int:
    """The key of a sample's random numbers: the same id draws the same numbers after a resume."""
    return stable_hash(seed, purpose, uid.group, uid.index)


def single_turn(
    codec: ChatCodec, sampling: Sampling | SamplingOf, *, seed: int, purpose: str = "train"
) -> Episode:
    """The episode of a prompt that is answered once; `sampling` may differ by prompt."""

    async def answer(uid: SampleId, prompt: Prompt, access: Access) -> Sample:
        prompt_ids = codec.encode_prompt(prompt.turns)
        stream = stream_of(seed, purpose, uid)
        drawn = sampling if isinstance(sampling, Sampling) else sampling(prompt)
        request = Request(uid, prompt_ids, drawn, stream, group=uid.group)
        completion = await access.generate(request)
        return make_sample(
            prompt,
            prompt_ids,
            completion=completion,
            temperature=drawn.temperature,
            text=codec.decode(completion.token_ids),
        )

    return answer


def make_sample(
    prompt: Prompt,
    prompt_ids: IntArray,
    *,
    completion: Completion,
    temperature: float,
    text: str,
) -> Sample:
    """Prompt and response end to end; only the drawn tokens have versions and may be trained on."""
    before, drawn = len(prompt_ids), len(completion.token_ids)
    token_ids = np.concatenate([prompt_ids, completion.token_ids], dtype=np.int32)
    logprobs = np.zeros(before + drawn, np.float32)
    logprobs[before:] = completion.logprobs
    versions = np.full(before + drawn, NOT_SAMPLED, np.int32)
    versions[before:] = completion.versions
    loss_mask = np.arange(before + drawn) >= before
    kept = completion.kept_cache
    kept_cache = None if kept is None else np.concatenate([np.zeros(before, np.bool_), kept])
    for array in (token_ids, logprobs, versions, loss_mask, kept_cache):
        if array is not None:
            array.setflags(write=False)
    return Sample(
        uid=completion.uid,
        prompt=prompt,
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        loss_mask=loss_mask,
        temperature=temperature,
        stop=completion.stop,
        text=text,
        kept_cache=kept_cache,
    )
