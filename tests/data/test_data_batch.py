"""Batch: selected samples keep their tokens and their weights of the full batch."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.data.batch import Batch
from rollick.types import SampleId


def make_batch(lengths: list[int]) -> Batch:
    """Token number n of the batch is n in every stream; sample b has temperature b."""
    total = sum(lengths)
    numbers = np.arange(total)
    return Batch(
        token_ids_N=numbers.astype(np.int32),
        lengths_B=np.array(lengths, np.int32),
        uids=tuple(SampleId(b // 2, b % 2) for b in range(len(lengths))),
        group_B=np.arange(len(lengths), dtype=np.int32) // 2,
        temperature_B=np.arange(len(lengths), dtype=np.float64),
        loss_mask_N=numbers % 2 == 0,
        logprobs_N=-numbers.astype(np.float32),
        versions_N=numbers.astype(np.int32),
        advantages_N=numbers.astype(np.float64),
        weights_N=np.full(total, 1.0 / max(total, 1)),
    )


def test_offsets_are_the_start_of_each_sample_and_the_end_of_the_last():
    batch = make_batch([2, 3, 1])
    assert (batch.rows, batch.tokens) == (3, 6)
    assert batch.offsets_B1.tolist() == [0, 2, 5, 6]


def test_selected_samples_have_the_requested_order_and_all_their_streams():
    taken = make_batch([2, 3, 1]).take([2, 0])
    assert taken.token_ids_N.tolist() == [5, 0, 1]
    assert taken.versions_N.tolist() == [5, 0, 1]
    assert taken.loss_mask_N.tolist() == [False, True, False]
    assert taken.lengths_B.tolist() == [1, 2]
    assert taken.temperature_B.tolist() == [2.0, 0.0]
    assert taken.uids == (SampleId(1, 0), SampleId(0, 0))
    assert taken.old_logprobs_N is None
    assert taken.logprobs_N.dtype == np.float32


def test_selected_samples_keep_their_weights_of_the_full_batch():
    assert make_batch([2, 3, 1]).take([1]).weights_N.tolist() == [1 / 6] * 3


def fill_annotations(batch: Batch) -> Batch:
    """Fill optional streams: n for token n, b for sample b, (n, n + 0.5) in an [N, K] stream."""
    tokens_N, samples_B = np.arange(batch.tokens), np.arange(batch.rows)
    given: dict[str, Any] = {}
    for spec in fields(Batch):
        if getattr(batch, spec.name) is None:
            numbers = samples_B if spec.name.endswith("_B") else tokens_N
            given[spec.name] = (
                np.stack([numbers, numbers + 0.5], 1) if spec.name.endswith("_NK") else numbers
            )
    return replace(batch, **given)


def test_annotations_are_kept():
    batch = make_batch([2, 1])
    taken = fill_annotations(batch).take([1])
    expected = {"_B": [1], "_N": [2], "_NK": [[2.0, 2.5]]}
    for spec in fields(Batch):
        if getattr(batch, spec.name) is None:
            suffix = "_" + spec.name.rsplit("_", 1)[1]
            assert getattr(taken, spec.name).tolist() == expected[suffix], spec.name
    assert batch.take([1]).old_logprobs_N is None


def test_a_part_of_a_batch_knows_the_version_that_ages_are_counted_from():
    assert replace(make_batch([2, 1]), version=7).take([1]).version == 7


def test_trained_tokens_are_counted_by_sample():
    batch = replace(make_batch([3, 0, 2]), loss_mask_N=np.array([True, False, True, False, True]))
    assert batch.trained_B.tolist() == [2, 0, 1]


def test_scaling_changes_every_weight_and_nothing_else():
    batch = fill_annotations(make_batch([2, 1]))
    scaled = batch.scale_weights(2.0)
    weights = {"weights_N", "kl_weights_N", "entropy_weights_N"}
    for spec in fields(Batch):
        before, after = getattr(batch, spec.name), getattr(scaled, spec.name)
        if spec.name in weights:
            assert after.tolist() == (2 * before).tolist(), spec.name
        else:
            assert after is before, spec.name
    assert make_batch([1]).scale_weights(2.0).kl_weights_N is None


def test_taking_no_sample_gives_an_empty_batch():
    empty = make_batch([2, 3]).take([])
    assert (empty.rows, empty.tokens, empty.uids) == (0, 0, ())
    assert empty.token_ids_N.dtype == np.int32


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), data=st.data())
def test_any_split_of_a_batch_holds_every_token_once(lengths: list[int], data: st.DataObject):
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    batch = make_batch(lengths)
    parts = [batch.take(order[:cut]), batch.take(order[cut:])]
    tokens = sorted(token for part in parts for token in part.token_ids_N.tolist())
    assert tokens == list(range(sum(lengths)))
    assert sum(part.weights_N.sum() for part in parts) == pytest.approx(batch.weights_N.sum())
