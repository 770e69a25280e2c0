"""Counter-based random numbers: Philox4x32-10 for arrays of keys and counters.

A number depends only on (key, counter), so a sample's tokens depend neither on the rest of
the batch nor on interruptions (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""32-bit words held in 64 bits, so that a product keeps its high half."""

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLY_0 = np.uint64(0xD2511F53)
_MULTIPLY_2 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_ROUNDS = 10


def philox_4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words for each counter of four words and key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLY_0 * c0
        product_2 = _MULTIPLY_2 * c2
        c0, c1, c2, c3 = (
            (product_2 >> _SHIFT) ^ c1 ^ k0,
            product_2 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def uniforms(
    streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (stream, position)."""
    counter = positions.astype(np.uint64)
    zero = np.zeros_like(counter)
    high, low, _, _ = philox_4x32(
        (counter & _LOW, counter >> _SHIFT, zero, zero), (streams & _LOW, streams >> _SHIFT)
    )
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
