"""Losses that no pipeline feeds yet: value, preference pairs, distillation on the top-k."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.distillation import DIVERGENCES, skewed_kl
from rollick.algorithms.preference import dpo, ipo
from rollick.algorithms.value import value_loss


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_logs(seed: int, *, rows: int = 5, vocabulary: int = 8) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, vocabulary, generator=draw, dtype=torch.float64)
    return torch.log_softmax(logits, -1)


def test_the_value_loss_by_hand():
    # V_old 0, clip 0.2: inside; beyond and right (no gradient); beyond and wrong
    values = doubles(0.1, 1.0, -1.0).requires_grad_()
    loss = value_loss(values, doubles(0, 0, 0), returns_T=doubles(1, 1, 1), clip=0.2)
    assert loss.tolist() == pytest.approx([0.81 / 2, 0.64 / 2, 4 / 2])
    [gradient] = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == pytest.approx([-0.9, 0, -2])


@settings(max_examples=30, deadline=None)
@given(*[st.floats(-5, 5)] * 3, st.floats(0.01, 2))
def test_the_value_loss_is_never_below_the_plain_square(
    v: float, old: float, r: float, clip: float
):
    loss = value_loss(doubles(v), doubles(old), returns_T=doubles(r), clip=clip).item()
    near = min(max(v, old - clip), old + clip)
    assert loss == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2)
    assert loss >= (v - r) ** 2 / 2 - 1e-12


def test_the_gradient_of_the_value_loss_is_right():
    values = doubles(0.1, 0.7, -1.0).requires_grad_()
    old, returns = doubles(0, 0.1, 0), doubles(1, -1, 1)
    check = partial(value_loss, old_values_T=old, returns_T=returns)
    assert torch.autograd.gradcheck(check, (values,))


def pair_by_loops(
    kind: Any, c: float, r: float, rc: float, rr: float, beta: float, e: float
) -> float:
    margin = (c - rc) - (r - rr)
    if kind is dpo:
        right = math.log(1 + math.exp(-beta * margin))
        wrong = math.log(1 + math.exp(beta * margin))
    else:
        right, wrong = (margin - 1 / (2 * beta)) ** 2, (margin + 1 / (2 * beta)) ** 2
    return (1 - e) * right + e * wrong


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", [dpo, ipo])
def test_pairs_by_loops_and_their_gradients(kind: Any, smoothing: float):
    draw = torch.Generator().manual_seed(0)
    c, r, rc, rr = (-5 * torch.rand(4, 6, generator=draw, dtype=torch.float64)).unbind()
    options = {"reference_chosen_P": rc, "reference_rejected_P": rr, "beta": 0.3}
    loss = partial(kind, **options, label_smoothing=smoothing)
    expected = [
        pair_by_loops(kind, *(float(x[p]) for x in (c, r, rc, rr)), 0.3, smoothing)
        for p in range(6)
    ]
    assert loss(c, r).tolist() == pytest.approx(expected)
    assert torch.autograd.gradcheck(loss, (c.requires_grad_(), r.requires_grad_()))


def test_dpo_and_ipo_by_hand():
    zero = doubles(0.0)
    references = {"reference_chosen_P": zero, "reference_rejected_P": zero}
    assert dpo(zero, zero, **references).item() == pytest.approx(math.log(2))
    assert ipo(doubles(5.0), zero, **references, beta=0.1).item() == pytest.approx(0)  # 1 / 0.2
    assert ipo(zero, zero, **references, beta=0.5).item() == pytest.approx(1)


@pytest.mark.parametrize("kind", [dpo, ipo])
def test_pairs_far_apart_are_finite_and_no_pairs_give_nothing(kind: Any):
    far = torch.tensor([-1e4, 0.0], requires_grad=True)
    zero = torch.zeros(2)
    loss = kind(far, far.flip(0), reference_chosen_P=zero, reference_rejected_P=zero)
    [gradient] = torch.autograd.grad(loss.sum(), far)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()
    none = torch.zeros(0)
    assert kind(none, none, reference_chosen_P=none, reference_rejected_P=none).shape == (0,)


def kl_by_loops(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def divergence_by_loops(name: str, t: list[float], s: list[float]) -> float:
    t, s = [*t, 1 - sum(t)], [*s, 1 - sum(s)]
    pairs = list(zip(t, s, strict=True))
    match name:
        case "forward":
            return kl_by_loops(t, s)
        case "reverse":
            return kl_by_loops(s, t)
        case "js":
            m = [(a + b) / 2 for a, b in pairs]
            return (kl_by_loops(t, m) + kl_by_loops(s, m)) / 2
        case "skewed":
            return kl_by_loops(t, [0.1 * a + 0.9 * b for a, b in pairs])
        case "skewed_reverse":
            return kl_by_loops(s, [0.9 * a + 0.1 * b for a, b in pairs])
        case _:
            head = tail = before = 0.0
            for a, b in sorted(pairs, reverse=True):
                if before < 0.5:
                    head += abs(a - b)
                else:
                    tail += abs(a - b)
                before += a
            share = head / (head + tail)
            return share * kl_by_loops(t, s) + (1 - share) * kl_by_loops(s, t)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_by_loops(name: str):
    top = random_logs(0).topk(3)
    student = random_logs(1).gather(1, top.indices)
    expected = [
        divergence_by_loops(name, t, s)
        for t, s in zip(top.values.exp().tolist(), student.exp().tolist(), strict=True)
    ]
    assert DIVERGENCES[name](top.values, student).tolist() == pytest.approx(expected)


def test_divergences_by_hand():
    # t = 1/2, 1/2 and s = 1/4, 3/4: one token and the rest
    t, s = doubles(0.5).log()[None], doubles(0.25).log()[None]
    assert DIVERGENCES["forward"](t, s).item() == pytest.approx(math.log(4 / 3) / 2)
    assert DIVERGENCES["reverse"](t, s).item() == pytest.approx(
        math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4
    )


@pytest.mark.parametrize("name", [n for n in DIVERGENCES if n != "adaptive"])
def test_the_gradients_of_divergences_are_right(name: str):
    top = random_logs(0).topk(3)
    student = random_logs(1).gather(1, top.indices).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: DIVERGENCES[name](top.values, s), (student,))


def test_the_gradient_of_the_adaptive_divergence_holds_its_share_fixed():
    top = random_logs(0).topk(3)
    student = random_logs(1).gather(1, top.indices).requires_grad_()
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
    top = random_logs(seed).topk(k)
    student = random_logs(seed + 1000).gather(1, top.indices)
    assert (DIVERGENCES[name](top.values, student) >= -1e-9).all()
    equal = DIVERGENCES[name](top.values, top.values)
    assert equal.abs().max().item() == pytest.approx(0, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 500), k=st.integers(1, 7))
def test_more_tokens_show_more_of_the_forward_kl(seed: int, k: int):
    teacher, student = random_logs(seed), random_logs(seed + 1000)
    order = teacher.argsort(dim=-1, descending=True)
    teacher, student = teacher.gather(1, order), student.gather(1, order)
    few = DIVERGENCES["forward"](teacher[:, :k], student[:, :k])
    whole = (teacher.exp() * (teacher - student)).sum(-1)
    assert (few <= whole + 1e-9).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_certain_and_impossible_tokens_give_finite_divergences(name: str):
    teacher = torch.tensor([[0.0, -200.0], [-200.0, -300.0], [0.0, -1e4]])
    student = torch.tensor([[-200.0, 0.0], [0.0, -200.0], [0.0, -1e4]], requires_grad=True)
    value = DIVERGENCES[name](teacher, student)
    [gradient] = torch.autograd.grad(value.sum(), student)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()
    assert DIVERGENCES[name](teacher[:0], student[:0]).shape == (0,)


def test_a_skewed_divergence_is_bounded_where_the_plain_one_is_not():
    t, s = doubles(math.log(1 - 1e-5))[None], doubles(-500.0)[None]
    assert DIVERGENCES["forward"](t, s).item() > 400
    assert skewed_kl(t, s, skew=0.1).item() <= math.log(10)
