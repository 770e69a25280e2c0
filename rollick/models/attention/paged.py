"""Attention over a paged KV cache, for generation on a GPU.

A step is a prefill of packed prompts, or a decode of one token for each row. The caller allocates
the cache, attaches it to the layers (`attach_cache`) and assigns pages to sequences.

    with use_step(step): model(...) -> attention of a layer -> rollick::paged_attend -> step.attend

The operator reads the step from a thread-local variable: a compiled layer gets tensors only, and
one compilation serves all layers.

Legend: R rows of a decode, B sequences of a prefill, P pages of a sequence, N packed tokens, T
tiles, H query heads, K key/value heads, D head dim. Keys and values of a layer are [pages, K, PAGE,
D].
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rollick.errors import ModelError
from rollick.models.attention.causal import attend_with_mask, causal_mask
from rollick.models.attention.options import AttentionOptions
from rollick.models.decoder.batch_invariant import reference_rms_norm
from rollick.models.decoder.spec import apply_rope

PAGE = 32
"""Tokens per page."""

NO_WINDOW = 1 << 30

_thread = threading.local()

Cache = tuple[Tensor, Tensor]


class QkvHeads(NamedTuple):
    """Query, key and value of a layer, each [heads, tokens, D], and its attention options."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int
    softcap: float = 0.0
    """0: none."""
    sinks: Tensor | None = None

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> QkvHeads:
        scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
        window = NO_WINDOW if options.window is None else options.window
        return cls(query, key, value, scale, window, options.softcap or 0.0, options.sinks_H)


class FusedQkv(NamedTuple):
    """The output of the fused QKV projection, before QK norm and rotary embedding."""

    rows: Tensor
    """[tokens, (H + 2 K) D]: queries, keys and values of each token."""
    heads: int
    kv_heads: int
    cosine: Tensor
    """[positions, D], like `sine`."""
    sine: Tensor
    scale: float
    window: int
    norms: tuple[Tensor, Tensor] | None = None
    """Weights of the QK norm, each [D]: for queries, for keys."""
    eps: float = 0.0
    softcap: float = 0.0
    sinks: None = None

    @property
    def dim(self) -> int:
        return self.cosine.shape[1]

    def split(self) -> QkvHeads:
        """Views of `rows`, without QK norm and rotary embedding."""
        heads = self.rows.unflatten(1, (-1, self.dim)).transpose(0, 1)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads))
        return QkvHeads(query, key, value, self.scale, self.window)

    def rotated(self, position_N: Tensor) -> QkvHeads:
        """With QK norm and rotary embedding, in torch: the reference for the kernels."""
        qkv = self.split()
        query, key = qkv.query, qkv.key
        if self.norms is not None:
            query = reference_rms_norm(query, self.norms[0], self.eps)
            key = reference_rms_norm(key, self.norms[1], self.eps)
        index_N = position_N.long().clamp(min=0)
        cos_sin = self.cosine[index_N], self.sine[index_N]
        return qkv._replace(query=apply_rope(query, *cos_sin), key=apply_rope(key, *cos_sin))


class PagedStep(Protocol):
    """Stores keys and values in one forward, and attends to them."""

    def attend(self, qkv: QkvHeads, cache: Cache) -> Tensor:
        """Store the keys and values, then attend. Returns [tokens, H, D]."""
        ...

    def attend_fused(self, qkv: FusedQkv, cache: Cache) -> Tensor:
        """The same for projections before QK norm and rotary embedding."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PagedDecode:
    """One new token for each row; `length_R` is the length of the row, including this token."""

    table_RP: Tensor
    length_R: Tensor
    splits: int = 1
    """Kernel programs that share the keys of a row."""
    kernels: bool = True
    """Use the Triton kernels; False: their references in torch."""
    batch_invariant: bool = False
    """Use the prefill kernel, so that results are bitwise equal to a learner's forward."""

    def attend(self, qkv: QkvHeads, cache: Cache) -> Tensor:
        if self.batch_invariant:
            return self._as_prefill().attend(qkv, cache)
        if not self.kernels:
            return decode_reference(qkv, cache, table_RP=self.table_RP, length_R=self.length_R)
        return self._launch(qkv, cache)

    def attend_fused(self, qkv: FusedQkv, cache: Cache) -> Tensor:
        if self.batch_invariant or not self.kernels:
            return self.attend(qkv.rotated(self.length_R - 1), cache)
        return self._launch(qkv.split(), cache, fused=qkv)

    def _launch(self, qkv: QkvHeads, cache: Cache, *, fused: FusedQkv | None = None) -> Tensor:
        from rollick.models.attention.paged_kernels import launch_decode

        return launch_decode(
            qkv, cache, table=self.table_RP, length=self.length_R, splits=self.splits, fused=fused
        )

    def _as_prefill(self) -> PagedPrefill:
        """A prefill of one token for each row."""
        last_R = self.length_R.long() - 1
        row_R = torch.arange(len(last_R), device=last_R.device)
        page_R = self.table_RP[row_R, last_R // PAGE].long()
        tiles_R4 = torch.stack((row_R, torch.ones_like(row_R), last_R, row_R), dim=1).int()
        return PagedPrefill(
            self.table_RP, last_R, page_R, last_R % PAGE, tiles_R4, kernels=self.kernels
        )


@dataclass(frozen=True, slots=True, eq=False)
class PagedPrefill:
    """Packed tokens of several sequences. A tile: first token, count, first position, sequence."""

    table_BP: Tensor
    position_N: Tensor
    page_N: Tensor
    offset_N: Tensor
    tiles_T4: Tensor
    kernels: bool = True

    @classmethod
    def of(
        cls,
        pages: Sequence[Sequence[int]],
        spans: Sequence[tuple[int, int]],
        *,
        queries: int,
        device: str,
        kernels: bool,
    ) -> PagedPrefill:
        """`spans`: positions [start, stop); earlier ones are cached. `queries`: tokens per tile."""
        width = max(len(row) for row in pages)
        table_BP = np.zeros((len(pages), width), np.int32)
        tiles: list[tuple[int, int, int, int]] = []
        pages_of_tokens: list[np.ndarray[Any, Any]] = []
        token = 0
        for number, (row, (start, stop)) in enumerate(zip(pages, spans, strict=True)):
            table_BP[number, : len(row)] = row
            pages_of_tokens.append(table_BP[number, np.arange(start, stop) // PAGE])
            for first in range(start, stop, queries):
                count = min(queries, stop - first)
                tiles.append((token + first - start, count, first, number))
            token += stop - start
        positions = np.concatenate([np.arange(start, stop) for start, stop in spans])
        # Each array starts at a multiple of 16 bytes, so kernels are compiled for that case only.
        token_arrays = np.zeros((3, -(-len(positions) // 16) * 16), np.int64)
        columns = positions, np.concatenate(pages_of_tokens), positions % PAGE
        token_arrays[:, : len(positions)] = columns
        position_N, page_N, offset_N = to_device(token_arrays, device)[:, : len(positions)]
        tiles_T4 = to_device(np.asarray(tiles, np.int32), device)
        table = to_device(table_BP, device)
        return cls(table, position_N, page_N, offset_N, tiles_T4, kernels)

    def attend(self, qkv: QkvHeads, cache: Cache) -> Tensor:
        keys, values = cache
        keys[self.page_N, :, self.offset_N] = qkv.key.transpose(0, 1)
        values[self.page_N, :, self.offset_N] = qkv.value.transpose(0, 1)
        if not self.kernels:
            return prefill_reference(qkv, cache, step=self)
        return self.attend_stored(qkv.query, cache, qkv)

    def attend_fused(self, qkv: FusedQkv, cache: Cache) -> Tensor:
        if not self.kernels:
            return self.attend(qkv.rotated(self.position_N), cache)
        from rollick.models.decoder.layer_kernels import launch_rotate

        query_NHD = launch_rotate(
            qkv, cache, position_N=self.position_N, page_N=self.page_N, offset_N=self.offset_N
        )
        return self.attend_stored(query_NHD.transpose(0, 1), cache, qkv)

    def attend_stored(self, query: Tensor, cache: Cache, qkv: QkvHeads | FusedQkv) -> Tensor:
        """Attend to keys and values that the cache already holds; `qkv` has the options."""
        from rollick.models.attention.paged_kernels import launch_prefill

        return launch_prefill(query, cache, self.table_BP, self.tiles_T4, qkv)


def to_device(array: np.ndarray[Any, Any], device: str) -> Tensor:
    """Copy without blocking: torch's pinned-memory allocator keeps the source until it is read."""
    tensor = torch.from_numpy(array)
    if not device.startswith("cuda"):
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def use_step(step: PagedStep) -> Generator[None]:
    """Attention inside the context, in this thread, uses `step`."""
    _thread.step = step
    try:
        yield
    finally:
        _thread.step = None


def attach_cache(module: nn.Module, layers: Sequence[Cache] | None) -> None:
    """Set the KV cache of every layer; None removes it. The tensors are attributes, not buffers:
    `to()` and `state_dict()` ignore them."""
    for part in module.modules():
        index = part.__dict__.get("layer_idx")
        # Layers of another tower may have an index too, and never read the cache.
        if isinstance(index, int) and (layers is None or index < len(layers)):
            part.__dict__["paged_keys"] = None if layers is None else layers[index][0]
            part.__dict__["paged_values"] = None if layers is None else layers[index][1]


def attend_paged(
    module: Any, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    cache = module.paged_keys, module.paged_values
    *qkv, scale, window, softcap, sinks = QkvHeads.of(query, key, value, options)
    return torch.ops.rollick.paged_attend(*qkv, *cache, [scale, float(window), softcap], sinks)


@torch.library.custom_op("rollick::paged_attend", mutates_args=())
def _paged_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    numbers: list[float],
    sinks: Tensor | None,
) -> Tensor:
    """`numbers`: scale, window and softcap. Writes to keys and values without declaring it, because
    nothing else in a compiled graph uses them."""
    step: PagedStep | None = getattr(_thread, "step", None)
    if step is None:
        raise ModelError("a layer was called outside use_step", fix="generate with an engine")
    scale, window, softcap = numbers
    q, k, v = (x[0] if x.stride(-1) == 1 else x[0].contiguous() for x in (query, key, value))
    attended = step.attend(QkvHeads(q, k, v, scale, int(window), softcap, sinks), (keys, values))
    return attended.contiguous().unsqueeze(0)


@_paged_attend.register_fake
def _(query: Tensor, *_others: Any) -> Tensor:
    _, heads, tokens, dim = query.shape
    return query.new_empty(1, tokens, heads, dim)


def decode_reference(qkv: QkvHeads, cache: Cache, *, table_RP: Tensor, length_R: Tensor) -> Tensor:
    """The decode kernel's computation in torch, row by row."""
    keys, values = cache
    outputs: list[Tensor] = []
    for row, length in enumerate(length_R.tolist()):
        page, offset = int(table_RP[row, (length - 1) // PAGE]), (length - 1) % PAGE
        keys[page, :, offset] = qkv.key[:, row]
        values[page, :, offset] = qkv.value[:, row]
        query = qkv.query[:, row : row + 1]
        outputs.append(_attend_pages(query, cache, table_RP[row], length, qkv=qkv))
    return torch.cat(outputs)


def prefill_reference(qkv: QkvHeads, cache: Cache, *, step: PagedPrefill) -> Tensor:
    """The prefill kernel's computation in torch, tile by tile."""
    outputs: list[Tensor] = []
    for token, count, position, row in step.tiles_T4.tolist():
        query, table_P = qkv.query[:, token : token + count], step.table_BP[row]
        outputs.append(_attend_pages(query, cache, table_P, position + count, qkv=qkv))
    return torch.cat(outputs)


def _attend_pages(
    query: Tensor, cache: Cache, table_P: Tensor, length: int, *, qkv: QkvHeads
) -> Tensor:
    """Attention of the last tokens of a sequence of `length` tokens. Returns [tokens, H, D]."""
    if not length:  # an unused row
        return query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
    pages = table_P[: -(-length // PAGE)].long()
    key, value = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in cache)
    options = AttentionOptions(qkv.scale, qkv.window, qkv.softcap or None, qkv.sinks)
    if not options.is_plain:
        attends = causal_mask(query.shape[1], length, qkv.window, device=query.device)
        attended = attend_with_mask(query[None], key[None], value[None], attends, options)
        return attended[0].transpose(0, 1)
    return scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=causal_mask(query.shape[1], length, qkv.window, device=query.device),
        scale=qkv.scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0].transpose(0, 1)
