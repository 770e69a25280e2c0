"""Log-probs and entropy of tokens, without ever holding all their logits.

Row t is a hidden state; softmax(h_t W' / temperature) is the distribution of the token drawn next.

    token_logprobs    of one token a row, with the entropy     the tokens that were drawn
    chosen_logprobs   of K given tokens a row                  a student at its teacher's tokens
    top_logprobs      of the K likeliest, no gradient          a teacher

The vocabulary product is made for `chunk` rows at a time, forward and again backward, so at most
chunk x V logits (and as many gradients) exist at once. Those of the last chunk are kept for the
backward, which mostly follows at once: rows that make one chunk have no product made twice.

Legend: T rows, D hidden size, V vocabulary, C rows of a chunk, K tokens of a row. All log-probs are
float32 (float64 for float64 hidden states), whatever the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from rollick.errors import ModelError
from rollick.models.deterministic import tiled_linear
from rollick.models.fixed import fixed_product

LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings of model families whose logits are not the plain product of the head."""


def output_head(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The vocabulary matrix [V, D] and its bias, if it has one."""
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    config: Any = model.config
    changed = [name for name in LOGIT_CHANGES if getattr(config, name, None) not in (None, 1, 1.0)]
    if head is None or changed:
        raise ModelError(
            f"{type(model).__name__} changes its logits after the head ({', '.join(changed)})"
            if changed
            else f"{type(model).__name__} has no output head",
            fix="use a decoder whose logits are the plain product of its head",
        )
    return head.weight, getattr(head, "bias", None)


def head_logits(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    *,
    tiled: bool = False,
) -> torch.Tensor:
    """Logits [T, V] in float32 (float64 stays): a half-precision product is never rounded to half.

    A bfloat16 logit of 20 is off by up to 0.06, which is that much in a log-prob: engine and
    learner both take their logits from here. No gradient flows through it.
    """
    wide = _result_dtype(hidden_TD)
    with torch.no_grad():
        if hidden_TD.is_cuda and tiled:
            return fixed_product(hidden_TD, weight_VD, bias_V, dtype=wide)
        if hidden_TD.dtype is not wide and hidden_TD.is_cuda:
            logits_TV = torch.mm(hidden_TD, weight_VD.t(), out_dtype=wide)
            return logits_TV if bias_V is None else logits_TV.add_(bias_V)
        product = tiled_linear if tiled else linear
        bias_V = None if bias_V is None else bias_V.to(wide)
        return product(hidden_TD.to(wide), weight_VD.to(wide), bias_V)


def exact_logits(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    ids_TK: torch.Tensor,
    bias_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [T, K] of K tokens a row, in float64.

    A float32 product over the hidden size is off by some 5e-6, each kernel in its own way, and most
    of that in a log-prob is the error of the token's own logit. For this one token it costs nothing
    to do better.
    """
    logits_TK = torch.matmul(weight_VD[ids_TK].double(), hidden_TD.double()[:, :, None])[..., 0]
    return logits_TK if bias_V is None else logits_TK + bias_V[ids_TK].double()


def token_logprobs(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature_T: torch.Tensor,
    *,
    chunk: int,
    tiled: bool = False,
    bias_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of each target, entropy of its distribution), both differentiable.

    A backward that the entropy has no part in does no work for it. On a GPU kernels do the rest
    (head_fused.py).
    `tiled` makes a row's bits independent of the other rows (see deterministic.py, fixed.py).
    """
    if hidden_TD.is_cuda and not tiled and hidden_TD.dtype is not torch.float64:
        from rollick.models.head_fused import fused_logprobs

        return fused_logprobs(hidden_TD, weight_VD, bias_V, targets_T, temperature_T, chunk=chunk)
    how = _How(chunk, tiled, entropy=True)
    result: Any = _HeadLogprobs.apply(
        hidden_TD, weight_VD, bias_V, targets_T[:, None], temperature_T, how
    )
    logprobs_T1, entropy_T = result
    return logprobs_T1[:, 0], entropy_T


def chosen_logprobs(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    ids_TK: torch.Tensor,
    temperature_T: torch.Tensor,
    *,
    chunk: int,
    tiled: bool = False,
    bias_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probs [T, K] of K given tokens a row, out of the whole vocabulary; differentiable."""
    how = _How(chunk, tiled, entropy=False)
    result: Any = _HeadLogprobs.apply(hidden_TD, weight_VD, bias_V, ids_TK, temperature_T, how)
    return result[0]


@torch.no_grad()
def top_logprobs(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    temperature_T: torch.Tensor,
    *,
    k: int,
    chunk: int,
    tiled: bool = False,
    bias_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, log-probs), both [T, K], of the k likeliest tokens of each row, the likeliest first."""
    if not 1 <= k <= len(weight_VD):
        raise ModelError(
            f"cannot take the {k} likeliest tokens of a vocabulary of {len(weight_VD)}",
            fix=f"ask for 1 to {len(weight_VD)} tokens",
        )
    logprobs_TK = hidden_TD.new_empty(len(hidden_TD), k, dtype=_result_dtype(hidden_TD))
    ids_TK = torch.empty_like(logprobs_TK, dtype=torch.int64)
    how = _How(chunk, tiled, entropy=False)
    for rows, all_CV in _chunks(hidden_TD, weight_VD, bias_V, temperature_T, how=how):
        logprobs_TK[rows], ids_TK[rows] = all_CV.topk(k, dim=-1)
    return ids_TK, logprobs_TK


class _How(NamedTuple):
    chunk: int
    tiled: bool
    entropy: bool


def _chunks(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperature_T: torch.Tensor,
    *,
    how: _How,
    wanted_TK: torch.Tensor | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their log-softmax [C, V]), chunk by chunk; the caller may overwrite it.

    `wanted_TK` are the tokens whose log-probs are to be as exact as they can be.
    """
    temperature_T = temperature_T.to(_result_dtype(hidden_TD))
    for start in range(0, len(hidden_TD), how.chunk):
        rows = slice(start, start + how.chunk)
        parts = hidden_TD[rows], weight_VD, bias_V, temperature_T[rows]
        wanted_CK = None if wanted_TK is None else wanted_TK[rows]
        # Without a name for it here, the chunk is free as soon as the caller drops it.
        yield rows, _chunk_logprobs(*parts, tiled=how.tiled, wanted_CK=wanted_CK)


def _chunk_logprobs(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperature_C: torch.Tensor,
    *,
    tiled: bool,
    wanted_CK: torch.Tensor | None,
) -> torch.Tensor:
    """Log-softmax of a chunk, [C, V]; the division by the temperature is in float32."""
    logits_CV = head_logits(hidden_CD, weight_VD, bias_V, tiled=tiled)
    if wanted_CK is not None and not tiled and is_plain_float32(hidden_CD):
        exact_CK = exact_logits(hidden_CD, weight_VD, wanted_CK, bias_V)
        logits_CV.scatter_(1, wanted_CK, exact_CK.to(logits_CV.dtype))
    logits_CV.div_(temperature_C[:, None])
    if tiled or logits_CV.is_cuda:
        return torch.log_softmax(logits_CV, dim=-1)
    # On the CPU log_softmax adds one by one: over 50,000 tokens its log-probs come out 7e-6 too
    # large. sum() adds in pairs; how depends on the number of rows, hence not for `tiled`.
    logits_CV.sub_(logits_CV.amax(-1, keepdim=True))
    return logits_CV.sub_(logits_CV.exp().sum(-1, keepdim=True).log_())


def is_plain_float32(hidden: torch.Tensor) -> bool:
    """Whether `exact_logits` are worth making: elsewhere, other errors are larger or there are
    none."""
    return hidden.dtype is torch.float32 and not hidden.is_cuda


def _result_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype is torch.float64 else torch.float32


def _logit_gradient(
    logprobs_CV: torch.Tensor,
    ids_CK: torch.Tensor,
    *,
    chosen_CK: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Gradient [C, V] of the logits after the temperature, written over `logprobs_CV`.

    `chosen_CK` is the gradient of the log-probs of `ids_CK`, `entropy` the (gradient, value) [C, 1]
    of the entropy H. d log p_k = 1[k] - p and dH = -p (log p + H): what p multiplies is summed
    before the product, so no more than two arrays of [C, V] exist.
    """
    chosen_C1 = chosen_CK.sum(1, keepdim=True)
    if entropy is None:
        grad_CV = logprobs_CV.exp_().neg_().mul_(chosen_C1)
    else:
        gradient_C1, value_C1 = entropy
        probs_CV = logprobs_CV.exp()
        grad_CV = logprobs_CV.add_(value_C1).mul_(gradient_C1).add_(chosen_C1)
        grad_CV.mul_(probs_CV).neg_()
    return grad_CV.scatter_add_(1, ids_CK, chosen_CK)


def _kept_and_others(
    ctx: Any,
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperature_T: torch.Tensor,
    *,
    ids_TK: torch.Tensor,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The chunks again, the last one first: the forward kept it (for one backward, which writes
    over it)."""
    chunk = ctx.how.chunk
    last = max(0, (len(hidden_TD) - 1) // chunk * chunk)

    def computed(these: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        parts = hidden_TD[these], weight_VD, bias_V, temperature_T[these]
        return _chunks(*parts, how=ctx.how, wanted_TK=_wanted(ids_TK[these]))

    if ctx.kept:
        yield slice(last, last + chunk), ctx.kept.pop()
    else:
        for _, all_CV in computed(slice(last, None)):
            yield slice(last, last + chunk), all_CV
    yield from computed(slice(last))


def _wanted(ids_TK: torch.Tensor) -> torch.Tensor | None:
    """The tokens whose log-probs must be most exact: those that were drawn, one a row."""
    return ids_TK if ids_TK.shape[1] == 1 else None


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        ids_TK: torch.Tensor,
        temperature_T: torch.Tensor,
        how: _How,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs_TK = hidden_TD.new_empty(ids_TK.shape, dtype=_result_dtype(hidden_TD))
        entropy_T = logprobs_TK.new_empty(len(ids_TK)) if how.entropy else None
        parts = hidden_TD, weight_VD, bias_V, temperature_T
        ctx.kept = []
        for rows, all_CV in _chunks(*parts, how=how, wanted_TK=_wanted(ids_TK)):
            logprobs_TK[rows] = all_CV.gather(1, ids_TK[rows])
            if entropy_T is not None:
                entropy_T[rows] = -all_CV.exp().mul_(all_CV).sum(-1)
            if rows.stop >= len(hidden_TD) and any(ctx.needs_input_grad):
                ctx.kept.append(all_CV)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, ids_TK, temperature_T, entropy_T)
        ctx.how = how
        # An entropy that nobody uses then has the gradient None, not zeros to be worked on.
        ctx.set_materialize_grads(False)
        return logprobs_TK, entropy_T

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, chosen_TK: torch.Tensor | None, by_entropy_T: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, ids_TK, temperature_T, entropy_T = ctx.saved_tensors
        for_hidden, for_weight, for_bias, *_ = ctx.needs_input_grad
        wide = _result_dtype(hidden_TD)
        temperature_T1 = temperature_T.to(wide)[:, None]
        if chosen_TK is None:
            chosen_TK = torch.zeros_like(ids_TK, dtype=wide)
        hidden_grad = torch.empty_like(hidden_TD) if for_hidden else None
        # Summed over chunks in float32, so that the chunk size does not show in low precision.
        weight_grad = torch.zeros_like(weight_VD, dtype=wide) if for_weight else None
        bias_grad = torch.zeros_like(bias_V, dtype=wide) if for_bias else None
        parts = hidden_TD, weight_VD, bias_V, temperature_T
        for rows, all_CV in _kept_and_others(ctx, *parts, ids_TK=ids_TK):
            by_entropy = None
            if by_entropy_T is not None:
                by_entropy = by_entropy_T[rows, None] / temperature_T1[rows], entropy_T[rows, None]
            chosen_CK = chosen_TK[rows] / temperature_T1[rows]
            grad_CV = _logit_gradient(all_CV, ids_TK[rows], chosen_CK=chosen_CK, entropy=by_entropy)
            narrow_CV = grad_CV.to(hidden_TD.dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = narrow_CV @ weight_VD
            if weight_grad is not None:
                weight_grad += narrow_CV.t() @ hidden_TD[rows]
            if bias_grad is not None:
                bias_grad += grad_CV.sum(0)
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        bias_grad = None if bias_grad is None else bias_grad.to(bias_V.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None
