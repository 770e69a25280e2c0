"""Deltas: lossless, small if little changed, and never larger than the full weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.errors import WeightError
from rollick.weights.delta import apply_changes, decode_gaps, encode_changes, encode_gaps


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 3000), max_size=60))
def test_places_survive_their_encoding(indices: set[int]) -> None:
    ascending = np.array(sorted(indices), np.int64)
    assert decode_gaps(encode_gaps(ascending)).tolist() == ascending.tolist()


def test_gaps_are_bytes_with_an_escape() -> None:
    assert encode_gaps(np.array([0, 1, 4])).tolist() == [0, 0, 2]
    assert encode_gaps(np.array([254])).tolist() == [254]
    assert encode_gaps(np.array([255])).tolist() == [255, 0]
    assert encode_gaps(np.array([256, 767])).tolist() == [255, 1, 255, 255, 0]


def copy_with_changes(tensor: torch.Tensor, share: float) -> torch.Tensor:
    new = tensor.clone()
    generator = torch.Generator().manual_seed(1)
    indices = torch.rand(tensor.numel(), generator=generator) < share
    new.view(-1)[indices] += 1
    return new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.02, 0.9])
def test_the_extracted_answer_is_the_intended_one(dtype: torch.dtype, share: float) -> None:
    old = torch.randn(300, 101, generator=torch.Generator().manual_seed(0)).to(dtype)
    new = copy_with_changes(old, share)
    received = {"a": old.clone()}
    apply_changes(encode_changes([("a", new)], {"a": old}), received)
    assert torch.equal(received["a"], new)


def test_two_percent_of_bfloat16_take_about_three_percent_of_the_bytes() -> None:
    old = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    sent = encode_changes([("a", copy_with_changes(old, 0.02))], {"a": old})
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in sent)
    assert 0.029 < size / (2 * old.numel()) < 0.032


def test_an_unchanged_tensor_is_not_sent_and_one_with_many_changes_is_sent_in_full() -> None:
    still, moved = torch.ones(100), torch.ones(100)
    sent = encode_changes(
        [("still", still), ("moved", moved + 1)], {"still": still, "moved": moved}
    )
    assert [name for name, _ in sent] == ["moved"]


def test_zeros_of_another_sign_are_changes_and_equal_nans_are_none() -> None:
    old = torch.tensor([0.0, float("nan")] + [1.0] * 8)
    new = old.clone()
    new[0] = -0.0
    sent = dict(encode_changes([("a", new)], {"a": old}))
    assert sent["a:gaps"].tolist() == [0]
    assert torch.signbit(sent["a:values"]).tolist() == [True]


def test_places_beyond_the_tensor_are_refused() -> None:
    sent = [("a:gaps", torch.tensor([9], dtype=torch.uint8)), ("a:values", torch.ones(1))]
    with pytest.raises(WeightError, match="does not fit"):
        apply_changes(sent, {"a": torch.zeros(4)})
