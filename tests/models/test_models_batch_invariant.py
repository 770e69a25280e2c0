"""Batch-invariant kernels: the bits of a row depend on that row alone, in engine and learner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from rollick.errors import ModelError
from rollick.models.attention.batch_invariant import PagePlan, attend_batch_invariant
from rollick.models.attention.options import PLAIN
from rollick.models.attention.paged import (
    NO_WINDOW,
    PAGE,
    PagedDecode,
    PagedPrefill,
    QkvHeads,
)
from rollick.models.attention.varlen import VARLEN, PackedLayout
from rollick.models.decoder.batch_invariant import (
    BatchInvariantLinear,
    BatchInvariantNorm,
    reference_rms_norm,
    use_batch_invariant_kernels,
    with_gradient_of,
)
from rollick.models.loading.load import empty_model, share_parameters
from rollick.testing.tiny import tiny_model

# A warning of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture(autouse=True)
def _products_row_by_row(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes tl.dot with numpy's BLAS. On some CPUs the bits of a row then depend
    on where it is in its tile, unlike on a GPU."""
    if kernel_device != "cpu":
        return
    from triton.runtime import interpreter

    matmul = np.matmul

    def matmul_by_row(a: Any, b: Any, dtype: Any) -> Any:
        wide = b.astype(np.float64)
        rows = [matmul(row[None].astype(np.float64), wide) for row in a]
        return np.concatenate(rows).astype(dtype)

    numpy: Any = SimpleNamespace(**{**vars(np), "matmul": matmul_by_row})
    monkeypatch.setattr(interpreter, "np", numpy)


@pytest.mark.parametrize("biased", [True, False])
def test_a_row_of_a_product_has_the_same_bits_alone_and_in_any_batch(
    kernel_device: str, biased: bool
):
    from rollick.models.decoder.batch_invariant_kernels import launch_matmul

    torch.manual_seed(0)
    rows, weight = torch.randn(130, 100).to(kernel_device), torch.randn(70, 100).to(kernel_device)
    bias = torch.randn(70).to(kernel_device) if biased else None
    full = launch_matmul(rows, weight, bias, dtype=torch.float32)
    torch.testing.assert_close(full, nn.functional.linear(rows, weight, bias))
    for start, stop in ((0, 1), (77, 78), (5, 69), (64, 130)):
        part = launch_matmul(rows[start:stop], weight, bias, dtype=torch.float32)
        assert torch.equal(part, full[start:stop])


def test_a_norm_has_the_same_bits_alone_and_in_any_batch(kernel_device: str):
    from rollick.models.decoder.batch_invariant_kernels import launch_norm

    torch.manual_seed(0)
    rows, weight = torch.randn(2, 9, 100).to(kernel_device), torch.randn(100).to(kernel_device)
    full = launch_norm(rows, weight, eps=1e-6)
    torch.testing.assert_close(full, reference_rms_norm(rows, weight, 1e-6))
    assert torch.equal(launch_norm(rows[1, 4:5], weight, eps=1e-6), full[1, 4:5])


@pytest.mark.parametrize("window", [None, 20])
def test_a_decoded_token_attends_with_the_same_bits_as_in_a_full_sequence(
    kernel_device: str, window: int | None
):
    from rollick.models.attention.paged_kernels import launch_prefill, prefill_queries

    torch.manual_seed(0)
    length = 70
    query, key, value = (
        torch.randn(count, length, DIM).to(kernel_device) for count in (HEADS, KV_HEADS, KV_HEADS)
    )
    plan = PagePlan([length], [[]], device=kernel_device)
    pages = 1 + -(-length // PAGE)
    cache = torch.zeros(2, pages, KV_HEADS, PAGE, DIM, device=kernel_device)
    step = plan.step(prefill_queries(HEADS // KV_HEADS), kernels=True)
    prefill = PagedPrefill(
        step.table_BP + 1,
        step.position_N,
        step.page_N + 1,
        step.offset_N,
        step.tiles_T4,
        kernels=True,
    )
    window_size = NO_WINDOW if window is None else window
    qkv_heads = QkvHeads(query, key, value, DIM**-0.5, window_size)
    full = prefill.attend(qkv_heads, (cache[0], cache[1]))
    table = prefill.table_BP
    for position in (0, 31, 32, 69):
        alone = QkvHeads(
            *(x[:, position : position + 1] for x in qkv_heads[:3]), DIM**-0.5, window_size
        )
        decode = PagedDecode(
            table, torch.tensor([position + 1], device=kernel_device), batch_invariant=True
        )
        assert torch.equal(decode.attend(alone, (cache[0], cache[1]))[0], full[position])
    filled_pages = cache[:, 1:].contiguous()
    relaunched = launch_prefill(
        query,
        (filled_pages[0], filled_pages[1]),
        table=step.table_BP,
        tiles=step.tiles_T4,
        qkv=qkv_heads,
    )
    assert torch.equal(relaunched, full)


def test_packed_sequences_attend_in_pages_as_they_do_in_place():
    """Includes sequences that continue another one, and the backward."""
    lengths, parents = [40, 7, 33, 1], [-1, 0, 0, -1]
    torch.manual_seed(0)
    packed = tuple(
        torch.randn(1, count, sum(lengths), DIM, requires_grad=True)
        for count in (HEADS, KV_HEADS, KV_HEADS)
    )
    actual: list[list[torch.Tensor]] = []
    for batch_invariant in (False, True):
        layout = PackedLayout.of(lengths, parents=parents, batch_invariant=batch_invariant)
        from rollick.models.attention.varlen import varlen_attention

        output, _ = varlen_attention(nn.Module(), *packed, None, layout=layout, sliding_window=20)
        gradients = torch.autograd.grad(output.square().sum(), packed)
        actual.append([output.detach(), *gradients])
    for one, other in zip(*actual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_kernel_has_the_gradient_of_the_plain_function():
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    with_gradient_of(lambda x, w: x * w, lambda x, w: (x * w).round(), x, w).sum().backward()
    torch.testing.assert_close(x.grad, w)


def test_a_module_keeps_its_parameters_and_its_results():
    model: Any = tiny_model(32).eval()
    other: Any = empty_model(model.config, attention="sdpa")
    share_parameters(other, model)
    use_batch_invariant_kernels(other)
    kinds = [type(part) for part in other.modules()]
    assert kinds.count(BatchInvariantLinear) == 2 * 7
    assert kinds.count(BatchInvariantNorm) == 2 * 2 + 1
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
        use_batch_invariant_kernels(
            AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN)
        )


def test_attention_in_pages_needs_no_gradient_to_run():
    packed = tuple(torch.randn(1, count, 5, DIM) for count in (HEADS, KV_HEADS, KV_HEADS))
    plan = PagePlan([5], [[]], device="cpu")

    def raise_if_called(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only a backward needs plain attention")

    output = attend_batch_invariant(packed, plan, PLAIN, reference=raise_if_called)
    assert output.shape == (5, HEADS, DIM)
