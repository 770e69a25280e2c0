"""Log-probs and entropy of chosen tokens, without ever holding all their logits.

Row t is a hidden state, its target the token drawn next: log softmax(h_t W' / temperature)[y_t].
The vocabulary product is made for `chunk` rows at a time, forward and again backward, so at most
chunk x V logits (and as many gradients) exist at once; nothing of that size is kept between.

Legend: T rows, D hidden size, V vocabulary, C rows of a chunk. All log-probs are float32 (float64
for float64 hidden states), whatever the dtype of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from rollick.errors import ModelError
from rollick.models.deterministic import tiled_linear

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
        if hidden_TD.dtype is not wide and hidden_TD.is_cuda:
            logits_TV = torch.mm(hidden_TD, weight_VD.t(), out_dtype=wide)
            return logits_TV if bias_V is None else logits_TV.add_(bias_V)
        product = tiled_linear if tiled else linear
        bias_V = None if bias_V is None else bias_V.to(wide)
        return product(hidden_TD.to(wide), weight_VD.to(wide), bias_V)


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
    """(log-prob of each target, entropy of its distribution); the entropy has no gradient.

    `tiled` makes a row's bits independent of the other rows (see deterministic.py).
    """
    return _TokenLogprobs.apply(
        hidden_TD, weight_VD, bias_V, targets_T, temperature_T, chunk, tiled
    )  # pyright: ignore[reportReturnType]


def _chunk_logprobs(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperature_C: torch.Tensor,
    *,
    tiled: bool,
) -> torch.Tensor:
    """Log-softmax of a chunk, [C, V]; the division by the temperature is in float32."""
    logits_CV = head_logits(hidden_CD, weight_VD, bias_V, tiled=tiled)
    return torch.log_softmax(logits_CV.div_(temperature_C[:, None]), dim=-1)


def _result_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype is torch.float64 else torch.float32


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        temperature_T: torch.Tensor,
        chunk: int,
        tiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _result_dtype(hidden_TD)
        temperature_T = temperature_T.to(dtype)
        logprobs_T = hidden_TD.new_empty(len(targets_T), dtype=dtype)
        entropy_T = torch.empty_like(logprobs_T)
        for start in range(0, len(targets_T), chunk):
            rows = slice(start, start + chunk)
            all_CV = _chunk_logprobs(
                hidden_TD[rows], weight_VD, bias_V, temperature_T[rows], tiled=tiled
            )
            logprobs_T[rows] = all_CV.gather(1, targets_T[rows, None])[:, 0]
            entropy_T[rows] = -all_CV.exp().mul_(all_CV).sum(-1)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T, temperature_T)
        ctx.chunk, ctx.tiled = chunk, tiled
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient_T: torch.Tensor, _entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, targets_T, temperature_T = ctx.saved_tensors
        for_hidden, for_weight, for_bias, *_ = ctx.needs_input_grad
        wide = _result_dtype(hidden_TD)
        hidden_grad = torch.empty_like(hidden_TD) if for_hidden else None
        # Summed over chunks in float32, so that the chunk size does not show in low precision.
        weight_grad = torch.zeros_like(weight_VD, dtype=wide) if for_weight else None
        bias_grad = (
            torch.zeros_like(bias_V, dtype=wide) if for_bias and bias_V is not None else None
        )
        for start in range(0, len(targets_T), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            # d log p_y / d logits = (1[y] - p) / temperature
            grad_CV = _chunk_logprobs(
                hidden_TD[rows], weight_VD, bias_V, temperature_T[rows], tiled=ctx.tiled
            )
            scale_C = (gradient_T[rows] / temperature_T[rows])[:, None]
            grad_CV.exp_().neg_().mul_(scale_C).scatter_add_(1, targets_T[rows, None], scale_C)
            narrow_CV = grad_CV.to(hidden_TD.dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = narrow_CV @ weight_VD
            if weight_grad is not None:
                weight_grad += narrow_CV.t() @ hidden_TD[rows]
            if bias_grad is not None:
                bias_grad += grad_CV.sum(0)
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        bias_grad = None if bias_grad is None or bias_V is None else bias_grad.to(bias_V.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None
