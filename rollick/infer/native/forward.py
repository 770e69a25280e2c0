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
from rollick.models.cached_attention import AttentionStep, DecodeStep, PrefillStep, RowStep
from rollick.models.deterministic import ROWS, tile_linears
from rollick.models.head import head_logits, output_head

Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens whose keys and values are to be computed into a row of the cache, from the start."""

    row: int
    token_ids: Ids


class Forward(Protocol):
    """Runs the model. The cache must have room for what is asked."""

    def prefill(self, prefixes: Sequence[Prefix]) -> None: ...

    def decode(self, token_R: Ids, position_R: Ids) -> Tensor:
        """Logits [R, V] after feeding one token to each of the rows 0..R-1."""
        ...


class BatchedForward:
    """All tokens of a step in one forward."""

    def __init__(self, module: nn.Module, cache: SlotCache, *, device: str) -> None:
        self._module = module
        self._cache = cache
        self._device = device

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        ordered = sorted(prefixes, key=lambda prefix: len(prefix.token_ids))
        lengths = [len(prefix.token_ids) for prefix in ordered]
        step = PrefillStep(self._cache, rows=[p.row for p in ordered], lengths=lengths)
        token_ids = np.concatenate([prefix.token_ids for prefix in ordered])
        positions = np.concatenate([np.arange(length) for length in lengths])
        _hidden(self._module, self._device, token_ids[None], positions[None], step=step)

    def decode(self, token_R: Ids, position_R: Ids) -> Tensor:
        step = DecodeStep(self._cache, positions=position_R.tolist(), device=self._device)
        hidden_R1D = _hidden(
            self._module, self._device, token_R[:, None], position_R[:, None], step=step
        )
        return head_logits(hidden_R1D[:, 0], *output_head(self._module))


class TiledForward:
    """ROWS tokens at a time, filled up with padding: every kernel always sees the same shape."""

    def __init__(self, module: nn.Module, cache: SlotCache, *, device: str) -> None:
        tile_linears(module)
        self._module = module
        self._cache = cache
        self._device = device

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        row_N = np.concatenate([np.full(len(p.token_ids), p.row) for p in prefixes])
        position_N = np.concatenate([np.arange(len(p.token_ids)) for p in prefixes])
        token_N = np.concatenate([p.token_ids for p in prefixes])
        self._tiles(token_N, position_N, row_N)

    def decode(self, token_R: Ids, position_R: Ids) -> Tensor:
        hidden_RD = torch.cat(self._tiles(token_R, position_R, np.arange(len(token_R))))
        return head_logits(hidden_RD, *output_head(self._module), tiled=True)[: len(token_R)]

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
