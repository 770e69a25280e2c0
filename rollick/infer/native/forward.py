"""The model's forwards over the slot cache: prefill sequences, decode one token per row.

BatchedForward is fast. TiledForward is deterministic: it feeds the model tiles of one constant
height, and each token attends separately, so that its result depends, bit for bit, only on its
sequence and the weights, not on the batch or on whether it was prefilled or decoded. Callers
reserve the cache.

Dims: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rollick.infer.native.cpu_decoder import cpu_decoder
from rollick.infer.native.packed_linear import (
    PackedHead,
    can_pack,
    check_copies,
    drop_packed,
    pack_linears,
)
from rollick.infer.native.slot_cache import SlotCache
from rollick.models.attention.slot_cache import (
    AttentionStep,
    DecodeStep,
    PrefillSpan,
    PrefillStep,
    TiledStep,
)
from rollick.models.decoder.batch_invariant import TILE_ROWS, tile_linears
from rollick.models.head.logprobs import exact_logits, head_logits, needs_exact_logits, output_head

Ids = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """Tokens to prefill in a row whose cache already holds the first `start` tokens."""

    row: int
    token_ids: Ids
    start: int = 0

    @property
    def positions(self) -> Ids:
        return np.arange(self.start, self.start + len(self.token_ids))


class BatchedForward:
    def __init__(self, module: nn.Module, cache: SlotCache, *, device: str) -> None:
        self._module = module
        self._cache = cache
        self._device = device
        self._packed = pack_linears(module) if can_pack(module) else None
        self._decoder = None if self._packed is None else cpu_decoder(module)
        self._head = PackedHead()
        self._last_RD: Tensor | None = None

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        ordered = sorted(chunks, key=lambda chunk: (chunk.start > 0, len(chunk.token_ids)))
        spans = [PrefillSpan(c.row, c.start, len(c.token_ids)) for c in ordered]
        step = PrefillStep(self._cache, spans)
        token_ids = np.concatenate([chunk.token_ids for chunk in ordered])
        positions = np.concatenate([chunk.positions for chunk in ordered])
        self._hidden(token_ids[None], positions[None], step)

    def decode(self, token_R: Ids, position_R: Ids) -> Tensor:
        """Feed one token to each of the rows 0..R-1; returns logits [R, V]."""
        step = DecodeStep(self._cache, positions=position_R.tolist(), device=self._device)
        hidden_R1D = self._hidden(token_R[:, None], position_R[:, None], step)
        head = output_head(self._module)
        self._last_RD = hidden_R1D[:, 0]
        if self._packed is None:
            return head_logits(self._last_RD, head)
        return self._head.logits(self._last_RD, head)

    def exact_logits(self, token_R: Ids) -> Floats | None:
        """The float64 logit of one token per row after the last `decode`; None if those that
        `decode` returned are exact enough."""
        hidden_RD = self._last_RD
        if hidden_RD is None or not needs_exact_logits(hidden_RD):
            return None
        head = output_head(self._module)
        with torch.no_grad():
            logits_R1 = exact_logits(hidden_RD, head, _int64(token_R)[:, None])
        return logits_R1[:, 0].numpy()

    def _hidden(self, token_ids: Ids, positions: Ids, step: AttentionStep) -> Tensor:
        if self._decoder is None:
            return _hidden(self._module, self._device, token_ids, positions, step=step)
        return self._decoder.hidden(_int64(token_ids), _int64(positions), step)

    def invalidate(self) -> None:
        """Drop what is derived from the weights: they changed, or memory is freed."""
        self._last_RD = None
        self._head.drop()
        drop_packed(self._packed or ())

    def check_copies(self) -> None:
        """Raises EngineCorrupt if a copy of weights that decoding reads has changed."""
        check_copies([self._head, *(weights for _, weights in self._packed or ())])


class TiledForward:
    """TILE_ROWS tokens at a time, padded: every kernel always sees the same shape."""

    def __init__(self, module: nn.Module, cache: SlotCache, *, device: str) -> None:
        tile_linears(module)
        self._module = module
        self._cache = cache
        self._device = device

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        row_N = np.concatenate([np.full(len(chunk.token_ids), chunk.row) for chunk in chunks])
        position_N = np.concatenate([chunk.positions for chunk in chunks])
        token_N = np.concatenate([chunk.token_ids for chunk in chunks])
        self._forward_tiles(token_N, position_N, row_N)

    def decode(self, token_R: Ids, position_R: Ids) -> Tensor:
        hidden_RD = torch.cat(self._forward_tiles(token_R, position_R, np.arange(len(token_R))))
        logits_RV = head_logits(hidden_RD, output_head(self._module), batch_invariant=True)
        return logits_RV[: len(token_R)]

    def exact_logits(self, token_R: Ids) -> None:
        """The logits of `decode` have the learner's bits."""

    def invalidate(self) -> None:
        """No-op: nothing is derived from the weights."""

    def check_copies(self) -> None:
        """No-op: there are no copies."""

    def _forward_tiles(self, token_N: Ids, position_N: Ids, row_N: Ids) -> list[Tensor]:
        """Hidden states of tiles of TILE_ROWS tokens; the last tile includes its padding."""
        hidden: list[Tensor] = []
        for start in range(0, len(token_N), TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            rows, positions = row_N[tile].tolist(), position_N[tile].tolist()
            step = TiledStep(self._cache, rows=rows, positions=positions)
            ids_1T, positions_1T = _pad_tile(token_N[tile]), _pad_tile(position_N[tile])
            hidden.append(_hidden(self._module, self._device, ids_1T, positions_1T, step=step)[0])
        return hidden


Forward = BatchedForward | TiledForward


def _int64(values: Ids) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _pad_tile(values: Ids) -> Ids:
    return np.pad(values, (0, TILE_ROWS - len(values)))[None]


def _hidden(
    module: nn.Module, device: str, token_ids: Ids, positions: Ids, *, step: AttentionStep
) -> Tensor:
    """The last hidden state of every token; writes keys and values to the cache."""
    decoder: Any = module.base_model
    return decoder(
        input_ids=_int64(token_ids).to(device),
        position_ids=_int64(positions).to(device),
        use_cache=False,
        step=step,
    ).last_hidden_state
