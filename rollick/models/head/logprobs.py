"""Log-probs and entropy of tokens, without materialising all logits.

Row t is a hidden state; softmax(h_t W' / temperature) is the distribution of the next token. Some
models scale or cap their logits (OutputHead).

    token_logprobs    of one token per row, with the entropy    for sampled tokens
    chosen_logprobs   of K tokens per row                       for a student, the teacher's tokens
    top_logprobs      of the top K tokens, without gradient     for a teacher

Forward and backward each compute the logits of `chunk` rows at a time, so at most chunk x V logits
(and as many gradients) are in memory. The backward reuses the logits of the last chunk.

Legend: T rows, D hidden size, V vocabulary, C rows of a chunk, K tokens of a row. All log-probs are
float32 (float64 for float64 hidden states), for any dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollick.errors import ModelError
from rollick.models.decoder.batch_invariant import batch_invariant_matmul, tiled_linear


class OutputHead(NamedTuple):
    """From hidden states to logits: softcap * tanh(scale * (h W' + b) / softcap)."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def first_tokens(self, tokens: int) -> OutputHead:
        """The head for the first `tokens` of the vocabulary."""
        bias_V = None if self.bias_V is None else self.bias_V[:tokens]
        return self._replace(weight_VD=self.weight_VD[:tokens], bias_V=bias_V)

    def finish(self, raw_logits: Tensor) -> Tensor:
        """Scale and cap h W' + b, in place."""
        if self.scale != 1.0:
            raw_logits.mul_(self.scale)
        if self.softcap is not None:
            raw_logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw_logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of finished logits with respect to h W' + b."""
        if self.softcap is None:
            return self.scale
        return (logits / self.softcap).square_().neg_().add_(1).mul_(self.scale)


def output_head(model: nn.Module) -> OutputHead:
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if getattr(head, "weight", None) is None:
        raise ModelError(
            f"{type(model).__name__} has no output head",
            fix="use a language model with an output head",
        )
    config: Any = model.config
    scale, softcap = read_logit_scaling(config.get_text_config())
    return OutputHead(head.weight, getattr(head, "bias", None), scale, softcap)


def read_logit_scaling(text_config: Any) -> tuple[float, float | None]:
    """(scale, soft cap) of the logits, from the configuration of a language model."""
    names = ("logits_scaling", "logit_scale", "final_logit_softcapping")
    divisor, factor, softcap = (getattr(text_config, name, None) for name in names)
    return float(factor or 1.0) / float(divisor or 1.0), softcap or None


@torch.no_grad()
def head_logits(hidden_TD: Tensor, head: OutputHead, *, batch_invariant: bool = False) -> Tensor:
    """Logits [T, V] in float32 (float64 for float64 inputs), without gradient.

    A half-precision matmul is not rounded to half: a bfloat16 logit of 20 is off by up to 0.06, and
    so would be its log-prob. Engine and learner both compute their logits here.
    """
    result_dtype, weight_VD, bias_V = _result_dtype(hidden_TD), head.weight_VD, head.bias_V
    if hidden_TD.is_cuda and batch_invariant:
        raw_TV = batch_invariant_matmul(hidden_TD, weight_VD, bias_V, dtype=result_dtype)
        return head.finish(raw_TV)
    if hidden_TD.dtype is not result_dtype and hidden_TD.is_cuda:
        raw_TV = torch.mm(hidden_TD, weight_VD.t(), out_dtype=result_dtype)
        return head.finish(raw_TV if bias_V is None else raw_TV.add_(bias_V))
    linear_layer = tiled_linear if batch_invariant else linear
    bias_V = None if bias_V is None else bias_V.to(result_dtype)
    return head.finish(linear_layer(hidden_TD.to(result_dtype), weight_VD.to(result_dtype), bias_V))


def exact_logits(hidden_TD: Tensor, head: OutputHead, ids_TK: Tensor) -> Tensor:
    """Logits [T, K] of K tokens per row, in float64.

    A float32 sum over the hidden size is off by about 5e-6, differently in each kernel. Most of the
    error of a log-prob is that of the token's logit, which is cheap to compute exactly.
    """
    weight_TKD = head.weight_VD[ids_TK].double()
    logits_TK = torch.matmul(weight_TKD, hidden_TD.double()[:, :, None])[..., 0]
    if head.bias_V is not None:
        logits_TK += head.bias_V[ids_TK].double()
    return head.finish(logits_TK)


def token_logprobs(
    hidden_TD: Tensor,
    head: OutputHead,
    targets_T: Tensor,
    temperature_T: Tensor,
    *,
    chunk: int,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of its distribution), differentiable; an unused entropy has
    no backward cost. `batch_invariant`: a row's bits do not depend on the other rows."""
    tensors = hidden_TD, *head[:2]
    options = ChunkOptions(chunk, *head[2:], batch_invariant=batch_invariant)
    if hidden_TD.is_cuda and not batch_invariant and hidden_TD.dtype is not torch.float64:
        from rollick.models.head.fused import FusedLogprobs

        fused: Any = FusedLogprobs.apply(*tensors, targets_T, temperature_T.float(), options)
        return fused
    result: Any = _HeadLogprobs.apply(*tensors, targets_T[:, None], temperature_T, options)
    logprobs_T1, entropy_T = result
    return logprobs_T1[:, 0], entropy_T


def chosen_logprobs(
    hidden_TD: Tensor,
    head: OutputHead,
    ids_TK: Tensor,
    temperature_T: Tensor,
    *,
    chunk: int,
    batch_invariant: bool = False,
) -> Tensor:
    """Log-probs [T, K] of K tokens per row; differentiable."""
    options = ChunkOptions(chunk, *head[2:], batch_invariant=batch_invariant, entropy=False)
    result: Any = _HeadLogprobs.apply(hidden_TD, *head[:2], ids_TK, temperature_T, options)
    return result[0]


@torch.no_grad()
def top_logprobs(
    hidden_TD: Tensor,
    head: OutputHead,
    temperature_T: Tensor,
    *,
    k: int,
    chunk: int,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """(ids, log-probs), both [T, K], of the k most likely tokens of each row, descending."""
    if not 1 <= k <= len(head.weight_VD):
        raise ModelError(
            f"cannot take the {k} likeliest tokens of a vocabulary of {len(head.weight_VD)}",
            fix=f"request 1 to {len(head.weight_VD)} tokens",
        )
    logprobs_TK = hidden_TD.new_empty(len(hidden_TD), k, dtype=_result_dtype(hidden_TD))
    ids_TK = torch.empty_like(logprobs_TK, dtype=torch.int64)
    options = ChunkOptions(chunk, *head[2:], batch_invariant=batch_invariant, entropy=False)
    for chunk_logprobs in _chunks(hidden_TD, head, temperature_T, options=options):
        rows = chunk_logprobs.rows
        logprobs_TK[rows], ids_TK[rows] = chunk_logprobs.logprobs_CV.topk(k, dim=-1)
    return ids_TK, logprobs_TK


class ChunkOptions(NamedTuple):
    """Arguments of the autograd functions besides tensors; `scale` and `softcap` of the head."""

    chunk: int
    scale: float
    softcap: float | None
    batch_invariant: bool = False
    entropy: bool = True
    needs_gradient: bool = False


class _Chunk(NamedTuple):
    """A chunk's log-softmax [C, V], which the caller may overwrite, and `OutputHead.slope`."""

    rows: slice
    logprobs_CV: Tensor
    slope: Tensor | float


def _chunks(
    hidden_TD: Tensor,
    head: OutputHead,
    temperature_T: Tensor,
    *,
    options: ChunkOptions,
    ids_TK: Tensor | None = None,
    kept: list[_Chunk] | None = None,
) -> Iterator[_Chunk]:
    """Yield chunk by chunk. With one id per row (sampled tokens), the logits of the ids are
    computed in float64. A backward passes `kept`, the last chunk of the forward or an empty list;
    the last chunk then comes first."""
    temperature_T = temperature_T.to(_result_dtype(hidden_TD))
    starts = list(range(0, len(hidden_TD), options.chunk))
    for start in starts if kept is None else [*starts[-1:], *starts[:-1]]:
        rows = slice(start, start + options.chunk)
        if kept:
            yield kept.pop()
            continue
        with_slope = kept is not None or options.needs_gradient
        # No local variable: the generator must not keep the chunk alive after the caller drops it.
        yield _compute_chunk(
            rows, hidden_TD[rows], head, temperature_T[rows], ids_TK, options, with_slope=with_slope
        )


def _compute_chunk(
    rows: slice,
    hidden_CD: Tensor,
    head: OutputHead,
    temperature_C: Tensor,
    ids_TK: Tensor | None,
    options: ChunkOptions,
    *,
    with_slope: bool,
) -> _Chunk:
    """Divides by the temperature in float32."""
    batch_invariant = options.batch_invariant
    logits_CV = head_logits(hidden_CD, head, batch_invariant=batch_invariant)
    use_exact = not batch_invariant and needs_exact_logits(hidden_CD)
    if use_exact and ids_TK is not None and ids_TK.shape[1] == 1:
        exact_CK = exact_logits(hidden_CD, head, ids_TK[rows])
        logits_CV.scatter_(1, ids_TK[rows], exact_CK.to(logits_CV.dtype))
    slope = head.slope(logits_CV) if with_slope else 1.0
    logits_CV.div_(temperature_C[:, None])
    if batch_invariant or logits_CV.is_cuda:
        return _Chunk(rows, torch.log_softmax(logits_CV, dim=-1), slope)
    # On the CPU log_softmax sums sequentially: for 50,000 tokens the log-probs are 7e-6 too large.
    # sum() sums pairwise, in an order that depends on the number of rows.
    logits_CV.sub_(logits_CV.amax(-1, keepdim=True))
    return _Chunk(rows, logits_CV.sub_(logits_CV.exp().sum(-1, keepdim=True).log_()), slope)


def needs_exact_logits(hidden: Tensor) -> bool:
    """Whether `exact_logits` improves accuracy: only for float32 on the CPU."""
    return hidden.dtype is torch.float32 and not hidden.is_cuda


def _result_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype is torch.float64 else torch.float32


def _logit_gradient(
    logprobs_CV: Tensor,
    ids_CK: Tensor,
    *,
    logprob_grad_CK: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Gradient [C, V] of the logits after the temperature, written over `logprobs_CV`.

    `logprob_grad_CK` is the gradient of the log-probs of `ids_CK`, `entropy` the (gradient, value)
    [C, 1] of the entropy H. d log p_k = 1[k] - p and dH = -p (log p + H): the factors of p are
    summed first, so at most two arrays of [C, V] exist.
    """
    logprob_grad_C1 = logprob_grad_CK.sum(1, keepdim=True)
    if entropy is None:
        grad_CV = logprobs_CV.exp_().neg_().mul_(logprob_grad_C1)
    else:
        gradient_C1, value_C1 = entropy
        probs_CV = logprobs_CV.exp()
        grad_CV = logprobs_CV.add_(value_C1).mul_(gradient_C1).add_(logprob_grad_C1)
        grad_CV.mul_(probs_CV).neg_()
    return grad_CV.scatter_add_(1, ids_CK, logprob_grad_CK)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        ids_TK: Tensor,
        temperature_T: Tensor,
        options: ChunkOptions,
    ) -> tuple[Tensor, Tensor | None]:
        head = OutputHead(weight_VD, bias_V, options.scale, options.softcap)
        logprobs_TK = hidden_TD.new_empty(ids_TK.shape, dtype=_result_dtype(hidden_TD))
        entropy_T = logprobs_TK.new_empty(len(ids_TK)) if options.entropy else None
        options = options._replace(needs_gradient=any(ctx.needs_input_grad))
        ctx.kept = []
        for chunk in _chunks(hidden_TD, head, temperature_T, options=options, ids_TK=ids_TK):
            rows, log_softmax_CV, _ = chunk
            logprobs_TK[rows] = log_softmax_CV.gather(1, ids_TK[rows])
            if entropy_T is not None:
                entropy_T[rows] = -log_softmax_CV.exp().mul_(log_softmax_CV).sum(-1)
            if rows.stop >= len(hidden_TD) and options.needs_gradient:
                ctx.kept.append(chunk)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, ids_TK, temperature_T, entropy_T)
        ctx.options = options
        # An unused entropy then has the gradient None instead of zeros.
        ctx.set_materialize_grads(False)
        return logprobs_TK, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logprob_grad_TK, entropy_grad_T = gradients
        hidden_TD, weight_VD, bias_V, ids_TK, temperature_T, entropy_T = ctx.saved_tensors
        head = OutputHead(weight_VD, bias_V, ctx.options.scale, ctx.options.softcap)
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        result_dtype = _result_dtype(hidden_TD)
        temperature_T1 = temperature_T.to(result_dtype)[:, None]
        if logprob_grad_TK is None:
            logprob_grad_TK = torch.zeros_like(ids_TK, dtype=result_dtype)
        hidden_grad = torch.empty_like(hidden_TD) if needs_hidden else None
        # Summed over chunks in float32, so that the result hardly depends on the chunk size.
        weight_grad = torch.zeros_like(weight_VD, dtype=result_dtype) if needs_weight else None
        bias_grad = torch.zeros_like(bias_V, dtype=result_dtype) if needs_bias else None
        inputs: Any = {"options": ctx.options, "ids_TK": ids_TK, "kept": ctx.kept}
        for rows, log_softmax_CV, slope in _chunks(hidden_TD, head, temperature_T, **inputs):
            entropy = None
            if entropy_grad_T is not None:
                entropy_grad_C1 = entropy_grad_T[rows, None] / temperature_T1[rows]
                entropy = entropy_grad_C1, entropy_T[rows, None]
            grad_CV = _logit_gradient(
                log_softmax_CV,
                ids_TK[rows],
                logprob_grad_CK=logprob_grad_TK[rows] / temperature_T1[rows],
                entropy=entropy,
            )
            grad_CV = multiply_by_slope(grad_CV, slope)
            rounded_CV = grad_CV.to(hidden_TD.dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = rounded_CV @ weight_VD
            if weight_grad is not None:
                weight_grad += rounded_CV.t() @ hidden_TD[rows]
            if bias_grad is not None:
                bias_grad += grad_CV.sum(0)
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        bias_grad = None if bias_grad is None else bias_grad.to(bias_V.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None


def multiply_by_slope(gradient_CV: Tensor, slope: Tensor | float) -> Tensor:
    """Multiply in place, unless the slope is 1."""
    return gradient_CV if isinstance(slope, float) and slope == 1.0 else gradient_CV.mul_(slope)
