"""How a batch is split over ranks, and how their results are put back into the batch order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.data.batch import Batch
from rollick.trainer.parallel.shares import BatchSplit, SplitPlan, gather_samples, gather_tokens
from rollick.types import SampleId


def make_batch(lengths: list[int]) -> Batch:
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


def split_batch(
    batch: Batch, ranks: int, *, keep_groups: bool = False
) -> tuple[list[Batch], SplitPlan]:
    plan = BatchSplit(keep_groups=keep_groups).plan(batch, ranks=ranks)
    return [batch.take(rows) for rows in plan], plan


@pytest.mark.parametrize(
    ("lengths", "ranks", "plan"),
    [
        ([2] * 4, 1, ((0, 1, 2, 3),)),
        ([5, 4, 3, 2], 2, ((0, 3), (1, 2))),
        ([2, 2, 2, 9], 2, ((3,), (0, 1, 2))),
        ([3, 3], 4, ((0,), (1,), (), ())),
        ([], 2, ((), ())),
    ],
)
def test_rows_are_balanced_by_cost(lengths: list[int], ranks: int, plan: SplitPlan) -> None:
    assert split_batch(make_batch(lengths), ranks)[1] == plan


def test_ten_equal_rows_over_three_ranks_are_four_three_and_three() -> None:
    assert [part.rows for part in split_batch(make_batch([7] * 10), 3)[0]] == [4, 3, 3]


@given(st.lists(st.integers(2, 50), max_size=30), st.integers(1, 7))
def test_no_rank_has_more_than_its_share_and_one_row(lengths: list[int], ranks: int) -> None:
    parts, plan = split_batch(make_batch(lengths), ranks)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    max_tokens = max(part.tokens for part in parts)
    assert max_tokens <= sum(lengths) / ranks + max(lengths, default=0)


def test_rows_without_a_trained_token_are_those_of_the_first_replica() -> None:
    batch = make_batch([9, 4, 9, 4])
    batch = replace(batch, loss_mask_N=np.repeat([False, True, False, True], batch.lengths_B))
    assert split_batch(batch, 2)[1] == ((0, 1, 2), (3,))


def test_a_replica_is_as_fast_as_its_slowest_rank() -> None:
    batch = make_batch([6] * 9)
    split = BatchSplit(ranks_per_replica=2, speeds=(1.0, 0.5, 1.0, 1.0))
    assert [len(rows) for rows in split.plan(batch, ranks=4)] == [3, 6]
    assert [len(rows) for rows in split.plan(batch, ranks=2)] == [9]


def test_ranks_that_compute_the_same_rows_get_one_object() -> None:
    split = BatchSplit(ranks_per_replica=2, minibatches=2)
    batch = make_batch([5, 6, 7, 8, 9, 4])
    shares = split.shares(batch, ranks=4)
    assert shares[0] is shares[1]
    assert shares[2] is shares[3]
    parts = [[part.uids for part in share.minibatches] for share in shares[::2]]
    group_ids = [
        [sorted(uid.group for uid in uids) for uids in replica_ids] for replica_ids in parts
    ]
    assert sorted(
        group_id
        for replica_ids in group_ids
        for minibatch_ids in replica_ids
        for group_id in minibatch_ids
    ) == [0, 1, 2, 3, 4, 5]
    assert sum(share.tokens for share in shares[::2]) == batch.tokens
    weights = [sum(p.weights_N.sum() for p in share.minibatches) for share in shares[::2]]
    assert sum(weights) == 2 * batch.weights_N.sum()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 5))
def test_tokens_come_back_in_the_order_of_the_batch(lengths, ranks):
    batch = make_batch(lengths)
    parts, plan = split_batch(batch, ranks)
    rank_values = [part.token_ids_N.astype(np.float32) for part in parts]
    gathered = gather_tokens(rank_values, batch, plan)
    np.testing.assert_array_equal(gathered, np.arange(batch.tokens))
    assert [part.uids for part in parts] == [tuple(SampleId(b, 0) for b in p) for p in plan]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 5))
def test_results_with_several_numbers_per_token_or_one_per_sample_are_returned_in_order(
    lengths, ranks
):
    batch = make_batch(lengths)
    parts, plan = split_batch(batch, ranks)
    rank_pairs = [np.stack([part.token_ids_N, -part.token_ids_N], 1) for part in parts]
    gathered_NK = gather_tokens(rank_pairs, batch, plan)
    expected_N = np.arange(batch.tokens)
    np.testing.assert_array_equal(gathered_NK, np.stack([expected_N, -expected_N], 1))
    rank_values = [None if not part.rows else part.group_B * 0.5 for part in parts]
    gathered_B = gather_samples(rank_values, batch, plan)
    assert gathered_B.tolist() == [b * 0.5 for b in range(len(lengths))]


def test_kept_groups_are_on_one_rank_and_balanced_by_their_tokens():
    batch = replace(make_batch([5, 2, 2, 4, 3, 3]), group_B=np.array([7, 3, 7, 3, 9, 9], np.int32))
    parts, plan = split_batch(batch, 2, keep_groups=True)
    assert plan == ((0, 2), (1, 3, 4, 5))
    assert [set(part.group_B.tolist()) for part in parts] == [{7}, {3, 9}]
    assert split_batch(batch, 2)[1] != plan


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(2, 9)), max_size=12), st.integers(1, 4))
def test_no_group_is_on_two_ranks_where_groups_are_kept(samples, ranks):
    batch = make_batch([length for _, length in samples])
    batch = replace(batch, group_B=np.array([group for group, _ in samples], np.int32))
    parts, plan = split_batch(batch, ranks, keep_groups=True)
    assert sorted(index for part in plan for index in part) == list(range(len(samples)))
    groups_by_rank = [{int(group) for group in part.group_B} for part in parts]
    assert sum(len(rank_groups) for rank_groups in groups_by_rank) == len(
        set().union(*groups_by_rank)
    )


def test_a_rank_without_samples_may_answer_nothing():
    batch = make_batch([2])
    _, plan = split_batch(batch, 2)
    gathered = gather_tokens([np.asarray([1.5, 2.5]), None], batch, plan)
    assert gathered.tolist() == [1.5, 2.5]
    assert gathered.dtype == np.float64


def test_an_answer_of_the_wrong_length_is_refused():
    batch = make_batch([2, 3])
    _, plan = split_batch(batch, 1)
    with pytest.raises(ValueError, match="4 values for its 5 tokens"):
        gather_tokens([np.zeros(4, np.float32)], batch, plan)
