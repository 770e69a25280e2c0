"""From logits to tokens: the distribution, its cuts, and the log-probs that are reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollick.infer.native.philox import uniforms
from rollick.infer.native.sampler import DrawRules, draw, draw_row_by_row

LOGITS_V = torch.tensor([1.0, 0.0, 3.0, 2.0])


def _rules(
    count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> DrawRules:
    return DrawRules(
        np.full(count, temperature), np.full(count, top_k), np.full(count, top_p, np.float64)
    )


def _many(count: int, **rules: float) -> tuple[np.ndarray, np.ndarray]:
    uniform = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    drawn = draw(LOGITS_V.expand(count, -1), _rules(count, **rules), uniform_R=uniform)
    return drawn.tokens_R, drawn.logprobs_R


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax_at_the_temperature(temperature):
    tokens, _ = _many(4000, temperature=temperature)
    expected = 4000 * (LOGITS_V / temperature).softmax(-1).numpy()
    counts = np.bincount(tokens, minlength=4)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees, p = 0.001


def test_the_log_prob_is_that_of_the_distribution_drawn_from():
    tokens, logprobs = _many(50, temperature=0.7)
    expected = (LOGITS_V / 0.7).log_softmax(-1)[tokens].numpy()
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_temperature_zero_takes_the_likeliest_and_reports_temperature_one():
    tokens, logprobs = _many(3, temperature=0.0)
    assert tokens.tolist() == [2, 2, 2]
    np.testing.assert_allclose(logprobs, LOGITS_V.log_softmax(-1)[2].item(), atol=1e-6)


def test_top_k_draws_from_the_k_likeliest_and_renormalises():
    tokens, logprobs = _many(500, top_k=2)
    kept = torch.tensor([3.0, 2.0]).log_softmax(-1)
    assert set(tokens.tolist()) == {2, 3}
    np.testing.assert_allclose(logprobs[tokens == 2][0], kept[0].item(), atol=1e-6)


def test_top_p_draws_from_the_smallest_set_with_that_mass():
    # softmax of (3, 2, 1, 0): 0.644, 0.237, 0.087, 0.032. Two tokens have 0.881 >= 0.8.
    tokens, _ = _many(500, top_p=0.8)
    assert set(tokens.tolist()) == {2, 3}
    tokens, logprobs = _many(500, top_p=0.5)
    assert set(tokens.tolist()) == {2}
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)


def test_rows_with_different_rules_are_drawn_together():
    rules = DrawRules(
        np.asarray([0.0, 1.0, 1.0]), np.asarray([0, 1, 0]), np.asarray([1.0, 1.0, 1.0])
    )
    drawn = draw(LOGITS_V.expand(3, -1), rules, uniform_R=np.asarray([0.99, 0.99, 0.0]))
    assert drawn.tokens_R.tolist() == [2, 2, 0]


def test_a_token_of_probability_zero_is_never_drawn_even_at_the_edges():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    edges = np.asarray([0.0, 1 - 2.0**-53])
    assert draw(logits, _rules(2), uniform_R=edges).tokens_R.tolist() == [1, 1]


def test_row_by_row_draws_the_same_tokens_and_no_row_depends_on_another():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    uniform = uniforms(np.arange(5, dtype=np.uint64), np.arange(5))
    rules = _rules(5, temperature=0.8)
    together = draw_row_by_row(logits, rules, uniform_R=uniform)
    assert together.tokens_R.tolist() == draw(logits, rules, uniform_R=uniform).tokens_R.tolist()
    last = draw_row_by_row(logits[4:], rules.row(4), uniform_R=uniform[4:])
    assert last.logprobs_R[0] == together.logprobs_R[4]
