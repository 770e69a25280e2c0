"""Shaping: changes to scores before advantages are computed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.objective import resolve_advantage
from rollick.algorithms.score_statistics import RunningStatistics
from rollick.algorithms.shaping import (
    Source,
    normalise_scores,
    penalise_length,
    soft_length_penalty,
    trained_members,
    valid_scores,
)
from rollick.config.schema.advantages import ShapingConfig
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.testing.fakes import group
from rollick.types import Group, StopReason


def shape_scores(
    groups: list[Group],
    options: ShapingConfig,
    *,
    max_tokens: int,
    running: RunningStatistics | None = None,
) -> Any:
    penalised = [penalise_length(one, options, max_tokens=max_tokens) for one in groups]
    return normalise_scores(penalised, options, running or RunningStatistics())


exhaustive = settings(derandomize=True, database=None, deadline=None, max_examples=60)
SOURCES: list[Source] = ["none", "group", "batch", "running"]
ScoreLists = list[list[float | None]]
NUMBER = st.integers(-64, 64).map(lambda number: number / 16)
BATCHES = st.lists(st.lists(st.one_of(st.none(), NUMBER), max_size=5), max_size=4)
RUNNING = RunningStatistics().updated([1, 2, 6])


def list_scores(groups: Any) -> ScoreLists:
    return [[m.score.value if m.score.ok else None for m in one.members] for one in groups]


def test_the_default_shaping_changes_nothing():
    groups = [group([1, None, 3])]
    assert shape_scores(groups, ShapingConfig(), max_tokens=8)[0] is groups[0]


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        # groups 0 2 (mean 1) and 4 6 (mean 5), both std sqrt(2); batch: mean 3, std sqrt(20/3)
        ("group", "none", [[-1, 1], [-1, 1]]),
        ("batch", "none", [[-3, -1], [1, 3]]),
        ("none", "group", [[0, 2 / math.sqrt(2)], [4 / math.sqrt(2), 6 / math.sqrt(2)]]),
        ("none", "batch", [[s / math.sqrt(20 / 3) for s in row] for row in ([0, 2], [4, 6])]),
        ("group", "batch", [[s / math.sqrt(20 / 3) for s in row] for row in ([-1, 1], [-1, 1])]),
        ("batch", "group", [[s / math.sqrt(2) for s in row] for row in ([-3, -1], [1, 3])]),
    ],
)
def test_mean_and_std_come_each_from_their_own_source(
    mean: Source, std: Source, expected: list[list[float]]
):
    groups = [group([0, 2]), group([4, 6])]
    shaped = normalise_scores(groups, ShapingConfig(mean=mean, std=std), RUNNING)
    assert list_scores(shaped) == [pytest.approx(row) for row in expected]


def compute_by_loops(batch: ScoreLists, mean: Source, std: Source, clip: float) -> ScoreLists:
    all_scores = [score for scores in batch for score in scores if score is not None]
    result: ScoreLists = []
    for scores in batch:
        group_scores = [score for score in scores if score is not None]
        data = {"none": [], "group": group_scores, "batch": all_scores, "running": [1.0, 2.0, 6.0]}
        offset = sum(data[mean]) / len(data[mean]) if data[mean] else 0.0
        spread = 0.0
        if len(data[std]) > 1:
            centre = sum(data[std]) / len(data[std])
            spread = math.sqrt(sum((v - centre) ** 2 for v in data[std]) / (len(data[std]) - 1))
        row: list[float | None] = []
        for score in scores:
            if score is None:
                row.append(None)
                continue
            value = (score - offset) / (spread + 1e-6 if spread else 1.0)
            row.append(min(max(value, -clip), clip) if clip else value)
        result.append(row)
    return result


@exhaustive
@given(batch=BATCHES, clip=st.sampled_from([0.0, 0.5]))
@pytest.mark.parametrize("mean", SOURCES)
@pytest.mark.parametrize("std", SOURCES)
def test_every_mixture_of_sources_agrees_with_plain_loops(
    mean: Source, std: Source, batch: ScoreLists, clip: float
):
    groups = [group(scores, uid=uid) for uid, scores in enumerate(batch)]
    shaped = normalise_scores(groups, ShapingConfig(mean=mean, std=std, clip=clip), RUNNING)
    for actual, expected in zip(
        list_scores(shaped), compute_by_loops(batch, mean, std, clip), strict=True
    ):
        assert len(actual) == len(expected)
        for value, expected_value in zip(actual, expected, strict=True):
            assert (value is None) == (expected_value is None)
            if value is not None:
                assert value == pytest.approx(expected_value, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("std", SOURCES)
@pytest.mark.parametrize("scores", [[7.0], [0.1, 0.1, 0.1], []])
def test_scores_without_spread_keep_their_size(std: Source, scores: list[float | None]):
    running = RunningStatistics().updated([score for score in scores if score is not None])
    shaped = normalise_scores([group(scores)], ShapingConfig(std=std), running)
    assert list_scores(shaped) == [scores]


@exhaustive
@given(
    scores=st.lists(NUMBER, min_size=2, max_size=6),
    clips=st.tuples(st.floats(0.1, 4), st.floats(0.1, 4)),
)
def test_a_clip_keeps_the_order_of_scores_and_a_wider_one_more_of_their_size(
    scores: list[float], clips: tuple[float, float]
):
    def clip_scores(clip: float) -> list[float]:
        groups = [group([*sorted(scores)])]
        [row] = list_scores(normalise_scores(groups, ShapingConfig(clip=clip), RUNNING))
        return [value for value in row if value is not None]

    narrow, wide = clip_scores(min(clips)), clip_scores(max(clips))
    assert narrow == sorted(narrow)
    assert all(abs(a) <= abs(b) for a, b in zip(narrow, wide, strict=True))
    assert max(map(abs, narrow)) <= min(clips)


@exhaustive
@given(first=st.lists(NUMBER, max_size=6), second=st.lists(NUMBER, max_size=6))
def test_running_statistics_are_those_of_all_scores_together(
    first: list[float], second: list[float]
):
    running = RunningStatistics().updated(first)
    state = json.loads(json.dumps(running.to_state()))
    running = RunningStatistics.from_state(state).updated(second)
    values = first + second
    mean = sum(values) / len(values) if values else 0.0
    squares = sum((value - mean) ** 2 for value in values)
    assert running.count == len(values)
    assert running.mean == pytest.approx(mean, abs=1e-12)
    std = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0
    assert running.std == pytest.approx(std, abs=1e-7)


@pytest.mark.parametrize("missing", ["count", "mean", "squares"])
def test_a_running_state_without_a_key_is_an_error_and_not_a_default(missing: str):
    state = RUNNING.to_state()
    del state[missing]
    with pytest.raises(KeyError, match=missing):
        RunningStatistics.from_state(state)


def test_running_statistics_keep_their_digits_far_from_zero():
    assert RunningStatistics().updated([1e9, 1e9 + 1, 1e9 + 2]).std == pytest.approx(1)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1), (1000, -1)],
)
def test_the_length_penalty_grows_over_the_buffer_to_one(length: int, penalty: float):
    assert soft_length_penalty(length, limit=100, buffer=20) == pytest.approx(penalty)


@exhaustive
@given(
    lengths=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    limit=st.integers(1, 40),
    share=st.floats(0.1, 1),
)
def test_a_longer_response_never_has_a_smaller_penalty(
    lengths: tuple[int, int], limit: int, share: float
):
    short, long = (
        soft_length_penalty(length, limit=limit, buffer=share * limit) for length in sorted(lengths)
    )
    assert -1 <= long <= short <= 0


def test_the_length_penalty_counts_drawn_tokens_and_comes_before_the_normalisation():
    # lengths 2, 3, 4 with a limit of 4 and a buffer of 2: penalties 0, 0.5, 1 times 2
    options = ShapingConfig(length_limit=4, length_buffer=0.5, length_weight=2, mean="group")
    groups = [group([1, 1, None, 1], texts=["ab", "abc", "abcd", "abcd"])]
    assert list_scores(shape_scores(groups, options, max_tokens=9)) == [[1, 0, None, -1]]
    limit = options.model_copy(update={"length_limit": "max_tokens"})
    assert list_scores(shape_scores(groups, limit, max_tokens=4)) == [[1, 0, None, -1]]
    assert list_scores(shape_scores(groups, limit, max_tokens=8)) == [[0, 0, None, 0]]


@pytest.mark.parametrize(
    "shaping",
    [
        {"mean": "batch"},
        {"mean": "running"},
        {"std": "group"},
        {"std": "running"},
        {"clip": 0.5},
        {"length_limit": 2},
        {"length_limit": 3, "length_buffer": 1.0},
        {"length_limit": 2, "length_weight": 3.0},
    ],
    ids=str,
)
def test_every_setting_of_the_shaping_reaches_the_advantage_from_a_recipe(shaping: dict[str, Any]):
    groups = [group([3, 1, 0], texts=["a", "ab", "abc"])]

    def first(settings: dict[str, Any]) -> list[Any]:
        algorithm = AlgorithmConfig.model_validate({"advantage": "reinforce", "shaping": settings})
        shaped = shape_scores(groups, algorithm.shaping, max_tokens=3, running=RUNNING)
        return [float(value[-1]) for value in resolve_advantage(algorithm)(shaped)[0]]  # pyright: ignore

    without = {k: v for k, v in shaping.items() if k == "length_limit" and len(shaping) > 1}
    assert first(shaping) != first(without)


def test_shaped_groups_are_new_ones_and_the_advantage_does_not_shape_again():
    groups = [group([10, 0])]
    algorithm = AlgorithmConfig.model_validate({"shaping": {"clip": 2}})
    shaped = shape_scores(groups, algorithm.shaping, max_tokens=3)
    advantage = resolve_advantage(algorithm)
    assert advantage(shaped) == [[1, -1]]
    assert advantage(groups) == [[5, -5]]
    assert groups[0].scores == (10, 0)


def test_the_length_penalty_alone_is_what_running_statistics_are_made_of():
    options = ShapingConfig(length_limit=2, length_buffer=1, mean="running", std="batch", clip=0.5)
    plain = group([1, None, 4], texts=["a", "a", "ab"])
    penalised = penalise_length(plain, options, max_tokens=9)
    assert list_scores([penalised]) == [[0.5, None, 3]]
    assert valid_scores([penalised]) == [0.5, 3]


def test_masks_leave_out_truncated_and_failed_samples_and_prompts_of_a_wrong_difficulty():
    plain = group([1, 0, None, 0])
    truncated_sample = replace(plain.members[1].sample, stop=StopReason.LENGTH)
    mixed = replace(
        plain,
        members=(
            plain.members[0],
            replace(plain.members[1], sample=truncated_sample),
            *plain.members[2:],
        ),
    )
    assert trained_members(mixed) == [True, True, False, True]
    assert trained_members(mixed, drop_truncated=True) == [True, False, False, True]
    assert trained_members(mixed, difficulty=(1 / 3, 1)) == [True, True, False, True]
    assert trained_members(mixed, difficulty=(0.5, 1)) == [False] * 4
    assert trained_members(mixed, difficulty=(0, 0.25)) == [False] * 4


@pytest.mark.parametrize("scores", [[], [None], [1, 1]])
def test_if_all_are_truncated_failed_or_missing_nothing_is_trained(scores: list[float | None]):
    plain = group(scores)
    members = tuple(
        replace(member, sample=replace(member.sample, stop=StopReason.LENGTH))
        for member in plain.members
    )
    all_truncated: Group = replace(plain, members=members)
    assert trained_members(all_truncated, drop_truncated=True) == [False] * len(scores)
