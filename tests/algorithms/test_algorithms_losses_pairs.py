"""Losses of pairs: a chosen and a rejected answer, over the tokens of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.algorithms.objective import build_objective
from rollick.config.names import resolve
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.losses import PAIRWISE
from rollick.errors import ConfigError
from rollick.observe.metric_table import METRICS

Answer = tuple[int, float, Sequence[tuple[float, float]]]
"""Number of the pair, 1 if chosen and -1 if rejected, (log pi, log pi_ref) of each token."""

every_kind = pytest.mark.parametrize("kind", sorted(PAIRWISE))


def make_algorithm(kind: str, **options: float) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"loss": {"name": kind, **options}, "aggregation": "prompt_mean"}
    )


def compute_loss(kind: str, inputs: LossInputs, **options: float) -> TokenLoss:
    return resolve("losses", kind)(inputs, make_algorithm(kind, **options).loss)


def make_inputs(*answers: Answer) -> LossInputs:
    """The tokens of these answers; their aggregation is the mean over pairs."""
    token_labels = [(n, number, sign) for n, (number, sign, t) in enumerate(answers) for _ in t]
    logs = torch.tensor([pair for _, _, tokens in answers for pair in tokens], dtype=torch.float64)
    now_T, reference_T = logs.reshape(-1, 2).unbind(1)
    pair_T = torch.tensor([number for _, number, _ in token_labels], dtype=torch.int64)
    return LossInputs(
        logprobs_T=now_T.clone().requires_grad_(),
        old_T=torch.zeros_like(now_T),
        behaviour_T=torch.zeros_like(now_T),
        advantages_T=torch.tensor([sign for _, _, sign in token_labels], dtype=torch.float64),
        weights_T=1 / (len(pair_T.unique()) * pair_T.bincount()[pair_T].double()),
        sequence_T=torch.tensor([n for n, _, _ in token_labels], dtype=torch.int64),
        reference_T=reference_T.clone(),
        pair_T=pair_T,
    )


def make_random_inputs(
    seed: int, *, lengths: Sequence[tuple[int, int]] = ((3, 1), (2, 4))
) -> LossInputs:
    """Pairs of answers of these lengths; the rejected one of the second pair comes first."""
    rng = torch.Generator().manual_seed(seed)
    answers: list[Answer] = []
    for number, of_pair in enumerate(lengths):
        both: list[Answer] = []
        for sign, length in zip((1.0, -1.0), of_pair, strict=True):
            logs = -3 * torch.rand(length, 2, generator=rng, dtype=torch.float64)
            both.append((number, sign, [(a, b) for a, b in logs.tolist()]))
        answers += both if number % 2 == 0 else both[::-1]
    return make_inputs(*answers)


def compute_margins(inputs: LossInputs) -> dict[int, float]:
    """By pair: the log-ratio to the reference of the chosen answer minus that of the rejected."""
    assert inputs.reference_T is not None
    assert inputs.pair_T is not None
    actual: dict[int, float] = {}
    streams = (inputs.pair_T, inputs.advantages_T, inputs.logprobs_T, inputs.reference_T)
    for pair, sign, now, reference in zip(*(x.tolist() for x in streams), strict=True):
        actual[pair] = actual.get(pair, 0.0) + (now - reference if sign > 0 else reference - now)
    return actual


def compute_by_loops(kind: str, margin: float, beta: float, e: float) -> float:
    if kind == "dpo":
        right = math.log(1 + math.exp(-beta * margin))
        wrong = math.log(1 + math.exp(beta * margin))
    else:
        right, wrong = (margin - 1 / (2 * beta)) ** 2, (margin + 1 / (2 * beta)) ** 2
    return (1 - e) * right + e * wrong


def test_dpo_by_hand():
    # gains 0.5 + 0.5 of the chosen answer and -1 of the rejected one: the margin is 2
    inputs = make_inputs((0, 1, [(-1, -1.5), (-2, -2.5)]), (0, -1, [(-4, -3)]))
    loss = compute_loss("dpo", inputs, beta=0.5)
    assert loss.loss_T.tolist() == pytest.approx([math.log(1 + math.exp(-1))] * 3)
    assert loss.sums["margin"].item() == pytest.approx(6)
    assert loss.sums["preference_accuracy"].item() == 3
    total = build_objective(make_algorithm("dpo", beta=0.5))(inputs).total
    [gradient] = torch.autograd.grad(total, inputs.logprobs_T)
    magnitude = 0.5 / (1 + math.exp(1))
    assert gradient.tolist() == pytest.approx([-magnitude, -magnitude, magnitude])


def test_ipo_by_hand():
    inputs = make_inputs((0, 1, [(-1, -3)]), (0, -1, [(-4, -1)]))  # a margin of 5 = 1 / (2 * 0.1)
    assert compute_loss("ipo", inputs, beta=0.1).loss_T.tolist() == pytest.approx([0, 0])
    even = make_inputs((0, 1, [(-1, -1)]), (0, -1, [(-4, -4)]))
    assert compute_loss("ipo", even, beta=0.5).loss_T.tolist() == pytest.approx([1, 1])


def test_a_policy_that_is_its_reference_prefers_neither():
    inputs = make_inputs((0, 1, [(-1, -1)] * 3), (0, -1, [(-2, -2)]))
    loss = compute_loss("dpo", inputs)
    assert loss.loss_T.tolist() == pytest.approx([math.log(2)] * 4)
    assert loss.sums["preference_accuracy"].item() == 0


@every_kind
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_each_token_carries_the_loss_of_its_pair(kind: str, smoothing: float, seed: int):
    inputs = make_random_inputs(seed)
    assert inputs.pair_T is not None
    of_pair = compute_margins(inputs)
    expected = [
        compute_by_loops(kind, of_pair[pair], 0.3, smoothing) for pair in inputs.pair_T.tolist()
    ]
    loss = compute_loss(kind, inputs, beta=0.3, label_smoothing=smoothing)
    assert loss.loss_T.tolist() == pytest.approx(expected)


@every_kind
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_objective_is_the_mean_over_pairs_and_its_gradient_is_right(
    kind: str, smoothing: float
):
    inputs = make_random_inputs(3)
    parts = make_algorithm(kind, beta=0.3, label_smoothing=smoothing)
    losses = [
        compute_by_loops(kind, margin, 0.3, smoothing)
        for margin in compute_margins(inputs).values()
    ]
    loss = build_objective(parts)(inputs)
    assert loss.total.item() == pytest.approx(sum(losses) / 2)
    assert set(loss.sums) == {"policy_loss", "preference_accuracy", "margin"}
    assert {f"train/mean/{name}" for name in loss.sums} <= METRICS.keys()

    def value(logprobs_T: torch.Tensor) -> torch.Tensor:
        return build_objective(parts)(replace(inputs, logprobs_T=logprobs_T)).total

    assert torch.autograd.gradcheck(value, (inputs.logprobs_T,))


@every_kind
def test_all_tokens_of_an_answer_have_the_same_gradient_however_long_it_is(kind: str):
    inputs = make_random_inputs(4, lengths=((5, 2),))
    [gradient] = torch.autograd.grad(
        build_objective(make_algorithm(kind))(inputs).total, inputs.logprobs_T
    )
    sign = gradient[0].item()
    assert gradient.tolist() == pytest.approx([sign] * 5 + [-sign] * 2)


@every_kind
def test_pairs_do_not_affect_each_other_and_their_numbers_may_have_gaps(kind: str):
    inputs = make_random_inputs(5)
    assert inputs.pair_T is not None
    full = compute_loss(kind, inputs).loss_T
    for number in (0, 1):
        kept = inputs.pair_T == number
        assert compute_loss(kind, inputs.where(kept)).loss_T.tolist() == pytest.approx(
            full[kept].tolist()
        )
    renumbered = replace(inputs, pair_T=3 * inputs.pair_T + 2)
    assert compute_loss(kind, renumbered).loss_T.tolist() == full.tolist()


@every_kind
def test_an_empty_answer_has_a_log_ratio_of_zero(kind: str):
    inputs = make_inputs((0, 1, [(-1, -3)]))
    expected = compute_by_loops(kind, 2.0, 0.1, 0.0)
    assert compute_loss(kind, inputs).loss_T.tolist() == pytest.approx([expected])


@every_kind
def test_no_pairs_give_nothing(kind: str):
    loss = compute_loss(kind, make_random_inputs(0, lengths=()))
    assert loss.loss_T.shape == (0,)
    assert all(total.item() == 0 for total in loss.sums.values())


@every_kind
@pytest.mark.parametrize("chosen", [0.0, -1e4])
@pytest.mark.parametrize("rejected", [0.0, -1e4])
def test_pairs_with_very_different_log_probs_are_finite(kind: str, chosen: float, rejected: float):
    inputs = make_inputs((0, 1, [(chosen, -1)]), (0, -1, [(rejected, -1)]))
    inputs = replace(inputs, logprobs_T=inputs.logprobs_T.detach().float().requires_grad_())
    loss = compute_loss(kind, inputs)
    [gradient] = torch.autograd.grad(loss.loss_T.sum(), inputs.logprobs_T)
    assert torch.isfinite(loss.loss_T).all()
    assert torch.isfinite(gradient).all()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.floats(-20, 20), st.floats(-20, 20), st.floats(0.01, 2))
def test_dpo_falls_with_the_margin_and_ipo_has_its_minimum_at_its_target(
    first: float, second: float, beta: float
):
    low, high = sorted((first, second))

    def value(kind: str, margin: float) -> float:
        inputs = make_inputs((0, 1, [(margin, 0)]), (0, -1, [(0, 0)]))
        return compute_loss(kind, inputs, beta=beta).loss_T[0].item()

    assert value("dpo", high) <= value("dpo", low)
    target_margin = 1 / (2 * beta)
    assert value("ipo", first) >= value("ipo", target_margin) == pytest.approx(0)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(kind=st.sampled_from(sorted(PAIRWISE)), seed=st.integers(0, 100), e=st.floats(0, 0.49))
def test_swapping_the_labels_smooths_by_the_complementary_share(kind: str, seed: int, e: float):
    inputs = make_random_inputs(seed)
    swapped = replace(inputs, advantages_T=-inputs.advantages_T)
    for plain, other, margin in zip(
        compute_loss(kind, inputs, label_smoothing=e).loss_T.tolist(),
        compute_loss(kind, swapped, label_smoothing=e).loss_T.tolist(),
        (compute_margins(inputs)[pair] for pair in inputs.pair_T.tolist()),  # pyright: ignore[reportOptionalMemberAccess]
        strict=True,
    ):
        assert plain == pytest.approx(compute_by_loops(kind, margin, 0.1, e))
        assert other == pytest.approx(compute_by_loops(kind, margin, 0.1, 1 - e))


@every_kind
@pytest.mark.parametrize("missing", ["pair_T", "reference_T"])
def test_a_loss_of_pairs_reports_what_it_needs(kind: str, missing: str):
    inputs: LossInputs = replace(make_random_inputs(0), **{missing: None})
    with pytest.raises(
        ConfigError, match="needs the pair and the reference log-prob of each token"
    ):
        compute_loss(kind, inputs)


@every_kind
@pytest.mark.parametrize(("option", "value"), [("beta", 0.9), ("label_smoothing", 0.2)])
def test_every_option_can_be_set_in_a_recipe_and_has_an_effect(kind: str, option: str, value: Any):
    inputs = make_random_inputs(6)
    plain, other = (
        build_objective(make_algorithm(kind, **options))(inputs).total.item()
        for options in ({}, {option: value})
    )
    assert plain != other
