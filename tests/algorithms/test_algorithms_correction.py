"""Every correction: by hand, against plain loops, degenerate cases, properties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.correction import interpolated_old
from rollick.algorithms.credit import CreditAssigner
from rollick.algorithms.losses import LossInputs
from rollick.algorithms.objective import build_objective, resolve_correction
from rollick.config.names import NAMES, resolve
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.data.collate import collate
from rollick.errors import ConfigError
from rollick.testing.batches import recipe_of
from rollick.testing.fakes import group

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in NAMES["corrections"]},
    "sequence_tis ten": {"cap": 10},
    "icepop narrow": {"low": 0.8, "high": 1.2},
    "geometric wide": {"low": 0.9, "high": 1.1},
    "k3 wide": {"max_kl": 0.05},
    "opsm narrow": {"delta": 0.01},
}


def compute_weights(variant: str, inputs: LossInputs) -> torch.Tensor:
    options = parse_options(variant)
    return resolve("corrections", options.name)(inputs, options)


def parse_options(variant: str) -> Any:
    part = {"name": variant.split()[0], **VARIANTS[variant]}
    return AlgorithmConfig.model_validate({"loss": "ppo", "correction": part}).correction


def make_inputs(
    mu: Sequence[float],
    old: Sequence[float],
    *,
    now: Sequence[float] | None = None,
    advantage: Sequence[float] | None = None,
    sequence: Sequence[int] | None = None,
) -> LossInputs:
    def logs(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).log()

    return LossInputs(
        logprobs_T=logs(now or old).requires_grad_(),
        old_T=logs(old),
        behaviour_T=logs(mu),
        advantages_T=torch.tensor(advantage or [1.0] * len(mu), dtype=torch.float64),
        weights_T=torch.ones(len(mu), dtype=torch.float64),
        sequence_T=torch.tensor(sequence or [0] * len(mu)),
    )


def make_random_inputs(seed: int, *, sequences: Sequence[int] = (5, 1, 9)) -> LossInputs:
    rng = torch.Generator().manual_seed(seed)
    tokens = sum(sequences)

    def rand(scale: float) -> torch.Tensor:
        return torch.randn(tokens, generator=rng, dtype=torch.float64) * scale

    behaviour_T = -rand(1).abs() - 0.5
    return LossInputs(
        logprobs_T=(behaviour_T + rand(0.3)).requires_grad_(),
        old_T=behaviour_T + rand(0.2),
        behaviour_T=behaviour_T,
        advantages_T=rand(1),
        weights_T=torch.ones(tokens, dtype=torch.float64),
        sequence_T=torch.tensor([b for b, n in enumerate(sequences) for _ in range(n)]).long(),
    )


def compute_by_loops(o: Any, inputs: LossInputs) -> list[float]:
    now, old, mu = (x.tolist() for x in (inputs.logprobs_T, inputs.old_T, inputs.behaviour_T))
    sequence, advantages = inputs.sequence_T.tolist(), inputs.advantages_T.tolist()
    result: list[float] = []
    for t in range(len(now)):
        same = [u for u in range(len(now)) if sequence[u] == sequence[t]]
        w = math.exp(old[t] - mu[t])
        match o.name:
            case "bypass" | "none":
                value = 1.0
            case "token_tis" | "decoupled":
                value = min(w, o.cap)
            case "sequence_tis":
                value = min(math.prod(math.exp(old[u] - mu[u]) for u in same), o.cap)
            case "icepop":
                value = w if o.low <= w <= o.high else 0.0
            case "geometric":
                mean = math.prod(math.exp(old[u] - mu[u]) for u in same) ** (1 / len(same))
                value = 1.0 if o.low <= mean <= o.high else 0.0
            case "k3":
                logs = [old[u] - mu[u] for u in same]
                mean = sum(math.exp(x) - 1 - x for x in logs) / len(logs)
                value = 1.0 if mean <= o.max_kl else 0.0
            case _:
                decrease = sum(mu[u] - old[u] for u in same) / len(same)
                value = 0.0 if advantages[t] < 0 and decrease > o.delta else 1.0
        result.append(value)
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_weight_is_the_formula_in_plain_loops(variant: str, seed: int):
    inputs = make_random_inputs(seed)
    assert compute_weights(variant, inputs).tolist() == pytest.approx(
        compute_by_loops(parse_options(variant), inputs)
    )


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        # two samples; w = 1/2, 3/2 and 9, 1
        ("bypass", [1, 1, 1, 1]),
        ("none", [1, 1, 1, 1]),
        ("token_tis", [0.5, 1.5, 2, 1]),
        ("decoupled", [0.5, 1.5, 2, 1]),
        ("sequence_tis", [0.75, 0.75, 2, 2]),
        ("sequence_tis ten", [0.75, 0.75, 9, 9]),
        ("icepop", [0.5, 1.5, 0, 1]),
        ("icepop narrow", [0, 0, 0, 1]),
        ("geometric", [0, 0, 0, 0]),
        ("k3", [0, 0, 0, 0]),
    ],
)
def test_weights_by_hand(variant: str, expected: list[float]):
    inputs = make_inputs([0.5, 0.4, 0.1, 0.3], [0.25, 0.6, 0.9, 0.3], sequence=[0, 0, 1, 1])
    assert compute_weights(variant, inputs).tolist() == pytest.approx(expected)


def test_geometric_lets_opposite_errors_cancel_and_k3_does_not():
    inputs = make_inputs([0.4, 0.2], [0.2, 0.4])
    assert compute_weights("geometric", inputs).tolist() == [1, 1]
    assert compute_weights("k3", inputs).tolist() == [0, 0]


def test_opsm_drops_bad_samples_that_the_policy_left_behind():
    # samples: A < 0 and less likely now, A < 0 and unchanged, A > 0 and less likely now
    inputs = make_inputs([0.5] * 3, [0.2, 0.5, 0.2], advantage=[-1, -1, 1], sequence=[0, 1, 2])
    assert compute_weights("opsm", inputs).tolist() == [0, 1, 1]


def test_opsm_uses_the_start_of_the_step_and_drops_the_same_in_every_pass():
    inputs = make_inputs([0.9], [0.5], now=[0.9], advantage=[-1])
    assert compute_weights("opsm", inputs).tolist() == [0]
    assert AlgorithmConfig.model_validate({"correction": "opsm"}).needs_old_logprobs


def test_the_loss_under_opsm_is_on_the_behaviour_policy():
    inputs = make_inputs([0.4], [0.1], now=[0.44])
    parts = AlgorithmConfig.model_validate({"loss": "ppo", "correction": "opsm"})
    assert build_objective(parts)(inputs).total.item() == pytest.approx(-1.1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_policies_are_weighed_by_one(variant: str):
    assert compute_weights(variant, make_inputs([0.3, 0.7], [0.3, 0.7])).tolist() == pytest.approx(
        [1, 1]
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_tokens_have_no_weights(variant: str):
    assert compute_weights(variant, make_random_inputs(0, sequences=())).shape == (0,)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_have_no_gradient_and_are_finite_for_any_mismatch(variant: str):
    extremes = [0.0, -200.0, -1e4]
    grid = torch.tensor([(pi, mu, old) for pi in extremes for mu in extremes for old in extremes])
    inputs = LossInputs(
        logprobs_T=grid[:, 0].clone().requires_grad_(),
        behaviour_T=grid[:, 1],
        old_T=grid[:, 2].clone().requires_grad_(),
        advantages_T=-torch.ones(27),
        weights_T=torch.ones(27),
        sequence_T=torch.arange(27) // 3,
    )
    result = compute_weights(variant, inputs)
    assert torch.isfinite(result).all()
    assert (result >= 0).all()
    assert not result.requires_grad
    assert result.dtype == torch.float32


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), low=st.floats(0.1, 10), high=st.floats(0.1, 10))
def test_a_larger_cap_never_lowers_a_weight(seed: int, low: float, high: float):
    inputs, (low, high) = make_random_inputs(seed), sorted((low, high))
    for name in ("token_tis", "sequence_tis", "decoupled"):
        function = resolve("corrections", name)
        options_type = type(parse_options(name))
        small, large = (
            function(inputs, options_type(cap=low)),
            function(inputs, options_type(cap=high)),
        )
        assert (small <= large + 1e-12).all()
        assert (large <= high + 1e-9).all()


def assign_credit(correction: str, mu: Sequence[float], old: Sequence[float]) -> tuple[Any, Any]:
    """Assign credit to a group of one-token samples with the scores 1, 0, 1, 0, …"""
    parts = {"loss": "ppo", "correction": correction}
    recipe = recipe_of(Path("none"), algorithm=parts, data=make_toy_domain())
    full_group = group([float(index % 2 == 0) for index in range(len(mu))])
    logs = [np.full(5, math.log(p), np.float32) for p in mu]
    members = tuple(
        replace(member, sample=replace(member.sample, logprobs=logprobs))
        for member, logprobs in zip(full_group.members, logs, strict=True)
    )
    full_group = replace(full_group, members=members)
    batch = collate([full_group])
    # The log-probs of the four prompt tokens are unused and may have any value.
    old_N = np.where(batch.loss_mask_N, np.repeat(np.log(old), batch.lengths_B), -np.inf)
    credit = CreditAssigner(recipe, base=None)
    return credit.assign([full_group], replace(batch, old_logprobs_N=old_N))


def make_toy_domain() -> dict[str, Any]:
    return {"domains": {"toy": {"source": "none.jsonl"}}}


@pytest.mark.parametrize("name", ["geometric", "k3", "icepop", "opsm"])
def test_a_dropped_token_enters_neither_the_sum_nor_the_denominator(name: str):
    # the second sample has A < 0 and is less likely now; the other two are on-policy
    batch, means = assign_credit(name, [0.3, 0.9, 0.3], [0.3, 0.1, 0.3])
    trained = batch.weights_N[batch.loss_mask_N]
    assert trained.tolist() == pytest.approx([1 / 2, 0, 1 / 2])
    assert batch.weights_N[~batch.loss_mask_N].tolist() == [0] * 12
    assert means["dropped_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["geometric", "k3", "icepop"])
def test_if_everything_is_dropped_nothing_is_trained(name: str):
    batch, means = assign_credit(name, [0.9, 0.9], [0.1, 0.1])
    assert batch.weights_N.tolist() == [0] * 10
    assert means["dropped_share"] == 1


def test_dropped_tokens_are_counted_by_the_sign_of_their_advantage():
    # old/mu is 9, 0.1, 9, 1: the first three are outside of icepop's [0.5, 5]
    _, means = assign_credit("icepop", [0.1, 0.5, 0.1, 0.5], [0.9, 0.05, 0.9, 0.5])
    shares = [means[f"dropped_share{sign}"] for sign in ("", "_positive", "_negative")]
    assert shares == pytest.approx([3 / 4, 2 / 4, 1 / 4])


def test_the_mean_weight_and_the_mismatch_are_reported():
    _, means = assign_credit("token_tis", [0.2, 0.5], [0.3, 0.5])
    assert means["correction_weight"] == pytest.approx((1.5 + 1) / 2)
    assert means["engine_kl"] == pytest.approx((1.5 - 1 - math.log(1.5)) / 2)


def test_a_cheap_old_policy_lies_between_behaviour_and_now():
    mu, now = torch.tensor([-4.0, -4.0, -4.0, -4.0]), torch.tensor([-2.0] * 4, requires_grad=True)
    old = interpolated_old(mu, now, torch.tensor([0, 1, 2, 4]))
    assert old.tolist() == [-2.0, -4.0, -3.0, -2.5]
    assert not old.requires_grad


def make_interpolated_config(cap: float = 2.0) -> AlgorithmConfig:
    part = {"name": "decoupled", "old": "interpolated", "cap": cap}
    return AlgorithmConfig.model_validate({"loss": "ppo", "correction": part})


def make_aged_inputs(seed: int) -> LossInputs:
    inputs = make_random_inputs(seed)
    return replace(inputs, age_T=torch.arange(len(inputs.logprobs_T)) % 4)


def test_the_interpolated_decoupled_loss_by_hand():
    # age 2: log pi_old = (log 0.2 + log 0.45) / 2 = log 0.3; w = 1.5, r = 1.5 clipped to 1.2
    inputs = replace(make_inputs([0.2], [0.9], now=[0.45]), age_T=torch.tensor([2]))
    loss = build_objective(make_interpolated_config())(inputs)
    assert loss.total.item() == pytest.approx(-1.5 * 1.2)
    assert build_objective(make_interpolated_config(cap=1.25))(
        inputs
    ).total.item() == pytest.approx(-1.25 * 1.2)


@pytest.mark.parametrize("seed", range(3))
def test_the_interpolated_decoupled_loss_in_plain_loops(seed: int):
    inputs = make_aged_inputs(seed)
    assert inputs.age_T is not None
    total = 0.0
    streams = (inputs.logprobs_T, inputs.behaviour_T, inputs.advantages_T, inputs.age_T)
    for now, mu, a, age in zip(*(x.tolist() for x in streams), strict=True):
        old = mu / age + (1 - 1 / age) * now if age else now
        r = math.exp(now - old)
        surrogate = min(r * a, min(max(r, 0.8), 1.2) * a)
        total -= min(math.exp(old - mu), 2) * (max(surrogate, 3 * a) if a < 0 else surrogate)
    assert build_objective(make_interpolated_config())(inputs).total.item() == pytest.approx(total)


def test_the_interpolated_old_policy_and_its_weight_are_held_fixed_in_the_gradient():
    inputs = make_aged_inputs(4)
    assert inputs.age_T is not None
    old_T = interpolated_old(inputs.behaviour_T, inputs.logprobs_T, inputs.age_T)
    fixed = replace(inputs, old_T=old_T)
    decoupled = AlgorithmConfig.model_validate({"loss": "ppo", "correction": "decoupled"})
    weights_T = resolve_correction(decoupled)(fixed)
    totals = (
        build_objective(make_interpolated_config())(inputs).total,
        build_objective(decoupled)(replace(fixed, weights_T=weights_T)).total,
    )
    actual, expected = (torch.autograd.grad(total, inputs.logprobs_T)[0] for total in totals)
    assert actual.tolist() == pytest.approx(expected.tolist(), abs=1e-14)

    def value(logprobs_T: torch.Tensor) -> torch.Tensor:
        moved = replace(fixed, logprobs_T=logprobs_T, weights_T=weights_T)
        return build_objective(decoupled)(moved).total

    assert torch.autograd.gradcheck(value, (inputs.logprobs_T,))


def test_an_old_policy_cannot_be_interpolated_without_the_age_of_tokens():
    with pytest.raises(ConfigError, match="needs the age of each token"):
        build_objective(make_interpolated_config())(make_random_inputs(0))


@pytest.mark.parametrize("name", sorted(NAMES["corrections"]))
def test_every_correction_is_reachable_by_name_and_describes_its_options(name: str):
    part = AlgorithmConfig.model_validate({"correction": name}).correction
    assert part.name == name
    options = {key: field for key, field in type(part).model_fields.items() if key != "name"}
    assert all(field.description for field in options.values())


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("token_tis", "cap", (1.05, 2)),
        ("sequence_tis", "cap", (1.05, 2)),
        ("decoupled", "cap", (1.05, 2)),
        ("icepop", "low", (0.5, 0.99)),
        ("icepop", "high", (1.01, 5)),
        ("geometric", "low", (0.5, 0.999)),
        ("geometric", "high", (1.001, 2)),
        ("k3", "max_kl", (0.001, 1)),
        ("opsm", "delta", (0.001, 1)),
    ],
)
def test_every_option_can_be_set_in_a_recipe_and_has_an_effect(
    name: str, option: str, values: tuple[float, float]
):
    results: list[list[float]] = []
    for value in values:
        part = {"name": name, option: value}
        parts = AlgorithmConfig.model_validate({"loss": "ppo", "correction": part})
        correct = resolve_correction(parts)
        results.append([x for s in range(4) for x in correct(make_random_inputs(s)).tolist()])
    assert results[0] != results[1]
