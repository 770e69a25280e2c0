"""Distillation: divergences over a teacher's top-k tokens, and the loss that uses them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.distillation import skewed_kl
from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.algorithms.objective import build_objective
from rollick.config.names import NAMES, resolve
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.errors import ConfigError
from rollick.observe.metric_table import METRICS

DIVERGENCES = {name: resolve("divergences", name) for name in NAMES["divergences"]}


def make_tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_random_logprobs(seed: int, *, rows: int = 5, vocabulary: int = 8) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, vocabulary, generator=rng, dtype=torch.float64)
    return torch.log_softmax(logits, -1)


def make_random_inputs(seed: int, *, rows: int = 5, k: int = 3) -> LossInputs:
    """Tokens with the teacher's top k; the weights add up to 1."""
    top = make_random_logprobs(seed, rows=rows).topk(k)
    student_TK = make_random_logprobs(seed + 1, rows=rows).gather(1, top.indices)
    zeros_T = torch.zeros(rows, dtype=torch.float64)
    return LossInputs(
        logprobs_T=student_TK[:, 0].clone().requires_grad_(),
        old_T=zeros_T,
        behaviour_T=zeros_T,
        advantages_T=zeros_T + 1,
        weights_T=(torch.arange(rows) + 1.0).double() / max(rows * (rows + 1) / 2, 1),
        sequence_T=torch.zeros(rows, dtype=torch.int64),
        teacher_TK=top.values,
        student_TK=student_TK.requires_grad_(),
    )


def make_algorithm(name: str, **options: float) -> AlgorithmConfig:
    loss = {"name": "distillation", "divergence": name, **options}
    return AlgorithmConfig.model_validate({"loss": loss})


def compute_loss(name: str, inputs: LossInputs, **options: float) -> TokenLoss:
    return resolve("losses", "distillation")(inputs, make_algorithm(name, **options).loss)


def compute_kl_by_loops(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def compute_divergence_by_loops(name: str, t: list[float], s: list[float]) -> float:
    t, s = [*t, 1 - sum(t)], [*s, 1 - sum(s)]
    pairs = list(zip(t, s, strict=True))
    match name:
        case "forward":
            return compute_kl_by_loops(t, s)
        case "reverse":
            return compute_kl_by_loops(s, t)
        case "js":
            m = [(a + b) / 2 for a, b in pairs]
            return (compute_kl_by_loops(t, m) + compute_kl_by_loops(s, m)) / 2
        case "skewed":
            return compute_kl_by_loops(t, [0.1 * a + 0.9 * b for a, b in pairs])
        case "skewed_reverse":
            return compute_kl_by_loops(s, [0.9 * a + 0.1 * b for a, b in pairs])
        case _:
            head = tail = cumulative = 0.0
            for a, b in sorted(pairs, reverse=True):
                if cumulative < 0.5:
                    head += abs(a - b)
                else:
                    tail += abs(a - b)
                cumulative += a
            share = head / (head + tail)
            return share * compute_kl_by_loops(t, s) + (1 - share) * compute_kl_by_loops(s, t)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_by_loops(name: str):
    top = make_random_logprobs(0).topk(3)
    student = make_random_logprobs(1).gather(1, top.indices)
    expected = [
        compute_divergence_by_loops(name, t, s)
        for t, s in zip(top.values.exp().tolist(), student.exp().tolist(), strict=True)
    ]
    assert DIVERGENCES[name](top.values, student).tolist() == pytest.approx(expected)


def test_divergences_by_hand():
    # t = 1/2, 1/2 and s = 1/4, 3/4: one token and the rest
    t, s = make_tensor(0.5).log()[None], make_tensor(0.25).log()[None]
    assert DIVERGENCES["forward"](t, s).item() == pytest.approx(math.log(4 / 3) / 2)
    assert DIVERGENCES["reverse"](t, s).item() == pytest.approx(
        math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4
    )


@pytest.mark.parametrize("name", [n for n in DIVERGENCES if n != "adaptive"])
def test_the_gradients_of_divergences_are_right(name: str):
    top = make_random_logprobs(0).topk(3)
    student = make_random_logprobs(1).gather(1, top.indices).requires_grad_()
    assert torch.autograd.gradcheck(partial(DIVERGENCES[name], top.values), (student,))


def test_the_gradient_of_the_adaptive_divergence_holds_its_share_fixed():
    top = make_random_logprobs(0).topk(3)
    student = make_random_logprobs(1).gather(1, top.indices).requires_grad_()
    forward, reverse, adaptive = (
        torch.stack(
            [
                f(top.values, student)[0],
                torch.autograd.grad(f(top.values, student)[0], student)[0][0, 0],
            ]
        ).detach()
        for f in (DIVERGENCES[n] for n in ("forward", "reverse", "adaptive"))
    )
    share = (adaptive[0] - reverse[0]) / (forward[0] - reverse[0])
    assert adaptive[1].item() == pytest.approx(
        (share * forward[1] + (1 - share) * reverse[1]).item()
    )


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(DIVERGENCES)), seed=st.integers(0, 500), k=st.integers(1, 8))
def test_divergences_are_never_negative_and_zero_for_equals(name: str, seed: int, k: int):
    top = make_random_logprobs(seed).topk(k)
    student = make_random_logprobs(seed + 1000).gather(1, top.indices)
    assert (DIVERGENCES[name](top.values, student) >= -1e-9).all()
    equal = DIVERGENCES[name](top.values, top.values)
    assert equal.abs().max().item() == pytest.approx(0, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 500), k=st.integers(1, 7))
def test_more_tokens_show_more_of_the_forward_kl(seed: int, k: int):
    teacher, student = make_random_logprobs(seed), make_random_logprobs(seed + 1000)
    order = teacher.argsort(dim=-1, descending=True)
    teacher, student = teacher.gather(1, order), student.gather(1, order)
    top_k_kl = DIVERGENCES["forward"](teacher[:, :k], student[:, :k])
    full = (teacher.exp() * (teacher - student)).sum(-1)
    assert (top_k_kl <= full + 1e-9).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_certain_and_impossible_tokens_give_finite_divergences(name: str):
    inf = math.inf
    teacher = torch.tensor([[0.0, -200.0], [-200.0, -300.0], [0.0, -1e4], [0.0, -inf], [-1, -2]])
    student = torch.tensor([[-200.0, 0.0], [0.0, -200.0], [0.0, -1e4], [-1, -2], [0.0, -inf]])
    student.requires_grad_()
    value = DIVERGENCES[name](teacher, student)
    [gradient] = torch.autograd.grad(value.sum(), student)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()
    assert DIVERGENCES[name](teacher[:0], student[:0]).shape == (0,)


def test_a_skewed_divergence_is_bounded_and_the_plain_one_is_not():
    t, s = make_tensor(math.log(1 - 1e-5))[None], make_tensor(-500.0)[None]
    assert DIVERGENCES["forward"](t, s).item() > 400
    assert skewed_kl(t, s, skew=0.1).item() <= math.log(10)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_certain_teacher_that_the_student_agrees_with_costs_nothing(name: str):
    certain = torch.tensor([[0.0, -200.0]])
    student = certain.clone().requires_grad_()
    value = DIVERGENCES[name](certain, student)
    [gradient] = torch.autograd.grad(value.sum(), student)
    assert value.item() == pytest.approx(0, abs=1e-6)
    assert torch.isfinite(gradient).all()


def to_probabilities(logs_TK: torch.Tensor | None) -> list[list[float]]:
    assert logs_TK is not None
    return logs_TK.detach().exp().tolist()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_loss_is_the_divergence_that_its_options_name(name: str):
    inputs = make_random_inputs(2)
    rows = zip(
        to_probabilities(inputs.teacher_TK), to_probabilities(inputs.student_TK), strict=True
    )
    expected = [compute_divergence_by_loops(name, t, s) for t, s in rows]
    loss = compute_loss(name, inputs)
    assert loss.loss_T.tolist() == pytest.approx(expected)
    assert loss.sums["divergence"].item() == pytest.approx(sum(expected))
    total = build_objective(make_algorithm(name))(inputs).total.item()
    weights = inputs.weights_T.tolist()
    assert total == pytest.approx(sum(w * x for w, x in zip(weights, expected, strict=True)))


def test_the_loss_by_hand():
    # t = 1/2, 1/2 and s = 1/4, 3/4; d/ds of KL(t || s) with the rest 1 - s
    t, s = make_tensor(0.5).log()[None], make_tensor(0.25).log()[None].requires_grad_()
    inputs = replace(make_random_inputs(0, rows=1), teacher_TK=t, student_TK=s)
    total = build_objective(make_algorithm("forward"))(inputs).total
    assert total.item() == pytest.approx(math.log(4 / 3) / 2)
    [gradient] = torch.autograd.grad(total, s)
    assert gradient.item() == pytest.approx(0.25 * (-0.5 / 0.25 + 0.5 / 0.75))


@pytest.mark.parametrize("name", [n for n in DIVERGENCES if n != "adaptive"])
def test_the_gradient_of_the_objective_goes_to_the_student(name: str):
    inputs = make_random_inputs(3)
    objective = build_objective(make_algorithm(name))

    def value(student_TK: torch.Tensor) -> torch.Tensor:
        return objective(replace(inputs, student_TK=student_TK)).total

    assert inputs.student_TK is not None
    assert torch.autograd.gradcheck(value, (inputs.student_TK,))
    sums = objective(inputs).sums
    assert set(sums) == {"policy_loss", "divergence"}
    assert {f"train/mean/{name}" for name in sums} <= METRICS.keys()
    assert not any(total.requires_grad for total in sums.values())


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (1, 8), (0, 3)])
def test_one_token_the_whole_vocabulary_or_nothing_at_all_is_finite(name: str, rows: int, k: int):
    inputs = make_random_inputs(4, rows=rows, k=k)
    loss = build_objective(make_algorithm(name))(inputs)
    assert inputs.student_TK is not None
    [gradient] = torch.autograd.grad(loss.total, inputs.student_TK)
    assert math.isfinite(loss.total.item())
    assert torch.isfinite(gradient).all()
    assert rows or loss.total.item() == 0


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_loss_of_a_token_does_not_depend_on_the_others(name: str):
    inputs = make_random_inputs(5)
    full = compute_loss(name, inputs).loss_T
    for t in range(5):
        alone = inputs.where(torch.arange(5) == t)
        assert compute_loss(name, alone).loss_T.item() == pytest.approx(full[t].item())


def test_a_large_micro_batch_is_computed_piece_by_piece_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
):
    inputs = make_random_inputs(7)
    assert inputs.student_TK is not None
    full = build_objective(make_algorithm("js"))(inputs).total
    monkeypatch.setattr("rollick.algorithms.distillation.CHUNK_POSITIONS", 2)
    pieces = build_objective(make_algorithm("js"))(inputs).total
    assert pieces.item() == pytest.approx(full.item(), rel=1e-14)
    first, second = (torch.autograd.grad(total, inputs.student_TK)[0] for total in (full, pieces))
    assert torch.allclose(first, second, rtol=1e-12, atol=0)


@pytest.mark.parametrize("missing", ["teacher_TK", "student_TK"])
def test_without_a_teacher_the_loss_is_an_error(missing: str):
    inputs: LossInputs = replace(make_random_inputs(0), **{missing: None})
    with pytest.raises(ConfigError, match="needs the teacher's top tokens"):
        compute_loss("forward", inputs)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("skewed", "skew", 0.5), ("skewed_reverse", "skew", 0.5), ("adaptive", "head", 0.9)],
)
def test_every_option_can_be_set_in_a_recipe_and_has_an_effect(name: str, option: str, value: Any):
    inputs = make_random_inputs(6)
    assert (
        compute_loss(name, inputs).loss_T.tolist()
        != compute_loss(name, inputs, **{option: value}).loss_T.tolist()
    )


def test_every_divergence_of_the_table_is_one_of_the_loss():
    assert set(NAMES["divergences"]) == set(DIVERGENCES)
    assert all(resolve("divergences", name) is DIVERGENCES[name] for name in DIVERGENCES)
