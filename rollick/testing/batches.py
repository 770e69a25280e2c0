"""Builds batches and recipes for tests of learners."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.algorithms.objective import Loss
from rollick.config.schema import Recipe, parse_recipe
from rollick.data.batch import Batch
from rollick.types import NOT_SAMPLED, Completion, Request, SampleId

ANSWERS = {
    "sft": {"completion": "answer"},
    "dpo": {"chosen": "better", "rejected": "worse"},
    "distill": {"completion": "answer"},
}
"""The answer columns that each supervised pipeline needs."""


def recipe_of(folder: Path, /, **sections: Any) -> Recipe:
    """A recipe for the model in a folder; `sections` override, such as train={...}."""
    columns = ANSWERS.get(sections.get("pipeline", "rlvr"), {})
    domains = {"none": {"source": "none.jsonl", **columns}}
    defaults = {"model": {"path": str(folder)}, "data": {"domains": domains}}
    return parse_recipe({**defaults, **sections})


def weighted_loss(inputs: LossInputs, loss: TokenLoss) -> Loss:
    """The weighted sum of a token loss, as a trainer computes it for a micro-batch."""
    return Loss((inputs.weights_T * loss.loss_T).sum(), loss.sums)


def random_batch(
    lengths: Sequence[int], *, vocabulary: int = 60, seed: int = 0, prompt: int = 2
) -> Batch:
    """Random samples of these lengths: `prompt` tokens, then sampled tokens with random advantages.
    Weights are those of token_mean; temperatures differ between samples."""
    random = np.random.default_rng(seed)
    sampled_N = np.concatenate([np.arange(length) >= min(prompt, length) for length in lengths])
    tokens = int(sum(lengths))
    return Batch(
        token_ids_N=random.integers(4, vocabulary, tokens).astype(np.int32),
        lengths_B=np.asarray(lengths, np.int32),
        uids=tuple(SampleId(b // 2, b % 2) for b in range(len(lengths))),
        group_B=np.asarray([b // 2 for b in range(len(lengths))], np.int32),
        temperature_B=np.asarray([1.0 + 0.25 * (b % 2) for b in range(len(lengths))], np.float32),
        loss_mask_N=sampled_N,
        logprobs_N=np.where(sampled_N, -random.uniform(3.0, 5.0, tokens), 0).astype(np.float32),
        versions_N=np.where(sampled_N, 0, NOT_SAMPLED).astype(np.int32),
        advantages_N=random.normal(size=tokens).astype(np.float32),
        weights_N=np.where(sampled_N, 1 / max(1, sampled_N.sum()), 0).astype(np.float64),
    )


def completions_to_batch(requests: Sequence[Request], completions: Sequence[Completion]) -> Batch:
    """The completions of an engine as a batch, so that a learner can compute their log-probs."""
    pairs = list(zip(requests, completions, strict=True))
    lengths = [len(r.token_ids) + len(c.token_ids) for r, c in pairs]
    masks = [np.arange(n) >= len(r.token_ids) for n, r in zip(lengths, requests, strict=True)]
    mask_N = np.concatenate(masks)
    ids = [part for r, c in pairs for part in (r.token_ids, c.token_ids)]
    logprobs = [part for r, c in pairs for part in (np.zeros(len(r.token_ids)), c.logprobs)]
    return Batch(
        token_ids_N=np.concatenate(ids).astype(np.int32),
        lengths_B=np.asarray(lengths, np.int32),
        uids=tuple(request.uid for request in requests),
        group_B=np.asarray([request.uid.group for request in requests], np.int32),
        temperature_B=np.asarray([r.sampling.temperature for r in requests], np.float32),
        loss_mask_N=mask_N,
        logprobs_N=np.concatenate(logprobs).astype(np.float32),
        versions_N=np.where(mask_N, 0, NOT_SAMPLED).astype(np.int32),
        advantages_N=np.zeros(len(mask_N), np.float32),
        weights_N=mask_N / mask_N.sum(),
    )
