"""Sampling on the device: the kernels against the CPU sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollick.infer.native.gpu.device_sampler import (
    DeviceState,
    SamplingField,
    StateField,
    sample_on_device,
)
from rollick.infer.native.philox import uniforms
from rollick.infer.native.sampler import SamplingMetadata, sample

# A warning of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

ROWS = 12


def _make_rows(*, device: str = "cpu") -> DeviceState:
    """Rows with all kinds of parameters. Some have ended, others are about to end."""
    rows = DeviceState.empty(rows=ROWS, pages=1, stop_ids=[5, 7], device=device)
    index_R = torch.arange(ROWS, device=device)
    rows.state[StateField.LENGTH] = 10 + index_R
    rows.state[StateField.PROMPT] = 5
    rows.state[StateField.LIMIT] = 20
    rows.state[StateField.STREAM] = index_R * 7919 - 5
    rows.state[StateField.ACTIVE] = (index_R % 5 != 4).long()
    rows.state[StateField.TOP_K] = torch.tensor([0, 1, 20, 50, 200, 0]).repeat(2)
    rows.sampling[SamplingField.TEMPERATURE] = torch.tensor([0.0, 0.7, 1.0, 1.3]).repeat(3)
    rows.sampling[SamplingField.TOP_P] = torch.tensor([0.9, 1.0, 0.3]).repeat(4)
    rows.sampling[SamplingField.MIN_P] = torch.tensor([0.0] * 5 + [0.05]).repeat(2)
    return rows


def _make_logits(vocabulary: int, *, device: str = "cpu") -> torch.Tensor:
    torch.manual_seed(0)
    logits_RV = torch.randn(ROWS, vocabulary) * 4
    logits_RV[:, 3] = float("-inf")
    return logits_RV.to(device)


@pytest.mark.parametrize("truncate", [False, True])
def test_without_kernels_the_cpu_sampler_decides(truncate: bool):
    rows, logits_RV = _make_rows(), _make_logits(500)
    state = rows.state.clone()
    sample_on_device(logits_RV, rows, truncate=truncate, kernels=False)
    zeros_R = np.zeros(ROWS)
    metadata = SamplingMetadata(
        rows.sampling[SamplingField.TEMPERATURE].double().numpy(),
        state[StateField.TOP_K].numpy() if truncate else zeros_R.astype(np.int64),
        rows.sampling[SamplingField.TOP_P].double().numpy() if truncate else zeros_R + 1,
        rows.sampling[SamplingField.MIN_P].double().numpy() if truncate else zeros_R,
    )
    stream = state[StateField.STREAM].numpy().view(np.uint64)
    position_R = (state[StateField.LENGTH] - state[StateField.PROMPT]).numpy()
    expected = sample(logits_RV, metadata, uniform_R=uniforms(stream, position_R))
    assert rows.sampled[0].tolist() == expected.tokens_R.tolist()
    np.testing.assert_allclose(rows.logprobs.numpy(), expected.logprobs_R, atol=1e-5)


def test_a_row_advances_until_it_stops_or_reaches_its_limit():
    rows = DeviceState.empty(rows=4, pages=1, stop_ids=[2], device="cpu")
    rows.state[StateField.LENGTH] = 5
    rows.state[StateField.LIMIT] = torch.tensor([9, 6, 9, 9])
    rows.state[StateField.ACTIVE] = torch.tensor([1, 1, 1, 0])
    logits_RV = torch.zeros(4, 4)
    logits_RV[torch.arange(4), torch.tensor([1, 1, 2, 1])] = 50.0
    sample_on_device(logits_RV, rows, truncate=False, kernels=False)
    assert rows.sampled[0].tolist() == [1, 1, 2, 1]
    assert rows.state[StateField.LENGTH].tolist() == [6, 6, 6, 5]
    assert rows.state[StateField.ACTIVE].tolist() == [1, 0, 0, 0]
    assert rows.state[StateField.TOKEN].tolist() == [1, 1, 2, 0]


def _compute_floors(logits_RV: torch.Tensor, rows: DeviceState) -> torch.Tensor:
    from rollick.infer.native.gpu.sampling_kernels import launch_logit_floors

    top_k_R = rows.state[StateField.TOP_K]
    return launch_logit_floors(logits_RV, top_k=top_k_R, sampling=rows.sampling)


def _compute_expected_floors(logits_RV: torch.Tensor, rows: DeviceState) -> torch.Tensor:
    count, vocabulary = logits_RV.shape
    temperature_R1 = rows.sampling[SamplingField.TEMPERATURE, :count, None].double()
    greedy_R1 = temperature_R1 == 0
    ordered_RV = logits_RV.sort(dim=-1, descending=True).values
    scaled_RV = ordered_RV.double() / torch.where(greedy_R1, 1.0, temperature_R1)
    top_k_R1 = rows.state[StateField.TOP_K, :count, None]
    rank_V = torch.arange(vocabulary, device=logits_RV.device)
    outside_RV = (rank_V >= top_k_R1) & (top_k_R1 > 0)
    # Top-p applies to the tokens that top-k keeps, as in other engines.
    mass_RV = scaled_RV.masked_fill(outside_RV, float("-inf")).softmax(-1)
    before_RV = mass_RV.cumsum(-1) - mass_RV
    top_p_R1 = rows.sampling[SamplingField.TOP_P, :count, None].double()
    outside_RV |= (before_RV >= top_p_R1) & (top_p_R1 < 1)
    min_p_R1 = rows.sampling[SamplingField.MIN_P, :count, None].double()
    outside_RV |= mass_RV < min_p_R1 * mass_RV[:, :1]
    outside_RV &= ~greedy_R1
    outside_RV[:, 0] = False
    return ordered_RV.masked_fill(outside_RV, float("inf")).amin(-1)


def test_floors_of_a_distribution_that_can_be_checked_by_hand(kernel_device: str):
    rows = DeviceState.empty(rows=4, pages=1, stop_ids=[], device=kernel_device)
    rows.sampling[SamplingField.TEMPERATURE] = 1.0
    rows.sampling[SamplingField.TOP_P] = torch.tensor([0.65, 1.0, 1.0, 0.65])
    rows.sampling[SamplingField.MIN_P] = torch.tensor([0.0, 0.0, 0.4, 0.0])
    rows.state[StateField.TOP_K] = torch.tensor([0, 3, 0, 2])
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3], device=kernel_device)
    logits_RV = probs.log().repeat(4, 1)
    # Row by row: 0.4 + 0.3 exceed 0.65; the best three; at least 0.4 * 0.4; 0.4 is 0.57 of 0.7.
    expected = probs[[3, 2, 2, 3]].log()
    torch.testing.assert_close(_compute_expected_floors(logits_RV, rows), expected)
    kept, expected_kept = (
        logits_RV >= floor[:, None] for floor in (_compute_floors(logits_RV, rows), expected)
    )
    assert torch.equal(kept, expected_kept)


@pytest.mark.parametrize("vocabulary", [100, 5000])
def test_the_kernels_keep_the_tokens_of_the_reference_floors(kernel_device: str, vocabulary: int):
    rows, logits_RV = (
        _make_rows(device=kernel_device),
        _make_logits(vocabulary, device=kernel_device),
    )
    actual, expected = _compute_floors(logits_RV, rows), _compute_expected_floors(logits_RV, rows)
    greedy_R = rows.sampling[SamplingField.TEMPERATURE] == 0
    for row in range(ROWS):
        kept, expected_kept = (logits_RV[row] >= floor[row] for floor in (actual, expected))
        assert torch.equal(kept, expected_kept), (row, int(kept.sum()), int(expected_kept.sum()))
        assert not greedy_R[row] or kept.all()


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("vocabulary", [100, 5000])
def test_the_kernels_sample_the_tokens_of_the_reference(
    kernel_device: str, vocabulary: int, truncate: bool
):
    actual, expected = _make_rows(device=kernel_device), _make_rows(device=kernel_device)
    logits_RV = _make_logits(vocabulary, device=kernel_device)
    sample_on_device(logits_RV, actual, truncate=truncate, kernels=True)
    sample_on_device(logits_RV, expected, truncate=truncate, kernels=False)
    assert actual.sampled[0].tolist() == expected.sampled[0].tolist()
    assert torch.equal(actual.state, expected.state)
    torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=0, atol=1e-5)
