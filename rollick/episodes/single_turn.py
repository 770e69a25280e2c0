"""The episode of a prompt that is answered once: encode, generate, assemble the Sample."""

from __future__ import annotations

import numpy as np

from rollick.episodes.base import EngineAccess, PromptCodec, RunEpisode, SamplingFor, random_stream
from rollick.types import (
    NOT_SAMPLED,
    Completion,
    IntArray,
    Prompt,
    Request,
    Sample,
    SampleId,
    Sampling,
)


def single_turn(
    codec: PromptCodec, sampling: Sampling | SamplingFor, *, seed: int, purpose: str = "train"
) -> RunEpisode:
    """An episode with one generation; `sampling` may differ by prompt."""

    async def run(uid: SampleId, prompt: Prompt, access: EngineAccess) -> Sample:
        prompt_ids = codec.encode_prompt(prompt.turns)
        stream = random_stream(seed, purpose, uid)
        parameters = sampling if isinstance(sampling, Sampling) else sampling(prompt)
        request = Request(uid, prompt_ids, parameters, stream, group=uid.group)
        completion = await access.generate(request)
        text = codec.decode(completion.token_ids)
        return make_sample(prompt, prompt_ids, completion, parameters.temperature, text)

    return run


def make_sample(
    prompt: Prompt, prompt_ids: IntArray, completion: Completion, temperature: float, text: str
) -> Sample:
    """Concatenate prompt and response; only the sampled tokens have versions and are trained on."""
    before, sampled = len(prompt_ids), len(completion.token_ids)
    token_ids = np.concatenate([prompt_ids, completion.token_ids], dtype=np.int32)
    logprobs = np.zeros(before + sampled, np.float32)
    logprobs[before:] = completion.logprobs
    versions = np.full(before + sampled, NOT_SAMPLED, np.int32)
    versions[before:] = completion.versions
    loss_mask = np.arange(before + sampled) >= before
    kept_cache = completion.kept_cache
    if kept_cache is not None:
        kept_cache = np.concatenate([np.zeros(before, np.bool_), kept_cache])
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
