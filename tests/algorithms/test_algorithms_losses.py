"""Every policy loss: by hand, against plain loops, gradients, degenerate cases, properties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.algorithms.objective import build_objective
from rollick.config.names import NAMES, resolve
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.losses import SUPERVISED
from rollick.observe.metric_table import METRICS

POLICY = sorted({*NAMES["losses"]} - SUPERVISED | {"sft"})
"""Losses of single tokens and samples; pairwise losses and distillation have their own tests."""

FROZEN = ("dppo_tv", "dppo_kl", "reinforce", "truncated_is", "topr", "cispo")
"""Losses -c log pi with c detached: their value is a surrogate, only the gradient counts."""

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in POLICY},
    "gspo wide": {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.1},
    "segment wide": {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 0},
    "truncated_is both": {"low": 0.6, "high": 1.3},
    "cispo both": {"clip_low": 0.3, "clip_high": 0.2},
    "topr token": {"ratio": "token", "cap": 0.9, "negative_weight": 0.5, "positive_weight": 2},
    "dppo_kl narrow": {"delta": 0.01, "max_ratio": 1.5},
    "gmpo narrow": {"clip_low": 0.1, "clip_high": 0.2},
}


def resolve_loss(variant: str) -> Callable[[LossInputs], TokenLoss]:
    """The loss function alone, without the terms that the objective adds."""
    options = parse_options(variant)
    function = resolve("losses", options.name)
    return lambda loss_inputs: function(loss_inputs, options)


def parse_options(variant: str) -> Any:
    name = variant.split()[0]
    return AlgorithmConfig.model_validate({"loss": {"name": name, **VARIANTS[variant]}}).loss


def loss_inputs(
    now: Sequence[float],
    *,
    old: Sequence[float] | None = None,
    mu: Sequence[float] | None = None,
    advantage: Sequence[float],
    sequence: Sequence[int] | None = None,
    segment: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
) -> LossInputs:
    """Tokens with these probabilities."""

    def to_logprobs(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).log()

    return LossInputs(
        logprobs_T=to_logprobs(now).requires_grad_(),
        old_T=to_logprobs(old or now),
        behaviour_T=to_logprobs(mu or now),
        advantages_T=torch.tensor(advantage, dtype=torch.float64),
        weights_T=torch.ones(len(now), dtype=torch.float64),
        sequence_T=torch.tensor(sequence or [0] * len(now)),
        turn_T=torch.tensor(segment) if segment else None,
        scores_T=torch.tensor(scores) if scores else None,
    )


def make_random_inputs(
    seed: int, *, sequences: Sequence[int] = (4, 1, 7, 12), scored: bool = True
) -> LossInputs:
    """Samples of two turns each (if long enough), with ratios that reach every branch.

    A score does not always have the sign of its advantage.
    """
    rng = torch.Generator().manual_seed(seed)
    tokens = sum(sequences)

    def rand(scale: float) -> torch.Tensor:
        return torch.randn(tokens, generator=rng, dtype=torch.float64) * scale

    sequence = [b for b, length in enumerate(sequences) for _ in range(length)]
    segment = [2 * b + (t >= n // 2) for b, n in enumerate(sequences) for t in range(n)]
    behaviour_T, sequence_T = -rand(1).abs() - 0.1, torch.tensor(sequence, dtype=torch.int64)
    return LossInputs(
        logprobs_T=(behaviour_T + rand(0.5)).clamp(max=-0.01).requires_grad_(),
        old_T=(behaviour_T + rand(0.3)).clamp(max=-0.01),
        behaviour_T=behaviour_T,
        advantages_T=rand(1)[sequence_T],
        weights_T=torch.ones(tokens, dtype=torch.float64),
        sequence_T=sequence_T,
        scores_T=rand(1)[sequence_T] if scored else None,
        turn_T=torch.tensor(segment, dtype=torch.int64),
    )


def compute_gradient(variant: str, inputs: LossInputs) -> list[float]:
    [gradient] = torch.autograd.grad(resolve_loss(variant)(inputs).loss_T.sum(), inputs.logprobs_T)
    return gradient.tolist()


def compute_by_loops(o: Any, inputs: LossInputs) -> list[float]:
    """The formulas of docs/algorithms/losses, in plain Python."""
    now, old, mu = (x.tolist() for x in (inputs.logprobs_T, inputs.old_T, inputs.behaviour_T))
    advantages, sequence = inputs.advantages_T.tolist(), inputs.sequence_T.tolist()
    assert inputs.turn_T is not None
    segment = inputs.turn_T.tolist()
    scores = advantages if inputs.scores_T is None else inputs.scores_T.tolist()
    result: list[float] = []
    for t, (a, score) in enumerate(zip(advantages, scores, strict=True)):
        same = [u for u in range(len(now)) if sequence[u] == sequence[t]]
        turn = [u for u in range(len(now)) if segment[u] == segment[t]]
        r, rho = math.exp(now[t] - old[t]), math.exp(now[t] - mu[t])
        match o.name:
            case "sft":
                value = -now[t]
            case "reinforce":
                value = -a * now[t]
            case "raft":
                value = -now[t] if score > 0 else 0.0
            case "raft++":
                value = -min(r, 1 + o.clip_high) if score > 0 else 0.0
            case "kimi":
                value = -a * now[t] + o.tau / 2 * (now[t] - old[t]) ** 2
            case "sapo":
                tau = o.tau_positive if a > 0 else o.tau_negative
                value = -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
            case "truncated_is":
                value = -min(max(rho, o.low), o.high) * a * now[t]
            case "cispo":
                value = -min(max(rho, 1 - o.clip_low), 1 + o.clip_high) * a * now[t]
            case "dppo_tv":
                moved = math.exp(now[t]) - math.exp(mu[t])
                kept = moved <= o.delta if a > 0 else moved >= -o.delta
                value = -a * min(rho, o.max_ratio) * now[t] if kept else 0.0
            case "dppo_kl":
                p, q = math.exp(mu[t]), math.exp(now[t])
                kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
                kept = kl <= o.delta or (q < p if a > 0 else q > p)
                value = -a * min(rho, o.max_ratio) * now[t] if kept else 0.0
            case "topr":
                if o.ratio == "sequence":
                    rho = math.prod(math.exp(now[u] - mu[u]) for u in same)
                weight = o.positive_weight if score > 0 else o.negative_weight * min(rho, o.cap)
                value = -weight * a * now[t]
            case "gmpo":
                clipped = [
                    min(now[u] - old[u], o.clip_high)
                    if a > 0
                    else max(now[u] - old[u], -o.clip_low)
                    for u in same
                ]
                value = -a * math.exp(sum(clipped) / len(clipped))
            case _:
                where = {"ppo": [t], "gspo": same, "segment": turn}[o.name]
                s = math.exp(sum(now[u] - old[u] for u in where) / len(where))
                surrogate = min(s * a, min(max(s, 1 - o.clip_low), 1 + o.clip_high) * a)
                if o.dual_clip and a < 0:
                    surrogate = max(surrogate, o.dual_clip * a)
                value = -surrogate
        result.append(value)
    return result


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_the_formula_in_plain_loops(variant: str, seed: int, scored: bool):
    inputs = make_random_inputs(seed, scored=scored)
    expected = compute_by_loops(parse_options(variant), inputs)
    assert resolve_loss(variant)(inputs).loss_T.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_is_that_of_the_value_or_of_its_fixed_factor(variant: str):
    inputs = make_random_inputs(seed=3)
    loss = resolve_loss(variant)
    if variant.split()[0] in FROZEN:
        factor_T = (loss(inputs).loss_T / inputs.logprobs_T).detach()
        assert compute_gradient(variant, inputs) == pytest.approx(factor_T.tolist(), abs=1e-14)
        return

    def value(logprobs_T: torch.Tensor) -> torch.Tensor:
        return loss(replace(inputs, logprobs_T=logprobs_T)).loss_T

    assert torch.autograd.gradcheck(value, (inputs.logprobs_T,))


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        # two tokens: pi 0.6 and 0.2; pi_old 0.5 and 0.4 (r 1.2, 0.5), mu 0.3 and 0.1 (rho 2, 2)
        ("reinforce", [-1, 1]),
        ("truncated_is", [-2, 2]),
        ("truncated_is both", [-1.3, 1.3]),
        ("cispo", [-2, 2]),
        ("cispo both", [-1.2, 1.2]),
        ("topr", [-1, 1]),  # the weight of the second one is min(4, 1)
        ("topr token", [-2, 0.5 * 0.9]),
        ("dppo_tv", [0, 2]),  # +0.3 with A > 0 is beyond delta, +0.1 with A < 0 is not
        ("raft", [-1, 0]),
        ("raft++", [-1.2, 0]),  # r = 1.2 is not beyond 1.2
        ("ppo", [-1.2, 0]),  # r = 0.5 with A < 0 is beyond 0.8
        ("kimi", [-1 + 0.1 * math.log(1.2), 1 + 0.1 * math.log(0.5)]),
        ("sft", [-1, -1]),
    ],
)
def test_gradients_by_hand(variant: str, expected: list[float]):
    inputs = loss_inputs([0.6, 0.2], old=[0.5000001, 0.4], mu=[0.3, 0.1], advantage=[1, -1])
    assert compute_gradient(variant, inputs) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        # three samples of score 1, -1 and 0 with advantages 0, 2, -1; r and rho are 1/2
        ("raft", [-1, 0, 0]),
        ("raft++", [-0.5, 0, 0]),
        ("topr", [0, -2 * 0.5, 0.5]),
        ("topr token", [0, -2 * 0.25, 0.25]),
    ],
)
def test_a_good_sample_is_one_with_a_positive_score_whatever_its_advantage(
    variant: str, expected: list[float]
):
    half = [0.5] * 3
    inputs = loss_inputs(
        [0.25] * 3, old=half, mu=half, advantage=[0, 2, -1], sequence=[0, 1, 2], scores=[1, -1, 0]
    )
    assert compute_gradient(variant, inputs) == pytest.approx(expected)


@pytest.mark.parametrize("variant", ["raft", "raft++"])
def test_a_batch_without_a_good_sample_has_no_gradient(variant: str):
    inputs = loss_inputs([0.25, 0.5], advantage=[1, 1], scores=[-1, -2])
    assert compute_gradient(variant, inputs) == [0, 0]


def test_a_clipped_good_token_of_raft_counts_as_one_that_was_pushed_up():
    inputs = loss_inputs([0.9, 0.9], old=[0.5, 0.5], advantage=[-1, -1], scores=[1, -1])
    sums = resolve_loss("raft++")(inputs).sums
    assert [sums[f"clip_share{sign}"].item() for sign in ("", "_positive", "_negative")] == [
        1,
        1,
        0,
    ]


def test_gspo_clips_all_tokens_of_a_sample_together():
    # sample 0: r = 2, 2 and mean 2; sample 1: r = 2, 1/2 and mean 1
    inputs = loss_inputs(
        [0.8, 0.4, 0.8, 0.2], old=[0.4, 0.2, 0.4, 0.4], advantage=[1] * 4, sequence=[0, 0, 1, 1]
    )
    assert resolve_loss("gspo")(inputs).loss_T.tolist() == pytest.approx([-1.0004, -1.0004, -1, -1])
    assert compute_gradient("gspo", inputs) == pytest.approx([0, 0, -1, -1])
    assert resolve_loss("gspo")(inputs).sums["clip_share"].item() == 2


def test_segment_takes_the_ratio_of_each_turn():
    inputs = loss_inputs(
        [0.8, 0.4, 0.8, 0.2], old=[0.4, 0.2, 0.4, 0.4], advantage=[1] * 4, segment=[0, 0, 1, 1]
    )
    assert compute_gradient("segment", inputs) == pytest.approx([0, 0, -1, -1])
    unsplit = replace(inputs, turn_T=None)  # one turn: mean ratio 2 ** 0.5, clipped
    assert compute_gradient("segment", unsplit) == pytest.approx([0, 0, 0, 0])


def test_gmpo_takes_a_clipped_token_out_of_the_gradient_but_not_its_sample():
    # r = 2 (beyond e^0.4) and 1.1
    inputs = loss_inputs([0.8, 0.22], old=[0.4, 0.2], advantage=[1, 1])
    s = math.exp((0.4 + math.log(1.1)) / 2)
    assert resolve_loss("gmpo")(inputs).loss_T.tolist() == pytest.approx([-s, -s])
    assert compute_gradient("gmpo", inputs) == pytest.approx([0, -s])


def test_dppo_kl_keeps_a_token_that_comes_back():
    inputs = loss_inputs([0.9, 0.9, 0.1, 0.1], mu=[0.5] * 4, advantage=[1, -1, 1, -1])
    assert compute_gradient("dppo_kl", inputs) == pytest.approx([0, 1.8, -0.2, 0])
    sums = resolve_loss("dppo_kl")(inputs).sums
    assert [sums[f"clip_share{sign}"].item() for sign in ("", "_positive", "_negative")] == [
        2,
        1,
        1,
    ]


@pytest.mark.parametrize("variant", sorted({*VARIANTS} - {"sft", "raft", "raft++", "topr token"}))
def test_on_policy_the_gradient_is_that_of_reinforce(variant: str):
    inputs = loss_inputs([0.3, 0.9, 0.5], advantage=[2, 2, -1], sequence=[0, 0, 1])
    assert compute_gradient(variant, inputs) == pytest.approx([-2, -2, 1])


@pytest.mark.parametrize("name", ["truncated_is", "cispo", "topr", "dppo_tv", "dppo_kl"])
def test_off_policy_weights_look_at_the_behaviour_and_not_at_the_old_policy(name: str):
    """With one optimizer step per batch, pi/pi_old is 1 and would correct nothing."""
    fresh = loss_inputs([0.5, 0.5], mu=[0.5, 0.5], advantage=[-1, -1])
    stale = replace(fresh, behaviour_T=torch.tensor([0.8, 0.6]).double().log())
    other = replace(stale, old_T=torch.tensor([0.1, 0.2]).double().log())
    assert compute_gradient(name, fresh) != pytest.approx(compute_gradient(name, stale))
    assert compute_gradient(name, stale) == compute_gradient(name, other)


@pytest.mark.parametrize("variant", sorted({*VARIANTS} - {"sft", "kimi"}))
def test_a_token_without_advantage_is_never_clipped_and_has_no_gradient(variant: str):
    inputs = loss_inputs([0.9, 0.1], old=[0.5, 0.5], mu=[0.5, 0.5], advantage=[0, 0])
    assert compute_gradient(variant, inputs) == [0, 0]
    sums = resolve_loss(variant)(inputs).sums
    assert sums.get("clip_share_positive", 0) == sums.get("clip_share_negative", 0) == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_tokens_give_an_empty_loss(variant: str):
    loss = resolve_loss(variant)(make_random_inputs(0, sequences=()))
    assert loss.loss_T.shape == (0,)
    assert all(total.item() == 0 for total in loss.sums.values())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("one_sample", [True, False])
def test_very_different_policies_never_give_a_nan(variant: str, advantage: float, one_sample: bool):
    extremes = [0.0, -200.0, -1e4]
    grid = torch.tensor([(pi, mu, old) for pi in extremes for mu in extremes for old in extremes])
    inputs = LossInputs(
        logprobs_T=grid[:, 0].clone().requires_grad_(),
        behaviour_T=grid[:, 1],
        old_T=grid[:, 2],
        advantages_T=torch.full((27,), advantage),
        weights_T=torch.ones(27),
        sequence_T=torch.zeros(27, dtype=torch.int64) if one_sample else torch.arange(27),
    )
    loss = resolve_loss(variant)(inputs)
    [gradient] = torch.autograd.grad(loss.loss_T.sum(), inputs.logprobs_T)
    assert torch.isfinite(loss.loss_T).all()
    assert loss.loss_T.dtype == torch.float32
    assert torch.isfinite(gradient).all()
    assert {f"train/mean/{name}" for name in loss.sums} <= METRICS.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sample_does_not_depend_on_the_others_of_its_micro_batch(variant: str):
    inputs = make_random_inputs(4)
    unsplit = resolve_loss(variant)(inputs).loss_T
    for b in range(4):
        kept = inputs.sequence_T == b
        alone = inputs.where(kept)
        assert resolve_loss(variant)(alone).loss_T.tolist() == pytest.approx(unsplit[kept].tolist())


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["ppo", "gspo", "raft++", "gmpo"]),
    ratios=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
    sign=st.sampled_from([-1.0, 1.0]),
)
def test_the_loss_of_a_clipped_ratio_is_monotone(
    name: str, ratios: tuple[float, float], sign: float
):
    """A higher ratio never raises the loss for A > 0 and never lowers it for A < 0."""
    low, high = sorted(ratios)

    def value(ratio: float) -> float:
        inputs = loss_inputs([0.05 * ratio], old=[0.05], advantage=[sign])
        return resolve_loss(name)(inputs).loss_T.item()

    assert sign * value(high) <= sign * value(low) + 1e-12


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted({*POLICY} - {"sft", "raft", "raft++", "kimi"})),
    seed=st.integers(0, 50),
    scale=st.floats(0.01, 100),
)
def test_the_loss_is_linear_in_a_positive_factor_of_the_advantage(
    name: str, seed: int, scale: float
):
    inputs = make_random_inputs(seed)
    scaled = replace(inputs, advantages_T=inputs.advantages_T * scale)
    expected = (resolve_loss(name)(inputs).loss_T * scale).tolist()
    assert resolve_loss(name)(scaled).loss_T.tolist() == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("name", sorted(NAMES["losses"]))
def test_every_loss_describes_its_options(name: str):
    loss = AlgorithmConfig.model_validate({"loss": name}).loss
    assert loss.name == name
    options = {key: field for key, field in type(loss).model_fields.items() if key != "name"}
    assert all(field.description for field in options.values())


@pytest.mark.parametrize("name", POLICY)
def test_every_loss_is_reachable_by_name(name: str):
    inputs = make_random_inputs(0)
    total = build_objective(AlgorithmConfig.model_validate({"loss": name}))(inputs).total
    bypassed = replace(inputs, old_T=inputs.behaviour_T)
    assert total.item() == pytest.approx(resolve_loss(name)(bypassed).loss_T.sum().item())


OPTION_VALUES: dict[str, Any] = {
    "ratio": "token",
    "dual_clip": 1.01,
    "low": 0.95,
    "max_ratio": 1.01,
}
"""Another value of an option, if a tenth of its default is not valid."""


@pytest.mark.parametrize(
    ("name", "option"),
    [(n, o) for n in POLICY for o in type(parse_options(n)).model_fields if o != "name"],
)
def test_every_option_can_be_set_in_a_recipe_and_has_an_effect(name: str, option: str):
    wide = {"clip_low": 0.9, "clip_high": 5.0} if option == "dual_clip" else {}
    default = getattr(parse_options(name), option)
    if option == "high":
        other = 1.01
    else:
        other = OPTION_VALUES[option] if option in OPTION_VALUES else default / 10
    values: list[list[float]] = []
    for value in (default, other):
        parts = {"loss": {"name": name, **wide, option: value}, "correction": "none"}
        objective = build_objective(AlgorithmConfig.model_validate(parts))
        values.append([objective(make_random_inputs(seed)).total.item() for seed in range(4)])
    assert values[0] != values[1]
