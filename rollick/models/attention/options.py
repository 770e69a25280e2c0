"""The options that transformers passes to an attention function besides the projections.

Both attention functions (varlen.py, slot_cache.py) read them here; unsupported ones raise.
`record_layers` records which layers attended, and with which shapes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from rollick.errors import ModelError

_UNSUPPORTED = ("position_bias", "head_mask", "score_mod", "block_mask")
"""Options that change the scores and that no kernel here supports."""


class AttentionOptions(NamedTuple):
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head dim)."""
    window: int | None = None
    """Tokens that a query attends to, itself included; None: all before it."""
    softcap: float | None = None
    """A score s becomes softcap * tanh(s / softcap)."""
    sinks_H: Tensor | None = None
    """A score for each query head that is in the sum of the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention kernels support the options."""
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
    """Record every call of our attention functions inside the context, in order. Not
    thread-safe."""
    global _recorded
    previous, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = previous


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
    """The options of a call of an attention function by transformers. Raises for options that no
    kernel here supports."""
    if _recorded is not None:
        query, key, value = projections
        layer: Any = getattr(module, "layer_idx", None)
        index, group = layer if isinstance(layer, int) else -1, query.shape[1] // key.shape[1]
        shape = AttendedLayer(index, key.shape[1], group, key.shape[-1], value.shape[-1])
        _recorded.append(shape)
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if mask is not None or unsupported:
        reason = "a mask of its own" if mask is not None else " and ".join(unsupported)
        raise ModelError(
            f"{type(module).__name__} attends with {reason}, which the native engine and the "
            "learner do not compute",
            fix="choose a model of a family that docs/models.md lists as exact",
        )
    return AttentionOptions(
        kwargs.get("scaling"),
        kwargs.get("sliding_window"),
        kwargs.get("softcap") or None,
        kwargs.get("s_aux"),
    )
