"""Aggregation: the weight of every trained token of the global batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.objective import resolve_aggregation
from rollick.config.names import NAMES
from rollick.errors import ConfigError

ALL = sorted(NAMES["aggregations"])
COUNTS = np.array([1, 3, 0, 4])
GROUPS = np.array([5, 5, 5, 9])


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("token_mean", [1 / 8, 1 / 8, 0, 1 / 8]),
        ("sequence_mean_token_mean", [1 / 3, 1 / 9, 0, 1 / 12]),
        ("sequence_mean_token_sum", [1 / 3, 1 / 3, 0, 1 / 3]),
        ("fixed_length", [1 / 30, 1 / 30, 0, 1 / 30]),
        ("prompt_mean", [1 / 8, 1 / 8, 0, 1 / 8]),
    ],
)
def test_weights_by_hand(name: str, weights: list[float]):
    # 8 tokens, 3 samples with tokens, 2 groups of 4 tokens each, limit of 10 tokens
    actual = resolve_aggregation(name)(COUNTS, GROUPS, max_tokens=10)
    assert actual.dtype == np.float64
    assert actual == pytest.approx(weights, abs=1e-15)


def test_prompt_mean_gives_each_group_equal_weight():
    actual = resolve_aggregation("prompt_mean")(
        np.array([1, 1, 6]), np.array([0, 0, 1]), max_tokens=8
    )
    assert actual == pytest.approx([1 / 4, 1 / 4, 1 / 12])


def compute_loss_by_loops(
    name: str, losses: list[list[float]], groups: list[int], limit: int
) -> float:
    """The definition, sample by sample and token by token."""
    trained = [(loss, group) for loss, group in zip(losses, groups, strict=True) if loss]
    if not trained:
        return 0.0
    if name == "token_mean":
        return sum(sum(loss) for loss, _ in trained) / sum(len(loss) for loss, _ in trained)
    if name == "prompt_mean":
        by_group: dict[int, list[float]] = {}
        for loss, group in trained:
            by_group.setdefault(group, []).extend(loss)
        return sum(sum(loss) / len(loss) for loss in by_group.values()) / len(by_group)
    per_sample: dict[str, Callable[[list[float]], float]] = {
        "sequence_mean_token_mean": lambda loss: sum(loss) / len(loss),
        "sequence_mean_token_sum": sum,
        "fixed_length": lambda loss: sum(loss) / limit,
    }
    return sum(per_sample[name](loss) for loss, _ in trained) / len(trained)


@settings(derandomize=True, database=None, deadline=None)
@given(
    samples=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.floats(-10, 10), max_size=5)), max_size=6
    )
)
@pytest.mark.parametrize("name", ALL)
def test_the_weighted_sum_is_the_definition(name: str, samples: list[tuple[int, list[float]]]):
    groups, losses = [group for group, _ in samples], [loss for _, loss in samples]
    counts = np.array([len(loss) for loss in losses], np.int64)
    weights = resolve_aggregation(name)(counts, np.array(groups, np.int32), max_tokens=7)
    total = sum(weight * sum(loss) for weight, loss in zip(weights, losses, strict=True))
    assert total == pytest.approx(compute_loss_by_loops(name, losses, groups, 7), abs=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_samples_without_trained_tokens_weigh_nothing_even_if_there_are_no_others(name: str):
    assert list(resolve_aggregation(name)(np.array([0, 0]), np.array([0, 1]), max_tokens=4)) == [
        0,
        0,
    ]
    assert len(resolve_aggregation(name)(np.array([], int), np.array([], int), max_tokens=4)) == 0


@pytest.mark.parametrize("name", ALL)
def test_a_sample_without_trained_tokens_does_not_change_the_others(name: str):
    aggregate = resolve_aggregation(name)
    with_empty = aggregate(COUNTS, GROUPS, max_tokens=10)
    without = aggregate(COUNTS[COUNTS > 0], GROUPS[COUNTS > 0], max_tokens=10)
    assert list(with_empty[COUNTS > 0]) == list(without)


def test_an_unknown_aggregation_is_named_with_its_nearest():
    with pytest.raises(ConfigError, match="did you mean token_mean"):
        resolve_aggregation("tokenmean")
