"""How much data a call to a worker carries."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rollick.data.batch import Batch, BatchShare


class Payload(NamedTuple):
    """The batches among a call's arguments."""

    tokens: int
    bytes: int

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> Payload:
        batches = [arg for arg in args if isinstance(arg, (Batch, BatchShare))]
        return cls(sum(b.tokens for b in batches), sum(b.nbytes for b in batches))


def array_bytes(result: Any) -> int:
    """Of the arrays that a call returned."""
    if isinstance(result, np.ndarray):
        return result.nbytes
    return sum(map(array_bytes, result)) if isinstance(result, tuple) else 0
