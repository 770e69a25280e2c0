"""From logits to tokens and their log-probs, for all rows at once.

The log-prob of a token is that of the distribution it was drawn from: log-softmax(logits / T),
cut and renormalised where top-k or top-p say so; a greedy row reports log-probs at temperature 1.
Randomness comes in as one uniform number per row: drawing is a pure function.

Dims: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DrawRules:
    """How each row draws. Temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature_R: npt.NDArray[np.float64]
    top_k_R: npt.NDArray[np.int64]
    top_p_R: npt.NDArray[np.float64]

    def row(self, number: int) -> DrawRules:
        one = slice(number, number + 1)
        return DrawRules(self.temperature_R[one], self.top_k_R[one], self.top_p_R[one])


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The tokens of one step and their log-probs, on the host."""

    tokens_R: npt.NDArray[np.int64]
    logprobs_R: npt.NDArray[np.float64]


def draw(logits_RV: Tensor, rules: DrawRules, *, uniform_R: npt.NDArray[np.float64]) -> Drawn:
    """One token per row, in float32, with a single transfer from the device."""
    tokens_R, logprobs_R = _draw(logits_RV.float(), rules, uniform_R)
    both = torch.stack((tokens_R.double(), logprobs_R.double())).cpu().numpy()
    return Drawn(both[0].astype(np.int64), both[1])


def draw_row_by_row(
    logits_RV: Tensor, rules: DrawRules, *, uniform_R: npt.NDArray[np.float64]
) -> Drawn:
    """The same in float64 and one row at a time: a row's bits do not depend on the others."""
    drawn = [
        _draw(logits_RV[row : row + 1].double(), rules.row(row), uniform_R[row : row + 1])
        for row in range(len(logits_RV))
    ]
    tokens_R = torch.cat([tokens for tokens, _ in drawn])
    logprobs_R = torch.cat([logprobs for _, logprobs in drawn])
    return Drawn(tokens_R.cpu().numpy(), logprobs_R.cpu().numpy())


def _draw(
    logits_RV: Tensor, rules: DrawRules, uniform_R: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    greedy_R = rules.temperature_R == 0
    scale_R = np.where(greedy_R, 1.0, rules.temperature_R)
    if (scale_R != 1).any():
        logits_RV = logits_RV / _like(scale_R, logits_RV)[:, None]
    cut_R = ((rules.top_k_R > 0) | (rules.top_p_R < 1)) & ~greedy_R
    if cut_R.any():
        logits_RV = _cut(logits_RV, rules, rows=np.flatnonzero(cut_R))
    logprobs_RV = logits_RV.log_softmax(-1)
    if greedy_R.all():
        tokens_R = logits_RV.argmax(-1)
    else:
        tokens_R = _invert(logprobs_RV, torch.from_numpy(uniform_R).to(logits_RV.device))
        if greedy_R.any():
            best_R = logits_RV.argmax(-1)
            tokens_R = torch.where(torch.from_numpy(greedy_R).to(best_R.device), best_R, tokens_R)
    return tokens_R, logprobs_RV.gather(-1, tokens_R[:, None])[:, 0]


def _invert(logprobs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The first token at which the cumulative probability passes the uniform number.

    In float64: over a large vocabulary a float32 sum would make the last tokens unreachable.
    """
    cumulative_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64)
    goal_R1 = uniform_R[:, None] * cumulative_RV[:, -1:]
    tokens_R1 = torch.searchsorted(cumulative_RV, goal_R1, right=True)
    return tokens_R1[:, 0].clamp_(max=logprobs_RV.shape[-1] - 1)


def _cut(logits_RV: Tensor, rules: DrawRules, *, rows: npt.NDArray[np.intp]) -> Tensor:
    """-inf for what lies outside the k likeliest, or outside the smallest set with mass p."""
    rows_C = torch.from_numpy(rows).to(logits_RV.device)
    ordered_CV, order_CV = logits_RV[rows_C].sort(dim=-1, descending=True)
    vocabulary = logits_RV.shape[-1]
    top_k_C = np.where(rules.top_k_R[rows] > 0, rules.top_k_R[rows], vocabulary)
    rank_V = torch.arange(vocabulary, device=logits_RV.device)
    outside_CV = rank_V >= torch.from_numpy(top_k_C).to(logits_RV.device)[:, None]
    # Top-p looks at what top-k left, as it is commonly understood.
    mass_CV = ordered_CV.masked_fill(outside_CV, float("-inf")).softmax(-1, dtype=torch.float64)
    before_CV = mass_CV.cumsum(-1) - mass_CV
    top_p_C = np.where(rules.top_p_R[rows] < 1, rules.top_p_R[rows], 2.0)
    outside_CV |= before_CV >= torch.from_numpy(top_p_C).to(logits_RV.device)[:, None]
    outside_CV[:, 0] = False
    ordered_CV = ordered_CV.masked_fill(outside_CV, float("-inf"))
    kept_RV = logits_RV.clone()
    kept_RV[rows_C] = torch.empty_like(ordered_CV).scatter_(-1, order_CV, ordered_CV)
    return kept_RV


def _like(values: npt.NDArray[np.float64], tensor: Tensor) -> Tensor:
    return torch.from_numpy(values).to(device=tensor.device, dtype=tensor.dtype)
