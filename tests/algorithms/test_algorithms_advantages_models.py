"""Advantages from the outputs of other models for each token: GAE, on-policy distillation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import mask_of, masked_group
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.advantages import AdvantagesAndReturns
from rollick.algorithms.objective import resolve_advantage
from rollick.algorithms.returns import (
    gae,
    opd,
    token_gae,
    token_opd,
)
from rollick.config.schema.advantages import (
    GaeAdvantage,
    OpdAdvantage,
)
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.errors import ConfigError
from rollick.testing.fakes import annotated, group
from rollick.types import Annotations, FloatArray, Group, StopReason

exhaustive = settings(derandomize=True, database=None, deadline=None, max_examples=60)
MASKS = st.lists(st.booleans(), min_size=1, max_size=12)
SEEDS = st.integers(0, 10_000)
INF, NAN = math.inf, math.nan


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float64)


def to_lists(actual: object) -> list[list[list[float]]]:
    return [[np.asarray(value).tolist() for value in row] for row in actual]  # pyright: ignore


def draw_numbers(seed: int, count: int) -> FloatArray:
    return np.random.default_rng(seed).normal(size=count)


def compute_gae_by_loops(
    rewards: list[float], values: list[float], *, gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """A_t as the sum over all later TD errors, term by term."""
    next_values = [*values[1:], bootstrap]
    errors = [r + gamma * v2 - v for r, v, v2 in zip(rewards, values, next_values, strict=False)]
    return [
        sum((gamma * lam) ** (later - now) * errors[later] for later in range(now, len(errors)))
        for now in range(len(errors))
    ]


def test_gae_by_hand():
    # d_2 = 1 - 0.5 = 0.5; d_1 = 0.5 * 0.5 - 0.25 = 0; A_1 = 0 + 0.5 * 0.5 * 0.5
    actual = token_gae(
        np.array([0.0, 0.0, 1.0]),
        np.array([9.0, 0.25, 0.5]),
        mask_of(".xx"),
        gamma=0.5,
        lam=0.5,
    )
    assert actual.advantages_T.tolist() == [0, 0.125, 0.5]
    assert actual.returns_T.tolist() == [0, 0.375, 1.0]


@exhaustive
@given(mask=MASKS, seed=SEEDS, lam=st.sampled_from([0.0, 0.95, 1.0]), end=st.floats(-2, 2))
def test_gae_agrees_with_plain_loops_over_the_drawn_tokens(
    mask: list[bool], seed: int, lam: float, end: float
):
    inside = np.array(mask)
    rewards, values = (
        np.where(inside, draw_numbers(seed, len(mask)), 0),
        draw_numbers(seed + 1, len(mask)),
    )
    actual = token_gae(rewards, values, inside, gamma=0.9, lam=lam, bootstrap=end)
    expected = compute_gae_by_loops(
        rewards[inside].tolist(), values[inside].tolist(), gamma=0.9, lam=lam, bootstrap=end
    )
    assert actual.advantages_T[inside].tolist() == pytest.approx(expected, abs=1e-12)
    assert not actual.advantages_T[~inside].any()
    assert not actual.returns_T[~inside].any()


@pytest.mark.parametrize("junk", [7.0, math.nan, -math.inf])
def test_gae_skips_padding_and_observations(junk: float):
    packed = token_gae(
        np.array([0.0, 0, 0, 1]),
        np.array([0.1, 0.2, 0.3, 0.4]),
        mask_of("xxxx"),
        gamma=0.9,
        lam=0.8,
    )
    spread = token_gae(
        np.array([0.0, 0, 0, 0, 0, 0, 1, 0, 0]),
        np.array([junk, 0.1, 0.2, junk, junk, 0.3, 0.4, junk, junk]),
        mask_of(".xx..xx.."),
        gamma=0.9,
        lam=0.8,
    )
    assert spread.advantages_T[mask_of(".xx..xx..")].tolist() == packed.advantages_T.tolist()
    assert spread.advantages_T[~mask_of(".xx..xx..")].tolist() == [0] * 5


def test_nothing_follows_a_terminated_sample_and_the_bootstrap_follows_a_truncated_one():
    rewards, values = np.zeros(2), np.array([0.5, 0.5])
    ended = token_gae(rewards, values, mask_of("xx"), gamma=1, lam=1)
    cut = token_gae(rewards, values, mask_of("xx"), gamma=1, lam=1, bootstrap=0.75)
    assert ended.returns_T.tolist() == [0, 0]
    assert cut.returns_T.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("mask", ["", "..", "x"])
def test_gae_of_nothing_or_one_token_is_finite(mask: str):
    zeros = np.zeros(len(mask))
    actual = token_gae(zeros, zeros + 0.5, mask_of(mask), gamma=1, lam=1)
    assert actual.advantages_T.tolist() == [-0.5 if letter == "x" else 0 for letter in mask]


def make_gae_group(*members: tuple[float | None, str, Sequence[float]], cut: str = "") -> Group:
    """Members of (score, mask, values of a critic); `cut` marks the truncated ones with `x`."""
    full_group = masked_group([score for score, _, _ in members], *(mask for _, mask, _ in members))
    annotations = [Annotations(values=floats(*values), last_value=0.5) for _, _, values in members]
    ends = [StopReason.LENGTH if mark == "x" else StopReason.STOP for mark in cut.ljust(9, ".")]
    full_group = annotated(full_group, *annotations)
    return replace(
        full_group,
        members=tuple(
            replace(m, sample=replace(m.sample, stop=end))
            for m, end in zip(full_group.members, ends, strict=False)
        ),
    )


def unpack_advantages(actual: Any) -> list[list[tuple[list[float], list[float]]]]:
    assert all(isinstance(value, AdvantagesAndReturns) for row in actual for value in row)
    return [[(v.advantages_T.tolist(), v.returns_T.tolist()) for v in row] for row in actual]


def test_gae_of_a_group_by_hand():
    # as in test_gae_by_hand; the values of the observation between the two tokens are ignored
    full_group = make_gae_group((1, "....x..x", [9, 9, 9, 9, 0.25, NAN, INF, 0.5]))
    options = GaeAdvantage(gamma=0.5, lam=0.5, whiten=False)
    [[(advantages, returns)]] = unpack_advantages(gae([full_group], options))
    assert advantages == [0, 0, 0, 0, 0.125, 0, 0, 0.5]
    assert returns == [0, 0, 0, 0, 0.375, 0, 0, 1]


def test_a_truncated_sample_bootstraps_from_the_critic_only_if_configured():
    full_group = make_gae_group(
        (0, "....x", [0, 0, 0, 0, 0.25]), (0, "....x", [0, 0, 0, 0, 0.25]), cut="x."
    )
    options = GaeAdvantage(whiten=False)
    assert [returns[4] for _, returns in unpack_advantages(gae([full_group], options))[0]] == [0, 0]
    options = GaeAdvantage(whiten=False, bootstrap_truncated=True)
    assert [returns[4] for _, returns in unpack_advantages(gae([full_group], options))[0]] == [
        0.5,
        0,
    ]


def test_gae_is_whitened_over_the_batch_and_its_returns_are_not():
    # advantages 1 - 0 = 1 and 0 - 3 = -3: mean -1, std 2 sqrt(2)
    full_group = make_gae_group(
        (1, "....x", [0] * 5), (0, "....x", [0, 0, 0, 0, 3]), (None, "....xx", [7] * 6)
    )
    actual = unpack_advantages(gae([full_group], GaeAdvantage()))[0]
    std = 2 * math.sqrt(2) + 1e-6
    assert [a[4] for a, _ in actual] == pytest.approx([2 / std, -2 / std, 0])
    assert [r[4] for _, r in actual] == [1, 0, 0]


def make_random_gae_group(masks: list[list[bool]], seed: int) -> Group:
    """Every third sample failed, every second one is truncated; NaN outside the masks."""
    texts = ["...." + "".join("x" if inside else "." for inside in mask) for mask in masks]
    scores = [
        None if n % 3 == 2 else float(draw_numbers(seed + n, 1)[0]) for n in range(len(masks))
    ]
    values = [
        np.where(mask_of(text), draw_numbers(seed + 7 * n, len(text)), NAN)
        for n, text in enumerate(texts)
    ]
    cut = "".join("x."[n % 2] for n in range(len(masks)))
    return make_gae_group(*zip(scores, texts, [v.tolist() for v in values], strict=True), cut=cut)


@exhaustive
@given(
    masks=st.lists(MASKS, min_size=1, max_size=4),
    seed=SEEDS,
    bootstrap=st.booleans(),
    whiten=st.booleans(),
)
def test_gae_of_groups_agrees_with_plain_loops(
    masks: list[list[bool]], seed: int, bootstrap: bool, whiten: bool
):
    full_group = make_random_gae_group(masks, seed)
    options = GaeAdvantage(gamma=0.9, lam=0.8, whiten=whiten, bootstrap_truncated=bootstrap)
    expected: list[list[float]] = []
    for member in full_group.members:
        assert member.annotations.values is not None
        values = member.annotations.values[member.sample.loss_mask].tolist()
        rewards = [0.0] * len(values)
        rewards[-1:] = [member.score.value] * len(rewards[-1:])
        end = 0.5 if bootstrap and member.sample.truncated else 0.0
        actual = compute_gae_by_loops(rewards, values, gamma=0.9, lam=0.8, bootstrap=end)
        expected.append(actual if member.score.ok else [0.0] * len(values))
    known = [
        x for m, row in zip(full_group.members, expected, strict=True) if m.score.ok for x in row
    ]
    mean, std = sum(known) / max(len(known), 1), 0.0
    if len(known) > 1:
        std = math.sqrt(sum((x - mean) ** 2 for x in known) / (len(known) - 1))
    for member, row, (advantages, returns) in zip(
        full_group.members, expected, unpack_advantages(gae([full_group], options))[0], strict=True
    ):
        inside = member.sample.loss_mask
        if whiten:
            row = [(x - mean) / (std + 1e-6) if member.score.ok and std else 0.0 for x in row]
        assert np.array(advantages)[inside].tolist() == pytest.approx(row, abs=1e-9)
        assert not np.array(advantages)[~inside].any()
        assert not np.array(returns)[~inside].any()
        assert np.isfinite(returns).all()


@pytest.mark.parametrize(
    "full_group",
    [
        make_gae_group((5, "....x", [1] * 5)),
        make_gae_group((5, "....", [1] * 4)),
        make_gae_group((0.1, "....x", [0] * 5), (0.1, "....x", [0] * 5)),
        make_gae_group((1, "....x", [1] * 5), (1, "....x", [1] * 5), cut="xx"),
        make_gae_group((None, "....x", [NAN] * 5)),
    ],
    ids=["one token", "empty mask", "equal", "all truncated", "failed"],
)
def test_whitened_gae_without_anything_to_compare_is_exactly_zero(full_group: Group):
    for advantages, returns in unpack_advantages(gae([full_group], GaeAdvantage()))[0]:
        assert advantages == [0] * len(advantages)
        assert np.isfinite(returns).all()


def test_opd_is_the_teachers_log_prob_minus_the_students():
    actual = token_opd(np.log([0.5, 0.2, 0.1]), np.log([0.25, 0.4, 0.7]), mask_of("xx."), limit=20)
    assert actual.tolist() == pytest.approx([math.log(2), -math.log(2), 0])


def test_opd_is_finite_whatever_the_log_probs_and_zero_outside_the_mask():
    inf = math.inf
    teacher = np.array([-inf, -1.0, -inf, math.nan, -inf])
    student = np.array([-1.0, -inf, -inf, -1.0, -1.0])
    actual = token_opd(teacher, student, mask_of("xxx.."), limit=5)
    assert actual.tolist() == [-5, 5, 0, 0, 0]


@exhaustive
@given(seed=SEEDS, limits=st.tuples(st.floats(0, 3), st.floats(0, 3)))
def test_a_wider_limit_of_opd_never_makes_an_advantage_smaller(
    seed: int, limits: tuple[float, float]
):
    teacher, student = -np.abs(draw_numbers(seed, 5)), -np.abs(draw_numbers(seed + 1, 5)) * 3
    narrow, wide = (
        np.abs(token_opd(teacher, student, mask_of("xxxxx"), limit=limit))
        for limit in sorted(limits)
    )
    assert (narrow <= wide).all()


def make_opd_group(*members: tuple[float | None, str, Annotations]) -> Group:
    full_group = masked_group([score for score, _, _ in members], *(mask for _, mask, _ in members))
    return annotated(full_group, *(annotations for _, _, annotations in members))


def test_opd_compares_with_the_old_policy_if_computed_and_else_with_the_behaviour_policy():
    teacher = floats(NAN, NAN, NAN, NAN, -0.5, -3, -INF)
    old = floats(INF, INF, INF, INF, -2, -2, -2)
    # the fakes sample every token with log-prob -1; the last token is not in the loss mask
    full_group = make_opd_group(
        (0, "....xx.", Annotations(teacher=teacher)),
        (0, "....xx.", Annotations(teacher=teacher, old=old)),
        (None, "....xx.", Annotations(teacher=teacher)),
    )
    actual = to_lists(opd([full_group], OpdAdvantage()))[0]
    assert actual == [[0] * 4 + [0.5, -2, 0], [0] * 4 + [1.5, -1, 0], [0] * 7]
    limited = to_lists(opd([full_group], OpdAdvantage(limit=1)))[0]
    assert limited[0] == [0] * 4 + [0.5, -1, 0]


@exhaustive
@given(
    masks=st.lists(MASKS, min_size=1, max_size=3), seed=SEEDS, limit=st.sampled_from([0.3, 20.0])
)
def test_opd_of_groups_agrees_with_plain_loops(masks: list[list[bool]], seed: int, limit: float):
    texts = ["...." + "".join("x" if inside else "." for inside in mask) for mask in masks]
    annotations = [
        Annotations(
            teacher=draw_numbers(seed + n, len(text)),
            old=draw_numbers(seed - n - 1 + 10**6, len(text)),
        )
        for n, text in enumerate(texts)
    ]
    full_group = make_opd_group(
        *((1.0, text, a) for text, a in zip(texts, annotations, strict=True))
    )
    for text, a, actual in zip(
        texts, annotations, to_lists(opd([full_group], OpdAdvantage(limit=limit)))[0], strict=True
    ):
        assert a.teacher is not None
        assert a.old is not None
        for t, letter in enumerate(text):
            gap = min(max(float(a.teacher[t] - a.old[t]), -limit), limit)
            assert actual[t] == pytest.approx(gap if letter == "x" else 0, abs=1e-12)


@pytest.mark.parametrize(
    ("mask", "cut"),
    [("....", False), ("....x", False), ("....xx", True)],
    ids=["empty mask", "one token", "truncated"],
)
def test_opd_depends_on_tokens_and_on_neither_score_nor_group(mask: str, cut: bool):
    annotations = Annotations(teacher=np.full(len(mask), -2.0))
    full_group = make_opd_group((7, mask, annotations))
    stop = StopReason.LENGTH if cut else StopReason.STOP
    [member] = full_group.members
    full_group = replace(
        full_group, members=(replace(member, sample=replace(member.sample, stop=stop)),)
    )
    [[actual]] = to_lists(opd([full_group], OpdAdvantage()))
    assert actual == [-1.0 if letter == "x" else 0.0 for letter in mask]


@pytest.mark.parametrize(("name", "what"), [("gae", "values of a critic"), ("opd", "of a teacher")])
def test_missing_model_outputs_are_named(name: str, what: str):
    advantage = resolve_advantage(AlgorithmConfig.model_validate({"advantage": name}))
    with pytest.raises(ConfigError, match=rf"{what}, and sample g0.0 has none"):
        advantage([group([1])])
    short = Annotations(values=np.zeros(3), teacher=np.zeros(3))
    with pytest.raises(ConfigError, match=r"has 5 tokens, and the values have the shape \(3,\)"):
        advantage([annotated(group([1]), short)])


@pytest.mark.parametrize(
    ("part", "option", "value"),
    [
        ("reinforce", "gamma", 0.5),
        ("reinforce", "whiten", True),
        ("reinforce++", "gamma", 0.5),
        ("reinforce++", "epsilon", 5.0),
        ("gae", "gamma", 0.5),
        ("gae", "lam", 0.0),
        ("gae", "bootstrap_truncated", True),
        ("gae", "whiten", False),
        ("gae", "epsilon", 5.0),
        ("opd", "limit", 0.5),
    ],
)
def test_every_option_can_be_set_in_a_recipe_and_has_an_effect(
    part: str, option: str, value: object
):
    full_group = make_gae_group((1, "....xxx", [0.3] * 7), (0, "....x", [0.5] * 5), cut="xx")
    annotations = [
        replace(m.annotations, teacher=np.zeros(m.sample.length)) for m in full_group.members
    ]
    batch = [annotated(full_group, *annotations)]

    def compute_advantages(**options: object) -> list[Any]:
        config = AlgorithmConfig.model_validate({"advantage": {"name": part, **options}})
        return to_lists(resolve_advantage(config)(batch))

    assert compute_advantages() != compute_advantages(**{option: value})
