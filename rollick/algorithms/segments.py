"""Sums and means over the tokens of a sample or turn, within a micro-batch.

T tokens, S segments. `segment_T` is the index of each token's sample or turn, ascending; gaps are
allowed. A micro-batch holds whole samples, so the results do not depend on the split.
"""

from __future__ import annotations

import torch


def segment_sum(values_T: torch.Tensor, segment_T: torch.Tensor) -> torch.Tensor:
    """For each token, the sum over its segment."""
    return _segment_totals(values_T, segment_T)[segment_T]


def segment_mean(values_T: torch.Tensor, segment_T: torch.Tensor) -> torch.Tensor:
    """For each token, the mean over its segment."""
    counts_S = _segment_totals(torch.ones_like(values_T), segment_T)
    return (_segment_totals(values_T, segment_T) / counts_S.clamp(min=1))[segment_T]


def _segment_totals(values_T: torch.Tensor, segment_T: torch.Tensor) -> torch.Tensor:
    num_segments = int(segment_T[-1]) + 1 if len(segment_T) else 0
    return values_T.new_zeros(num_segments).index_add(0, segment_T, values_T)
