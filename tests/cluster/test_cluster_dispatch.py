from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.cluster.dispatch import gather_samples, gather_tokens, plan_split, split_batch
from rollick.data.batch import Batch
from rollick.types import SampleId


def batch_of(lengths: list[int]) -> Batch:
    samples, tokens = len(lengths), sum(lengths)
    return Batch(
        token_ids_N=np.arange(tokens, dtype=np.int32),
        lengths_B=np.asarray(lengths, dtype=np.int32),
        uids=tuple(SampleId(b, 0) for b in range(samples)),
        group_B=np.arange(samples, dtype=np.int32),
        temperature_B=np.ones(samples, np.float32),
        loss_mask_N=np.ones(tokens, np.bool_),
        logprobs_N=np.zeros(tokens, np.float32),
        versions_N=np.zeros(tokens, np.int32),
        advantages_N=np.zeros(tokens, np.float32),
        weights_N=np.ones(tokens, np.float32),
    )


@pytest.mark.parametrize(
    ("costs", "ranks", "parts"),
    [
        ([1] * 4, 1, ((0, 1, 2, 3),)),
        ([5, 4, 3, 2], 2, ((0, 3), (1, 2))),
        ([1, 1, 1, 9], 2, ((3,), (0, 1, 2))),
        ([3, 3], 4, ((0,), (1,), (), ())),
        ([], 2, ((), ())),
        ([0, 0, 0, 0], 2, ((0, 2), (1, 3))),
    ],
)
def test_items_are_balanced_by_cost(costs, ranks, parts):
    assert plan_split(costs, ranks) == parts


def test_ten_equal_items_over_three_ranks_are_four_three_and_three():
    assert [len(part) for part in plan_split([7] * 10, 3)] == [4, 3, 3]


def test_no_split_is_possible_over_no_ranks():
    with pytest.raises(ValueError, match="over 0 ranks"):
        plan_split([1], 0)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 7))
def test_no_rank_has_more_than_its_share_and_one_item(costs, ranks):
    plan = plan_split(costs, ranks)
    assert sorted(item for part in plan for item in part) == list(range(len(costs)))
    loads = [sum(costs[item] for item in part) for part in plan]
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 5))
def test_tokens_come_back_in_the_order_of_the_batch(lengths, ranks):
    batch = batch_of(lengths)
    parts, plan = split_batch(batch, ranks)
    answers = [part.token_ids_N.astype(np.float32) for part in parts]
    gathered = gather_tokens(answers, batch, plan)
    np.testing.assert_array_equal(gathered, np.arange(batch.tokens))
    assert [part.uids for part in parts] == [tuple(SampleId(b, 0) for b in p) for p in plan]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 5))
def test_results_with_several_numbers_per_token_or_one_per_sample_are_returned_in_order(
    lengths, ranks
):
    batch = batch_of(lengths)
    parts, plan = split_batch(batch, ranks)
    tops = [np.stack([part.token_ids_N, -part.token_ids_N], 1) for part in parts]
    gathered_NK = gather_tokens(tops, batch, plan)
    expected_N = np.arange(batch.tokens)
    np.testing.assert_array_equal(gathered_NK, np.stack([expected_N, -expected_N], 1))
    answers = [None if not part.samples else part.group_B * 0.5 for part in parts]
    gathered_B = gather_samples(answers, batch, plan)
    assert gathered_B.tolist() == [b * 0.5 for b in range(len(lengths))]


def test_kept_groups_are_on_one_rank_and_balanced_by_their_tokens():
    batch = replace(batch_of([5, 1, 2, 4, 3, 3]), group_B=np.array([7, 3, 7, 3, 9, 9], np.int32))
    parts, plan = split_batch(batch, 2, keep_groups=True)
    assert plan == ((0, 2), (1, 3, 4, 5))
    assert [set(part.group_B.tolist()) for part in parts] == [{7}, {3, 9}]
    _, cut = split_batch(batch, 2)
    assert cut == ((0, 1, 5), (2, 3, 4))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=12), st.integers(1, 4))
def test_no_group_is_on_two_ranks_where_groups_are_kept(samples, ranks):
    batch = batch_of([length for _, length in samples])
    batch = replace(batch, group_B=np.array([group for group, _ in samples], np.int32))
    parts, plan = split_batch(batch, ranks, keep_groups=True)
    assert sorted(place for part in plan for place in part) == list(range(len(samples)))
    homes = [{int(group) for group in part.group_B} for part in parts]
    assert sum(len(home) for home in homes) == len(set().union(*homes))


def test_a_rank_without_samples_may_answer_nothing():
    batch = batch_of([2])
    _, plan = split_batch(batch, 2)
    gathered = gather_tokens([np.asarray([1.5, 2.5]), None], batch, plan)
    assert gathered.tolist() == [1.5, 2.5]
    assert gathered.dtype == np.float64


def test_an_answer_of_the_wrong_length_is_refused():
    batch = batch_of([2, 3])
    _, plan = split_batch(batch, 1)
    with pytest.raises(ValueError, match="4 values for its 5 tokens"):
        gather_tokens([np.zeros(4, np.float32)], batch, plan)
