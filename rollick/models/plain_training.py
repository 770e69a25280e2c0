"""The forward of a plain decoder over a pack, for training, without its modules.

Owns what a plain decoder (paged_decoder.PLAIN) computes from the modules' own parameters, and the
gradients of it. Does not own the parameters, the attention (attention.py) or the head (head.py).

    tokens -> embedding -> for each layer: norm; one product for query, key and value; turn;
    attention; product; add and norm; one product for gate and up; gate; product; add
    -> hidden states

Query, key and value, and gate and up, are one product forward and one each for both gradients:
their weights lie behind one another (fused.py). A norm, a turn and a gate keep what they were given
and nothing else, and are one kernel each way on a GPU, where small operations cost most of what is
not a product. A decoder that is not plain, or in which somebody put hooks or other layers, runs as
it is: `plain_hidden` gives None.

Legend: N tokens of a pack, E width of the model, F width between gate/up and down, H query heads,
K key/value heads, C size of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from rollick.models.attention import PackedLayout, varlen_attention
from rollick.models.fused import fuse_storage, whole_of
from rollick.models.paged_decoder import is_known

LOG = logging.getLogger("rollick")


def is_plain(decoder: nn.Module) -> bool:
    """Whether the decoder is of a known kind and nothing in it was changed."""
    if not is_known(decoder):
        return False
    config: Any = decoder.config
    layers: Any = decoder.layers
    return (
        type(decoder.embed_tokens) is nn.Embedding
        and config.hidden_act == "silu"
        and (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1) == 1
        and all(type(part) is nn.Linear for layer in layers for part in _linears(layer))
        # A part of a sharded parameter is a tensor of another type.
        and all(type(part) is nn.Parameter for part in decoder.parameters())
        and len({(part.dtype, part.device) for part in decoder.parameters()}) == 1
    )


def prepare_plain(decoder: nn.Module) -> None:
    """Lay the weights that compute together behind one another, where the decoder is plain.

    Before anybody shares the parameters: their storage changes, names and values do not.
    """
    if is_plain(decoder):
        fuse_storage(decoder)


def plain_hidden(decoder: nn.Module, token_ids_N: Tensor, layout: PackedLayout) -> Tensor | None:
    """The last hidden states [N, E]; None where the decoder must run itself."""
    if not is_plain(decoder):
        return None
    anything: Any = decoder
    ways = _ways(token_ids_N.device.type)
    residual_NE = embedding(token_ids_N, anything.embed_tokens.weight)
    cos_1NC, sin_1NC = anything.rotary_emb(
        residual_NE[None], position_ids=layout.position_ids_N[None]
    )
    turn = cos_1NC[0][:, None], sin_1NC[0][:, None]
    change_NE: Tensor | None = None
    for layer in anything.layers[: anything.config.num_hidden_layers]:
        residual_NE, normed_NE = _add_norm(residual_NE, change_NE, layer.input_layernorm, ways)
        change_NE = _attend(layer.self_attn, normed_NE, turn, layout, ways)
        residual_NE, normed_NE = _add_norm(
            residual_NE, change_NE, layer.post_attention_layernorm, ways
        )
        gate_up_N2F = _together(normed_NE, [layer.mlp.gate_proj, layer.mlp.up_proj])
        gated_NF: Any = _Gate.apply(gate_up_N2F, ways)
        change_NE = linear(gated_NF, layer.mlp.down_proj.weight, layer.mlp.down_proj.bias)
    return _add_norm(residual_NE, change_NE, anything.norm, ways)[1]


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def _attend(
    attention: Any,
    normed_NE: Tensor,
    turn: tuple[Tensor, Tensor],
    layout: PackedLayout,
    ways: Ways,
) -> Tensor:
    """What a layer's attention adds, [N, E]."""
    size = int(attention.head_dim)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    queries, keys = (part.out_features // size for part in parts[:2])
    packed_NHC = _together(normed_NE, parts).unflatten(1, (-1, size))
    turning_NHC, value_NKC = packed_NHC.split([queries + keys, keys], dim=1)
    if hasattr(attention, "q_norm"):
        query_NHC, key_NKC = turning_NHC.split([queries, keys], dim=1)
        query_NHC = _add_norm(query_NHC, None, attention.q_norm, ways)[1]
        key_NKC = _add_norm(key_NKC, None, attention.k_norm, ways)[1]
        turning_NHC = torch.cat([query_NHC, key_NKC], dim=1)
    turned: Any = _Turn.apply(turning_NHC, *turn, queries, ways)
    query, key = turned
    # Mistral's layers read it in the configuration; Llama's never look at it.
    by_config = "Mistral" in type(attention).__name__
    window = getattr(attention.config if by_config else attention, "sliding_window", None)
    query, key, value = (heads.transpose(0, 1)[None] for heads in (query, key, value_NKC))
    attended, _ = varlen_attention(
        attention,
        query,
        key,
        value,
        None,
        layout=layout,
        scaling=attention.scaling,
        sliding_window=window,
    )
    return linear(attended[0].flatten(1), attention.o_proj.weight, attention.o_proj.bias)


def _together(input_NE: Tensor, layers: Sequence[Any]) -> Tensor:
    """The outputs of layers that read one input, side by side."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    whole = whole_of(weights)
    if whole is None:
        return torch.cat([linear(input_NE, layer.weight, layer.bias) for layer in layers], dim=-1)
    output: Any = _Products.apply(input_NE, whole, len(weights), *weights, *biases)
    return output


def _add_norm(
    residual: Tensor, change: Tensor | None, norm: Any, ways: Ways
) -> tuple[Tensor, Tensor]:
    """(sum of both, the sum normed)."""
    if change is None:
        normed: Any = _Norm.apply(residual, norm.weight, norm.variance_epsilon, ways)
        return residual, normed
    both: Any = _AddNorm.apply(residual, change, norm.weight, norm.variance_epsilon, ways)
    return both


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def norm_forward(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, what each row was multiplied with); rounded as transformers' norms are."""
    wide = _wide(values)
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * factor).to(values.dtype), factor


def norm_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, factor: Tensor, passed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the values, with what is `passed` by the norm added, and of the weight."""
    normed, weighted = _wide(values) * factor, _wide(gradient) * _wide(weight)
    along = (normed * weighted).mean(-1, keepdim=True)
    back = (weighted - normed * along) * factor
    if passed is not None:
        back = back + passed
    by_weight = (_wide(gradient) * normed).flatten(0, -2).sum(0)
    return back.to(values.dtype), by_weight.to(weight.dtype)


def add_norm_forward(
    residual: Tensor, change: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    both = residual + change
    return (both, *norm_forward(both, weight, eps))


def gate_forward(gate_up_N2F: Tensor) -> Tensor:
    gate, up = gate_up_N2F.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gate_backward(gradient_NF: Tensor, gate_up_N2F: Tensor) -> Tensor:
    gate, up = (_wide(part) for part in gate_up_N2F.chunk(2, dim=-1))
    wide = _wide(gradient_NF)
    share = torch.sigmoid(gate)
    open_ = gate * share
    by_gate = wide * up * (share + open_ * (1 - share))
    return torch.cat([by_gate, wide * open_], dim=-1).to(gate_up_N2F.dtype)


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [N, heads, C]. Its gradient is the turn by the negative sine."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def turn_forward(heads: Tensor, cos: Tensor, sin: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Queries and keys turned, each in memory of its own: attention then gives its output in the
    order that the gradient of it comes in."""
    return turn(heads[:, :queries], cos, sin), turn(heads[:, queries:], cos, sin)


def turn_backward(by_query: Tensor, by_key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([turn(by_query, cos, -sin), turn(by_key, cos, -sin)], dim=1)


class Ways:
    """The functions above, plain or compiled."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self.norm_forward = wrap(norm_forward)
        self.norm_backward = wrap(norm_backward)
        self.add_norm_forward = wrap(add_norm_forward)
        self.gate_forward = wrap(gate_forward)
        self.gate_backward = wrap(gate_backward)
        self.turn_forward = wrap(turn_forward)
        self.turn_backward = wrap(turn_backward)


def _compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    kernel = torch.compile(work)

    def run(*given: Any) -> Any:
        # The compiler asks a tensor that was computed for its gradient, of which torch warns.
        return kernel(*(one.detach() if isinstance(one, Tensor) else one for one in given))

    return run


@cache
def _ways(device: str) -> Ways:
    """Compiled on a GPU; as they are on the CPU, where starting the compiler costs more than they
    do, and on a GPU that has no compiler."""
    plain = Ways(lambda work: work)
    if device != "cuda":
        return plain
    compiled = Ways(_compiled)
    try:
        compiled.gate_forward(torch.zeros(8, 32, device=device))
    except Exception as error:  # whatever a compiler's toolchain raises where it is not whole
        LOG.warning("training computes without compiled kernels: %s", error)
        return plain
    return compiled


class _Products(torch.autograd.Function):
    """One product with the weights of several layers, whose gradients are parts of one."""

    @staticmethod
    def forward(
        ctx: Any, input_NE: Tensor, whole_OE: Tensor, count: int, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(input_NE, whole_OE)
        ctx.sizes = [len(weight) for weight in parameters[:count]]
        ctx.biased = len(parameters) > count
        bias = torch.cat(parameters[count:]) if ctx.biased else None
        return linear(input_NE, whole_OE, bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient_NO: Tensor
    ) -> tuple[Tensor | None, ...]:
        input_NE, whole_OE = ctx.saved_tensors
        for_input, for_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        by_input = gradient_NO @ whole_OE if for_input else None
        nothing = [None] * len(ctx.sizes)
        weights = (gradient_NO.t() @ input_NE).split(ctx.sizes) if for_weight else nothing
        biases = gradient_NO.sum(0).split(ctx.sizes) if ctx.biased and for_weight else nothing
        return by_input, None, None, *weights, *(biases if ctx.biased else ())


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, eps: float, ways: Ways) -> Tensor:
        normed, factor = ways.norm_forward(values, weight, eps)
        ctx.save_for_backward(values, weight, factor)
        ctx.ways = ways
        return normed

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        back, by_weight = ctx.ways.norm_backward(gradient, *ctx.saved_tensors, None)
        return back, by_weight, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, change: Tensor, weight: Tensor, eps: float, ways: Ways
    ) -> tuple[Tensor, Tensor]:
        both, normed, factor = ways.add_norm_forward(residual, change, weight, eps)
        ctx.save_for_backward(both, weight, factor)
        ctx.ways = ways
        ctx.set_materialize_grads(False)
        return both, normed

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, passed: Tensor | None, gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return passed, passed, None, None, None
        back, by_weight = ctx.ways.norm_backward(gradient, *ctx.saved_tensors, passed)
        return back, back, by_weight, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_N2F: Tensor, ways: Ways) -> Tensor:
        ctx.save_for_backward(gate_up_N2F)
        ctx.ways = ways
        return ways.gate_forward(gate_up_N2F)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient_NF: Tensor
    ) -> tuple[Tensor | None, ...]:
        (gate_up_N2F,) = ctx.saved_tensors
        return ctx.ways.gate_backward(gradient_NF, gate_up_N2F), None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, queries: int, ways: Ways
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.ways = ways
        return ways.turn_forward(heads, cos, sin, queries)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, by_query: Tensor, by_key: Tensor
    ) -> tuple[Tensor | None, ...]:
        return ctx.ways.turn_backward(by_query, by_key, *ctx.saved_tensors), None, None, None, None
