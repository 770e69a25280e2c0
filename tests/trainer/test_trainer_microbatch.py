"""How a batch is split into micro-batches, and which of its tokens are trained or computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_mixture import widen_norms

from rollick.algorithms.losses import LossInputs
from rollick.algorithms.objective import Loss
from rollick.data.batch import Batch
from rollick.models.attention.varlen import VARLEN
from rollick.models.head.logprobs import output_head, token_logprobs
from rollick.models.loading.load import empty_model, share_parameters
from rollick.testing.batches import random_batch, recipe_of
from rollick.testing.tiny import save_tiny, tiny_model
from rollick.trainer.local import LocalStrategy
from rollick.trainer.microbatch import (
    PackedBatch,
    microbatches,
    pack,
    plan_microbatches,
    plan_shared_microbatches,
    trained_tokens,
)
from rollick.types import SampleId

SHARED = {
    "tails of different lengths": ("0 pqrABC", "0 pqrD", "0 pqrEF", "0 pqrG"),
    "a prompt of one token": ("0 pAB", "0 pC"),
    "a sample alone": ("0 pqAB",),
    "tails of one token": ("0 pqA", "0 pqB"),
    "samples alike throughout": ("0 pqAB", "0 pqAB"),
    "two groups in turns": ("0 pqrAB", "1 stC", "0 pqrD", "1 stEFG"),
    "equal prompts of two groups": ("0 pqA", "0 pqB", "1 pqA", "1 pqB"),
    "observations inside": ("0 pqABxyC", "0 pqAzzDE", "0 pqBxC"),
    "no common prompt": ("0 pqAB", "0 rqAC"),
    "prompts that part later": ("0 pqrAB", "0 pqsC"),
    "a prompt that goes on": ("0 pqA", "0 pqrsB"),
    "a first answer that does not count": ("0 pqaB", "0 pqAB"),
    "a sample without counted tokens": ("0 pq", "0 pqA"),
}
"""Samples as "GROUP TOKENS". Capitals are trained tokens; "a" and "A" are the same token id."""

COMPUTED = {
    "tails of different lengths": 3 + 7,
    "a prompt of one token": 1 + 3,
    "a sample alone": 4,
    "tails of one token": 2 + 2,
    "samples alike throughout": 2 + 4,
    "two groups in turns": 3 + 3 + 2 + 4,
    "equal prompts of two groups": 2 * (2 + 2),
    "observations inside": 2 + 5 + 5 + 3,
    "no common prompt": 8,
    "prompts that part later": 2 + 3 + 2,
    "a prompt that goes on": 2 + 1 + 3,
    "a first answer that does not count": 2 + 4,
    "a sample without counted tokens": 1 + 1 + 2,
}


def make_batch(samples: Sequence[str]) -> Batch:
    groups, letters = zip(*(sample.split() for sample in samples), strict=True)
    text = "".join(letters)
    return replace(
        random_batch([len(sample) for sample in letters]),
        token_ids_N=np.array([4 + ord(letter) - ord("a") for letter in text.lower()], np.int32),
        loss_mask_N=np.array([letter.isupper() for letter in text]),
        group_B=np.array([int(group) for group in groups], np.int32),
    )


def test_parts_are_filled_longest_first_and_a_long_sample_is_alone():
    assert plan_microbatches([3, 9, 4, 3], tokens=7) == [[1], [2, 0], [3]]


def test_parts_can_be_cut_in_the_given_order():
    assert plan_microbatches([3, 9, 4, 3], tokens=7, keep_order=True) == [[0], [1], [2, 3]]


def test_no_samples_make_no_parts():
    assert plan_microbatches([], tokens=7) == []


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 40), st.booleans())
def test_every_sample_is_in_one_part_that_fits(lengths: list[int], tokens: int, keep: bool):
    parts = plan_microbatches(lengths, tokens=tokens, keep_order=keep)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[index] for index in part) <= tokens


def test_a_first_token_never_counts_even_if_its_mask_is_true():
    batch = replace(random_batch([3, 2]), loss_mask_N=np.array([1, 0, 1, 1, 1], bool))
    indices, samples = trained_tokens(batch)
    assert indices.tolist() == [2, 4]
    assert samples.tolist() == [0, 1]


def test_a_sample_without_a_counted_token_is_in_no_micro_batch():
    batch = replace(random_batch([2, 2]), loss_mask_N=np.array([1, 0, 0, 1], bool))
    assert microbatches(batch, tokens=100, by_uid=False) == [[1]]


def test_the_deterministic_order_is_that_of_the_ids():
    uids = (SampleId(2, 0), SampleId(0, 1), SampleId(0, 0))
    batch = replace(random_batch([3, 9, 4]), uids=uids)
    assert microbatches(batch, tokens=100, by_uid=True) == [[2, 1, 0]]
    assert microbatches(batch, tokens=100, by_uid=False) == [[1, 2, 0]]


def test_a_token_is_predicted_by_the_row_before_it_at_its_samples_temperature():
    batch = random_batch([3, 4], prompt=2)
    packed = pack(batch, device="cpu", deterministic=False)
    assert packed.indices_T.tolist() == [2, 5, 6]
    assert packed.rows_T.tolist() == [1, 4, 5]
    assert packed.targets_T.tolist() == batch.token_ids_N[[2, 5, 6]].tolist()
    assert packed.temperature_T.tolist() == [1.0, 1.25, 1.25]
    assert packed.sequence_T.tolist() == [0, 1, 1]


def test_greedy_samples_have_their_log_probs_at_temperature_one():
    batch = replace(random_batch([3]), temperature_B=np.zeros(1, np.float32))
    assert pack(batch, device="cpu", deterministic=False).temperature_T.tolist() == [1.0]


def test_a_deterministic_pack_has_complete_tiles_of_rows():
    packed = pack(random_batch([5, 30]), device="cpu", deterministic=True)
    assert len(packed.token_ids_N) == 64
    assert packed.layout.lengths == (5, 30, 29)
    assert packed.indices_T.max() == 34


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """The tiny model in float64, under packed attention."""
    plain = tiny_model(60, hidden=16).double()
    packed = empty_model(plain.config, attention=VARLEN)
    share_parameters(packed, plain)
    widen_norms(packed)
    return packed.requires_grad_()


def run_forward_backward(
    model: Any, packed: PackedBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the log-probs of the trained tokens, and the gradients of their weighted sum."""
    model.zero_grad()
    hidden_ND = model.base_model(
        input_ids=packed.token_ids_N[None],
        position_ids=packed.layout.position_ids_N[None],
        use_cache=False,
        layout=packed.layout,
    ).last_hidden_state[0]
    logprobs_T, _ = token_logprobs(
        hidden_ND.index_select(0, packed.rows_T),
        output_head(model),
        packed.targets_T,
        packed.temperature_T,
        chunk=3,
    )
    (logprobs_T * torch.linspace(-1, 2, len(logprobs_T), dtype=torch.float64)).sum().backward()
    return logprobs_T.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("case", SHARED)
def test_a_shared_prefix_changes_no_log_prob_and_no_gradient(case: str, model: torch.nn.Module):
    batch = make_batch(SHARED[case])
    full = pack(batch, device="cpu", deterministic=False)
    shared = pack(batch, device="cpu", deterministic=False, share_prefix=True)
    assert sum(shared.layout.lengths) == len(shared.token_ids_N) == COMPUTED[case]
    assert shared.indices_T.tolist() == full.indices_T.tolist()
    for name in ("targets_T", "temperature_T", "sequence_T"):
        assert torch.equal(getattr(shared, name), getattr(full, name)), name

    expected_T, gradients = run_forward_backward(model, full)
    logprobs_T, own = run_forward_backward(model, shared)
    torch.testing.assert_close(logprobs_T, expected_T, rtol=1e-10, atol=0)
    for name, expected in gradients.items():
        assert (own[name] - expected).norm() <= 1e-10 * expected.norm(), name


def test_the_last_shared_row_predicts_the_first_own_token_of_every_sample():
    batch = make_batch(["0 pqrA", "0 pqrBC"])
    packed = pack(batch, device="cpu", deterministic=False, share_prefix=True)
    assert packed.layout.lengths == (3, 1, 2)
    assert packed.rows_T.tolist() == [2, 2, 4]
    assert packed.temperature_T.tolist() == [1.0, 1.25, 1.25]


def test_a_deterministic_pack_shares_nothing():
    batch = make_batch(["0 pqA", "0 pqB"])
    packed = pack(batch, device="cpu", deterministic=True, share_prefix=True)
    assert packed.layout.lengths == (3, 3, 26)
    assert packed.rows_T.tolist() == [1, 4]
    assert microbatches(batch, tokens=5, by_uid=True, share_prefix=True) == [[0], [1]]


def test_shared_tokens_count_once_against_the_size_of_a_part():
    batch = make_batch(["0 pqrA", "0 pqrB", "0 pqrC"])
    assert microbatches(batch, tokens=6, by_uid=False, share_prefix=True) == [[0, 1, 2]]
    assert microbatches(batch, tokens=6, by_uid=False) == [[0], [1], [2]]


def test_groups_stay_together_and_fill_the_parts_largest_first():
    lengths, groups, shared = [5, 9, 6, 9, 3], [0, 1, 0, 1, 2], [4, 8, 4, 8, 0]
    plan = plan_shared_microbatches(lengths, groups=groups, shared=shared, tokens=14)
    assert plan == [[1, 3, 4], [2, 0]]


def test_kept_groups_are_never_split_however_large():
    batch = make_batch(["0 pqA", "1 rsB", "0 pqCDE", "1 rC"])
    expected_parts = [[0, 2], [1, 3]]
    for tokens in (1, 5, 8):
        for by_uid in (False, True):
            actual = microbatches(batch, tokens=tokens, by_uid=by_uid, keep_groups=True)
            assert sorted(map(sorted, actual)) == expected_parts, (tokens, by_uid)
    assert microbatches(batch, tokens=13, by_uid=False, keep_groups=True) == [[0, 2, 1, 3]]


def test_kept_groups_count_what_they_share_once():
    batch = make_batch(["0 pqrA", "0 pqrB", "1 stC", "1 stD"])
    actual = microbatches(batch, tokens=9, by_uid=False, share_prefix=True, keep_groups=True)
    assert actual == [[0, 1, 2, 3]]
    actual = microbatches(batch, tokens=8, by_uid=False, share_prefix=True, keep_groups=True)
    assert actual == [[0, 1], [2, 3]]


def test_a_group_larger_than_a_part_is_split_and_its_prefix_counts_in_each_piece():
    plan = plan_shared_microbatches([5, 5, 5, 9], groups=[0] * 4, shared=[3] * 4, tokens=7)
    assert plan == [[3], [0, 1], [2]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=16), st.integers(1, 40))
def test_every_sample_is_in_one_part_that_fits_with_shared_tokens_once(
    samples: list[tuple[int, int]], tokens: int
):
    """A sample is (group, own tokens); the samples of group g share g tokens."""
    groups, shared = [group for group, _ in samples], [group for group, _ in samples]
    lengths = [group + own for group, own in samples]
    parts = plan_shared_microbatches(lengths, groups=groups, shared=shared, tokens=tokens)
    assert sorted(index for part in parts for index in part) == list(range(len(samples)))
    for part in parts:
        size = sum(samples[b][1] for b in part) + sum({groups[b] for b in part})
        assert len(part) == 1 or size <= tokens


def test_the_setting_decides_whether_a_strategy_shares(tmp_path: Path):
    folder = save_tiny(tmp_path, hidden=16)
    batch = make_batch(["0 pqrA", "0 pqrBC", "1 stD", "1 stE"])
    results: list[np.ndarray[Any, Any]] = []
    for share, computed in [(True, 6 + 4), (False, 9 + 6)]:
        recipe = recipe_of(folder, train={"share_prefix": share})
        strategy = LocalStrategy(recipe, trainable=False)
        (part,) = strategy.microbatches(batch)
        assert sum(strategy.pack(batch.take(part)).layout.lengths) == computed
        results.append(strategy.logprobs(batch))
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)


def test_no_split_of_a_batch_with_shared_prefixes_changes_its_gradient(tmp_path: Path):
    """In float64: one micro-batch, a group split in two, and every sample alone."""
    folder = save_tiny(tmp_path, hidden=16)
    batch = make_batch(["0 pqrA", "0 pqrBC", "1 stD", "1 stxyEF", "0 pqrGH"])
    gradients: list[torch.Tensor] = []
    for share, tokens, parts in [(False, 100, 1), (True, 100, 1), (True, 6, 4), (True, 1, 5)]:
        train = {"share_prefix": share, "tokens_per_microbatch": tokens}
        strategy = LocalStrategy(recipe_of(folder, train=train))
        widen_norms(strategy.module.double())
        assert len(strategy.microbatches(batch)) == parts
        strategy.forward_backward(batch, advantage_loss)
        grads = [p.grad.flatten() for p in strategy.module.parameters() if p.grad is not None]
        gradients.append(torch.cat(grads))
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() <= 1e-10 * gradients[0].norm()


def advantage_loss(inputs: LossInputs) -> Loss:
    return Loss(-(inputs.weights_T * inputs.advantages_T * inputs.logprobs_T).sum(), sums={})
