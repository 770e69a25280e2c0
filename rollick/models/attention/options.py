"""How a layer attends: what transformers passes to an attention function beside the projections.

Both attention functions (varlen.py, slot_cache.py) read their options here, and refuse what neither
computes. `record_layers` shows which layers attended, and with which shapes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from rollick.errors import ModelError

_UNSUPPORTED = ("position_bias", "head_mask", "score_mod", "block_mask")
"""Options that change scores in a way that no kernel here computes."""


class AttentionOptions(NamedTuple):
    scale: float | None = None
    """Factor of the scores; None: one over the square root of the head dim."""
    window: int | None = None
    """Tokens that a query attends to, itself included; None: all before it."""
    softcap: float | None = None
    """A score s becomes softcap * tanh(s / softcap)."""
    sinks_H: Tensor | None = None
    """One score of each query head that takes part in the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention kernels compute it."""
        return self.softcap is None and self.sinks_H is None


PLAIN = AttentionOptions()


class AttendedLayer(NamedTuple):
    """One call of an attention function."""

    layer: int
    kv_heads: int
    group: int
    """Query heads of each key/value head."""
    key_dim: int
    value_dim: int


_recorded: list[AttendedLayer] | None = None


@contextmanager
def record_layers() -> Generator[list[AttendedLayer]]:
    """Every call of our attention functions inside the context, in order. Not for several threads
    at once."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def missing_argument(module: nn.Module) -> ModelError:
    return ModelError(
        f"{type(module).__name__} does not get the arguments that the model is called with",
        fix="choose a model of a family that docs/models.md lists as exact",
    )


def read_options(
    module: nn.Module,
    projections: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kwargs: Mapping[str, Any],
) -> AttentionOptions:
    """The options with which transformers calls an attention function. Raises if the call has
    others, which no kernel here computes."""
    if _recorded is not None:
        query, key, value = projections
        layer: Any = getattr(module, "layer_idx", None)
        index, group = layer if isinstance(layer, int) else -1, query.shape[1] // key.shape[1]
        shape = AttendedLayer(index, key.shape[1], group, key.shape[-1], value.shape[-1])
        _recorded.append(shape)
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if mask is not None or unsupported:
        what = "a mask of its own" if mask is not None else " and ".join(unsupported)
        raise ModelError(
            f"{type(module).__name__} attends with {what}, which the native engine and the "
            "learner do not compute",
            fix="choose a model of a family that docs/models.md lists as exact",
        )
    return AttentionOptions(
        kwargs.get("scaling"),
        kwargs.get("sliding_window"),
        kwargs.get("softcap") or None,
        kwargs.get("s_aux"),
    )
