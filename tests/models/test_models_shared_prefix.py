"""Shared prefixes are computed once: plans by hand, and attention that stays exact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_mixture import widen_norms
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig

from rollick.models.attention import varlen as attention
from rollick.models.attention.options import AttentionOptions
from rollick.models.attention.shared_prefix import plan_prefixes, plan_unshared, shared_lengths
from rollick.models.attention.varlen import ROOT, VARLEN, AttentionCall, PackedLayout
from rollick.models.loading.load import empty_model, share_parameters

SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
DECODERS: dict[str, PretrainedConfig] = {
    "full": LlamaConfig(**SIZES),
    "window_1": MistralConfig(**SIZES, sliding_window=1),
    "window_2": MistralConfig(**SIZES, sliding_window=2),
    "window_5": MistralConfig(**SIZES, sliding_window=5),
}


def compute_shared(*samples: str, groups: Sequence[int], limits: Sequence[int]) -> list[int]:
    token_ids = [ord(letter) for letter in "".join(samples)]
    lengths = [len(sample) for sample in samples]
    return shared_lengths(token_ids, lengths, group_B=groups, limit_B=limits).tolist()


def test_a_group_shares_what_all_of_its_samples_begin_with():
    shared = compute_shared(
        "pqrab", "pqc", "pqra", "pqra", groups=[0, 0, 0, 1], limits=[4, 2, 3, 3]
    )
    assert shared == [2, 2, 2, 0]


def test_no_sample_shares_more_than_the_least_limit_of_its_group():
    assert compute_shared("pqra", "pqra", groups=[7, 7], limits=[3, 1]) == [1, 1]


def test_samples_that_begin_differently_share_nothing():
    assert compute_shared("pq", "rq", groups=[0, 0], limits=[1, 1]) == [0, 0]


def test_the_plan_has_prefixes_first_and_then_the_tails_by_length():
    # p q r a b | s t | p q r c
    plan = plan_prefixes([5, 2, 4], group_B=[0, 1, 0], shared_B=[3, 0, 3])
    assert plan.lengths == (2, 3, 1, 2)
    assert plan.parents == (ROOT, ROOT, 1, 1)
    assert plan.source_C.tolist() == [5, 6, 0, 1, 2, 10, 3, 4]
    assert plan.packed_index_N.tolist() == [2, 3, 4, 6, 7, 0, 1, 2, 3, 4, 5]


def test_a_sample_whose_group_is_on_another_engine_is_computed_in_full():
    plan = plan_prefixes([3], group_B=[0], shared_B=[2])
    assert plan.lengths == (3,)
    assert plan.packed_index_N.tolist() == [0, 1, 2]


def test_without_sharing_the_tokens_stay_where_they_are():
    plan = plan_unshared([2, 1])
    assert (plan.lengths, plan.parents) == ((2, 1), (ROOT, ROOT))
    assert plan.source_C.tolist() == plan.packed_index_N.tolist() == [0, 1, 2]


@st.composite
def samples_in_groups(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    samples = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1))
    size = len(samples)
    return samples, draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))


@given(samples_in_groups())
def test_every_sample_is_found_again_along_its_segments(case: tuple[list[list[int]], list[int]]):
    samples, groups = case
    lengths = [len(sample) for sample in samples]
    ids = np.concatenate(samples)
    limits = [length - 1 for length in lengths]
    shared = shared_lengths(ids, lengths, group_B=groups, limit_B=limits)
    plan = plan_prefixes(lengths, group_B=groups, shared_B=shared)
    layout = PackedLayout.of(plan.lengths, parents=plan.parents)

    computed = ids[plan.source_C]
    assert computed[plan.packed_index_N].tolist() == ids.tolist()
    expected_positions = np.concatenate([np.arange(length) for length in lengths])
    assert (
        layout.position_ids_N.numpy()[plan.packed_index_N].tolist() == expected_positions.tolist()
    )
    assert layout.order_N is None
    shared_by_group = {group: shared[groups.index(group)] for group in groups}
    assert len(computed) == sum(lengths) - shared.sum() + sum(shared_by_group.values())


def test_a_segment_continues_where_its_parent_ends():
    layout = PackedLayout.of([2, 3, 1, 1], parents=[ROOT, 0, 0, 1])
    assert layout.position_ids_N.tolist() == [0, 1, 2, 3, 4, 2, 5]
    assert layout.calls == (
        AttentionCall(1, 2),
        AttentionCall(1, 3, before=((0, 0),)),
        AttentionCall(1, 1, before=((0, 0),)),
        AttentionCall(1, 1, before=((0, 0), (1, 0))),
    )


def test_tails_of_one_length_and_parent_make_one_kernel_call():
    layout = PackedLayout.of([2, 2, 1, 3, 1], parents=[ROOT, ROOT, 1, 1, 1])
    assert layout.calls == (
        AttentionCall(2, 2),
        AttentionCall(2, 1, before=((0, 1),)),
        AttentionCall(1, 3, before=((0, 1),)),
    )
    assert layout.order_N is not None
    assert layout.order_N.tolist() == [0, 1, 2, 3, 4, 8, 5, 6, 7]


@pytest.mark.parametrize("parents", [[0, ROOT], [ROOT, 1], [ROOT, -2]])
def test_a_segment_cannot_continue_itself_or_a_later_one(parents: list[int]):
    with pytest.raises(ValueError, match="must be an earlier segment"):
        PackedLayout.of([1, 1], parents=parents)


#        0: 4 tokens
#        |- 1: 3      |- 3: 3      |- 4: 1          6: 2 (a sequence of its own)
#        |  |- 2: 2                |- 5: 6
TREE_LENGTHS = [4, 3, 2, 3, 1, 6, 2]
TREE_PARENTS = [ROOT, 0, 1, 0, 0, 4, ROOT]


def find_path(segment: int) -> list[int]:
    return [*find_path(TREE_PARENTS[segment]), segment] if segment != ROOT else []


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_a_tree_of_segments_gives_what_each_path_gives_alone(name: str, per_sequence: bool):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(DECODERS[name], attn_implementation="sdpa")
    plain = plain.double().eval()
    packed = empty_model(plain.config, attention=VARLEN)
    share_parameters(packed, plain)
    packed.requires_grad_()
    for decoder in (packed, plain):
        widen_norms(decoder)
    layout = PackedLayout.of(TREE_LENGTHS, parents=TREE_PARENTS, per_sequence=per_sequence)
    ids = torch.arange(sum(layout.lengths)) * 7 % SIZES["vocab_size"]
    weight = torch.linspace(-1, 1, sum(layout.lengths) * 23, dtype=torch.float64).view(-1, 23)

    packed_logits = packed(
        input_ids=ids[None],
        position_ids=layout.position_ids_N[None],
        use_cache=False,
        layout=layout,
    ).logits[0]
    pieces = ids.split(TREE_LENGTHS)
    path_logits = torch.cat(
        [
            plain(torch.cat([pieces[b] for b in find_path(segment)])[None]).logits[0, -length:]
            for segment, length in enumerate(TREE_LENGTHS)
        ]
    )
    torch.testing.assert_close(packed_logits, path_logits, rtol=0, atol=1e-10)
    (packed_logits * weight).sum().backward()
    (path_logits * weight).sum().backward()
    for packed_parameter, plain_parameter in zip(
        packed.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(
            packed_parameter.grad, plain_parameter.grad, rtol=1e-10, atol=1e-10
        )


def attend_by_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """A plain reference of torch's varlen attention kernel."""
    outputs: list[torch.Tensor] = []
    for b in range(len(query_starts) - 1):
        query_span = slice(int(query_starts[b]), int(query_starts[b + 1]))
        key_span = slice(int(key_starts[b]), int(key_starts[b + 1]))
        queries, keys = query_span.stop - query_span.start, key_span.stop - key_span.start
        assert queries <= longest_query
        assert keys <= longest_key
        behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None]
        left, right = window_size
        hidden = (behind < -right) | ((behind > left) if left >= 0 else False)
        scores = torch.einsum("qhd,khd->hqk", query[query_span], key[key_span]) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[key_span]))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_one_kernel_for_all_segments_gives_what_one_for_each_run_gives(
    window: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "ragged_kernel", lambda: attend_by_segment)
    layout = PackedLayout.of(TREE_LENGTHS, parents=TREE_PARENTS)
    torch.manual_seed(0)
    tokens = sum(TREE_LENGTHS)
    query = torch.randn(1, 4, tokens, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, tokens, 8, requires_grad=True) for _ in range(2))
    given = (query, key, value)
    ragged = attention.attend_ragged(*given, layout, AttentionOptions(0.3, window))
    by_run, _ = attention.varlen_attention(
        torch.nn.Identity(), *given, None, layout=layout, scaling=0.3, sliding_window=window
    )
    torch.testing.assert_close(ragged, by_run[0], rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(ragged)
    for actual, expected in zip(
        torch.autograd.grad((ragged * weights).sum(), given),
        torch.autograd.grad((by_run[0] * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_segment_sees_the_keys_on_the_way_to_it_and_its_own():
    attended = PackedLayout.of([2, 1, 2], parents=[ROOT, 0, 1]).attended
    assert attended is not None
    assert attended.indices_M.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4]
    assert attended.starts_B1.tolist() == [0, 2, 5, 10]
    assert attended.longest == 5
