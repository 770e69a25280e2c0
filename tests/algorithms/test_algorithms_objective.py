"""Losses and the objective built from them: value, gradient, split invariance, metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollick.algorithms.losses import LossInputs, TokenLoss, dppo_tv, ppo, sft
from rollick.algorithms.objective import (
    Loss,
    build_objective,
    resolve_aggregation,
    resolve_correction,
)
from rollick.config.names import NAMES
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.losses import DppoTvLoss, PlainLoss, PpoLoss
from rollick.errors import ConfigError
from rollick.observe.metric_table import METRICS

MIXTURES: dict[str, dict[str, Any]] = {
    "dppo_tv": {"loss": "dppo_tv"},
    "dppo_tv with k3": {"loss": "dppo_tv", "kl": {"coefficient": 0.1, "form": "k3"}},
    "dppo_tv with entropy": {"loss": "dppo_tv", "entropy": 0.1},
    "ppo bypass": {"loss": "ppo"},
    "ppo none": {"loss": "ppo", "correction": "none"},
    "ppo token_tis k2 entropy": {
        "loss": {"name": "ppo", "clip_high": 0.28},
        "correction": "token_tis",
        "kl": {"coefficient": 0.5, "form": "k2", "max_ratio": 1.2},
        "entropy": 0.2,
    },
    "ppo without dual clip": {"loss": {"name": "ppo", "dual_clip": 0}},
    "sft": {"loss": "sft"},
}


def make_algorithm(**parts: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(parts)


def make_inputs(
    pi: list[float],
    *,
    mu: list[float] | None = None,
    old: list[float] | None = None,
    advantage: list[float] | None = None,
    reference: list[float] | None = None,
) -> LossInputs:
    """Tokens with these probabilities, of weight 1; gradients are with respect to their logs."""

    def to_logprobs(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).log()

    behaviour_T, ones_T = to_logprobs(mu or pi), torch.ones(len(pi), dtype=torch.float64)
    return LossInputs(
        logprobs_T=to_logprobs(pi).requires_grad_(),
        old_T=to_logprobs(old) if old else behaviour_T,
        behaviour_T=behaviour_T,
        advantages_T=torch.tensor(advantage or [1.0] * len(pi), dtype=torch.float64),
        weights_T=ones_T,
        sequence_T=torch.zeros(len(pi), dtype=torch.int64),
        reference_T=to_logprobs(reference) if reference else None,
        kl_weights_T=ones_T,
        entropy_T=(ones_T / 2).requires_grad_(),
        entropy_weights_T=ones_T,
    )


def make_random_inputs(seed: int, tokens: int) -> LossInputs:
    """Log-probs that disagree enough for every branch of every loss to occur."""
    rng = torch.Generator().manual_seed(seed)

    def rand(scale: float) -> torch.Tensor:
        return torch.randn(tokens, generator=rng, dtype=torch.float64) * scale

    def make_weights() -> torch.Tensor:
        return (0.1 + rand(1).abs()).requires_grad_()

    behaviour_T = -rand(1).abs() - 0.1
    return LossInputs(
        logprobs_T=(behaviour_T + rand(0.7)).clamp(max=-0.01).requires_grad_(),
        old_T=(behaviour_T + rand(0.4)).clamp(max=-0.01),
        behaviour_T=behaviour_T,
        advantages_T=rand(1),
        weights_T=make_weights(),
        sequence_T=torch.zeros(tokens, dtype=torch.int64),
        reference_T=(behaviour_T + rand(0.5)).clamp(max=-0.01),
        kl_weights_T=make_weights(),
        entropy_T=rand(1).abs().requires_grad_(),
        entropy_weights_T=make_weights(),
    )


def apply_correction(parts: AlgorithmConfig, inputs: LossInputs) -> LossInputs:
    """Multiply the weights by the correction as CreditAssigner does, if it needs old log-probs."""
    if not parts.needs_old_logprobs:
        return inputs
    return replace(inputs, weights_T=inputs.weights_T * resolve_correction(parts)(inputs))


def compute_objective(mixture: str, inputs: LossInputs) -> Loss:
    parts = make_algorithm(**MIXTURES[mixture])
    return build_objective(parts)(apply_correction(parts, inputs))


def compute_gradient(loss: TokenLoss | Loss, inputs: LossInputs) -> list[float]:
    total = loss.total if isinstance(loss, Loss) else loss.loss_T.sum()
    [gradient] = torch.autograd.grad(total, inputs.logprobs_T, retain_graph=True)
    return gradient.tolist()


def compute_token_losses(loss: Loss, weights_T: torch.Tensor | None) -> list[float]:
    """The loss of each token at weight 1: the gradient of the total, which is linear in weights."""
    assert weights_T is not None
    [actual] = torch.autograd.grad(loss.total, weights_T, retain_graph=True)
    return actual.tolist()


def test_dppo_tv_trains_on_tokens_that_have_not_left_the_trust_region():
    # moved by +0.3, +0.1, -0.3, -0.1, delta 0.2: a token beyond delta in A's direction is cut
    inputs = make_inputs([0.8, 0.6, 0.2, 0.4], mu=[0.5] * 4, advantage=[1, 1, -1, -1])
    loss = dppo_tv(inputs, DppoTvLoss(delta=0.2))
    assert compute_gradient(loss, inputs) == pytest.approx([0, -0.6 / 0.5, 0, 0.4 / 0.5])
    assert loss.loss_T.tolist() == pytest.approx([0, -1.2 * math.log(0.6), 0, 0.8 * math.log(0.4)])
    assert loss.sums["clip_share"].item() == 2


def test_dppo_tv_keeps_tokens_that_come_back_to_the_trust_region():
    inputs = make_inputs([0.8, 0.2], mu=[0.5, 0.5], advantage=[-1, 1])
    loss = dppo_tv(inputs, DppoTvLoss(delta=0.2))
    assert compute_gradient(loss, inputs) == pytest.approx([1.6, -0.4])
    assert loss.sums["clip_share"].item() == 0


def test_dppo_tv_truncates_the_importance_ratio():
    inputs = make_inputs([0.1], mu=[0.001])
    assert compute_gradient(dppo_tv(inputs, DppoTvLoss(max_ratio=20)), inputs) == pytest.approx(
        [-20]
    )


def test_ppo_stops_the_gradient_beyond_the_clip_and_counts_by_sign():
    # ratios 1.6, 1.1, 0.5, 0.9
    inputs = make_inputs([0.8, 0.55, 0.25, 0.45], old=[0.5] * 4, advantage=[1, 1, -1, -1])
    loss = ppo(inputs, PpoLoss())
    assert compute_gradient(loss, inputs) == pytest.approx([0, -1.1, 0, 0.9])
    assert loss.loss_T.tolist() == pytest.approx([-1.2, -1.1, 0.8, 0.9])
    counts = {name: total.item() for name, total in loss.sums.items()}
    assert counts == {"clip_share": 2, "clip_share_positive": 1, "clip_share_negative": 1}


def test_ppo_clips_higher_if_configured():
    inputs = make_inputs([0.625], old=[0.5])
    assert compute_gradient(ppo(inputs, PpoLoss(clip_high=0.28)), inputs) == pytest.approx([-1.25])
    assert compute_gradient(ppo(inputs, PpoLoss(clip_high=0.2)), inputs) == [0]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    inputs = make_inputs([0.8], old=[0.1], advantage=[-1])
    assert ppo(inputs, PpoLoss(dual_clip=3)).loss_T.tolist() == pytest.approx([3])
    assert compute_gradient(ppo(inputs, PpoLoss(dual_clip=3)), inputs) == [0]
    assert ppo(inputs, PpoLoss(dual_clip=0)).loss_T.tolist() == pytest.approx([8])
    assert compute_gradient(ppo(inputs, PpoLoss(dual_clip=0)), inputs) == pytest.approx([8])


@pytest.mark.parametrize("name", ["dppo_tv", "ppo"])
def test_a_token_without_advantage_is_never_counted_as_clipped(name: str):
    inputs = make_inputs([0.9, 0.1], mu=[0.5, 0.5], advantage=[0, 0])
    loss = build_objective(make_algorithm(loss=name))(inputs)
    assert loss.sums["clip_share"].item() == 0
    assert compute_gradient(loss, inputs) == [0, 0]


def test_sft_is_the_negative_log_likelihood():
    inputs = make_inputs([0.5, 0.25])
    loss = sft(inputs, PlainLoss(name="sft"))
    assert loss.loss_T.tolist() == pytest.approx([math.log(2), math.log(4)])
    assert compute_gradient(loss, inputs) == [-1, -1]


@pytest.mark.parametrize("name", ["dppo_tv", "ppo"])
def test_on_policy_every_policy_loss_has_the_gradient_of_reinforce(name: str):
    inputs = make_inputs([0.3, 0.9], advantage=[2, -1])
    assert compute_gradient(
        build_objective(make_algorithm(loss=name))(inputs), inputs
    ) == pytest.approx([-2, 1])


def compute_loss_by_loops(
    parts: AlgorithmConfig, inputs: LossInputs, t: int
) -> tuple[float, float]:
    """The policy loss (with its correction) and the KL of one token, in plain Python."""
    pi, mu = inputs.logprobs_T[t].item(), inputs.behaviour_T[t].item()
    advantage = inputs.advantages_T[t].item()
    old = mu if parts.correction.name == "bypass" else inputs.old_T[t].item()
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
    assert inputs.reference_T is not None
    log_x = inputs.reference_T[t].item() - pi
    kl = {"k2": log_x**2 / 2, "k3": math.exp(log_x) - 1 - log_x}[parts.kl.form]
    return loss, min(math.exp(pi - mu), parts.kl.max_ratio) * kl


@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_objective_agrees_with_the_formulas_token_by_token(mixture: str):
    parts, inputs = make_algorithm(**MIXTURES[mixture]), make_random_inputs(seed=1, tokens=200)
    loss = compute_objective(mixture, inputs)
    expected = [compute_loss_by_loops(parts, inputs, t) for t in range(200)]
    assert compute_token_losses(loss, inputs.weights_T) == pytest.approx(
        [p for p, _ in expected], abs=1e-12
    )
    total = sum(w * p for w, (p, _) in zip(inputs.weights_T.tolist(), expected, strict=True))
    if parts.kl.coefficient:
        assert inputs.kl_weights_T is not None
        kls = [kl for _, kl in expected]
        assert compute_token_losses(loss, inputs.kl_weights_T) == pytest.approx(kls, abs=1e-12)
        total += sum(w * kl for w, kl in zip(inputs.kl_weights_T.tolist(), kls, strict=True))
        assert loss.sums["kl"].item() == pytest.approx(sum(kls))
    if parts.entropy:
        assert inputs.entropy_T is not None
        assert inputs.entropy_weights_T is not None
        assert compute_token_losses(loss, inputs.entropy_weights_T) == (-inputs.entropy_T).tolist()
        total -= (inputs.entropy_weights_T * inputs.entropy_T).sum().item()
    assert loss.total.item() == pytest.approx(total)


@pytest.mark.parametrize(
    "mixture",
    [n for n, parts in MIXTURES.items() if parts["loss"] != "dppo_tv" and "kl" not in parts],
)
def test_gradients_are_those_of_the_value(mixture: str):
    inputs = make_random_inputs(seed=2, tokens=30)

    def value(logprobs_T: torch.Tensor) -> torch.Tensor:
        return compute_objective(mixture, replace(inputs, logprobs_T=logprobs_T)).total

    assert torch.autograd.gradcheck(value, (inputs.logprobs_T,))


@pytest.mark.parametrize("form", ["k2", "k3"])
def test_the_gradient_of_the_kl_holds_its_importance_weight_fixed(form: str):
    inputs = make_random_inputs(seed=2, tokens=30)
    kl = {"coefficient": 1, "form": form, "max_ratio": 1.3}
    with_kl, without = (
        compute_gradient(build_objective(make_algorithm(loss="ppo", kl=k))(inputs), inputs)
        for k in (kl, {})
    )
    assert inputs.reference_T is not None
    assert inputs.kl_weights_T is not None
    for t in range(30):
        log_x = (inputs.reference_T[t] - inputs.logprobs_T[t]).item()
        slope = -log_x if form == "k2" else 1 - math.exp(log_x)
        rho = min(math.exp((inputs.logprobs_T[t] - inputs.behaviour_T[t]).item()), 1.3)
        expected = inputs.kl_weights_T[t].item() * rho * slope
        assert with_kl[t] - without[t] == pytest.approx(expected, abs=1e-12)


def test_off_policy_the_kl_is_weighted_by_the_policy_and_not_by_the_behaviour():
    """The weighted mean over samples from mu is KL(pi || ref), the mean under pi."""
    pi, mu, ref = [0.7, 0.2, 0.1], [0.2, 0.3, 0.5], [0.5, 0.1, 0.4]
    true = sum(p * math.log(p / q) for p, q in zip(pi, ref, strict=True))
    inputs = replace(make_inputs(pi, mu=mu, reference=ref), kl_weights_T=torch.tensor(mu).double())
    plain = build_objective(make_algorithm())(inputs).total
    with_kl = build_objective(make_algorithm(kl={"coefficient": 1}))(inputs).total
    assert (with_kl - plain).item() == pytest.approx(true, rel=1e-6)


def test_the_entropy_bonus_pushes_the_entropy_up_by_its_own_weights():
    inputs = replace(make_inputs([0.5, 0.5]), entropy_weights_T=torch.tensor([0.25, 2.0]).double())
    loss = build_objective(make_algorithm(entropy=0.1))(inputs)
    assert inputs.entropy_T is not None
    [gradient] = torch.autograd.grad(loss.total, inputs.entropy_T)
    assert gradient.tolist() == [-0.25, -2.0]


@pytest.mark.parametrize(
    ("parts", "missing", "message"),
    [
        ({"entropy": 0.1}, {"entropy_T": None}, "needs the entropy of each token"),
        ({"entropy": 0.1}, {"entropy_weights_T": None}, "needs the entropy_weights"),
        ({"kl": {"coefficient": 0.1}}, {"reference_T": None}, "needs the reference log-prob"),
        ({"kl": {"coefficient": 0.1}}, {"kl_weights_T": None}, "needs the kl_weights"),
    ],
)
def test_missing_fields_of_a_batch_are_named(
    parts: dict[str, Any], missing: dict[str, Any], message: str
):
    inputs = replace(make_inputs([0.5], reference=[0.5]), **missing)
    with pytest.raises(ConfigError, match=message):
        build_objective(make_algorithm(**parts))(inputs)


@pytest.mark.parametrize("mixture", [n for n, parts in MIXTURES.items() if "kl" not in parts])
def test_a_token_of_weight_zero_may_be_impossible_and_trains_nothing(mixture: str):
    inputs = make_random_inputs(seed=6, tokens=3)
    mask_T = torch.tensor([1, 0, 1])
    names = ("weights_T", "entropy_weights_T")
    zero = replace(inputs, **{name: getattr(inputs, name).detach() * mask_T for name in names})
    logprobs_T = torch.where(mask_T == 0, -math.inf, inputs.logprobs_T.detach()).requires_grad_()
    entropy_T = torch.where(mask_T == 0, math.nan, 1.0).double()
    impossible = replace(zero, logprobs_T=logprobs_T, entropy_T=entropy_T)
    loss = compute_objective(mixture, impossible)
    assert math.isfinite(loss.total.item())
    assert compute_gradient(loss, impossible) == compute_gradient(
        compute_objective(mixture, zero), inputs
    )
    assert compute_gradient(loss, impossible)[1] == 0


def test_the_gradient_of_dppo_tv_stops_at_its_factor():
    """Its value is a surrogate: the gradient is that of -c log pi with c detached."""
    inputs = make_random_inputs(seed=3, tokens=50)
    loss = build_objective(make_algorithm(loss="dppo_tv"))(inputs)
    loss_T = torch.tensor(compute_token_losses(loss, inputs.weights_T), dtype=torch.float64)
    factor_T = (inputs.weights_T * loss_T / inputs.logprobs_T).detach()
    assert compute_gradient(loss, inputs) == pytest.approx(factor_T.tolist(), abs=1e-15)


@pytest.mark.parametrize("aggregation", sorted(NAMES["aggregations"]))
@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(
    mixture: str, aggregation: str
):
    counts_B, group_B = np.array([3, 1, 7, 5]), np.array([0, 0, 1, 1])
    weights_B = resolve_aggregation(aggregation)(counts_B, group_B, max_tokens=8)
    weights_T = torch.tensor(weights_B.repeat(counts_B))
    inputs = replace(
        make_random_inputs(seed=4, tokens=16),
        weights_T=weights_T,
        kl_weights_T=weights_T / 2,
        entropy_weights_T=weights_T / 3,
    )
    assert inputs.entropy_T is not None
    leaves = (inputs.logprobs_T, inputs.entropy_T)

    def gradient(edges: list[int]) -> torch.Tensor:
        sums: dict[str, float] = {}
        totals: list[torch.Tensor] = []
        for first, last in pairwise(edges):
            chosen_T = (torch.arange(16) >= first) & (torch.arange(16) < last)
            loss = compute_objective(mixture, inputs.where(chosen_T))
            totals.append(loss.total)
            for name, total in loss.sums.items():
                sums[name] = sums.get(name, 0.0) + total.item()
        grads = torch.autograd.grad(
            torch.stack(totals).sum(), leaves, allow_unused=True, materialize_grads=True
        )
        return torch.cat([*grads, torch.tensor([sums[k] for k in sorted(sums)])])

    unsplit = gradient([0, 16])
    for edges in ([0, 3, 4, 11, 16], [0, 11, 16], list(range(17)), [0, 0, 16]):
        assert torch.allclose(unsplit, gradient(edges), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_no_tokens_give_a_loss_of_zero(mixture: str):
    loss = compute_objective(mixture, make_random_inputs(seed=0, tokens=0))
    assert loss.total.item() == 0
    assert all(total.item() == 0 for total in loss.sums.values())


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_very_different_policies_never_give_a_nan(mixture: str, advantage: float):
    extremes = [0.0, -200.0, -1e4]
    grid = torch.tensor([(pi, mu, old) for pi in extremes for mu in extremes for old in extremes])
    inputs = LossInputs(
        logprobs_T=grid[:, 0].clone().requires_grad_(),
        behaviour_T=grid[:, 1],
        old_T=grid[:, 2],
        advantages_T=torch.full((27,), advantage),
        weights_T=torch.ones(27, requires_grad=True),
        sequence_T=torch.zeros(27, dtype=torch.int64),
        reference_T=grid[:, 1].flip(0),
        kl_weights_T=torch.ones(27),
        entropy_T=torch.zeros(27),
        entropy_weights_T=torch.ones(27),
    )
    loss = compute_objective(mixture, inputs)
    assert all(math.isfinite(value) for value in list_loss_and_gradients(loss, inputs))
    assert all(torch.isfinite(total) for total in loss.sums.values())
    assert loss.total.dtype == torch.float32


def list_loss_and_gradients(loss: Loss, inputs: LossInputs) -> list[float]:
    grads = torch.autograd.grad(loss.total, (inputs.logprobs_T, inputs.weights_T))
    return [loss.total.item(), *grads[0].tolist(), *grads[1].tolist()]


def test_bypass_uses_the_behaviour_policy_as_the_old_one():
    inputs = make_inputs([0.5], mu=[0.4], old=[0.1])
    bypassed = build_objective(make_algorithm(loss="ppo", correction="bypass"))(inputs)
    computed = build_objective(make_algorithm(loss="ppo", correction="none"))(inputs)
    assert bypassed.total.item() == pytest.approx(-1.2)  # 0.5 / 0.4, clipped
    assert bypassed.sums["clip_share"].item() == 1
    assert computed.total.item() == pytest.approx(-1.2)  # 0.5 / 0.1, clipped
    inputs = make_inputs([0.44], mu=[0.4], old=[0.43])
    assert build_objective(make_algorithm(loss="ppo"))(inputs).total.item() == pytest.approx(-1.1)


def test_a_correction_weighs_the_policy_loss_but_not_the_kl():
    kl = {"coefficient": 2, "form": "k2"}
    parts = make_algorithm(loss="ppo", correction="token_tis", kl=kl)
    inputs = make_inputs([0.3], mu=[0.2], old=[0.3], reference=[0.3 * math.e])
    inputs = replace(inputs, kl_weights_T=torch.tensor([2.0]).double())
    loss = build_objective(parts)(apply_correction(parts, inputs))
    # pi/mu is 1.5: it weighs the policy loss once and the k2 of 1/2 once
    assert loss.total.item() == pytest.approx(-1.5 + 2 * 1.5 * 0.5)
    assert loss.sums["policy_loss"].item() == pytest.approx(-1)
    assert loss.sums["kl"].item() == pytest.approx(0.75)


def test_ratio_sums_give_the_effective_sample_size():
    sums = build_objective(make_algorithm())(make_inputs([0.5, 0.1], mu=[0.25, 0.1])).sums
    assert sums["ratio"].item() == pytest.approx(3)
    assert sums["ratio_squared"].item() == pytest.approx(5)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_metric_is_documented_and_carries_no_gradient(mixture: str):
    sums = compute_objective(mixture, make_random_inputs(seed=5, tokens=4)).sums
    assert {f"train/mean/{name}" for name in sums} <= METRICS.keys()
    assert not any(total.requires_grad for total in sums.values())


def test_sft_has_no_metrics_of_a_policy_that_drew_its_tokens():
    assert set(build_objective(make_algorithm(loss="sft"))(make_inputs([0.5])).sums) == {
        "policy_loss"
    }


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"kl": {"coefficient": 0.1, "form": "k1"}}, "expected gradient of zero"),
        ({"loss": "dppo_tv", "correction": "token_tis"}, "already weights by pi/mu"),
        ({"loss": "cispo", "correction": "icepop"}, "already weights by pi/mu"),
        ({"loss": "topr", "correction": "sequence_tis"}, "already weights by pi/mu"),
        ({"loss": "reinforce", "correction": "decoupled"}, "bounds pi/old, and reinforce does not"),
        ({"loss": "sft", "correction": "token_tis"}, "are not sampled"),
        ({"loss": "sft", "correction": "opsm"}, "are not sampled"),
        ({"loss": "dpo", "correction": "icepop"}, "are not sampled"),
        ({"loss": "distillation", "correction": "token_tis"}, "are not sampled"),
        ({"loss": "nowhere.py:loss"}, "does not exist"),
    ],
)
def test_parts_that_cannot_work_together_are_refused(
    tmp_path: Path, parts: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        build_objective(make_algorithm(**parts), base=tmp_path)


@pytest.mark.parametrize(
    ("parts", "needs"),
    [
        ({}, set()),
        ({"correction": "token_tis", "loss": "ppo"}, {"old"}),
        ({"correction": "opsm"}, {"old"}),
        ({"correction": {"name": "decoupled", "old": "interpolated"}, "loss": "ppo"}, set()),
        ({"kl": {"coefficient": 0.1}}, {"reference"}),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, {"reference"}),
        ({"loss": "dpo"}, {"reference"}),
        ({"loss": "distillation"}, {"teacher_top"}),
        ({"advantage": "gae"}, {"values"}),
        ({"advantage": "opd", "correction": "none"}, {"teacher", "old"}),
        ({"loss": {"name": "a.py:b", "needs": ["teacher"]}}, {"teacher"}),
    ],
)
def test_what_a_recipe_needs_follows_from_its_parts(parts: dict[str, Any], needs: set[str]):
    assert make_algorithm(**parts).needs == needs


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
    algorithm = make_algorithm(**parts)
    inputs = make_inputs([math.exp(-2)])
    objective = build_objective(algorithm, base=tmp_path)
    assert objective(inputs).total.item() == pytest.approx(12)
    assert resolve_correction(algorithm, base=tmp_path)(inputs).tolist() == [0.5]
