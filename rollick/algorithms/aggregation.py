"""Loss aggregation: the weight of each trained token in the loss of the batch.

(counts_B, group_B, *, max_tokens) -> weights_B, float64. `counts_B` is the number of trained tokens
of each sample of the global batch, `group_B` the group of each sample. The loss is the sum of
weight * loss over the trained tokens, so it does not depend on the split into micro-batches or
ranks. A sample without trained tokens has weight 0 and is not counted.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.integer[Any]]
Weights = npt.NDArray[np.float64]


class AggregationFn(Protocol):
    """The weight of each trained token of each sample."""

    def __call__(self, counts_B: Counts, group_B: Counts, *, max_tokens: int) -> Weights: ...


def token_mean(counts_B: Counts, group_B: Counts, *, max_tokens: int) -> Weights:
    """All trained tokens of the batch have the same weight."""
    return _reciprocals(counts_B, np.full(len(counts_B), np.sum(counts_B), np.float64))


def sequence_mean_token_mean(counts_B: Counts, group_B: Counts, *, max_tokens: int) -> Weights:
    """Mean over a sample's tokens, then over samples: tokens of short samples weigh more."""
    return _reciprocals(counts_B, _count_samples(counts_B) * np.asarray(counts_B, np.float64))


def sequence_mean_token_sum(counts_B: Counts, group_B: Counts, *, max_tokens: int) -> Weights:
    """Sum over a sample's tokens, mean over samples."""
    return _reciprocals(counts_B, np.full(len(counts_B), _count_samples(counts_B), np.float64))


def fixed_length(counts_B: Counts, group_B: Counts, *, max_tokens: int) -> Weights:
    """Sum over tokens / (samples * max_tokens): the weights do not depend on lengths."""
    return _reciprocals(
        counts_B, np.full(len(counts_B), _count_samples(counts_B) * max_tokens, np.float64)
    )


def prompt_mean(counts_B: Counts, group_B: Counts, *, max_tokens: int) -> Weights:
    """Mean over the tokens of a group, then over groups."""
    _, index_B = np.unique(np.asarray(group_B), return_inverse=True)
    tokens_G = np.zeros(index_B.max(initial=-1) + 1)
    np.add.at(tokens_G, index_B, counts_B)
    return _reciprocals(counts_B, float(np.count_nonzero(tokens_G)) * tokens_G[index_B])


def _count_samples(counts_B: Counts) -> int:
    return int(np.count_nonzero(counts_B))


def _reciprocals(counts_B: Counts, denominators_B: Weights) -> Weights:
    """1 / denominator for samples with trained tokens, 0 for others."""
    trained_B = np.asarray(counts_B) > 0
    return np.divide(1.0, denominators_B, out=np.zeros(len(trained_B)), where=trained_B)
