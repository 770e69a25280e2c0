"""KL estimators and controllers, on log-probs of sampled tokens."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollick.algorithms.kl import (
    MAX_LOG_RATIO,
    adaptive_coefficient,
    binary_kl,
    bounded_ratio,
    fixed_coefficient,
    k1,
    k2,
    k3,
)
from rollick.config.names import NAMES, resolve


def to_logprobs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_estimators_by_hand():
    # p = 1/2, q = 1/4: x = 1/2
    p, q = to_logprobs(0.5), to_logprobs(0.25)
    assert k1(p, q).item() == pytest.approx(math.log(2))
    assert k2(p, q).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(p, q).item() == pytest.approx(0.5 - 1 + math.log(2))


def test_k1_and_k3_have_the_mean_of_the_true_kl():
    log_p, log_q = to_logprobs(0.7, 0.2, 0.1), to_logprobs(0.5, 0.1, 0.4)
    p = log_p.exp()
    exact_kl = (p * (log_p - log_q)).sum().item()
    for form in (k1, k3):
        assert (p * form(log_p, log_q)).sum().item() == pytest.approx(exact_kl, abs=1e-12)


def test_the_mean_gradient_of_k2_is_that_of_the_reverse_kl():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.tensor([0.1, 0.4, -0.5]).double(), 0)

    log_p = torch.log_softmax(logits, 0)
    [exact] = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)
    log_p = torch.log_softmax(logits, 0)
    [sampled] = torch.autograd.grad((log_p.detach().exp() * k2(log_p, log_q)).sum(), logits)
    assert torch.allclose(exact, sampled, atol=1e-12)


def test_the_mean_gradient_of_k1_is_zero_which_is_why_it_is_refused_in_a_loss():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(logits, 0)
    mean = (log_p.detach().exp() * k1(log_p, torch.zeros(3).double())).sum()
    [gradient] = torch.autograd.grad(mean, logits)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("form", sorted(NAMES["kl_forms"]))
def test_gradients_are_right(form: str):
    log_p = torch.tensor([-0.1, -2.0, -7.0], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([-0.2, -1.0, -3.0], dtype=torch.float64)

    def estimate(p: torch.Tensor) -> torch.Tensor:
        return resolve("kl_forms", form)(p, log_q)

    assert torch.autograd.gradcheck(estimate, (log_p,))


@pytest.mark.parametrize("form", sorted(NAMES["kl_forms"]))
@pytest.mark.parametrize(("p", "q"), [(-1000.0, 0.0), (0.0, -1000.0), (-1000.0, -1000.0)])
def test_very_different_policies_give_finite_values_and_gradients(form: str, p: float, q: float):
    log_p = torch.tensor([p], requires_grad=True)
    value = resolve("kl_forms", form)(log_p, torch.tensor([q]))
    [gradient] = torch.autograd.grad(value.sum(), log_p)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


def test_k3_never_pushes_away_from_the_reference_however_far():
    log_p = torch.tensor([-100.0, 0.0], requires_grad=True)
    value = k3(log_p, torch.tensor([0.0, -100.0]))
    [gradient] = torch.autograd.grad(value.sum(), log_p)
    assert gradient[0] <= 0  # p far below q: descent does not lower it further
    assert gradient[1] == 1  # p far above q: descent lowers it


def test_k3_keeps_its_digits_for_policies_that_nearly_agree():
    # half of the squared log-ratio, to first order; x - 1 - ln x in float32 would give 0 or 1e-7
    value = k3(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-10]))
    assert value.item() == pytest.approx(2**-21, rel=1e-2)


def test_a_ratio_is_never_infinite():
    ratio = bounded_ratio(torch.tensor([0.0, -5.0]), torch.tensor([-1e30, -5.0]))
    assert ratio.tolist() == [pytest.approx(math.exp(MAX_LOG_RATIO)), 1.0]


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.25), (0.9, 0.1), (0.3, 0.3), (1e-6, 0.5)])
def test_the_binary_kl_is_that_of_drawing_the_token_or_not(p: float, q: float):
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert binary_kl(to_logprobs(p), to_logprobs(q)).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("p", [0.0, -1e-9, -1e4])
@pytest.mark.parametrize("q", [0.0, -1e-9, -1e4])
def test_the_binary_kl_of_certain_and_impossible_tokens_is_finite(p: float, q: float):
    value = binary_kl(torch.tensor([p]), torch.tensor([q])).item()
    assert math.isfinite(value)
    assert value >= 0
    assert p != q or value == 0


def test_the_fixed_controller_never_moves():
    assert fixed_coefficient(0.3, observed=99.0, samples=8) == 0.3


def test_the_adaptive_controller_by_hand():
    update = partial(adaptive_coefficient, 0.1, samples=64, target=2.0, horizon=640)
    assert update(observed=2.0) == pytest.approx(0.1)
    assert update(observed=2.2) == pytest.approx(0.1 * 1.01)
    assert update(observed=100.0) == pytest.approx(0.1 * 1.02)  # the error is clipped at 0.2
    assert update(observed=0.0) == pytest.approx(0.1 * 0.98)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 10**6))
def test_the_adaptive_controller_is_monotone_and_never_negative(low: float, high: float, n: int):
    low, high = sorted((low, high))
    update = partial(adaptive_coefficient, 0.2, samples=n, target=0.5, horizon=1000)
    assert 0 <= update(observed=low) <= update(observed=high)
