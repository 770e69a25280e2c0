"""Samples tokens from logits with torch, for all rows at once.

The log-prob of a token is that of the distribution it was sampled from: log-softmax(logits / T),
after the bias, truncated and renormalised by top-k, top-p and min-p. A greedy row reports log-probs
at temperature 1. The only random input is one uniform number per row.

A token is found in two steps: first its block of the vocabulary, then its position in the block.
So only the block sums and one block per row are summed in float64.

Dims: R rows, V vocabulary, C truncated rows, L candidates, S blocks, W tokens of a block, B entries
of a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 256
"""Tokens of the vocabulary in one block."""

FIRST_CANDIDATES = 1024
"""Most likely tokens that top-p examines before it sorts the full vocabulary."""

Floats = npt.NDArray[np.float64]
RowIndices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Adds `value_B` to the logits of `token_B` in `row_B`; twice if a pair occurs twice."""

    row_B: npt.NDArray[np.int64]
    token_B: npt.NDArray[np.int64]
    value_B: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMetadata:
    """Parameters of each row. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off."""

    temperature_R: Floats
    top_k_R: npt.NDArray[np.int64]
    top_p_R: Floats
    min_p_R: Floats
    bias: LogitBias | None = None

    @property
    def greedy_R(self) -> npt.NDArray[np.bool_]:
        return self.temperature_R == 0

    @property
    def truncated_R(self) -> npt.NDArray[np.bool_]:
        """The rows that top-k, top-p or min-p restrict."""
        truncated_R = (self.top_k_R > 0) | (self.top_p_R < 1) | (self.min_p_R > 0)
        return truncated_R & ~self.greedy_R

    def select_row(self, row: int) -> SamplingMetadata:
        """The parameters of one row, without its bias."""
        rows = slice(row, row + 1)
        temperature_R, top_k_R = self.temperature_R[rows], self.top_k_R[rows]
        return SamplingMetadata(temperature_R, top_k_R, self.top_p_R[rows], self.min_p_R[rows])


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    tokens_R: npt.NDArray[np.int64]
    logprobs_R: Floats

    def with_exact_logits(
        self, logits_RV: Tensor, exact_R: Floats, metadata: SamplingMetadata
    ) -> SampledTokens:
        """Recompute the log-probs with the exact float64 logits of the sampled tokens."""
        rows = np.arange(len(self.tokens_R))
        error_R = exact_R - logits_RV[rows, self.tokens_R].double().numpy()
        error_R /= np.where(metadata.greedy_R, 1.0, metadata.temperature_R)
        # The normaliser contains the token's own probability, so it changes too.
        log_total_R = np.log1p(np.exp(self.logprobs_R) * np.expm1(error_R))
        return SampledTokens(self.tokens_R, self.logprobs_R + error_R - log_total_R)


def sample(logits_RV: Tensor, metadata: SamplingMetadata, *, uniform_R: Floats) -> SampledTokens:
    """Sample a token per row, with float32 probabilities and a single transfer from the device."""
    logits_RV = _process_logits(logits_RV.float(), metadata)
    probs_RV = logits_RV.softmax(-1)
    tokens_R, probs_R = _invert_cdf(probs_RV, torch.from_numpy(uniform_R).to(probs_RV.device))
    if metadata.greedy_R.any():
        rows = torch.from_numpy(np.flatnonzero(metadata.greedy_R)).to(probs_RV.device)
        # From the logits: rounding can make two probabilities equal.
        tokens_R[rows] = logits_RV[rows].argmax(-1)
        probs_R[rows] = probs_RV[rows, tokens_R[rows]].double()
    result = torch.stack((tokens_R.double(), probs_R.log())).cpu().numpy()
    return SampledTokens(result[0].astype(np.int64), result[1])


def sample_row_by_row(
    logits_RV: Tensor, metadata: SamplingMetadata, *, uniform_R: Floats
) -> SampledTokens:
    """Like `sample`, one row at a time, so that a row's result does not depend on the others, bit
    for bit. Divides by the temperature and takes a log-softmax in the dtype of the logits, like the
    learner, so that the log-probs can be bit-equal."""
    logits_RV = _add_bias(logits_RV, metadata.bias)
    tokens: list[int] = []
    logprobs: list[float] = []
    for row in range(len(logits_RV)):
        row_slice, row_metadata = slice(row, row + 1), metadata.select_row(row)
        logprobs_1V = _process_logits(logits_RV[row_slice], row_metadata).log_softmax(-1)
        if row_metadata.greedy_R[0]:
            token = int(logprobs_1V.argmax())
        else:
            uniform_1 = torch.from_numpy(uniform_R[row_slice]).to(logits_RV.device)
            token = int(_invert_cdf(logprobs_1V.double().exp_(), uniform_1)[0])
        tokens.append(token)
        logprobs.append(float(logprobs_1V[0, token]))
    return SampledTokens(np.asarray(tokens, np.int64), np.asarray(logprobs, np.float64))


def _process_logits(logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Logits plus bias, divided by the temperature; -inf where they are truncated."""
    logits_RV = _add_bias(logits_RV, metadata.bias)
    scale_R = np.where(metadata.greedy_R, 1.0, metadata.temperature_R)
    if (scale_R != 1).any():
        scale_R1 = torch.from_numpy(scale_R)[:, None]
        logits_RV = logits_RV / scale_R1.to(logits_RV.device, logits_RV.dtype)
    rows = np.flatnonzero(metadata.truncated_R)
    return _truncate(logits_RV, metadata, rows=rows) if len(rows) else logits_RV


def _add_bias(logits_RV: Tensor, bias: LogitBias | None) -> Tensor:
    if bias is None:
        return logits_RV
    arrays = bias.row_B, bias.token_B, bias.value_B
    row_B, token_B, value_B = (torch.from_numpy(array).to(logits_RV.device) for array in arrays)
    return logits_RV.index_put((row_B, token_B), value_B.to(logits_RV.dtype), accumulate=True)


def _invert_cdf(probs_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the cumulative probability passes the uniform number, and its probability.
    In float64: a float32 sum over a large vocabulary would make the last tokens unreachable."""
    cumulative_RS = _block_sums(probs_RV).cumsum(-1, dtype=torch.float64)
    total_R1 = cumulative_RS[:, -1:]
    target_R1 = _clamp_below(uniform_R[:, None] * total_R1, total_R1)
    block_R1 = torch.searchsorted(cumulative_RS, target_R1, right=True)
    block_R1.clamp_(max=cumulative_RS.shape[1] - 1)
    before_R1 = torch.where(block_R1 > 0, cumulative_RS.gather(1, (block_R1 - 1).clamp_(min=0)), 0)
    token_RW = block_R1 * BLOCK + torch.arange(BLOCK, device=probs_RV.device)
    padding_RW = token_RW >= probs_RV.shape[1]
    token_RW.clamp_(max=probs_RV.shape[1] - 1)
    cumulative_RW = probs_RV.gather(1, token_RW).double().masked_fill_(padding_RW, 0).cumsum(-1)
    target_R1 = _clamp_below(target_R1 - before_R1, cumulative_RW[:, -1:])
    offset_R1 = torch.searchsorted(cumulative_RW, target_R1, right=True).clamp_(max=BLOCK - 1)
    token_R1 = token_RW.gather(1, offset_R1)
    return token_R1[:, 0], (probs_RV.gather(1, token_R1).double() / total_R1)[:, 0]


def _block_sums(probs_RV: Tensor) -> Tensor:
    """Sums [R, S] of the blocks; the last block may be shorter."""
    num_full = probs_RV.shape[1] // BLOCK
    end = num_full * BLOCK
    sums_RS = probs_RV[:, :end].unflatten(1, (num_full, BLOCK)).sum(-1)
    if end == probs_RV.shape[1]:
        return sums_RS
    return torch.cat((sums_RS, probs_RV[:, end:].sum(-1, keepdim=True)), dim=1)


def _clamp_below(target: Tensor, total: Tensor) -> Tensor:
    """Clamp to the largest float below `total`, so that rounding cannot select past the last
    token."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


def _truncate(logits_RV: Tensor, metadata: SamplingMetadata, *, rows: RowIndices) -> Tensor:
    """Set to -inf the logits outside the top k, outside the smallest set of these with mass p, or
    with a probability below min_p times the highest."""
    rows_C = torch.from_numpy(rows).to(logits_RV.device)
    logits_CV = logits_RV[rows_C]
    ordered_CL, order_CL = _top_candidates(logits_CV, metadata, rows)
    top_k_C = np.where(metadata.top_k_R[rows] > 0, metadata.top_k_R[rows], logits_RV.shape[-1])
    rank_L = torch.arange(ordered_CL.shape[1], device=logits_RV.device)
    outside_CL = rank_L >= torch.from_numpy(top_k_C).to(logits_RV.device)[:, None]
    # Top-p applies to the tokens that top-k keeps, as in other engines.
    kept_CL = ordered_CL.double().masked_fill(outside_CL, float("-inf"))
    has_top_k_C = torch.from_numpy(metadata.top_k_R[rows] > 0)
    normalizer_C1 = _log_normalizer(logits_CV, kept_CL, has_top_k_C=has_top_k_C)
    mass_CL = (kept_CL - normalizer_C1).exp_()
    before_CL = mass_CL.cumsum(-1) - mass_CL
    top_p_C = np.where(metadata.top_p_R[rows] < 1, metadata.top_p_R[rows], 2.0)
    outside_CL |= before_CL >= torch.from_numpy(top_p_C).to(logits_RV.device)[:, None]
    min_p_C1 = torch.from_numpy(metadata.min_p_R[rows]).to(logits_RV.device)[:, None]
    outside_CL |= mass_CL < min_p_C1 * mass_CL[:, :1]
    outside_CL[:, 0] = False
    ordered_CL = ordered_CL.masked_fill(outside_CL, float("-inf"))
    kept_RV = logits_RV.clone()
    masked_CV = torch.full_like(logits_CV, float("-inf"))
    kept_RV[rows_C] = masked_CV.scatter_(-1, order_CL, ordered_CL)
    return kept_RV


def _log_normalizer(logits_CV: Tensor, kept_CL: Tensor, *, has_top_k_C: Tensor) -> Tensor:
    """Log-sum-exp over the tokens that top-k keeps, or over all tokens without a top-k."""
    kept_C1 = kept_CL.logsumexp(-1, keepdim=True)
    if has_top_k_C.all():
        return kept_C1
    all_C1 = logits_CV.double().logsumexp(-1, keepdim=True)
    return torch.where(has_top_k_C.to(kept_C1.device)[:, None], kept_C1, all_C1)


def _top_candidates(
    logits_CV: Tensor, metadata: SamplingMetadata, rows: RowIndices
) -> tuple[Tensor, Tensor]:
    """The most likely tokens in order: enough to contain all that truncation keeps."""
    vocab_size = logits_CV.shape[1]
    top_k_C = metadata.top_k_R[rows]
    if (top_k_C > 0).all():
        candidates = logits_CV.topk(min(int(top_k_C.max()), vocab_size), dim=-1)
        return candidates.values, candidates.indices
    num_candidates = max(FIRST_CANDIDATES, int(top_k_C.max()))
    if num_candidates < vocab_size:
        candidates = logits_CV.topk(num_candidates, dim=-1)
        if _are_sufficient(logits_CV, candidates.values, metadata, rows):
            return candidates.values, candidates.indices
    ordered = logits_CV.sort(dim=-1, descending=True)
    return ordered.values, ordered.indices


def _are_sufficient(
    logits_CV: Tensor, candidates_CL: Tensor, metadata: SamplingMetadata, rows: RowIndices
) -> bool:
    """Whether top-p and min-p keep only candidates, in every row without a top-k."""
    log_mass_CL = candidates_CL.double() - logits_CV.double().logsumexp(-1, keepdim=True)
    mass_C = log_mass_CL.exp().sum(-1).cpu().numpy()
    suffices_C = (metadata.top_k_R[rows] > 0) | (mass_C > metadata.top_p_R[rows])
    lowest_ratio_C = (candidates_CL[:, -1] - candidates_CL[:, 0]).double().exp().cpu().numpy()
    suffices_C |= lowest_ratio_C < metadata.min_p_R[rows]
    return bool(suffices_C.all())
