"""How work is divided over ranks: pure functions, without processes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollick.config.schema import ParallelConfig
from rollick.errors import ConfigError
from rollick.models.attention.varlen import ROOT
from rollick.trainer.parallel.mesh import GridShape
from rollick.trainer.parallel.rank_forward import cut_segments, plan_cuts
from rollick.trainer.parallel.shares import RowCost, plan_ranks
from rollick.trainer.parallel.tensor import style_of

FLAT = RowCost(token=1.0, pair=0.0)
STEEP = RowCost(token=1.0, pair=1.0)


def test_the_cost_of_a_row_is_that_of_its_layers_and_of_what_it_sees():
    config = SimpleNamespace(
        hidden_size=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=16
    )
    cost = RowCost.of(config)
    # q and o: 8 x 8 each, k and v: 8 x 4 each, three matrices of 8 x 16; two operations per weight.
    assert cost.token == 2 * (2 * 64 + 2 * 32 + 3 * 128)
    assert cost.pair == 4 * 4 * 2
    assert STEEP.of_rows(0, 3) == 3 + (1 + 2 + 3)
    assert STEEP.of_rows(2, 4) == 2 + (3 + 4)


def test_one_long_sample_weighs_more_than_its_tokens():
    """By tokens, 8 equals 4 + 4. By cost, 44 exceeds 14 + 14, so a third short sample fits."""
    lengths = [8, 4, 4, 4]
    parts = plan_ranks(lengths, ranks=2, cost=STEEP, groups_B=[0, 1, 2, 3], shared_B=[0, 0, 0, 0])
    assert parts == [[0], [1, 2, 3]]


def test_samples_with_a_shared_prefix_stay_together_unless_a_rank_would_be_idle():
    lengths, groups = [6, 6, 6, 6], [0, 0, 1, 1]
    two_groups = plan_ranks(lengths, ranks=2, cost=FLAT, groups_B=groups, shared_B=[4] * 4)
    assert two_groups == [[0, 1], [2, 3]]
    one_group = plan_ranks([6, 6, 6], ranks=2, cost=FLAT, groups_B=[0, 0, 0], shared_B=[4] * 3)
    assert sorted(len(part) for part in one_group) == [1, 2]


def test_a_slow_rank_gets_less_work():
    samples = {"lengths_B": [4] * 9, "groups_B": list(range(9)), "shared_B": [0] * 9}
    parts = plan_ranks(**samples, ranks=2, cost=FLAT, speeds=[0.5, 1.0])
    assert [len(part) for part in parts] == [3, 6]
    equal = plan_ranks(**samples, ranks=2, cost=FLAT)
    assert equal == plan_ranks(**samples, ranks=2, cost=FLAT, speeds=[1.0, 1.0])


def test_pairs_are_never_cut():
    parts = plan_ranks(
        [5, 5, 5, 5], ranks=3, cost=FLAT, groups_B=[0, 0, 1, 1], shared_B=[0] * 4, keep_groups=True
    )
    assert sorted(parts) == [[], [0, 1], [2, 3]]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), ranks=st.integers(1, 6))
def test_every_sample_has_one_rank_and_no_rank_has_far_too_much(lengths: list[int], ranks: int):
    no_shared_tokens = [0] * len(lengths)
    parts = plan_ranks(
        lengths,
        ranks=ranks,
        cost=STEEP,
        groups_B=list(range(len(lengths))),
        shared_B=no_shared_tokens,
    )
    assert sorted(b for part in parts for b in part) == list(range(len(lengths)))
    loads = [sum(STEEP.of_rows(0, lengths[b]) for b in part) for part in parts]
    largest = max(STEEP.of_rows(0, length) for length in lengths)
    assert max(loads) <= sum(loads) / ranks + largest


def test_rows_that_see_more_make_a_shorter_slice():
    assert plan_cuts(np.arange(8), ranks=2, cost=FLAT) == (0, 4, 8)
    assert plan_cuts(np.arange(8), ranks=2, cost=STEEP) == (0, 6, 8)
    assert plan_cuts([0, 0, 0], ranks=3, cost=STEEP) == (0, 1, 2, 3)


@given(positions=st.lists(st.integers(0, 9), min_size=4, max_size=30), ranks=st.integers(1, 4))
def test_every_rank_has_a_row(positions: list[int], ranks: int):
    cuts = plan_cuts(positions, ranks=ranks, cost=STEEP)
    assert cuts[0] == 0
    assert cuts[-1] == len(positions)
    assert min(np.diff(cuts)) >= 1


def test_a_split_sample_continues_from_its_first_piece_and_so_do_its_children():
    """A prefix of 5 rows with two tails of 2 and 3 rows, cut after 3 and after 6 rows."""
    lengths, parents, owners = cut_segments([5, 2, 3], [ROOT, 0, 0], cuts=(0, 3, 6, 10))
    assert lengths == [3, 2, 1, 1, 3]
    assert parents == [ROOT, 0, 1, 2, 1]
    assert owners == [0, 1, 1, 2, 2]


def test_the_data_size_is_what_the_other_sizes_leave():
    shape = GridShape.of(ParallelConfig(tensor=2, context=2), 8)
    assert (shape.data, shape.replicas, shape.ranks_per_replica) == (2, 2, 4)
    assert GridShape.of(ParallelConfig(data=2, expert=2), 4).replicas == 4
    with pytest.raises(ConfigError, match="3 x 1 x 1 x 1 = 3 ranks"):
        GridShape.of(ParallelConfig(data=3), 4)


def test_a_plan_names_layers_by_a_star():
    plan = {"model.layers.*.mlp.up_proj": "colwise"}
    assert style_of("model.layers.12.mlp.up_proj", plan) == "colwise"
    assert style_of("model.layers.12.mlp.gate", plan) is None
