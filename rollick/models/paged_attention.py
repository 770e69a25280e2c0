"""Attention over a paged cache of keys and values, for generation on a GPU.

Owns the operator that a layer's attention calls when a paged step is under way, what such a step
is (packed prompts, or one token for each row), and the reference in plain torch. Does not own the
memory, which is given to the layers by `attach_cache`, nor which page belongs to whom.

    with running(step): model(...) -> attention of a layer -> rollick::paged_attend -> step.attend

The operator is opaque to a compiler, and finds the step in a variable of its thread: so a layer
that is compiled sees nothing but tensors, and one compilation serves all layers.

Legend: R rows, H query heads, K key/value heads, G = H / K, D head dim, N packed tokens, B
sequences of a prefill. Keys and values of a layer are [pages, K, PAGE, D].
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
from rollick.models.fixed import plain_norm

PAGE = 32
"""Positions of a page."""

NO_WINDOW = 1 << 30

_KEYS, _VALUES = "paged_keys", "paged_values"
_here = threading.local()

Cache = tuple[Tensor, Tensor]


class Heads(NamedTuple):
    """What a layer projects its tokens to, each [heads, tokens, D], and how it attends."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int


class Packed(NamedTuple):
    """What one product gives a layer, before norms of heads and before positions turn anything."""

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
    """Weights [D] of the norms of queries and keys."""
    eps: float = 0.0

    @property
    def dim(self) -> int:
        return self.cosine.shape[1]

    def split(self) -> Heads:
        """Views of the rows, not turned."""
        whole = self.rows.unflatten(1, (-1, self.dim)).transpose(0, 1)
        parts = whole.split((self.heads, self.kv_heads, self.kv_heads))
        return Heads(parts[0], parts[1], parts[2], self.scale, self.window)

    def turned(self, position_N: Tensor) -> Heads:
        """The reference in plain torch of what the kernels do with norms and positions."""
        given = self.split()
        query, key = given.query, given.key
        if self.norms is not None:
            query = plain_norm(query, self.norms[0], self.eps)
            key = plain_norm(key, self.norms[1], self.eps)
        at = position_N.long().clamp(min=0)
        cosine, sine = self.cosine[at], self.sine[at]
        return given._replace(query=_turn(query, cosine, sine), key=_turn(key, cosine, sine))


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class PagedStep(Protocol):
    """One forward's way to store keys and values and to attend to them."""

    def attend(self, given: Heads, cache: Cache) -> Tensor:
        """[tokens, H, D]; stores the keys and values first."""
        ...

    def attend_packed(self, given: Packed, cache: Cache) -> Tensor:
        """The same for what is not turned by its position yet."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PagedDecode:
    """One token for each row; `length_R` counts the tokens of a row with this one."""

    table_RP: Tensor
    length_R: Tensor
    splits: int = 1
    kernels: bool = True
    fixed: bool = False
    """With the kernel of a prefill: a token gets the bits that it has in a learner's forward."""

    def attend(self, given: Heads, cache: Cache) -> Tensor:
        if self.fixed:
            return self._as_prefill().attend(given, cache)
        if not self.kernels:
            return decode_reference(given, cache, table_RP=self.table_RP, length_R=self.length_R)
        return self._launch(given, cache)

    def attend_packed(self, given: Packed, cache: Cache) -> Tensor:
        if self.fixed or not self.kernels:
            return self.attend(given.turned(self.length_R - 1), cache)
        return self._launch(given.split(), cache, packed=given)

    def _launch(self, given: Heads, cache: Cache, *, packed: Packed | None = None) -> Tensor:
        from rollick.models.paged_kernels import launch_decode

        return launch_decode(
            given.query,
            given.key,
            given.value,
            cache,
            table=self.table_RP,
            length=self.length_R,
            scale=given.scale,
            window=given.window,
            splits=self.splits,
            packed=packed,
        )

    def _as_prefill(self) -> PagedPrefill:
        """Each row's token as a program of its own."""
        last_R = self.length_R.long() - 1
        row_R = torch.arange(len(last_R), device=last_R.device)
        return PagedPrefill(
            table_BP=self.table_RP,
            position_N=last_R,
            page_N=self.table_RP[row_R, last_R // PAGE].long(),
            offset_N=last_R % PAGE,
            tiles_T4=torch.stack((row_R, torch.ones_like(row_R), last_R, row_R), dim=1).int(),
            kernels=self.kernels,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PagedPrefill:
    """Neighbouring tokens of several sequences, packed; each sees what its pages hold before it."""

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
        """`spans` are the positions [start, stop) of each sequence that are computed now, and
        `queries` is how many tokens a kernel's program takes together."""
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
        # Each line begins at a multiple of 16 bytes, or kernels would be compiled for both cases.
        of_tokens = np.zeros((3, -(-len(positions) // 16) * 16), np.int64)
        columns = positions, np.concatenate(pages_of_tokens), positions % PAGE
        of_tokens[:, : len(positions)] = columns
        position_N, page_N, offset_N = to_device(of_tokens, device)[:, : len(positions)]
        return cls(
            table_BP=to_device(table_BP, device),
            position_N=position_N,
            page_N=page_N,
            offset_N=offset_N,
            tiles_T4=to_device(np.asarray(tiles, np.int32), device),
            kernels=kernels,
        )

    def attend(self, given: Heads, cache: Cache) -> Tensor:
        keys, values = cache
        keys[self.page_N, :, self.offset_N] = given.key.transpose(0, 1)
        values[self.page_N, :, self.offset_N] = given.value.transpose(0, 1)
        if not self.kernels:
            return prefill_reference(given, cache, step=self)
        return self._attend_stored(given.query, cache, given)

    def attend_packed(self, given: Packed, cache: Cache) -> Tensor:
        if not self.kernels:
            return self.attend(given.turned(self.position_N), cache)
        from rollick.models.paged_layer_kernels import launch_rotate

        query_NHD = launch_rotate(
            given,
            cache,
            position_N=self.position_N,
            page_N=self.page_N,
            offset_N=self.offset_N,
        )
        return self._attend_stored(query_NHD.transpose(0, 1), cache, given)

    def _attend_stored(self, query: Tensor, cache: Cache, given: Heads | Packed) -> Tensor:
        from rollick.models.paged_kernels import launch_prefill

        return launch_prefill(
            query,
            cache,
            table=self.table_BP,
            tiles=self.tiles_T4,
            scale=given.scale,
            window=given.window,
        )


def to_device(array: np.ndarray[Any, Any], device: str) -> Tensor:
    """A copy on the device that the host does not wait for.

    The host's side is page-locked memory of torch's pool, which keeps it until it was read.
    """
    tensor = torch.from_numpy(array)
    if not device.startswith("cuda"):
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def running(step: PagedStep) -> Generator[None]:
    """Layers that attend inside, in this thread, do so by `step`."""
    _here.step = step
    try:
        yield
    finally:
        _here.step = None


def attach_cache(module: nn.Module, layers: Sequence[Cache] | None) -> None:
    """Give every layer its keys and values; None takes them away.

    They are plain attributes, not buffers: they neither move with the module nor are saved.
    """
    for part in module.modules():
        index = part.__dict__.get("layer_idx")
        if isinstance(index, int):
            part.__dict__[_KEYS] = None if layers is None else layers[index][0]
            part.__dict__[_VALUES] = None if layers is None else layers[index][1]


def attend_paged(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    return torch.ops.rollick.paged_attend(
        query,
        key,
        value,
        module.paged_keys,
        module.paged_values,
        scale,
        NO_WINDOW if window is None else window,
    )


@torch.library.custom_op("rollick::paged_attend", mutates_args=())
def _paged_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Keys and values are written, which a compiler need not know: it only sees this operator
    read them, and the next one is the next layer's."""
    step: PagedStep | None = getattr(_here, "step", None)
    if step is None:
        raise ModelError(
            "a module built for generation was called without a step",
            fix="generate through an engine",
        )
    query, key, value = (
        x[0] if x.stride(-1) == 1 else x[0].contiguous() for x in (query, key, value)
    )
    attended = step.attend(Heads(query, key, value, scale, window), (keys, values))
    return attended.contiguous().unsqueeze(0)


@_paged_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    _, heads, tokens, dim = query.shape
    return query.new_empty(1, tokens, heads, dim)


def decode_reference(given: Heads, cache: Cache, *, table_RP: Tensor, length_R: Tensor) -> Tensor:
    """What the decode kernel computes, row by row in plain torch."""
    keys, values = cache
    outputs: list[Tensor] = []
    for row, length in enumerate(length_R.tolist()):
        page, offset = int(table_RP[row, (length - 1) // PAGE]), (length - 1) % PAGE
        keys[page, :, offset] = given.key[:, row]
        values[page, :, offset] = given.value[:, row]
        query = given.query[:, row : row + 1]
        outputs.append(_attend_pages(query, cache, table_RP[row], length, given=given))
    return torch.cat(outputs)


def prefill_reference(given: Heads, cache: Cache, *, step: PagedPrefill) -> Tensor:
    """What the prefill kernel computes, tile by tile in plain torch."""
    outputs: list[Tensor] = []
    for token, count, position, row in step.tiles_T4.tolist():
        query = given.query[:, token : token + count]
        table_P = step.table_BP[row]
        outputs.append(_attend_pages(query, cache, table_P, position + count, given=given))
    return torch.cat(outputs)


def _attend_pages(
    query: Tensor, cache: Cache, table_P: Tensor, length: int, *, given: Heads
) -> Tensor:
    """The last queries of a sequence of `length` tokens, [tokens, H, D]."""
    pages = table_P[: -(-length // PAGE)].long()
    key, value = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in cache)
    there = torch.arange(length, device=query.device)
    here = there[length - query.shape[1] :, None]
    seen = (there <= here) & (there > here - given.window)
    return scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=seen,
        scale=given.scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0].transpose(0, 1)
