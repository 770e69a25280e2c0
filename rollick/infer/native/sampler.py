"""From logits to tokens and their log-probs, for all rows at once.

The log-prob of a token is that of the distribution it was drawn from: log-softmax(logits / T),
with the bias added first, cut and renormalised where top-k, top-p or min-p say so; a greedy row
reports log-probs at temperature 1. Randomness comes in as one uniform number per row: drawing is
a pure function.

    logits -> bias -> / T -> cuts -> softmax -> sums of blocks -> the block -> the token in it

A token is found in two steps, first its block of the vocabulary and then its place in the block:
so only the sums of the blocks and one block of a row are added up in float64.

Dims: R rows, V vocabulary, C rows that are cut, S blocks, W tokens of a block, B entries of a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 256
"""Tokens of the vocabulary that are summed together before one is looked for."""

FIRST_LOOK = 1024
"""How many of the likeliest tokens top-p looks at, before it sorts the whole vocabulary."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """What is added to single logits: `value_B` to that of `token_B` in `row_B`."""

    row_B: npt.NDArray[np.int64]
    token_B: npt.NDArray[np.int64]
    value_B: npt.NDArray[np.float32]

    @classmethod
    def join(cls, parts: Sequence[Bias]) -> Bias | None:
        """Several as one; None for none. A token that is named twice gets the sum."""
        if not parts:
            return None
        return cls(
            np.concatenate([part.row_B for part in parts]),
            np.concatenate([part.token_B for part in parts]),
            np.concatenate([part.value_B for part in parts]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DrawRules:
    """How each row draws. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 cut nothing."""

    temperature_R: Floats
    top_k_R: npt.NDArray[np.int64]
    top_p_R: Floats
    min_p_R: Floats | None = None
    bias: Bias | None = None

    @property
    def greedy_R(self) -> npt.NDArray[np.bool_]:
        return self.temperature_R == 0

    @property
    def cut_R(self) -> npt.NDArray[np.bool_]:
        """The rows that cannot draw every token."""
        cut_R = (self.top_k_R > 0) | (self.top_p_R < 1)
        if self.min_p_R is not None:
            cut_R |= self.min_p_R > 0
        return cut_R & ~self.greedy_R

    def row(self, number: int) -> DrawRules:
        """The rules of one row, as a table of one row. The bias, if any, stays with the whole."""
        one = slice(number, number + 1)
        min_p_R = None if self.min_p_R is None else self.min_p_R[one]
        return DrawRules(self.temperature_R[one], self.top_k_R[one], self.top_p_R[one], min_p_R)


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The tokens of one step and their log-probs, on the host."""

    tokens_R: npt.NDArray[np.int64]
    logprobs_R: Floats

    def corrected(self, logits_RV: Tensor, exact_R: Floats, rules: DrawRules) -> Drawn:
        """With the log-probs that follow if the drawn tokens have these logits."""
        rows = np.arange(len(self.tokens_R))
        off_R = exact_R - logits_RV[rows, self.tokens_R].double().numpy()
        off_R /= np.where(rules.greedy_R, 1.0, rules.temperature_R)
        # The token's own part of the whole changes with it.
        whole_R = np.log1p(np.exp(self.logprobs_R) * np.expm1(off_R))
        return Drawn(self.tokens_R, self.logprobs_R + off_R - whole_R)


def draw(logits_RV: Tensor, rules: DrawRules, *, uniform_R: Floats) -> Drawn:
    """One token per row, with probabilities in float32 and a single transfer from the device."""
    logits_RV = _prepared(logits_RV.float(), rules)
    probs_RV = logits_RV.softmax(-1)
    tokens_R, probs_R = _find(probs_RV, torch.from_numpy(uniform_R).to(probs_RV.device))
    if rules.greedy_R.any():
        rows = torch.from_numpy(np.flatnonzero(rules.greedy_R)).to(probs_RV.device)
        # Of the logits, not the probabilities: two of these may be equal by rounding.
        tokens_R[rows] = logits_RV[rows].argmax(-1)
        probs_R[rows] = probs_RV[rows, tokens_R[rows]].double()
    both = torch.stack((tokens_R.double(), probs_R.log())).cpu().numpy()
    return Drawn(both[0].astype(np.int64), both[1])


def draw_row_by_row(logits_RV: Tensor, rules: DrawRules, *, uniform_R: Floats) -> Drawn:
    """The same, one row at a time: a row's bits do not depend on the others.

    The log-probs come from the operations that the learner's come from, so that their bits can
    be the same: a division by the temperature and a log-softmax, in the dtype of the logits.
    """
    logits_RV = _biased(logits_RV, rules.bias)
    tokens: list[int] = []
    logprobs: list[float] = []
    for number in range(len(logits_RV)):
        one = rules.row(number)
        logprobs_1V = _prepared(logits_RV[number : number + 1], one).log_softmax(-1)
        if one.greedy_R[0]:
            token = int(logprobs_1V.argmax())
        else:
            uniform_1 = torch.from_numpy(uniform_R[number : number + 1]).to(logits_RV.device)
            token = int(_find(logprobs_1V.double().exp_(), uniform_1)[0])
        tokens.append(token)
        logprobs.append(float(logprobs_1V[0, token]))
    return Drawn(np.asarray(tokens, np.int64), np.asarray(logprobs, np.float64))


def _prepared(logits_RV: Tensor, rules: DrawRules) -> Tensor:
    """Logits with their bias, over the temperature, -inf where a row is cut."""
    logits_RV = _biased(logits_RV, rules.bias)
    scale_R = np.where(rules.greedy_R, 1.0, rules.temperature_R)
    if (scale_R != 1).any():
        logits_RV = logits_RV / _like(scale_R, logits_RV)[:, None]
    rows = np.flatnonzero(rules.cut_R)
    return _cut(logits_RV, rules, rows=rows) if len(rows) else logits_RV


def _biased(logits_RV: Tensor, bias: Bias | None) -> Tensor:
    if bias is None:
        return logits_RV
    row_B, token_B, value_B = (
        torch.from_numpy(array).to(logits_RV.device)
        for array in (bias.row_B, bias.token_B, bias.value_B)
    )
    return logits_RV.index_put((row_B, token_B), value_B.to(logits_RV.dtype), accumulate=True)


def _find(probs_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the cumulative probability passes the uniform number, and its part of
    the whole, in float64: a float32 sum over a large vocabulary would make the last tokens
    unreachable."""
    cumulative_RS = _block_sums(probs_RV).cumsum(-1, dtype=torch.float64)
    total_R1 = cumulative_RS[:, -1:]
    goal_R1 = _below(uniform_R[:, None] * total_R1, total_R1)
    block_R1 = torch.searchsorted(cumulative_RS, goal_R1, right=True)
    block_R1.clamp_(max=cumulative_RS.shape[1] - 1)
    before_R1 = torch.where(block_R1 > 0, cumulative_RS.gather(1, (block_R1 - 1).clamp_(min=0)), 0)
    place_RW = block_R1 * BLOCK + torch.arange(BLOCK, device=probs_RV.device)
    outside_RW = place_RW >= probs_RV.shape[1]
    place_RW.clamp_(max=probs_RV.shape[1] - 1)
    inside_RW = probs_RV.gather(1, place_RW).double().masked_fill_(outside_RW, 0).cumsum(-1)
    goal_R1 = _below(goal_R1 - before_R1, inside_RW[:, -1:])
    step_R1 = torch.searchsorted(inside_RW, goal_R1, right=True).clamp_(max=BLOCK - 1)
    token_R1 = place_RW.gather(1, step_R1)
    return token_R1[:, 0], (probs_RV.gather(1, token_R1).double() / total_R1)[:, 0]


def _block_sums(probs_RV: Tensor) -> Tensor:
    """[R, S]; the last block may be shorter."""
    whole = probs_RV.shape[1] // BLOCK * BLOCK
    sums_RS = probs_RV[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1) if whole else None
    if whole == probs_RV.shape[1]:
        assert sums_RS is not None
        return sums_RS
    rest_R1 = probs_RV[:, whole:].sum(-1, keepdim=True)
    return rest_R1 if sums_RS is None else torch.cat((sums_RS, rest_R1), dim=1)


def _below(goal: Tensor, total: Tensor) -> Tensor:
    """A goal that rounding made as large as the total would lie behind the last token."""
    return torch.minimum(goal, torch.nextafter(total, torch.zeros_like(total)))


def _cut(logits_RV: Tensor, rules: DrawRules, *, rows: npt.NDArray[np.intp]) -> Tensor:
    """-inf for what lies outside the k likeliest, outside the smallest set with mass p of these,
    or below the share min_p of the likeliest."""
    rows_C = torch.from_numpy(rows).to(logits_RV.device)
    logits_CV = logits_RV[rows_C]
    ordered_CL, order_CL = _likeliest(logits_CV, rules, rows)
    top_k_C = np.where(rules.top_k_R[rows] > 0, rules.top_k_R[rows], logits_RV.shape[-1])
    rank_L = torch.arange(ordered_CL.shape[1], device=logits_RV.device)
    outside_CL = rank_L >= torch.from_numpy(top_k_C).to(logits_RV.device)[:, None]
    # Top-p looks at what top-k left, as it is commonly understood.
    left_CL = ordered_CL.double().masked_fill(outside_CL, float("-inf"))
    whole_C1 = _whole(logits_CV, left_CL, cut_C=torch.from_numpy(rules.top_k_R[rows] > 0))
    mass_CL = (left_CL - whole_C1).exp_()
    before_CL = mass_CL.cumsum(-1) - mass_CL
    top_p_C = np.where(rules.top_p_R[rows] < 1, rules.top_p_R[rows], 2.0)
    outside_CL |= before_CL >= torch.from_numpy(top_p_C).to(logits_RV.device)[:, None]
    if rules.min_p_R is not None:
        min_p_C1 = torch.from_numpy(rules.min_p_R[rows]).to(logits_RV.device)[:, None]
        outside_CL |= mass_CL < min_p_C1 * mass_CL[:, :1]
    outside_CL[:, 0] = False
    ordered_CL = ordered_CL.masked_fill(outside_CL, float("-inf"))
    kept_RV = logits_RV.clone()
    nothing_CV = torch.full_like(logits_CV, float("-inf"))
    kept_RV[rows_C] = nothing_CV.scatter_(-1, order_CL, ordered_CL)
    return kept_RV


def _whole(logits_CV: Tensor, left_CL: Tensor, *, cut_C: Tensor) -> Tensor:
    """Log of the sum that probabilities are a part of: of what top-k left, or of all tokens."""
    left_C1 = left_CL.logsumexp(-1, keepdim=True)
    if cut_C.all():
        return left_C1
    all_C1 = logits_CV.double().logsumexp(-1, keepdim=True)
    return torch.where(cut_C.to(left_C1.device)[:, None], left_C1, all_C1)


def _likeliest(
    logits_CV: Tensor, rules: DrawRules, rows: npt.NDArray[np.intp]
) -> tuple[Tensor, Tensor]:
    """As many of the likeliest tokens, in order, as surely hold all that the cuts leave."""
    vocabulary = logits_CV.shape[1]
    top_k_C = rules.top_k_R[rows]
    if (top_k_C > 0).all():
        found = logits_CV.topk(min(int(top_k_C.max()), vocabulary), dim=-1)
        return found.values, found.indices
    first = max(FIRST_LOOK, int(top_k_C.max()))
    if first < vocabulary:
        found = logits_CV.topk(first, dim=-1)
        if _is_enough(logits_CV, found.values, rules, rows):
            return found.values, found.indices
    ordered = logits_CV.sort(dim=-1, descending=True)
    return ordered.values, ordered.indices


def _is_enough(
    logits_CV: Tensor, best_CL: Tensor, rules: DrawRules, rows: npt.NDArray[np.intp]
) -> bool:
    """Whether every cut without a top-k ends within the tokens looked at."""
    log_mass_CL = best_CL.double() - logits_CV.double().logsumexp(-1, keepdim=True)
    mass_C = log_mass_CL.exp().sum(-1).cpu().numpy()
    ends_C = (rules.top_k_R[rows] > 0) | (mass_C > rules.top_p_R[rows])
    if rules.min_p_R is not None:
        lowest_C = (best_CL[:, -1] - best_CL[:, 0]).double().exp().cpu().numpy()
        ends_C |= lowest_C < rules.min_p_R[rows]
    return bool(ends_C.all())


def _like(values: Floats, tensor: Tensor) -> Tensor:
    return torch.from_numpy(values).to(device=tensor.device, dtype=tensor.dtype)
