"""Fixes rotary embeddings whose frequencies depend on the longest sequence of a forward.

`dynamic` and `longrope` choose their frequencies by the longest sequence in a batch, so the
log-probs of a sample depend on its neighbours, and cached keys of one sequence are rotated by
different frequencies. Engine and learner instead use those of the run's longest sequence for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rollick.errors import ModelError

_BY_LENGTH = ("dynamic", "longrope")
_FIXED = "default"
"""The type of a rotary embedding that transformers never changes."""


def fix_rope(module: nn.Module, max_length: int) -> None:
    """Set the frequencies for sequences of `max_length` tokens, in place."""
    for part in module.modules():
        rope_type: Any = getattr(part, "rope_type", None)
        if isinstance(rope_type, str) and rope_type in _BY_LENGTH:
            _set_frequencies(part, max_length, layer_type=None)
            part.__dict__["rope_type"] = _FIXED
        elif isinstance(rope_type, dict):
            rope_types: dict[str, str] = rope_type
            for layer_type, name in list(rope_types.items()):
                if name in _BY_LENGTH:
                    _set_frequencies(part, max_length, layer_type=layer_type)
                    rope_types[layer_type] = _FIXED


def check_lengths(module: nn.Module, lengths: Sequence[int]) -> None:
    """Raises if a sequence is longer than those that `fix_rope` has set frequencies for."""
    limits: list[Any] = [vars(part).get("fixed_length") for part in module.modules()]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is not None and max(lengths, default=0) > limit:
        raise ModelError(
            f"a sample has {max(lengths)} tokens, and the model's rotary embedding was set for "
            f"sequences of at most {limit}",
            fix=f"set infer.max_length={max(lengths)} or more, or leave out longer samples",
        )


def _set_frequencies(part: Any, max_length: int, *, layer_type: str | None) -> None:
    """Call the embedding with the last position, so that its own code computes the frequencies:
    families compute the same type differently."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    try:
        device = next(part.buffers()).device
        last = torch.tensor([[max_length - 1]], device=device)
        with torch.no_grad():
            part(torch.zeros(1, device=device), last, **options)
    except Exception as error:  # code of a model may raise anything
        raise ModelError(
            f"the rotary embedding {type(part).__name__} depends on the length and cannot be set "
            f"for sequences of {max_length} tokens ({type(error).__name__}: {error})",
            fix="choose a model of a family that docs/models.md lists as exact",
        ) from error
    part.fixed_length = max_length
