"""collate: what is trained on, in which order, with which weight."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.data.batch import Batch
from rollick.data.collate import collate, examples_to_batch
from rollick.errors import DataError
from rollick.testing.fakes import group, prompt
from rollick.types import NOT_SAMPLED, Group, SampleId, StopReason

ASKED = prompt("ab")  # two prompt tokens


def token_mean(counts_B: Any, group_B: Any, *, max_tokens: int) -> Any:
    return np.full(len(counts_B), 1.0 / counts_B.sum())


def by_count_group_and_limit(counts_B: Any, group_B: Any, *, max_tokens: int) -> Any:
    return counts_B + 10.0 * group_B + 100.0 * max_tokens


def collated(groups: list[Group], advantages: Any, **options: Any) -> Batch:
    return collate(groups, advantages, **{"aggregation": token_mean, "max_tokens": 4, **options})


def assert_same(left: Batch, right: Batch) -> None:
    for spec in fields(Batch):
        a, b = getattr(left, spec.name), getattr(right, spec.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def changed(of: Group, index: int, **fields_of_sample: Any) -> Group:
    members = list(of.members)
    sample = replace(members[index].sample, **fields_of_sample)
    members[index] = replace(members[index], sample=sample)
    return replace(of, members=tuple(members))


def test_two_samples_are_packed_end_to_end_with_their_advantages_and_weights():
    batch = collated([group([1, 0], texts=["x", "yz"], of=ASKED, started=3)], [[0.5, -0.5]])
    assert "".join(map(chr, batch.token_ids_N)) == "abxabyz"
    assert batch.lengths_B.tolist() == [3, 4]
    assert batch.uids == (SampleId(0, 0), SampleId(0, 1))
    assert batch.group_B.tolist() == [0, 0]
    assert batch.loss_mask_N.tolist() == [False, False, True, False, False, True, True]
    assert batch.advantages_N.tolist() == [0, 0, 0.5, 0, 0, -0.5, -0.5]
    assert batch.weights_N.tolist() == [0, 0, 1 / 3, 0, 0, 1 / 3, 1 / 3]
    assert batch.logprobs_N.tolist() == [0, 0, -1, 0, 0, -1, -1]
    assert batch.versions_N.tolist() == [NOT_SAMPLED] * 2 + [3] + [NOT_SAMPLED] * 2 + [3, 3]
    assert batch.temperature_B.tolist() == [1.0, 1.0]
    assert (batch.weights_N.dtype, batch.logprobs_N.dtype) == (np.float64, np.float32)


def test_the_aggregation_sees_trained_tokens_group_and_limit_of_each_sample():
    groups = [group([1], uid=7, texts=["xyz"], of=ASKED)]
    batch = collated(groups, [[1.0]], aggregation=by_count_group_and_limit)
    assert batch.weights_N.tolist() == [0, 0, 473, 473, 473]


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(3)), inner=st.permutations(range(3)))
def test_the_order_of_a_batch_follows_from_ids_alone(order: list[int], inner: list[int]):
    texts = [["a", "bb", "ccc"], ["dd", "e", "f"], ["g", "hhhh", "i"]]
    groups = [group([1, 0, 1], uid=n, texts=texts[n]) for n in range(3)]
    advantages = [[10.0 * n + m for m in range(3)] for n in range(3)]
    shuffled = [
        replace(groups[n], members=tuple(groups[n].members[m] for m in inner)) for n in order
    ]
    moved = [[advantages[n][m] for m in inner] for n in order]
    assert_same(collated(shuffled, moved), collated(groups, advantages))


def test_a_sample_whose_score_failed_is_in_neither_batch_nor_denominator():
    whole = group([1, None, 0], texts=["x", "yyyy", "z"], of=ASKED)
    batch = collated([whole], [[1.0, float("nan"), -1.0]])
    assert batch.uids == (SampleId(0, 0), SampleId(0, 2))
    assert batch.weights_N.sum() == 1.0
    assert batch.weights_N.max() == 0.5


def test_truncated_samples_are_left_out_only_where_the_recipe_says_so():
    cut = changed(group([1, 0], texts=["x", "y"], of=ASKED), 1, stop=StopReason.LENGTH)
    assert collated([cut], [[1.0, -1.0]]).samples == 2
    batch = collated([cut], [[1.0, -1.0]], drop_truncated=True)
    assert batch.uids == (SampleId(0, 0),)
    assert batch.weights_N.sum() == 1.0


def test_a_sample_without_a_trained_token_is_left_out():
    silent = changed(group([1, 0]), 0, loss_mask=np.zeros(5, np.bool_))
    assert collated([silent], [[1.0, -1.0]]).uids == (SampleId(0, 1),)


def test_the_first_token_of_a_sequence_is_never_trained():
    everything = changed(group([1], texts=["x"], of=ASKED), 0, loss_mask=np.ones(3, np.bool_))
    batch = collated([everything], [[1.0]])
    assert batch.loss_mask_N.tolist() == [False, True, True]
    assert batch.weights_N.tolist() == [0, 0.5, 0.5]


def test_an_advantage_may_be_given_for_every_token_and_counts_only_where_trained():
    per_token = np.array([9.0, np.nan, 0.25, 0.75])
    batch = collated([group([1], texts=["xy"], of=ASKED)], [[per_token]])
    assert batch.advantages_N.tolist() == [0, 0, 0.25, 0.75]


BAD_ADVANTAGES = [
    ([[1.0, 2.0], [1.0]], "gave 2 lists for 1 groups"),
    ([[1.0]], "gave 1 values for group 0, which has 2 members"),
    ([[1.0, np.zeros(9)]], r"sample g0.1 has the shape \(9,\), and the sample 5 tokens"),
    ([[float("nan"), 0.0]], r"sample g0.0 is not finite"),
    ([[0.0, float("inf")]], r"sample g0.1 is not finite"),
]


@pytest.mark.parametrize(("advantages", "message"), BAD_ADVANTAGES)
def test_advantages_that_do_not_fit_are_refused(advantages: Any, message: str):
    with pytest.raises(DataError, match=message) as caught:
        collated([group([1, 0])], advantages)
    assert caught.value.fix


def test_nothing_to_train_on_is_an_error_that_says_why():
    cut = changed(group([None, 1]), 1, stop=StopReason.LENGTH)
    with pytest.raises(DataError, match=r"none of 2 samples in 1 groups.*1 failed scores, 1 trunc"):
        collated([cut], [[0.0, 0.0]], drop_truncated=True)
    with pytest.raises(DataError, match="none of 0 samples in 0 groups"):
        collated([], [])


def test_the_arrays_of_a_batch_may_be_written_so_that_torch_takes_them_as_they_are():
    batch = collated([group([1])], [[1.0]])
    arrays = [getattr(batch, spec.name) for spec in fields(Batch) if spec.name != "uids"]
    assert all(array.flags.writeable for array in arrays if array is not None)


def test_examples_become_a_batch_of_groups_of_one():
    examples = [
        (np.array([1, 5, 6], np.int32), np.array([False, True, True])),
        (np.array([1, 7], np.int32), np.array([False, True])),
        (np.array([1, 8], np.int32), np.array([False, False])),
    ]
    batch = examples_to_batch(examples, aggregation=token_mean, max_tokens=4, first=40)
    assert batch.token_ids_N.tolist() == [1, 5, 6, 1, 7]
    assert batch.uids == (SampleId(40, 0), SampleId(41, 0))
    assert batch.loss_mask_N.tolist() == [False, True, True, False, True]
    assert batch.weights_N.tolist() == [0, 1 / 3, 1 / 3, 0, 1 / 3]
    assert batch.advantages_N.tolist() == [0, 1, 1, 0, 1]
    assert set(batch.versions_N.tolist()) == {NOT_SAMPLED}


def test_examples_with_nothing_to_train_on_or_of_two_lengths_are_refused():
    ids = np.array([1, 2], np.int32)
    with pytest.raises(DataError, match="none of the 1 examples"):
        examples_to_batch([(ids, np.zeros(2, np.bool_))], aggregation=token_mean, max_tokens=4)
    with pytest.raises(DataError, match="example 0 has 2 ids and 3 marks"):
        examples_to_batch([(ids, np.ones(3, np.bool_))], aggregation=token_mean, max_tokens=4)
