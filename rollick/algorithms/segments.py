"""Sums and means over the samples (or turns) that the tokens of a micro-batch belong to.

T tokens, S samples. `segment_T` numbers each token's sample, ascending from 0 with gaps allowed.
A sample is never cut over micro-batches, so these are its statistics, not those of a part.
"""

from __future__ import annotations

import torch


def segment_sum(values_T: torch.Tensor, segment_T: torch.Tensor) -> torch.Tensor:
    """The sum over its segment, at each token."""
    return _totals(values_T, segment_T)[segment_T]


def segment_mean(values_T: torch.Tensor, segment_T: torch.Tensor) -> torch.Tensor:
    """The mean over its segment, at each token."""
    counts_S = _totals(torch.ones_like(values_T), segment_T)
    return (_totals(values_T, segment_T) / counts_S.clamp(min=1))[segment_T]


def _totals(values_T: torch.Tensor, segment_T: torch.Tensor) -> torch.Tensor:
    segments = int(segment_T[-1]) + 1 if len(segment_T) else 0
    return values_T.new_zeros(segments).index_add(0, segment_T, values_T)
