"""collate: the trained tokens of a batch, their order and their weights."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.aggregation import sequence_mean_token_mean, sequence_mean_token_sum
from rollick.data.batch import Batch
from rollick.data.collate import collate, examples_to_batch, token_weights
from rollick.errors import DataError
from rollick.testing.fakes import group, prompt
from rollick.types import NOT_SAMPLED, Group, SampleId, StopReason

PROMPT = prompt("ab")  # two prompt tokens


def token_mean(counts_B: Any, group_B: Any, *, max_tokens: int) -> Any:
    return np.full(len(counts_B), 1.0 / counts_B.sum())


def encode_arguments(counts_B: Any, group_B: Any, *, max_tokens: int) -> Any:
    return counts_B + 10.0 * group_B + 100.0 * max_tokens


def compute_weights(batch: Batch, aggregation: Any = token_mean, **options: Any) -> list[float]:
    return token_weights(batch, aggregation, max_tokens=4, **options).tolist()


def assert_same(left: Batch, right: Batch) -> None:
    for spec in fields(Batch):
        a, b = getattr(left, spec.name), getattr(right, spec.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def replace_sample(of: Group, index: int, **fields_of_sample: Any) -> Group:
    members = list(of.members)
    sample = replace(members[index].sample, **fields_of_sample)
    members[index] = replace(members[index], sample=sample)
    return replace(of, members=tuple(members))


def test_two_samples_are_packed_end_to_end_and_have_no_credit_yet():
    batch = collate([group([1, 0], texts=["x", "yz"], of=PROMPT, start_version=3)], version=4)
    assert "".join(map(chr, batch.token_ids_N)) == "abxabyz"
    assert batch.lengths_B.tolist() == [3, 4]
    assert batch.uids == (SampleId(0, 0), SampleId(0, 1))
    assert batch.group_B.tolist() == [0, 0]
    assert batch.loss_mask_N.tolist() == [False, False, True, False, False, True, True]
    assert batch.advantages_N.tolist() == batch.weights_N.tolist() == [0] * 7
    assert batch.logprobs_N.tolist() == [0, 0, -1, 0, 0, -1, -1]
    assert batch.versions_N.tolist() == [NOT_SAMPLED] * 2 + [3] + [NOT_SAMPLED] * 2 + [3, 3]
    assert batch.temperature_B.tolist() == [1.0, 1.0]
    assert batch.scores_B is not None
    assert batch.scores_B.tolist() == [1, 0]
    assert batch.version == 4
    assert (batch.weights_N.dtype, batch.logprobs_N.dtype) == (np.float64, np.float32)


def test_a_sample_of_two_segments_is_two_sequences_under_one_id():
    of = replace_sample(group([1, 0], texts=["wxyz", "v"], of=PROMPT), 0, segment_starts=(4,))
    batch = collate([of])
    assert batch.lengths_B.tolist() == [4, 2, 3]
    assert batch.uids == (SampleId(0, 0), SampleId(0, 0), SampleId(0, 1))
    assert batch.rows_by_sample() == {SampleId(0, 0): range(2), SampleId(0, 1): range(2, 3)}
    # The first token of a segment has no context and is not trained.
    masks = [False, False, True, True, False, True, False, False, True]
    assert batch.loss_mask_N.tolist() == masks
    assert batch.scores_B is not None
    assert batch.scores_B.tolist() == [1, 1, 0]


def test_weights_are_those_of_the_trained_tokens():
    batch = collate([group([1, 0], texts=["x", "yz"], of=PROMPT)])
    assert compute_weights(batch) == [0, 0, 1 / 3, 0, 0, 1 / 3, 1 / 3]


def test_tokens_that_are_not_among_the_kept_are_in_neither_weights_nor_denominator():
    batch = collate([group([1, 0], texts=["x", "yz"], of=PROMPT)])
    among_N = np.array([True, True, True, True, True, False, True])
    assert compute_weights(batch, among_N=among_N) == [0, 0, 1 / 2, 0, 0, 0, 1 / 2]


def test_the_aggregation_sees_trained_tokens_group_and_limit_of_each_sample():
    batch = collate([group([1], uid=7, texts=["xyz"], of=PROMPT)])
    assert compute_weights(batch, encode_arguments) == [0, 0, 473, 473, 473]


def test_an_episode_of_several_segments_counts_once_in_a_mean_over_samples():
    of = replace_sample(group([1, 0], texts=["vwxyz", "uv"], of=PROMPT), 0, segment_starts=(4,))
    weights = compute_weights(collate([of]), sequence_mean_token_mean)
    # Segments abvw and xyz (x has no context) of one sample, and ab|uv.
    assert weights == [0, 0, 1 / 8, 1 / 8, 0, 1 / 8, 1 / 8, 0, 0, 1 / 4, 1 / 4]
    weights = compute_weights(collate([of]), sequence_mean_token_sum)
    assert weights == [0, 0, 1 / 2, 1 / 2, 0, 1 / 2, 1 / 2, 0, 0, 1 / 2, 1 / 2]


def test_the_segments_of_a_solved_episode_are_one_example():
    ids, mask = np.arange(3, dtype=np.int32), np.ones(3, np.bool_)
    options: Any = {"aggregation": sequence_mean_token_mean, "max_tokens": 4}
    examples = [[(ids, mask), (ids, mask)], [(ids, mask)]]
    batch = examples_to_batch(examples, are_segments=True, **options)
    assert batch.uids == (SampleId(0, 0), SampleId(0, 0), SampleId(1, 0))
    assert batch.weights_N.tolist() == 2 * [0, 1 / 8, 1 / 8] + [0, 1 / 4, 1 / 4]
    assert batch.advantages_N.tolist() == 3 * [0, 1, 1]


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(3)), inner=st.permutations(range(3)))
def test_the_order_of_a_batch_follows_from_ids_alone(order: list[int], inner: list[int]):
    texts = [["a", "bb", "ccc"], ["dd", "e", "f"], ["g", "hhhh", "i"]]
    groups = [group([n, 0.5, -n], uid=n, texts=texts[n]) for n in range(3)]
    shuffled = [
        replace(groups[n], members=tuple(groups[n].members[m] for m in inner)) for n in order
    ]
    assert_same(collate(shuffled), collate(groups))


def test_a_sample_whose_score_failed_is_in_neither_batch_nor_denominator():
    group_with_failure = group([1, None, 0], texts=["x", "yyyy", "z"], of=PROMPT)
    batch = collate([group_with_failure])
    assert batch.uids == (SampleId(0, 0), SampleId(0, 2))
    assert sum(compute_weights(batch)) == 1.0
    assert max(compute_weights(batch)) == 0.5


def test_only_chosen_members_are_in_the_batch_and_a_failed_one_cannot_be_chosen():
    groups = [group([1, 0], of=PROMPT), group([0, None, 1], uid=1, of=PROMPT)]
    chosen = {0: [False, True], 1: [True, True, False]}
    batch = collate(groups, select_members=lambda of: chosen[of.uid])
    assert batch.uids == (SampleId(0, 1), SampleId(1, 0))


def test_a_choice_of_another_length_than_the_group_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        collate([group([1, 0])], select_members=lambda of: [True])


def test_truncated_samples_are_trained_on_unless_excluded():
    truncated_group = replace_sample(
        group([1, 0], texts=["x", "y"], of=PROMPT), 1, stop=StopReason.LENGTH
    )
    assert collate([truncated_group]).rows == 2


def test_a_sample_without_a_trained_token_is_left_out():
    untrained = replace_sample(group([1, 0]), 0, loss_mask=np.zeros(5, np.bool_))
    assert collate([untrained]).uids == (SampleId(0, 1),)


def test_the_first_token_of_a_sequence_is_never_trained():
    all_trained = replace_sample(
        group([1], texts=["x"], of=PROMPT), 0, loss_mask=np.ones(3, np.bool_)
    )
    batch = collate([all_trained])
    assert batch.loss_mask_N.tolist() == [False, True, True]
    assert compute_weights(batch) == [0, 0.5, 0.5]


def test_an_empty_training_batch_is_an_error_with_the_reason():
    truncated_group = replace_sample(group([None, 1]), 1, stop=StopReason.LENGTH)
    with pytest.raises(DataError, match=r"none of 2 samples in 1 groups.*1 failed scores, 1 trunc"):
        collate(
            [truncated_group],
            select_members=lambda of: [not sample.truncated for sample in of.samples],
        )
    with pytest.raises(DataError, match="none of 0 samples in 0 groups"):
        collate([])


def test_the_arrays_of_a_batch_may_be_written_so_that_torch_takes_them_as_they_are():
    batch = collate([group([1])])
    arrays = [getattr(batch, spec.name) for spec in fields(Batch)]
    assert all(array.flags.writeable for array in arrays if isinstance(array, np.ndarray))


def make_example(*ids: int, trained: int) -> tuple[Any, Any]:
    """Token ids, and a mask of the last `trained` of them."""
    return np.array(ids, np.int32), np.arange(len(ids)) >= len(ids) - trained


def test_examples_become_a_batch_of_groups_of_one():
    examples = [
        [make_example(1, 5, 6, trained=2)],
        [make_example(1, 7, trained=1)],
        [make_example(1, 8, trained=0)],
    ]
    batch = examples_to_batch(examples, aggregation=token_mean, max_tokens=4)
    assert batch.token_ids_N.tolist() == [1, 5, 6, 1, 7]
    assert batch.uids == (SampleId(0, 0), SampleId(1, 0))
    assert batch.loss_mask_N.tolist() == [False, True, True, False, True]
    assert batch.weights_N.tolist() == [0, 1 / 3, 1 / 3, 0, 1 / 3]
    assert batch.advantages_N.tolist() == [0, 1, 1, 0, 1]
    assert set(batch.versions_N.tolist()) == {NOT_SAMPLED}


def test_a_pair_of_examples_is_a_group_whose_second_answer_has_a_negative_advantage():
    pairs = [
        [make_example(1, 5, 6, trained=2), make_example(1, 7, trained=1)],
        [make_example(1, 8, trained=1), make_example(1, 9, 9, trained=2)],
    ]
    batch = examples_to_batch(pairs, aggregation=token_mean, max_tokens=4)
    assert batch.uids == (SampleId(0, 0), SampleId(0, 1), SampleId(1, 0), SampleId(1, 1))
    assert batch.group_B.tolist() == [0, 0, 1, 1]
    assert batch.advantages_N.tolist() == [0, 1, 1, 0, -1, 0, 1, 0, -1, -1]
    assert batch.scores_B is not None
    assert batch.scores_B.tolist() == [1, -1, 1, -1]


def test_examples_with_nothing_to_train_on_or_of_two_lengths_are_refused():
    ids = np.array([1, 2], np.int32)
    with pytest.raises(DataError, match="none of the 1 examples"):
        examples_to_batch([[(ids, np.zeros(2, np.bool_))]], aggregation=token_mean, max_tokens=4)
    with pytest.raises(DataError, match=r"example g0\.0 has 2 token ids and a mask of 3"):
        examples_to_batch([[(ids, np.ones(3, np.bool_))]], aggregation=token_mean, max_tokens=4)
