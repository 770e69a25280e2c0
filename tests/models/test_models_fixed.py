"""One arithmetic for engine and learner: a row's bits follow from the row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from rollick.errors import ModelError
from rollick.models.attention import VARLEN, PackedLayout
from rollick.models.fixed import FixedLinear, FixedNorm, fix_arithmetic, plain_norm, through
from rollick.models.fixed_attention import FixedPlan, attend_fixed
from rollick.models.load import empty_model, share_parameters
from rollick.models.paged_attention import (
    NO_WINDOW,
    PAGE,
    Heads,
    PagedDecode,
    PagedPrefill,
)
from rollick.testing.tiny import tiny_model

# Of the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.mark.parametrize("biased", [True, False])
def test_a_row_of_a_product_has_the_same_bits_alone_and_in_any_batch(
    kernel_device: str, biased: bool
):
    from rollick.models.fixed_kernels import launch_product

    torch.manual_seed(0)
    rows, weight = torch.randn(130, 100).to(kernel_device), torch.randn(70, 100).to(kernel_device)
    bias = torch.randn(70).to(kernel_device) if biased else None
    whole = launch_product(rows, weight, bias, dtype=torch.float32)
    torch.testing.assert_close(whole, nn.functional.linear(rows, weight, bias))
    for start, stop in ((0, 1), (77, 78), (5, 69), (64, 130)):
        part = launch_product(rows[start:stop], weight, bias, dtype=torch.float32)
        assert torch.equal(part, whole[start:stop])


def test_a_norm_has_the_same_bits_alone_and_in_any_batch(kernel_device: str):
    from rollick.models.fixed_kernels import launch_norm

    torch.manual_seed(0)
    rows, weight = torch.randn(2, 9, 100).to(kernel_device), torch.randn(100).to(kernel_device)
    whole = launch_norm(rows, weight, eps=1e-6)
    torch.testing.assert_close(whole, plain_norm(rows, weight, 1e-6))
    assert torch.equal(launch_norm(rows[1, 4:5], weight, eps=1e-6), whole[1, 4:5])


@pytest.mark.parametrize("window", [None, 20])
def test_a_decoded_token_attends_with_the_bits_of_a_whole_sequence(
    kernel_device: str, window: int | None
):
    from rollick.models.paged_kernels import launch_prefill, prefill_queries

    torch.manual_seed(0)
    length = 70
    query, key, value = (
        torch.randn(count, length, DIM).to(kernel_device) for count in (HEADS, KV_HEADS, KV_HEADS)
    )
    plan = FixedPlan([length], [[]], device=kernel_device)
    pages = 1 + -(-length // PAGE)
    cache = torch.zeros(2, pages, KV_HEADS, PAGE, DIM, device=kernel_device)
    step = plan.step(prefill_queries(HEADS // KV_HEADS), kernels=True)
    filled = PagedPrefill(
        step.table_BP + 1,
        step.position_N,
        step.page_N + 1,
        step.offset_N,
        step.tiles_T4,
        kernels=True,
    )
    band = NO_WINDOW if window is None else window
    given = Heads(query, key, value, DIM**-0.5, band)
    whole = filled.attend(given, (cache[0], cache[1]))
    table = filled.table_BP
    for place in (0, 31, 32, 69):
        alone = Heads(*(x[:, place : place + 1] for x in given[:3]), DIM**-0.5, band)
        decode = PagedDecode(table, torch.tensor([place + 1], device=kernel_device), fixed=True)
        assert torch.equal(decode.attend(alone, (cache[0], cache[1]))[0], whole[place])
    in_pages = cache[:, 1:].contiguous()
    again = launch_prefill(
        query,
        (in_pages[0], in_pages[1]),
        table=step.table_BP,
        tiles=step.tiles_T4,
        scale=DIM**-0.5,
        window=band,
    )
    assert torch.equal(again, whole)


def test_packed_sequences_attend_in_pages_as_they_do_in_place():
    """Also those that continue another one, and backward."""
    lengths, parents = [40, 7, 33, 1], [-1, 0, 0, -1]
    torch.manual_seed(0)
    packed = tuple(
        torch.randn(1, count, sum(lengths), DIM, requires_grad=True)
        for count in (HEADS, KV_HEADS, KV_HEADS)
    )
    found: list[list[torch.Tensor]] = []
    for fixed in (False, True):
        layout = PackedLayout.of(lengths, parents=parents, fixed=fixed)
        from rollick.models.attention import varlen_attention

        output, _ = varlen_attention(nn.Module(), *packed, None, layout=layout, sliding_window=20)
        gradients = torch.autograd.grad(output.square().sum(), packed)
        found.append([output.detach(), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_goes_through_a_kernel_has_the_gradient_of_the_plain_function():
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    through(lambda x, w: (x * w).round(), lambda x, w: x * w, x, w).sum().backward()
    torch.testing.assert_close(x.grad, w)


def test_a_module_keeps_its_parameters_and_its_results():
    model: Any = tiny_model(32).eval()
    other: Any = empty_model(model.config, attention="sdpa")
    share_parameters(other, model)
    fix_arithmetic(other)
    kinds = [type(part) for part in other.modules()]
    assert kinds.count(FixedLinear) == 2 * 7
    assert kinds.count(FixedNorm) == 2 * 2 + 1
    assert [name for name, _ in other.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    ids = torch.tensor([[1, 5, 6]])
    torch.testing.assert_close(other(ids).logits, model(ids).logits)


def test_a_norm_without_a_kernel_is_refused():
    config = Gemma3TextConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    with pytest.raises(ModelError, match="Gemma3RMSNorm"):
        fix_arithmetic(AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN))


def test_attention_in_pages_needs_no_gradient_to_run():
    packed = tuple(torch.randn(1, count, 5, DIM) for count in (HEADS, KV_HEADS, KV_HEADS))
    plan = FixedPlan([5], [[]], device="cpu")

    def never(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only a backward needs plain attention")

    output = attend_fixed(packed, plan, scale=None, window=None, plain=never)
    assert output.shape == (5, HEADS, DIM)
