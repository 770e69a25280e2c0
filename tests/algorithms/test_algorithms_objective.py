"""Losses, and the objective that is built of them: value, gradient, split invariance, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollick.algorithms.losses import LossInputs, TokenLoss, dppo_tv, ppo, sft
from rollick.algorithms.objective import (
    METRICS,
    build_objective,
    resolve_aggregation,
)
from rollick.config.losses import DppoTvLoss, PpoLoss, SftLoss
from rollick.config.names import NAMES
from rollick.config.schema import AlgorithmConfig
from rollick.errors import ConfigError

MIXTURES: dict[str, dict[str, Any]] = {
    "dppo_tv": {"loss": "dppo_tv"},
    "dppo_tv with k3": {"loss": "dppo_tv", "kl": {"coefficient": 0.1, "form": "k3"}},
    "ppo bypass": {"loss": "ppo"},
    "ppo none": {"loss": "ppo", "correction": "none"},
    "ppo token_tis k2": {
        "loss": {"name": "ppo", "clip_high": 0.28},
        "correction": "token_tis",
        "kl": {"coefficient": 0.5, "form": "k2"},
    },
    "ppo without dual clip": {"loss": {"name": "ppo", "dual_clip": 0}},
    "sft": {"loss": "sft"},
}


def algorithm(**parts: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(parts)


def inputs(
    pi: list[float],
    *,
    mu: list[float] | None = None,
    old: list[float] | None = None,
    advantage: list[float] | None = None,
    reference: list[float] | None = None,
) -> LossInputs:
    """Tokens with these probabilities; the gradient is taken with respect to their logs."""

    def logs(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).log()

    behaviour_T = logs(mu or pi)
    return LossInputs(
        logprobs_T=logs(pi).requires_grad_(),
        old_T=logs(old) if old else behaviour_T,
        behaviour_T=behaviour_T,
        advantages_T=torch.tensor(advantage or [1.0] * len(pi), dtype=torch.float64),
        weights_T=torch.ones(len(pi), dtype=torch.float64),
        sequence_T=torch.zeros(len(pi), dtype=torch.int64),
        reference_T=logs(reference) if reference else None,
    )


def random_inputs(seed: int, tokens: int) -> LossInputs:
    """Log-probs that disagree enough for every branch of every loss to occur."""
    draw = torch.Generator().manual_seed(seed)

    def rand(scale: float) -> torch.Tensor:
        return torch.randn(tokens, generator=draw, dtype=torch.float64) * scale

    behaviour_T = -rand(1).abs() - 0.1
    return LossInputs(
        logprobs_T=(behaviour_T + rand(0.7)).clamp(max=-0.01).requires_grad_(),
        old_T=(behaviour_T + rand(0.4)).clamp(max=-0.01),
        behaviour_T=behaviour_T,
        advantages_T=rand(1),
        weights_T=torch.rand(tokens, generator=draw, dtype=torch.float64),
        sequence_T=torch.zeros(tokens, dtype=torch.int64),
        reference_T=(behaviour_T + rand(0.5)).clamp(max=-0.01),
    )


def gradient_of(loss: TokenLoss, at: LossInputs) -> list[float]:
    [gradient] = torch.autograd.grad(loss.loss_T.sum(), at.logprobs_T)
    return gradient.tolist()


def test_dppo_tv_trains_on_tokens_that_have_not_left_the_trust_region():
    # moved by +0.3, +0.1, -0.3, -0.1 with delta 0.2: a token is cut if it went where A pushes it
    at = inputs([0.8, 0.6, 0.2, 0.4], mu=[0.5] * 4, advantage=[1, 1, -1, -1])
    loss = dppo_tv(at, DppoTvLoss(delta=0.2))
    assert gradient_of(loss, at) == pytest.approx([0, -0.6 / 0.5, 0, 0.4 / 0.5])
    assert loss.loss_T.tolist() == pytest.approx([0, -1.2 * math.log(0.6), 0, 0.8 * math.log(0.4)])
    assert loss.sums["clip_share"].item() == 2


def test_dppo_tv_keeps_tokens_that_come_back_to_the_trust_region():
    at = inputs([0.8, 0.2], mu=[0.5, 0.5], advantage=[-1, 1])
    loss = dppo_tv(at, DppoTvLoss(delta=0.2))
    assert gradient_of(loss, at) == pytest.approx([1.6, -0.4])
    assert loss.sums["clip_share"].item() == 0


def test_dppo_tv_truncates_the_importance_ratio():
    at = inputs([0.1], mu=[0.001])
    assert gradient_of(dppo_tv(at, DppoTvLoss(max_ratio=20)), at) == pytest.approx([-20])


def test_ppo_stops_the_gradient_beyond_the_clip_and_counts_by_sign():
    # ratios 1.6, 1.1, 0.5, 0.9
    at = inputs([0.8, 0.55, 0.25, 0.45], old=[0.5] * 4, advantage=[1, 1, -1, -1])
    loss = ppo(at, PpoLoss())
    assert gradient_of(loss, at) == pytest.approx([0, -1.1, 0, 0.9])
    assert loss.loss_T.tolist() == pytest.approx([-1.2, -1.1, 0.8, 0.9])
    counts = {name: total.item() for name, total in loss.sums.items()}
    assert counts == {"clip_share": 2, "clip_share_up": 1, "clip_share_down": 1}


def test_ppo_clips_higher_where_asked():
    at = inputs([0.625], old=[0.5])
    assert gradient_of(ppo(at, PpoLoss(clip_high=0.28)), at) == pytest.approx([-1.25])
    assert gradient_of(ppo(at, PpoLoss(clip_high=0.2)), at) == [0]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    at = inputs([0.8], old=[0.1], advantage=[-1])
    assert ppo(at, PpoLoss(dual_clip=3)).loss_T.tolist() == pytest.approx([3])
    assert gradient_of(ppo(at, PpoLoss(dual_clip=3)), at) == [0]
    assert ppo(at, PpoLoss(dual_clip=0)).loss_T.tolist() == pytest.approx([8])
    assert gradient_of(ppo(at, PpoLoss(dual_clip=0)), at) == pytest.approx([8])


@pytest.mark.parametrize("name", ["dppo_tv", "ppo"])
def test_a_token_without_advantage_is_never_counted_as_clipped(name: str):
    at = inputs([0.9, 0.1], mu=[0.5, 0.5], advantage=[0, 0])
    loss = build_objective(algorithm(loss=name))(at)
    assert loss.sums["clip_share"].item() == 0
    assert gradient_of(loss, at) == [0, 0]


def test_sft_is_the_negative_log_likelihood():
    at = inputs([0.5, 0.25])
    loss = sft(at, SftLoss())
    assert loss.loss_T.tolist() == pytest.approx([math.log(2), math.log(4)])
    assert gradient_of(loss, at) == [-1, -1]


@pytest.mark.parametrize("name", ["dppo_tv", "ppo"])
def test_on_policy_every_policy_loss_has_the_gradient_of_reinforce(name: str):
    at = inputs([0.3, 0.9], advantage=[2, -1])
    assert gradient_of(build_objective(algorithm(loss=name))(at), at) == pytest.approx([-2, 1])


def loss_by_loops(parts: AlgorithmConfig, at: LossInputs, t: int) -> float:
    """The formulas for one token, in plain Python."""
    pi, mu = at.logprobs_T[t].item(), at.behaviour_T[t].item()
    advantage = at.advantages_T[t].item()
    old = mu if parts.correction.name == "bypass" else at.old_T[t].item()
    options: Any = parts.loss
    if options.name == "sft":
        loss = -pi
    elif options.name == "dppo_tv":
        moved = math.exp(pi) - math.exp(mu)
        kept = moved <= options.delta if advantage > 0 else moved >= -options.delta
        loss = -advantage * min(math.exp(pi - mu), options.max_ratio) * pi if kept else 0.0
    else:
        ratio = math.exp(pi - old)
        clipped = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
        surrogate = min(ratio * advantage, clipped * advantage)
        if options.dual_clip and advantage < 0:
            surrogate = max(surrogate, options.dual_clip * advantage)
        loss = -surrogate
    if parts.correction.name == "token_tis":
        loss *= min(math.exp(old - mu), 2.0)
    if parts.kl.coefficient:
        assert at.reference_T is not None
        log_x = at.reference_T[t].item() - pi
        kl = {"k2": log_x**2 / 2, "k3": math.exp(log_x) - 1 - log_x}[parts.kl.form]
        loss += parts.kl.coefficient * kl
    return loss


@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_objective_agrees_with_the_formulas_token_by_token(mixture: str):
    parts, at = algorithm(**MIXTURES[mixture]), random_inputs(seed=1, tokens=200)
    loss_T = build_objective(parts)(at).loss_T
    expected = [loss_by_loops(parts, at, t) for t in range(200)]
    assert loss_T.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "mixture", [name for name, parts in MIXTURES.items() if parts["loss"] != "dppo_tv"]
)
def test_gradients_are_those_of_the_value(mixture: str):
    at = random_inputs(seed=2, tokens=30)
    objective = build_objective(algorithm(**MIXTURES[mixture]))

    def value(logprobs_T: torch.Tensor) -> torch.Tensor:
        return objective(replace(at, logprobs_T=logprobs_T)).loss_T

    assert torch.autograd.gradcheck(value, (at.logprobs_T,))


def test_the_gradient_of_dppo_tv_stops_at_its_factor():
    """Its value is a stand-in: the gradient is that of -c log pi with c held fixed."""
    at = random_inputs(seed=3, tokens=50)
    objective = build_objective(algorithm(loss="dppo_tv"))
    factor_T = (objective(at).loss_T / at.logprobs_T).detach()

    def value(logprobs_T: torch.Tensor) -> torch.Tensor:
        return factor_T * logprobs_T

    assert torch.autograd.gradcheck(value, (at.logprobs_T,))
    assert gradient_of(objective(at), at) == pytest.approx(factor_T.tolist(), abs=1e-15)


def cut(at: LossInputs, first: int, last: int) -> LossInputs:
    """The tokens of a micro-batch; still leaves of one graph."""
    assert at.reference_T is not None
    return LossInputs(
        at.logprobs_T[first:last],
        at.old_T[first:last],
        at.behaviour_T[first:last],
        at.advantages_T[first:last],
        at.weights_T[first:last],
        at.sequence_T[first:last],
        at.reference_T[first:last],
    )


@pytest.mark.parametrize("aggregation", sorted(NAMES["aggregations"]))
@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(
    mixture: str, aggregation: str
):
    counts_B, group_B = np.array([3, 1, 7, 5]), np.array([0, 0, 1, 1])
    weights_B = resolve_aggregation(aggregation)(counts_B, group_B, max_tokens=8)
    at = replace(
        random_inputs(seed=4, tokens=16), weights_T=torch.tensor(weights_B.repeat(counts_B))
    )
    objective = build_objective(algorithm(**MIXTURES[mixture]))

    def gradient(edges: list[int]) -> torch.Tensor:
        at.logprobs_T.grad = None
        sums: dict[str, float] = {}
        for first, last in pairwise(edges):
            piece = cut(at, first, last)
            loss = objective(piece)
            (piece.weights_T * loss.loss_T).sum().backward()
            for name, total in loss.sums.items():
                sums[name] = sums.get(name, 0.0) + total.item()
        assert at.logprobs_T.grad is not None
        return torch.cat([at.logprobs_T.grad, torch.tensor([sums[k] for k in sorted(sums)])])

    whole = gradient([0, 16])
    for edges in ([0, 3, 4, 11, 16], [0, 11, 16], list(range(17)), [0, 0, 16]):
        assert torch.allclose(whole, gradient(edges), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_no_tokens_give_an_empty_loss(mixture: str):
    loss = build_objective(algorithm(**MIXTURES[mixture]))(random_inputs(seed=0, tokens=0))
    assert loss.loss_T.shape == (0,)
    assert all(total.item() == 0 for total in loss.sums.values())


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_policies_that_are_far_apart_never_give_a_nan(mixture: str, advantage: float):
    far = [0.0, -200.0, -1e4]
    grid = torch.tensor([(pi, mu, old) for pi in far for mu in far for old in far])
    at = LossInputs(
        logprobs_T=grid[:, 0].clone().requires_grad_(),
        behaviour_T=grid[:, 1],
        old_T=grid[:, 2],
        advantages_T=torch.full((27,), advantage),
        weights_T=torch.ones(27),
        sequence_T=torch.zeros(27, dtype=torch.int64),
        reference_T=grid[:, 1].flip(0),
    )
    loss = build_objective(algorithm(**MIXTURES[mixture]))(at)
    [gradient] = torch.autograd.grad(loss.loss_T.sum(), at.logprobs_T)
    assert torch.isfinite(loss.loss_T).all()
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(total) for total in loss.sums.values())


def test_bypass_puts_the_behaviour_policy_in_the_place_of_the_old_one():
    at = inputs([0.5], mu=[0.4], old=[0.1])
    bypassed = build_objective(algorithm(loss="ppo", correction="bypass"))(at)
    computed = build_objective(algorithm(loss="ppo", correction="none"))(at)
    assert bypassed.loss_T.tolist() == pytest.approx([-1.2])  # 0.5 / 0.4, clipped
    assert bypassed.sums["clip_share"].item() == 1
    assert computed.loss_T.tolist() == pytest.approx([-1.2])  # 0.5 / 0.1, clipped
    at = inputs([0.44], mu=[0.4], old=[0.43])
    assert build_objective(algorithm(loss="ppo"))(at).loss_T.tolist() == pytest.approx([-1.1])


def test_token_tis_weighs_the_policy_loss_but_not_the_kl():
    parts = {"loss": "ppo", "correction": "token_tis", "kl": {"coefficient": 2, "form": "k2"}}
    at = inputs([0.3], mu=[0.2], old=[0.3], reference=[0.3 * math.e])
    loss = build_objective(algorithm(**parts))(at)
    assert loss.loss_T.tolist() == pytest.approx([-1.5 + 2 * 0.5])
    assert loss.sums["policy_loss"].item() == pytest.approx(-1.5)
    assert loss.sums["kl"].item() == pytest.approx(0.5)
    assert loss.sums["correction_weight"].item() == pytest.approx(1.5)


def test_dropped_tokens_are_counted_by_the_sign_of_their_advantage():
    # old/mu is 9, 1, 0.1: the outer two are outside of icepop's [0.5, 5]
    at = inputs([0.5] * 3, mu=[0.1, 0.5, 0.5], old=[0.9, 0.5, 0.05], advantage=[1, 1, -1])
    loss = build_objective(algorithm(loss="ppo", correction="icepop"))(at)
    assert loss.loss_T.tolist() == pytest.approx([0, -1, 0])
    shares = [loss.sums[name].item() for name in METRICS if name.startswith("mask_share")]
    assert shares == [2, 1, 1]


def test_ratio_sums_give_the_effective_sample_size():
    sums = build_objective(algorithm())(inputs([0.5, 0.1], mu=[0.25, 0.1])).sums
    assert sums["ratio"].item() == pytest.approx(3)
    assert sums["ratio_squared"].item() == pytest.approx(5)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_metric_is_documented_and_carries_no_gradient(mixture: str):
    sums = build_objective(algorithm(**MIXTURES[mixture]))(random_inputs(seed=5, tokens=4)).sums
    assert set(sums) <= set(METRICS)
    assert not any(total.requires_grad for total in sums.values())


def test_sft_has_no_metrics_of_a_policy_that_drew_its_tokens():
    assert set(build_objective(algorithm(loss="sft"))(inputs([0.5])).sums) == {"policy_loss"}


def test_a_kl_without_a_reference_says_what_is_missing():
    objective = build_objective(algorithm(kl={"coefficient": 0.25}))
    with pytest.raises(ConfigError, match=r"kl.coefficient=0.25 needs log-probs of a reference"):
        objective(inputs([0.5]))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"kl": {"coefficient": 0.1, "form": "k1"}}, "expected gradient of zero"),
        ({"loss": "dppo_tv", "correction": "token_tis"}, "already weighs by pi/mu"),
        ({"loss": "cispo", "correction": "icepop"}, "already weighs by pi/mu"),
        ({"loss": "topr", "correction": "sequence_tis"}, "already weighs by pi/mu"),
        ({"loss": "reinforce", "correction": "decoupled"}, "bounds pi/old, and reinforce does not"),
        ({"loss": "sft", "correction": "token_tis"}, "no policy drew"),
        ({"loss": "sft", "correction": "opsm"}, "no policy drew"),
        ({"loss": "nowhere.py:loss"}, "does not exist"),
    ],
)
def test_parts_that_cannot_work_together_are_refused(
    tmp_path: Path, parts: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        build_objective(algorithm(**parts), base=tmp_path)


def test_what_a_recipe_needs_follows_from_its_parts():
    assert not algorithm().needs_old_logprobs
    assert not algorithm(correction="opsm").needs_old_logprobs
    assert algorithm(correction="token_tis").needs_old_logprobs
    assert not algorithm().needs_reference
    assert algorithm(kl={"coefficient": 0.1}).needs_reference


def test_a_users_loss_and_correction_are_used_with_their_options(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from rollick.algorithms.losses import TokenLoss\n"
        "def squared(inputs, options):\n"
        "    return TokenLoss(options['by'] * inputs.logprobs_T ** 2)\n"
        "def half(inputs, options):\n"
        "    return inputs.behaviour_T * 0 + options['weight']\n"
    )
    parts = {
        "loss": {"name": "mine.py:squared", "options": {"by": 3}},
        "correction": {"name": "mine.py:half", "options": {"weight": 0.5}},
    }
    loss: Callable[[LossInputs], TokenLoss] = build_objective(algorithm(**parts), base=tmp_path)
    assert loss(inputs([math.exp(-2)])).loss_T.tolist() == pytest.approx([6])
