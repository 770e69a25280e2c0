"""The sampler: the distribution of tokens, its truncation, and the reported log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rollick.infer.native.philox import uniforms
from rollick.infer.native.sampler import (
    BLOCK,
    FIRST_CANDIDATES,
    LogitBias,
    SamplingMetadata,
    sample,
    sample_row_by_row,
)

LOGITS_V = torch.tensor([1.0, 0.0, 3.0, 2.0])


def _make_metadata(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    bias: Mapping[int, float] | None = None,
) -> SamplingMetadata:
    entries = [(row, token) for row in range(count) for token in bias or {}]
    return SamplingMetadata(
        np.full(count, temperature),
        np.full(count, top_k),
        np.full(count, top_p, np.float64),
        np.full(count, min_p, np.float64),
        bias=LogitBias(
            np.asarray([row for row, _ in entries]),
            np.asarray([token for _, token in entries]),
            np.asarray([bias[token] for _, token in entries], np.float32),
        )
        if bias
        else None,
    )


def _sample_rows(count: int, **metadata: Any) -> tuple[np.ndarray, np.ndarray]:
    uniform = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    generated = sample(
        LOGITS_V.expand(count, -1), _make_metadata(count, **metadata), uniform_R=uniform
    )
    return generated.tokens_R, generated.logprobs_R


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax_at_the_temperature(temperature):
    tokens, _ = _sample_rows(4000, temperature=temperature)
    expected = 4000 * (LOGITS_V / temperature).softmax(-1).numpy()
    counts = np.bincount(tokens, minlength=4)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees, p = 0.001


def test_the_log_prob_is_that_of_the_sampled_distribution():
    tokens, logprobs = _sample_rows(50, temperature=0.7)
    expected = (LOGITS_V / 0.7).log_softmax(-1)[tokens].numpy()
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_temperature_zero_is_greedy_and_reports_temperature_one():
    tokens, logprobs = _sample_rows(3, temperature=0.0)
    assert tokens.tolist() == [2, 2, 2]
    np.testing.assert_allclose(logprobs, LOGITS_V.log_softmax(-1)[2].item(), atol=1e-6)


def test_top_k_samples_from_the_k_most_likely_and_renormalises():
    tokens, logprobs = _sample_rows(500, top_k=2)
    kept = torch.tensor([3.0, 2.0]).log_softmax(-1)
    assert set(tokens.tolist()) == {2, 3}
    np.testing.assert_allclose(logprobs[tokens == 2][0], kept[0].item(), atol=1e-6)


def test_top_p_samples_from_the_smallest_set_with_that_mass():
    # softmax of (3, 2, 1, 0): 0.644, 0.237, 0.087, 0.032. Two tokens have 0.881 >= 0.8.
    tokens, _ = _sample_rows(500, top_p=0.8)
    assert set(tokens.tolist()) == {2, 3}
    tokens, logprobs = _sample_rows(500, top_p=0.5)
    assert set(tokens.tolist()) == {2}
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)


def test_min_p_removes_tokens_far_less_likely_than_the_best():
    # softmax of (3, 2, 1, 0) over that of 3: 1, 0.37, 0.135, 0.05.
    tokens, logprobs = _sample_rows(500, min_p=0.2)
    kept = torch.tensor([3.0, 2.0]).log_softmax(-1)
    assert set(tokens.tolist()) == {2, 3}
    np.testing.assert_allclose(logprobs[tokens == 3][0], kept[1].item(), atol=1e-6)


def test_a_bias_shifts_probability_and_minus_infinity_bans_a_token():
    tokens, logprobs = _sample_rows(2000, bias={1: 3.0, 2: -np.inf})
    expected = torch.tensor([1.0, 3.0, -torch.inf, 2.0]).log_softmax(-1)
    assert set(tokens.tolist()) == {0, 1, 3}
    np.testing.assert_allclose(logprobs, expected[tokens].numpy(), atol=1e-6)
    assert _sample_rows(1, temperature=0.0, bias={0: 2.5})[0].tolist() == [0]


def _compute_distribution(logits: torch.Tensor, **metadata: Any) -> np.ndarray:
    """The reference distribution, computed token by token, most likely first."""
    logits = logits.double()
    for token, value in (metadata.get("bias") or {}).items():
        logits[token] += value
    probs = (logits / metadata.get("temperature", 1.0)).softmax(-1)
    order = probs.argsort(descending=True)[: metadata.get("top_k", 0) or None].tolist()
    top_k_mass = float(probs[order].sum())
    kept, mass = [], 0.0
    for token in order:
        if mass >= metadata.get("top_p", 1.0):
            break
        mass += float(probs[token]) / top_k_mass
        if probs[token] >= metadata.get("min_p", 0.0) * probs[order[0]]:
            kept.append(token)
    truncated = np.zeros(len(probs))
    truncated[kept] = probs[kept].numpy()
    return truncated / truncated.sum()


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"bias": {3: 2.0, 5: -1.0}},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "bias": {0: 1.5}},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_hundred_thousand_samples_follow_the_reported_distribution(case):
    generator = torch.Generator().manual_seed(1)
    # A full block of the vocabulary and a partial one.
    logits = torch.randn(BLOCK + 44, generator=generator) * 2
    expected = _compute_distribution(logits.clone(), **case)
    total, rows = 100_000, 5_000
    counts = np.zeros(len(logits))
    for part in range(total // rows):
        streams = np.arange(part * rows, (part + 1) * rows, dtype=np.uint64)
        uniform = uniforms(streams, np.zeros(rows, np.int64))
        generated = sample(logits.expand(rows, -1), _make_metadata(rows, **case), uniform_R=uniform)
        counts += np.bincount(generated.tokens_R, minlength=len(logits))
        np.testing.assert_allclose(
            generated.logprobs_R, np.log(expected[generated.tokens_R]), atol=2e-6
        )
    assert counts[expected == 0].sum() == 0
    # Tokens that are expected less than five times are one class, as the chi-squared test requires.
    rare = (expected * total < 5) & (expected > 0)
    frequent = expected * total >= 5
    classes = np.append(expected[frequent], expected[rare].sum()) * total
    actual = np.append(counts[frequent], counts[rare].sum())
    classes, actual = classes[classes > 0], actual[classes > 0]
    degrees = max(1, len(classes) - 1)
    statistic = ((actual - classes) ** 2 / classes).sum()
    # Wilson-Hilferty: the cube root is nearly normal. 3.7 standard deviations are p = 1e-4.
    spread = 2 / (9 * degrees)
    assert ((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5 < 3.7


@pytest.mark.parametrize("scale", [0.1, 4.0])
def test_truncation_is_the_same_whether_candidates_or_the_full_vocabulary_are_sorted(scale):
    logits = torch.randn(3 * FIRST_CANDIDATES, generator=torch.Generator().manual_seed(2)) * scale
    for case in ({"top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 2000}):
        expected = _compute_distribution(logits, **case)
        metadata = _make_metadata(2, **case)
        uniform = np.asarray([0.3, 0.9999])
        generated = sample(logits.expand(2, -1), metadata, uniform_R=uniform)
        np.testing.assert_allclose(
            generated.logprobs_R, np.log(expected[generated.tokens_R]), atol=5e-6
        )


def test_rows_with_different_parameters_are_sampled_together():
    metadata = SamplingMetadata(
        np.asarray([0.0, 1.0, 1.0]), np.asarray([0, 1, 0]), np.ones(3), np.zeros(3)
    )
    generated = sample(LOGITS_V.expand(3, -1), metadata, uniform_R=np.asarray([0.99, 0.99, 0.0]))
    assert generated.tokens_R.tolist() == [2, 2, 0]


def test_a_token_of_probability_zero_is_never_sampled_even_at_the_limits():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    edges = np.asarray([0.0, 1 - 2.0**-53])
    assert sample(logits, _make_metadata(2), uniform_R=edges).tokens_R.tolist() == [1, 1]


def test_row_by_row_samples_the_same_tokens_and_no_row_depends_on_another():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    uniform = uniforms(np.arange(5, dtype=np.uint64), np.arange(5))
    metadata = _make_metadata(5, temperature=0.8)
    batched = sample_row_by_row(logits, metadata, uniform_R=uniform)
    assert (
        batched.tokens_R.tolist() == sample(logits, metadata, uniform_R=uniform).tokens_R.tolist()
    )
    last = sample_row_by_row(logits[4:], metadata.select_row(4), uniform_R=uniform[4:])
    assert last.logprobs_R[0] == batched.logprobs_R[4]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_are_corrected_to_the_exact_logits_of_the_sampled_tokens(temperature):
    metadata = _make_metadata(20, temperature=temperature)
    uniform_R = uniforms(np.arange(20, dtype=np.uint64), np.zeros(20, np.int64))
    logits_RV = LOGITS_V.repeat(20, 1)
    generated = sample(logits_RV, metadata, uniform_R=uniform_R)
    rows = np.arange(20)
    exact_R = logits_RV[rows, generated.tokens_R].double().numpy() + np.linspace(-0.2, 0.2, 20)
    actual = generated.with_exact_logits(logits_RV, exact_R, metadata)
    exact_RV = logits_RV.double()
    exact_RV[rows, generated.tokens_R] = torch.from_numpy(exact_R)
    expected_RV = (exact_RV / (temperature or 1.0)).log_softmax(-1)
    np.testing.assert_allclose(
        actual.logprobs_R, expected_RV[rows, generated.tokens_R].numpy(), atol=1e-6
    )
    assert (actual.tokens_R == generated.tokens_R).all()
