"""The plan of a transfer from the ranks of a sharded learner: every part is sent once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.errors import WeightError
from rollick.trainer.strategy import Region
from rollick.weights.manifest import TensorLayout, plan_layout
from rollick.weights.shards import choose_pieces, plan_buckets


def make_layout(*shapes: tuple[int, ...]) -> tuple[TensorLayout, ...]:
    tensors = [(f"t{n}", torch.empty(shape, device="meta")) for n, shape in enumerate(shapes)]
    return plan_layout(tensors)[0]


def split_rows(layout: tuple[TensorLayout, ...], ranks: int) -> list[dict[str, Region]]:
    """The regions of ranks that divide the first dimension of each tensor; some may be empty."""
    regions: list[dict[str, Region]] = []
    for rank in range(ranks):
        named: dict[str, Region] = {}
        for tensor in layout:
            rows, *rest = tensor.shape
            size = -(-rows // ranks)
            start = min(rank * size, rows)
            shape = (min(size, rows - start), *rest)
            named[tensor.name] = Region((start, *(0 for _ in rest)), shape)
        regions.append(named)
    return regions


def test_each_rank_sends_its_part_and_an_empty_part_is_not_sent():
    layout = make_layout((5, 2), (1, 4))
    pieces = choose_pieces(layout, split_rows(layout, 2))
    assert [(piece.rank, piece.tensor, piece.region) for piece in pieces] == [
        (0, 0, Region((0, 0), (3, 2))),
        (0, 1, Region((0, 0), (1, 4))),
        (1, 0, Region((3, 0), (2, 2))),
    ]


def test_ranks_with_the_same_part_take_turns():
    layout = make_layout((2,), (2,), (2,))
    full = {tensor.name: Region((0,), (2,)) for tensor in layout}
    pieces = choose_pieces(layout, [full, full])
    assert [(piece.rank, piece.tensor) for piece in pieces] == [(0, 0), (0, 2), (1, 1)]


def test_a_part_that_no_rank_has_is_an_error():
    layout = make_layout((4, 2))
    with pytest.raises(WeightError, match="have 4 of the 8 elements of t0"):
        choose_pieces(layout, split_rows(layout, 2)[:1])


def test_buckets_hold_whole_tensors_and_a_large_one_is_alone():
    layout = make_layout((4,), (4,), (100,), (4,))  # 16, 16, 400 and 16 bytes
    buckets = plan_buckets(layout, choose_pieces(layout, split_rows(layout, 2)), bucket_bytes=40)
    assert [[tensor.name for tensor in bucket.tensors] for bucket in buckets] == [
        ["t0", "t1"],
        ["t2"],
        ["t3"],
    ]
    assert [bucket.size for bucket in buckets] == [32, 400, 16]
    assert [bucket.bytes_of(1) for bucket in buckets] == [16, 200, 8]


@settings(derandomize=True, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=6),
    ranks=st.integers(1, 5),
    bucket_bytes=st.integers(1, 200),
)
def test_buckets_have_every_byte_once(
    shapes: list[tuple[int, int]], ranks: int, bucket_bytes: int
) -> None:
    layout = make_layout(*shapes)
    pieces = choose_pieces(layout, split_rows(layout, ranks))
    buckets = plan_buckets(layout, pieces, bucket_bytes=bucket_bytes)
    assert [tensor for bucket in buckets for tensor in bucket.tensors] == list(layout)
    sent = [piece for bucket in buckets for own in bucket.pieces.values() for piece in own]
    assert sorted(sent) == list(pieces)
    for bucket in buckets:
        assert bucket.size == sum(tensor.size for tensor in bucket.tensors)
        assert bucket.size <= bucket_bytes or len(bucket.tensors) == 1
