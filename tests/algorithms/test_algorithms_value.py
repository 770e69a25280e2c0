"""The loss of a critic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.losses import ValueInputs, value
from rollick.config.names import resolve
from rollick.config.schema.losses import ValueLoss


def make_tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_inputs(values: list[float], *, old: list[float], returns: list[float]) -> ValueInputs:
    ones_T = torch.ones(len(values), dtype=torch.float64)
    return ValueInputs(
        make_tensor(*values).requires_grad_(), make_tensor(*old), make_tensor(*returns), ones_T
    )


def make_random_inputs(seed: int, tokens: int = 12) -> ValueInputs:
    rng = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, tokens, generator=rng, dtype=torch.float64).tolist()
    return make_inputs(values, old=old, returns=returns)


def compute_gradient(inputs: ValueInputs, options: ValueLoss) -> list[float]:
    [gradient] = torch.autograd.grad(value(inputs, options).loss_T.sum(), inputs.values_T)
    return gradient.tolist()


def test_it_is_reachable_by_name():
    assert resolve("value_losses", ValueLoss().name) is value


def test_the_value_loss_by_hand():
    # V_old 0, return 1, clip 0.2: inside the clip; beyond it on the side of the return (no
    # gradient); beyond it on the other side
    inputs = make_inputs([0.1, 1.0, -1.0], old=[0, 0, 0], returns=[1, 1, 1])
    loss = value(inputs, ValueLoss(clip=0.2))
    assert loss.loss_T.tolist() == pytest.approx([0.81 / 2, 0.64 / 2, 4 / 2])
    assert compute_gradient(inputs, ValueLoss(clip=0.2)) == pytest.approx([-0.9, 0, -2])
    sums = {name: total.item() for name, total in loss.sums.items()}
    assert sums == pytest.approx(
        {"value_error": 0.81 + 0 + 4, "value_clip_share": 1, "value": 0.1, "return": 3}
    )


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(*[st.floats(-5, 5)] * 3, st.floats(0.01, 2))
def test_the_value_loss_is_the_formula_and_never_below_the_plain_square(
    v: float, old: float, r: float, clip: float
):
    loss = value(make_inputs([v], old=[old], returns=[r]), ValueLoss(clip=clip)).loss_T.item()
    clipped = min(max(v, old - clip), old + clip)
    assert loss == pytest.approx(max((v - r) ** 2, (clipped - r) ** 2) / 2)
    assert loss >= (v - r) ** 2 / 2 - 1e-12


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 500), st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_wider_clip_never_raises_the_loss(seed: int, first: float, second: float):
    inputs, (narrow, wide) = make_random_inputs(seed), sorted((first, second))
    tight, loose = (value(inputs, ValueLoss(clip=clip)).loss_T for clip in (narrow, wide))
    assert (loose <= tight + 1e-12).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_the_value_loss_is_right(seed: int):
    inputs = make_random_inputs(seed)

    def loss(values_T: torch.Tensor) -> torch.Tensor:
        return value(replace(inputs, values_T=values_T), ValueLoss()).loss_T

    assert torch.autograd.gradcheck(loss, (inputs.values_T,))


def test_a_value_that_is_its_return_has_neither_loss_nor_gradient():
    inputs = make_inputs([0.5], old=[0.5], returns=[0.5])
    assert value(inputs, ValueLoss()).loss_T.tolist() == [0]
    assert compute_gradient(inputs, ValueLoss()) == [0]


def test_no_tokens_give_nothing():
    loss = value(make_random_inputs(0, tokens=0), ValueLoss())
    assert loss.loss_T.shape == (0,)
    assert all(total.item() == 0 for total in loss.sums.values())


@pytest.mark.parametrize("v", [-1e6, 0.0, 1e6])
@pytest.mark.parametrize("r", [-1e6, 0.0, 1e6])
def test_values_far_from_their_returns_are_finite(v: float, r: float):
    inputs = make_inputs([v], old=[0], returns=[r])
    assert math.isfinite(value(inputs, ValueLoss()).loss_T.item())
    assert math.isfinite(compute_gradient(inputs, ValueLoss())[0])
