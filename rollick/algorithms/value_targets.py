"""The tokens that the critic trains on, their weights, and how well its values predicted them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollick.data.batch import Batch
from rollick.errors import ConfigError
from rollick.types import BoolArray, FloatArray


def select_value_targets(batch: Batch, components: Sequence[int]) -> tuple[Batch, float]:
    """The samples that the critic trains on, and the explained variance of their old values.
    `components`: indices of the algorithms that read values; only their tokens have a return."""
    if batch.values_N is None or batch.returns_N is None:
        message = "the critic needs old values and returns, but the batch has none"
        raise ConfigError(message, fix="annotate the batch and assign credit before training")
    mask_N = batch.loss_mask_N
    if batch.component_N is not None:
        mask_N = mask_N & np.isin(batch.component_N, components)
    explained = explained_variance(batch.values_N[mask_N], batch.returns_N[mask_N])
    return select_value_tokens(batch, mask_N), explained


def select_value_tokens(batch: Batch, mask_N: BoolArray) -> Batch:
    """Keep the samples with a token in `mask_N`, weighted for a mean over these tokens. The
    denominator counts the full batch, before it is split into mini-batches. The policy's weights
    are not used: they include corrections and coefficients of the policy loss."""
    weights_N = np.where(mask_N, 1 / max(np.count_nonzero(mask_N), 1), 0.0)
    narrowed = replace(batch, loss_mask_N=mask_N, weights_N=weights_N)
    return narrowed.take(np.flatnonzero(narrowed.trained_B).tolist())


def explained_variance(values_T: FloatArray, returns_T: FloatArray) -> float:
    """1 - Var(return - value) / Var(return); 0 if all returns are equal."""
    returns_T = np.asarray(returns_T, np.float64)
    if not len(returns_T) or returns_T.min() == returns_T.max():
        return 0.0
    return float(1 - np.var(returns_T - values_T) / np.var(returns_T))
