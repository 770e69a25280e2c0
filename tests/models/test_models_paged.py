"""The Triton kernels against their references; in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollick.models.attention.paged import (
    NO_WINDOW,
    PAGE,
    PagedDecode,
    PagedPrefill,
    QkvHeads,
)

# A warning of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

GROUPS = [(4, 2, 16), (3, 1, 24)]
LENGTHS = [1, 2, 33, 64, 70]


def _make_cache(kv_heads: int, dim: int, *, rows: int, device: str) -> tuple[Any, Any]:
    """A shuffled table of pages, and random keys and values."""
    torch.manual_seed(0)
    width = -(-max(LENGTHS) // PAGE)
    table = (torch.randperm(rows * width) + 1).view(rows, width).int()
    cache = torch.randn(2, rows * width + 1, kv_heads, PAGE, dim)
    return table.to(device), cache.to(device)


def _make_heads(
    tokens: int, heads: tuple[int, int, int], *, window: int, device: str, scores: str = "plain"
) -> QkvHeads:
    query, key, value = (
        torch.randn(tokens, count, heads[2]).transpose(0, 1).to(device)
        for count in (heads[0], heads[1], heads[1])
    )
    qkv = QkvHeads(query, key, value, heads[2] ** -0.5, window)
    if scores == "plain":
        return qkv
    return qkv._replace(softcap=0.7, sinks=torch.linspace(-1, 2, heads[0]).to(device))


@pytest.mark.parametrize("scores", ["plain", "capped, with sinks"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [NO_WINDOW, 20])
@pytest.mark.parametrize("heads", GROUPS)
def test_the_decode_kernel_gives_and_stores_what_its_reference_does(
    kernel_device: str, heads: tuple[int, int, int], window: int, splits: int, scores: str
):
    table, cache = _make_cache(heads[1], heads[2], rows=len(LENGTHS), device=kernel_device)
    options: Any = {"window": window, "device": kernel_device, "scores": scores}
    qkv = _make_heads(len(LENGTHS), heads, **options)
    length, expected = torch.tensor(LENGTHS, device=kernel_device), cache.clone()
    step = PagedDecode(table, length, splits=splits)
    actual = step.attend(qkv, (cache[0], cache[1]))
    reference = PagedDecode(table, length, kernels=False).attend(qkv, (expected[0], expected[1]))
    torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-5)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("scores", ["plain", "capped, with sinks"])
@pytest.mark.parametrize("window", [NO_WINDOW, 20])
@pytest.mark.parametrize("heads", GROUPS)
def test_the_prefill_kernel_gives_what_its_reference_does(
    kernel_device: str, heads: tuple[int, int, int], window: int, scores: str
):
    from rollick.models.attention.paged_kernels import prefill_queries

    table, cache = _make_cache(heads[1], heads[2], rows=3, device=kernel_device)
    spans = [(0, 5), (40, 64), (3, 69)]
    options: Any = {"window": window, "device": kernel_device, "scores": scores}
    qkv = _make_heads(sum(b - a for a, b in spans), heads, **options)
    actual: list[torch.Tensor] = []
    for kernels in (True, False):
        step = PagedPrefill.of(
            table.tolist(),
            spans,
            queries=prefill_queries(heads[0] // heads[1]),
            device=kernel_device,
            kernels=kernels,
        )
        actual.append(step.attend(qkv, (cache[0], cache[1])))
    torch.testing.assert_close(actual[0], actual[1], rtol=1e-5, atol=1e-5)
