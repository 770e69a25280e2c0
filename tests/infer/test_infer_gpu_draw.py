"""Drawing on the device: the reference against the CPU's sampler, and the kernels against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollick.infer.native.gpu.draw import DeviceRows, Field, Share, draw, floors
from rollick.infer.native.philox import uniforms
from rollick.infer.native.sampler import DrawRules
from rollick.infer.native.sampler import draw as draw_on_cpu

# Of the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

ROWS = 12


def _rows(*, device: str = "cpu") -> DeviceRows:
    """Rows that draw in all ways, some of them ended, some about to end."""
    rows = DeviceRows.empty(rows=ROWS, pages=1, stops=[5, 7], device=device)
    every = torch.arange(ROWS, device=device)
    rows.state[Field.LENGTH] = 10 + every
    rows.state[Field.PROMPT] = 5
    rows.state[Field.LIMIT] = 20
    rows.state[Field.STREAM] = every * 7919 - 5
    rows.state[Field.ACTIVE] = (every % 5 != 4).long()
    rows.state[Field.TOP_K] = torch.tensor([0, 1, 20, 50, 200, 0]).repeat(2)
    rows.shares[Share.TEMPERATURE] = torch.tensor([0.0, 0.7, 1.0, 1.3]).repeat(3)
    rows.shares[Share.TOP_P] = torch.tensor([0.9, 1.0, 0.3]).repeat(4)
    rows.shares[Share.MIN_P] = torch.tensor([0.0] * 5 + [0.05]).repeat(2)
    return rows


def _logits(vocabulary: int, *, device: str = "cpu") -> torch.Tensor:
    torch.manual_seed(0)
    logits_RV = torch.randn(ROWS, vocabulary) * 4
    logits_RV[:, 3] = float("-inf")
    return logits_RV.to(device)


@pytest.mark.parametrize("cuts", [False, True])
def test_the_reference_draws_what_the_cpu_draws(cuts: bool):
    rows, logits_RV = _rows(), _logits(500)
    state = rows.state.clone()
    draw(logits_RV, rows, cuts=cuts, kernels=False)
    nothing = np.zeros(ROWS)
    rules = DrawRules(
        rows.shares[Share.TEMPERATURE].double().numpy(),
        state[Field.TOP_K].numpy() if cuts else nothing.astype(np.int64),
        rows.shares[Share.TOP_P].double().numpy() if cuts else nothing + 1,
        rows.shares[Share.MIN_P].double().numpy() if cuts else nothing,
    )
    stream = state[Field.STREAM].numpy().view(np.uint64)
    before = (state[Field.LENGTH] - state[Field.PROMPT]).numpy()
    expected = draw_on_cpu(logits_RV, rules, uniform_R=uniforms(stream, before))
    assert rows.drawn[0].tolist() == expected.tokens_R.tolist()
    np.testing.assert_allclose(rows.logprobs.numpy(), expected.logprobs_R, atol=1e-5)


def test_a_row_moves_on_until_it_stops_or_is_full():
    rows = DeviceRows.empty(rows=4, pages=1, stops=[2], device="cpu")
    rows.state[Field.LENGTH] = 5
    rows.state[Field.LIMIT] = torch.tensor([9, 6, 9, 9])
    rows.state[Field.ACTIVE] = torch.tensor([1, 1, 1, 0])
    logits_RV = torch.zeros(4, 4)
    logits_RV[torch.arange(4), torch.tensor([1, 1, 2, 1])] = 50.0
    draw(logits_RV, rows, cuts=False, kernels=False)
    assert rows.drawn[0].tolist() == [1, 1, 2, 1]
    assert rows.state[Field.LENGTH].tolist() == [6, 6, 6, 5]
    assert rows.state[Field.ACTIVE].tolist() == [1, 0, 0, 0]
    assert rows.state[Field.TOKEN].tolist() == [1, 1, 2, 0]


def test_floors_of_a_distribution_that_can_be_checked_by_hand():
    rows = DeviceRows.empty(rows=4, pages=1, stops=[], device="cpu")
    rows.shares[Share.TEMPERATURE] = 1.0
    rows.shares[Share.TOP_P] = torch.tensor([0.65, 1.0, 1.0, 0.65])
    rows.shares[Share.MIN_P] = torch.tensor([0.0, 0.0, 0.4, 0.0])
    rows.state[Field.TOP_K] = torch.tensor([0, 3, 0, 2])
    shares = torch.tensor([0.1, 0.4, 0.2, 0.3])
    logits_RV = shares.log().repeat(4, 1)
    # 0.4 + 0.3 pass 0.65; the best three; at least 0.4 of 0.4; of 0.4 and 0.3 the first is 0.57.
    expected = shares[[3, 2, 2, 3]].log()
    torch.testing.assert_close(floors(logits_RV, rows, kernels=False), expected)


@pytest.mark.parametrize("vocabulary", [100, 5000])
def test_the_kernels_find_the_floors_of_the_reference(kernel_device: str, vocabulary: int):
    rows, logits_RV = _rows(device=kernel_device), _logits(vocabulary, device=kernel_device)
    found, expected = (floors(logits_RV, rows, kernels=kernels) for kernels in (True, False))
    greedy_R = rows.shares[Share.TEMPERATURE] == 0
    for row in range(ROWS):
        left, wanted = (logits_RV[row] >= floor[row] for floor in (found, expected))
        assert torch.equal(left, wanted), (row, int(left.sum()), int(wanted.sum()))
        assert not greedy_R[row] or left.all()


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("vocabulary", [100, 5000])
def test_the_kernels_draw_what_the_reference_draws(kernel_device: str, vocabulary: int, cuts: bool):
    found, expected = _rows(device=kernel_device), _rows(device=kernel_device)
    logits_RV = _logits(vocabulary, device=kernel_device)
    draw(logits_RV, found, cuts=cuts, kernels=True)
    draw(logits_RV, expected, cuts=cuts, kernels=False)
    assert found.drawn[0].tolist() == expected.drawn[0].tolist()
    assert torch.equal(found.state, expected.state)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
