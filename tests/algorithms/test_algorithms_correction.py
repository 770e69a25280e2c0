"""Every correction: by hand, against plain loops, degenerate cases, properties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.correction import interpolated_old
from rollick.algorithms.losses import LossInputs
from rollick.algorithms.objective import build_objective
from rollick.config.names import NAMES, resolve
from rollick.config.schema import AlgorithmConfig

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in NAMES["corrections"]},
    "sequence_tis ten": {"cap": 10},
    "icepop narrow": {"low": 0.8, "high": 1.2},
    "geometric wide": {"low": 0.9, "high": 1.1},
    "k3 wide": {"max_kl": 0.05},
    "opsm narrow": {"delta": 0.01},
}


def weights(variant: str, at: LossInputs) -> torch.Tensor:
    options = options_of(variant)
    return resolve("corrections", options.name)(at, options)


def options_of(variant: str) -> Any:
    part = {"name": variant.split()[0], **VARIANTS[variant]}
    return AlgorithmConfig.model_validate({"loss": "ppo", "correction": part}).correction


def inputs(
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


def random_inputs(seed: int, *, sequences: Sequence[int] = (5, 1, 9)) -> LossInputs:
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(sequences)

    def rand(scale: float) -> torch.Tensor:
        return torch.randn(tokens, generator=draw, dtype=torch.float64) * scale

    behaviour_T = -rand(1).abs() - 0.5
    return LossInputs(
        logprobs_T=(behaviour_T + rand(0.3)).requires_grad_(),
        old_T=behaviour_T + rand(0.2),
        behaviour_T=behaviour_T,
        advantages_T=rand(1),
        weights_T=torch.ones(tokens, dtype=torch.float64),
        sequence_T=torch.tensor([b for b, n in enumerate(sequences) for _ in range(n)]).long(),
    )


def by_loops(o: Any, at: LossInputs) -> list[float]:
    now, old, mu = (x.tolist() for x in (at.logprobs_T, at.old_T, at.behaviour_T))
    sequence, advantages = at.sequence_T.tolist(), at.advantages_T.tolist()
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
                fall = sum(old[u] - now[u] for u in same) / len(same)
                value = 0.0 if advantages[t] < 0 and fall > o.delta else 1.0
        result.append(value)
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_weight_is_the_formula_in_plain_loops(variant: str, seed: int):
    at = random_inputs(seed)
    assert weights(variant, at).tolist() == pytest.approx(by_loops(options_of(variant), at))


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
    at = inputs([0.5, 0.4, 0.1, 0.3], [0.25, 0.6, 0.9, 0.3], sequence=[0, 0, 1, 1])
    assert weights(variant, at).tolist() == pytest.approx(expected)


def test_geometric_lets_opposite_errors_cancel_and_k3_does_not():
    at = inputs([0.4, 0.2], [0.2, 0.4])
    assert weights("geometric", at).tolist() == [1, 1]
    assert weights("k3", at).tolist() == [0, 0]


def test_opsm_drops_bad_samples_that_the_policy_left_behind():
    # samples: bad and left, bad and kept, good and left
    at = inputs(
        [0.5] * 3, [0.5] * 3, now=[0.2, 0.5, 0.2], advantage=[-1, -1, 1], sequence=[0, 1, 2]
    )
    assert weights("opsm", at).tolist() == [0, 1, 1]


def test_opsm_in_a_recipe_looks_at_the_behaviour_and_not_at_the_old_policy():
    """Against pi_old, which is pi at the first optimizer step on a batch, it would do nothing."""
    at = inputs([0.9], [0.5], now=[0.5], advantage=[-1])
    loss = build_objective(AlgorithmConfig.model_validate({"correction": "opsm"}))(at)
    assert loss.sums["mask_share_down"].item() == 1
    assert loss.loss_T.tolist() == [0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_policies_are_weighed_by_one(variant: str):
    assert weights(variant, inputs([0.3, 0.7], [0.3, 0.7])).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_tokens_have_no_weights(variant: str):
    assert weights(variant, random_inputs(0, sequences=())).shape == (0,)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_carry_no_gradient_and_are_finite_however_far_apart(variant: str):
    far = [0.0, -200.0, -1e4]
    grid = torch.tensor([(pi, mu, old) for pi in far for mu in far for old in far])
    at = LossInputs(
        logprobs_T=grid[:, 0].clone().requires_grad_(),
        behaviour_T=grid[:, 1],
        old_T=grid[:, 2].clone().requires_grad_(),
        advantages_T=-torch.ones(27),
        weights_T=torch.ones(27),
        sequence_T=torch.arange(27) // 3,
    )
    result = weights(variant, at)
    assert torch.isfinite(result).all()
    assert (result >= 0).all()
    assert not result.requires_grad
    assert result.dtype == torch.float32


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), low=st.floats(0.1, 10), high=st.floats(0.1, 10))
def test_a_larger_cap_never_lowers_a_weight(seed: int, low: float, high: float):
    at, (low, high) = random_inputs(seed), sorted((low, high))
    for name in ("token_tis", "sequence_tis", "decoupled"):
        function = resolve("corrections", name)
        kind = type(options_of(name))
        small, large = function(at, kind(cap=low)), function(at, kind(cap=high))
        assert (small <= large + 1e-12).all()
        assert (large <= high + 1e-9).all()


@pytest.mark.parametrize("name", ["geometric", "k3", "icepop", "opsm"])
def test_a_dropped_token_does_not_train(name: str):
    at = inputs([0.9, 0.3], [0.1, 0.3], now=[0.1, 0.3], advantage=[-1, -1], sequence=[0, 1])
    parts = AlgorithmConfig.model_validate({"loss": "ppo", "correction": name})
    loss = build_objective(parts)(at)
    [gradient] = torch.autograd.grad(loss.loss_T.sum(), at.logprobs_T)
    assert gradient.tolist() == pytest.approx([0, 1])
    assert loss.sums["mask_share"].item() == 1


def test_a_cheap_old_policy_lies_between_behaviour_and_now():
    mu, now = torch.tensor([-4.0, -4.0, -4.0, -4.0]), torch.tensor([-2.0] * 4, requires_grad=True)
    old = interpolated_old(mu, now, torch.tensor([0, 1, 2, 4]))
    assert old.tolist() == [-2.0, -4.0, -3.0, -2.5]
    assert not old.requires_grad


@pytest.mark.parametrize("name", sorted(NAMES["corrections"]))
def test_every_correction_is_reachable_by_name_and_says_its_options(name: str):
    part = AlgorithmConfig.model_validate({"correction": name}).correction
    assert part.name == name
    assert all(field.description for field in type(part).model_fields.values())


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
        objective = build_objective(parts)
        results.append([x for s in range(4) for x in objective(random_inputs(s)).loss_T.tolist()])
    assert results[0] != results[1]
