"""The fingerprint: equal if and only if names, dtypes, shapes and bytes are equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rollick.models.loading import fingerprint as module
from rollick.models.loading.fingerprint import (
    COLUMNS,
    PIECE_BYTES,
    ROW_BYTES,
    SMALL_BYTES,
    copy_and_fingerprint,
    fingerprint,
)

SIZES = [
    0,
    1,
    7,
    SMALL_BYTES,
    SMALL_BYTES + 1,
    ROW_BYTES + 3,
    PIECE_BYTES,
    PIECE_BYTES + ROW_BYTES + 5,
]
LARGE = 2 * PIECE_BYTES + 12_345


def random_bytes(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def fingerprint_tensor(tensor: Tensor) -> str:
    return fingerprint([("a", tensor)])


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_has_the_same_fingerprint_and_every_flipped_bit_changes_it(size: int) -> None:
    data = random_bytes(size)
    first = fingerprint_tensor(data)
    assert fingerprint_tensor(data.clone()) == first
    for index in sorted({0, size // 2, size - 1} - {-1}):
        if size == 0:
            continue
        changed = data.clone()
        changed[index] ^= 1 << index % 8
        assert fingerprint_tensor(changed) != first


@pytest.mark.parametrize("longer", [1, 8, ROW_BYTES])
def test_zeros_at_the_end_count(longer: int) -> None:
    data = random_bytes(PIECE_BYTES + 100)
    assert fingerprint_tensor(
        torch.cat([data, torch.zeros(longer, dtype=torch.uint8)])
    ) != fingerprint_tensor(data)


def flip_signs_in_a_column(words: Tensor) -> None:
    words[3] ^= -(2**63)
    words[3 + COLUMNS] ^= -(2**63)


def swap_words_of_a_row(words: Tensor) -> None:
    words[[10, 500]] = words[[500, 10]]


def swap_rows(words: Tensor) -> None:
    rows = words[: 2 * COLUMNS].view(2, COLUMNS)
    rows[:] = rows.flip(0).clone()


def swap_pieces(words: Tensor) -> None:
    size = PIECE_BYTES // 8
    words[: 2 * size] = words[: 2 * size].view(2, size).flip(0).reshape(-1).clone()


def move_by_a_word(words: Tensor) -> None:
    words[:] = words.roll(1).clone()


def cancel_in_a_row(words: Tensor) -> None:
    words[5] += 1
    words[6] += 1
    words[7] -= 2


def blank_a_part(words: Tensor) -> None:
    words[1000:2000] = 0


@pytest.mark.parametrize(
    "damage",
    [
        flip_signs_in_a_column,
        swap_words_of_a_row,
        swap_rows,
        swap_pieces,
        move_by_a_word,
        cancel_in_a_row,
        blank_a_part,
    ],
)
def test_damage_that_simple_sums_would_miss_is_found(damage: Callable[[Tensor], None]) -> None:
    data = random_bytes(LARGE // 8 * 8)
    first = fingerprint_tensor(data)
    damage(data.view(torch.int64))
    assert fingerprint_tensor(data) != first


def test_a_stream_gives_the_same_as_a_list_and_threads_change_nothing() -> None:
    pairs = [(str(size), random_bytes(size)) for size in SIZES]
    actual = set[str]()
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            actual |= {fingerprint(pairs), fingerprint(iter(pairs)), fingerprint(pairs[::-1])}
    finally:
        torch.set_num_threads(threads)
    assert len(actual) == 1


@pytest.mark.parametrize("size", [5, SMALL_BYTES + 8, LARGE])
def test_every_byte_is_copied_in_transit(size: int) -> None:
    data = random_bytes(size)
    target = torch.zeros_like(data)
    assert copy_and_fingerprint([("a", data)], [target]) == fingerprint_tensor(data)
    assert torch.equal(target, data)


def test_a_view_at_an_odd_address_has_the_fingerprint_of_its_values() -> None:
    data = random_bytes(ROW_BYTES + 3)
    assert fingerprint_tensor(data[3:]) == fingerprint_tensor(data[3:].clone())
    halves = torch.arange(30_001, dtype=torch.float32).bfloat16()
    assert fingerprint_tensor(halves[1:]) == fingerprint_tensor(halves[1:].clone())


def is_equal_on_cpu_and_gpu(tensors: list[Tensor]) -> bool:
    on_cpu = [module._Source(b"", tensor.cpu(), None) for tensor in tensors]  # pyright: ignore
    on_gpu = [module._Source(b"", tensor, None) for tensor in tensors]  # pyright: ignore
    return list(module._sum_on_gpu(on_gpu)) == list(module._sum_on_cpu(on_cpu))  # pyright: ignore


@pytest.mark.parametrize("size", [*SIZES[3:], LARGE])
def test_the_gpu_path_gives_the_same_fingerprint(size: int) -> None:
    assert is_equal_on_cpu_and_gpu([random_bytes(size)])


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_the_kernel_sums_all_tensors_at_once_wherever_they_begin_and_end(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KERNEL_BYTES", 1)
    sizes = [*SIZES, LARGE, 3 * ROW_BYTES - 8, 17 * ROW_BYTES + 16]
    full = [random_bytes(size).to(kernel_device) for size in sizes]
    offset_views = [random_bytes(LARGE).to(kernel_device)[start:] for start in (1, 8, 16)]
    assert is_equal_on_cpu_and_gpu([*full, *offset_views])
    assert is_equal_on_cpu_and_gpu(full[-1:])
