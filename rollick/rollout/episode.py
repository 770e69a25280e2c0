"""One sample's life on an engine: prompt -> Request -> Completion -> Sample (a single turn).

Owns how a prompt becomes token ids and how drawn tokens become a Sample. Does not score, count or
choose engines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from rollick.infer.engine import Engine
from rollick.types import (
    NOT_SAMPLED,
    Completion,
    IntArray,
    Prompt,
    Request,
    Sample,
    SampleId,
    Sampling,
    StopReason,
    Turn,
    stable_hash,
)

Resume = Callable[[], Awaitable[Engine | None]]
"""Waits until an aborted sample may go on, and says on which engine; None: it may not."""


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


async def run_episode(
    uid: SampleId,
    prompt: Prompt,
    *,
    engine: Engine,
    codec: ChatCodec,
    sampling: Sampling,
    stream: int,
    resume: Resume | None = None,
) -> Sample:
    """Consumes a prompt, produces a sample; waits for the engine.

    With `resume`, a generation that somebody aborted goes on where it stopped, its tokens kept;
    without it, the sample ends there with status ABORTED.
    """
    prompt_ids = codec.encode_prompt(prompt.turns)
    request = Request(uid, prompt_ids, sampling, stream, group=uid.group)
    completion = await engine.generate(request)
    while completion.stop is StopReason.ABORTED and resume is not None:
        next_engine = await resume()
        if next_engine is None:
            break
        completion = await next_engine.generate(replace(request, continue_from=completion))
    return make_sample(
        prompt,
        prompt_ids,
        completion=completion,
        temperature=sampling.temperature,
        text=codec.decode(completion.token_ids),
    )


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
    for array in (token_ids, logprobs, versions, loss_mask):
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
    )
