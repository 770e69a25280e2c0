"""Fixes rotary embeddings whose frequencies depend on the longest sequence of a forward.

`dynamic` and `longrope` choose their frequencies by the longest sequence in a batch, so the
log-probs of a sample depend on its neighbours, and cached keys of one sequence are rotated by
different frequencies. Engine and learner instead use those of the run's longest sequence for all,
as vLLM does for its `max_model_len`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollick.errors import ModelError

_BY_LENGTH = ("dynamic", "longrope")
_FIXED = "default"
"""The type of an embedding that transformers never changes."""


def fix_rope(module: nn.Module, max_length: int) -> None:
    """Set the frequencies for sequences of `max_length` tokens, in place."""
    for part in module.modules():
        kinds: Any = getattr(part, "rope_type", None)
        if isinstance(kinds, str) and kinds in _BY_LENGTH:
            _fix(part, kinds, max_length, layer_type=None)
            part.__dict__["rope_type"] = _FIXED
        elif isinstance(kinds, dict):
            by_length: dict[str, str] = {
                layer_type: kind
                for layer_type, kind in kinds.items()  # pyright: ignore[reportUnknownVariableType]
                if kind in _BY_LENGTH
            }
            for layer_type, kind in by_length.items():
                _fix(part, kind, max_length, layer_type=layer_type)
                kinds[layer_type] = _FIXED


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


def _fix(part: Any, kind: str, max_length: int, *, layer_type: str | None) -> None:
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    scaling = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
    device = getattr(part, name).device
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
        part.config, device, seq_len=max_length, **options
    )
    part.register_buffer(name, frequencies, persistent=False)
    setattr(part, scaling, factor)
    part.fixed_length = max_length
