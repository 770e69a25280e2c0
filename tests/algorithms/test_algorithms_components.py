"""Several algorithms in one batch: each token is trained by its own algorithm only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.losses import LossInputs
from rollick.algorithms.objective import Loss, build_objective
from rollick.config.names import NAMES
from rollick.config.schema.algorithm import AlgorithmConfig

LENGTHS = (4, 1, 6, 3, 5, 2)
PAIRS = (0, 0, 1, 1, 2, 2)
MIXTURES: dict[str, list[dict[str, Any]]] = {
    "ppo and reinforce": [{"loss": "ppo"}, {"loss": "reinforce"}],
    "sequences and turns": [{"loss": "gspo"}, {"loss": "segment"}, {"loss": "gmpo"}],
    "scores and imitation": [{"loss": "topr"}, {"loss": "raft++"}, {"loss": "sft"}],
    "pairs beside a policy": [{"loss": "dpo"}, {"loss": "dppo_tv"}],
    "a teacher beside a policy": [{"loss": "ppo"}, {"loss": "distillation"}],
    "kl and entropy of one only": [
        {"loss": "ppo", "kl": {"coefficient": 0.1, "form": "k2"}},
        {"loss": "cispo", "entropy": 0.1},
        {"loss": "cispo"},
    ],
    "two old policies": [
        {"loss": "ppo", "correction": "none"},
        {"loss": "ppo", "correction": "bypass"},
        {"loss": "ppo", "correction": {"name": "decoupled", "old": "interpolated"}},
    ],
}


def parse_mixture(mixture: str) -> list[AlgorithmConfig]:
    return [AlgorithmConfig.model_validate(parts) for parts in MIXTURES[mixture]]


def make_random_inputs(seed: int, components: Sequence[int]) -> LossInputs:
    """Six samples in three pairs; `components` has one number for each pair."""
    rng = torch.Generator().manual_seed(seed)
    tokens = sum(LENGTHS)

    def rand(scale: float, *shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=rng, dtype=torch.float64) * scale

    lengths = torch.tensor(LENGTHS)
    sequence_T = torch.arange(len(LENGTHS)).repeat_interleave(lengths)
    pair_T = torch.tensor(PAIRS)[sequence_T]
    behaviour_T = -rand(1).abs() - 0.1
    top_logprobs = [torch.log_softmax(rand(1, 8), -1)[:, :3] for _ in range(2)]
    return LossInputs(
        logprobs_T=(behaviour_T + rand(0.4)).requires_grad_(),
        old_T=behaviour_T + rand(0.3),
        behaviour_T=behaviour_T,
        advantages_T=torch.where(sequence_T % 2 == 0, 1.0, -1.0).double(),
        weights_T=rand(1).abs(),
        sequence_T=sequence_T,
        reference_T=behaviour_T + rand(0.3),
        turn_T=2 * sequence_T + (torch.arange(tokens) % 3 == 0).long().cummax(0).values,
        scores_T=rand(1)[sequence_T],
        pair_T=pair_T,
        age_T=torch.arange(tokens) % 3,
        teacher_TK=top_logprobs[0],
        student_TK=top_logprobs[1].requires_grad_(),
        entropy_T=rand(1).abs().requires_grad_(),
        component_T=torch.tensor(components, dtype=torch.int64)[pair_T],
        kl_weights_T=rand(1).abs(),
        entropy_weights_T=rand(1).abs(),
    )


def compute_gradients(loss: Loss, inputs: LossInputs) -> torch.Tensor:
    assert inputs.entropy_T is not None
    assert inputs.student_TK is not None
    leaves = (inputs.logprobs_T, inputs.entropy_T, inputs.student_TK)
    actual = torch.autograd.grad(loss.total, leaves, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in actual])


@pytest.mark.parametrize("components", [(0, 1, 2), (2, 0, 1), (1, 1, 0), (2, 2, 2)])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_mixed_batch_is_the_sum_of_what_each_algorithm_makes_of_its_own_tokens(
    mixture: str, components: tuple[int, ...]
):
    algorithms = parse_mixture(mixture)
    components = tuple(number % len(algorithms) for number in components)
    inputs = make_random_inputs(1, components)
    mixed = build_objective(algorithms)(inputs)
    assert inputs.component_T is not None
    total, gradient, sums = 0.0, torch.zeros(()), dict[str, float]()
    for number in set(components):
        own_loss = build_objective(algorithms[number])(inputs.where(inputs.component_T == number))
        total += own_loss.total.item()
        gradient = gradient + compute_gradients(own_loss, inputs)
        for name, value in own_loss.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    assert mixed.total.item() == pytest.approx(total, rel=1e-12)
    assert torch.allclose(compute_gradients(mixed, inputs), gradient, rtol=1e-12, atol=1e-14)
    actual = {name: value.item() for name, value in mixed.sums.items()}
    assert actual == pytest.approx(sums, rel=1e-12)


def test_two_components_by_hand():
    # reinforce on the first pair: -A log pi; sft on the others: -log pi
    algorithms = [AlgorithmConfig.model_validate({"loss": name}) for name in ("reinforce", "sft")]
    inputs = make_random_inputs(2, (0, 1, 1))
    [gradient] = torch.autograd.grad(build_objective(algorithms)(inputs).total, inputs.logprobs_T)
    factor_T = torch.where(torch.arange(sum(LENGTHS)) < 5, inputs.advantages_T, 1.0)
    assert gradient.tolist() == pytest.approx((-inputs.weights_T * factor_T).tolist())


def test_without_components_everything_goes_to_the_first_algorithm():
    algorithms = parse_mixture("ppo and reinforce")
    inputs = replace(make_random_inputs(3, (0, 1, 1)), component_T=None)
    first, both = build_objective(algorithms[0])(inputs), build_objective(algorithms)(inputs)
    assert first.total.item() == both.total.item()


def test_a_single_algorithm_may_come_alone_or_as_a_list_of_one():
    [only, _] = parse_mixture("ppo and reinforce")
    inputs = make_random_inputs(4, (0, 0, 0))
    assert (
        build_objective(only)(inputs).total.item() == build_objective([only])(inputs).total.item()
    )


@pytest.mark.parametrize("mixture", MIXTURES)
def test_no_tokens_give_a_loss_of_zero(mixture: str):
    inputs = make_random_inputs(5, (0, 0, 0))
    empty = inputs.where(torch.zeros(sum(LENGTHS), dtype=torch.bool))
    loss = build_objective(parse_mixture(mixture))(empty)
    assert loss.total.item() == 0
    assert all(total.item() == 0 for total in loss.sums.values())


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    names=st.lists(st.sampled_from(sorted(NAMES["losses"])), min_size=3, max_size=3),
    seed=st.integers(0, 100),
)
def test_the_gradient_of_a_token_does_not_depend_on_the_algorithm_of_others(
    names: list[str], seed: int
):
    algorithms = [AlgorithmConfig.model_validate({"loss": name}) for name in names]
    inputs = make_random_inputs(seed, (0, 1, 2))
    assert inputs.student_TK is not None
    for other in ("reinforce", "sft"):
        changed = [algorithms[0], *[AlgorithmConfig.model_validate({"loss": other})] * 2]
        plain, swapped = (
            torch.autograd.grad(
                build_objective(algorithm_list)(inputs).total,
                (inputs.logprobs_T, inputs.student_TK),
                allow_unused=True,
                materialize_grads=True,
            )
            for algorithm_list in (algorithms, changed)
        )
        for first, second in zip(plain, swapped, strict=True):
            assert torch.equal(first[:5], second[:5])
