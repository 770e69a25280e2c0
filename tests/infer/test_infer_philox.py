"""Random numbers that depend only on stream and position."""

from __future__ import annotations

import numpy as np
import pytest

from rollick.infer.native.philox import philox_4x32, uniforms


def _make_words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray([value], np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_test_vectors(counter, key, expected):
    assert (
        tuple(int(word[0]) for word in philox_4x32(_make_words(*counter), _make_words(*key)))
        == expected
    )


def test_a_number_does_not_depend_on_the_others_in_the_array():
    streams = np.asarray([3, 2**63 - 1, 3], np.uint64)
    positions = np.asarray([0, 7, 1])
    batched = uniforms(streams, positions)
    separate = [uniforms(streams[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert batched.tolist() == separate
    assert len(set(separate)) == 3


def test_numbers_fill_the_unit_interval_evenly():
    numbers = uniforms(np.full(4000, 11, np.uint64), np.arange(4000))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 27.9  # chi-square, 9 degrees, p = 0.001
