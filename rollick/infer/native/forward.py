"""The model's forwards, with the cache: prefill whole sequences, decode one token for every row.

Two ways behind one protocol. BatchedForward is fast. TiledForward feeds the model nothing but
tiles of one constant height and lets every token attend alone, so that a token's bits follow
from its sequence and the weights, whether it was prefilled or decoded, and beside whom.

Dims: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rollick.infer.native.cache import SlotCache
from rollick.infer.native.packed import PackedHead, can_pack, pack_linears
from rollick.infer.native.plain import plain_decoder
from rollick.models.cached_attention import AttentionStep, DecodeStep, PrefillStep, RowStep, Span
from rollick.models.deterministic import ROWS, tile_linears
from rollick.models.head import exact_logits, head_logits, is_plain_float32, output_head

Ids = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens whose keys and values are to be computed into a row of the cache, which already holds
    the `start` tokens before them."""

    row: int
    token_ids: Ids
    start: int = 0

    @property
    def positions(self) -> Ids:
        return np.arange(self.start, self.start + len(self.token_ids))


class Forward(Protocol):
    """Runs the model. The cache must have room for what is asked."""

    def prefill(self, prefixes: Sequence[Prefix]) -> None: ...

    def decode(self, token_R: Ids, position_R: Ids) -> Tensor:
        """Logits [R, V] after feeding one token to each of the rows 0..R-1."""
        ...

    def exact(self, token_R: Ids) -> Floats | None:
        """The logit of one token a row after the last `decode`, in float64; None where the logits
        that `decode` gave count as they are."""
        ...

    def invalidate(self) -> None:
        """The weights changed, or memory is to be freed: what was derived from them is dropped."""
        ...


class BatchedForward:
    """All tokens of a step in one forward."""

    def __init__(self, module: nn.Module, cache: SlotCache, *, device: str) -> None:
        self._module = module
        self._cache = cache
        self._device = device
        self._packed = pack_linears(module) if can_pack(module) else None
        self._plain = None if self._packed is None else plain_decoder(module)
        self._head = PackedHead()
        self._last_RD: Tensor | None = None

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        ordered = sorted(prefixes, key=lambda prefix: (prefix.start > 0, len(prefix.token_ids)))
        spans = [Span(p.row, p.start, len(p.token_ids)) for p in ordered]
        step = PrefillStep(self._cache, spans)
        token_ids = np.concatenate([prefix.token_ids for prefix in ordered])
        positions = np.concatenate([prefix.positions for prefix in ordered])
        self._hidden(token_ids[None], positions[None], step)

    def decode(self, token_R: Ids, position_R: Ids) -> Tensor:
        step = DecodeStep(self._cache, positions=position_R.tolist(), device=self._device)
        hidden_R1D = self._hidden(token_R[:, None], position_R[:, None], step)
        head = output_head(self._module)
        self._last_RD = hidden_R1D[:, 0]
        if self._packed is None:
            return head_logits(self._last_RD, *head)
        return self._head.logits(self._last_RD, *head)

    def exact(self, token_R: Ids) -> Floats | None:
        hidden_RD = self._last_RD
        if hidden_RD is None or not is_plain_float32(hidden_RD):
            return None
        weight_VD, bias_V = output_head(self._module)
        token_R1 = torch.from_numpy(token_R.astype(np.int64))[:, None]
        with torch.no_grad():
            return exact_logits(hidden_RD, weight_VD, token_R1, bias_V)[:, 0].numpy()

    def _hidden(self, token_ids: Ids, positions: Ids, step: AttentionStep) -> Tensor:
        if self._plain is None:
            return _hidden(self._module, self._device, token_ids, positions, step=step)
        ids, places = (torch.from_numpy(array.astype(np.int64)) for array in (token_ids, positions))
        return self._plain.hidden(ids, places, step)

    def invalidate(self) -> None:
        self._last_RD = None
        self._head.drop()
        if self._packed is not None:
            self._packed.drop()


class TiledForward:
    """ROWS tokens at a time, filled up with padding: every kernel always sees the same shape."""

    def __init__(self, module: nn.Module, cache: SlotCache, *, device: str) -> None:
        tile_linears(module)
        self._module = module
        self._cache = cache
        self._device = device

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        row_N = np.concatenate([np.full(len(p.token_ids), p.row) for p in prefixes])
        position_N = np.concatenate([p.positions for p in prefixes])
        token_N = np.concatenate([p.token_ids for p in prefixes])
        self._tiles(token_N, position_N, row_N)

    def decode(self, token_R: Ids, position_R: Ids) -> Tensor:
        hidden_RD = torch.cat(self._tiles(token_R, position_R, np.arange(len(token_R))))
        return head_logits(hidden_RD, *output_head(self._module), tiled=True)[: len(token_R)]

    def exact(self, token_R: Ids) -> None:
        """What is drawn with has the learner's bits."""

    def invalidate(self) -> None:
        """Nothing is derived from the weights."""

    def _tiles(self, token_N: Ids, position_N: Ids, row_N: Ids) -> list[Tensor]:
        """Hidden states of ROWS tokens at a time, the filler of the last tile included."""
        hidden: list[Tensor] = []
        for start in range(0, len(token_N), ROWS):
            here = slice(start, start + ROWS)
            step = RowStep(
                self._cache, rows=row_N[here].tolist(), positions=position_N[here].tolist()
            )
            tile = _tile(token_N[here]), _tile(position_N[here])
            hidden.append(_hidden(self._module, self._device, *tile, step=step)[0])
        return hidden


def _tile(values: Ids) -> Ids:
    return np.pad(values, (0, ROWS - len(values)))[None]


def _hidden(
    module: nn.Module, device: str, token_ids: Ids, positions: Ids, *, step: AttentionStep
) -> Tensor:
    """The last hidden state of every token; fills the cache on the way."""
    decoder: Any = module.base_model
    return decoder(
        input_ids=torch.from_numpy(token_ids.astype(np.int64)).to(device),
        position_ids=torch.from_numpy(positions.astype(np.int64)).to(device),
        use_cache=False,
        step=step,
    ).last_hidden_state
