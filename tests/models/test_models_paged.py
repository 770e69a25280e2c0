"""The Triton kernels against their references: in Triton's interpreter where there is no GPU."""

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

# Of the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

GROUPS = [(4, 2, 16), (3, 1, 24)]
LENGTHS = [1, 2, 33, 64, 70]


def _cache(kv_heads: int, dim: int, *, rows: int, device: str) -> tuple[Any, Any]:
    """A shuffled table of pages, and random keys and values."""
    torch.manual_seed(0)
    width = -(-max(LENGTHS) // PAGE)
    table = (torch.randperm(rows * width) + 1).view(rows, width).int()
    cache = torch.randn(2, rows * width + 1, kv_heads, PAGE, dim)
    return table.to(device), cache.to(device)


def _heads(
    tokens: int, heads: tuple[int, int, int], *, window: int, device: str, scores: str = "plain"
) -> QkvHeads:
    query, key, value = (
        torch.randn(tokens, count, heads[2]).transpose(0, 1).to(device)
        for count in (heads[0], heads[1], heads[1])
    )
    given = QkvHeads(query, key, value, heads[2] ** -0.5, window)
    if scores == "plain":
        return given
    return given._replace(softcap=0.7, sinks=torch.linspace(-1, 2, heads[0]).to(device))


@pytest.mark.parametrize("scores", ["plain", "capped, with sinks"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [NO_WINDOW, 20])
@pytest.mark.parametrize("heads", GROUPS)
def test_the_decode_kernel_gives_and_stores_what_its_reference_does(
    kernel_device: str, heads: tuple[int, int, int], window: int, splits: int, scores: str
):
    table, cache = _cache(heads[1], heads[2], rows=len(LENGTHS), device=kernel_device)
    how: Any = {"window": window, "device": kernel_device, "scores": scores}
    given = _heads(len(LENGTHS), heads, **how)
    length, expected = torch.tensor(LENGTHS, device=kernel_device), cache.clone()
    step = PagedDecode(table, length, splits=splits)
    actual = step.attend(given, (cache[0], cache[1]))
    wanted = PagedDecode(table, length, kernels=False).attend(given, (expected[0], expected[1]))
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("scores", ["plain", "capped, with sinks"])
@pytest.mark.parametrize("window", [NO_WINDOW, 20])
@pytest.mark.parametrize("heads", GROUPS)
def test_the_prefill_kernel_gives_what_its_reference_does(
    kernel_device: str, heads: tuple[int, int, int], window: int, scores: str
):
    from rollick.models.attention.paged_kernels import prefill_queries

    table, cache = _cache(heads[1], heads[2], rows=3, device=kernel_device)
    spans = [(0, 5), (40, 64), (3, 69)]
    how: Any = {"window": window, "device": kernel_device, "scores": scores}
    given = _heads(sum(b - a for a, b in spans), heads, **how)
    actual: list[torch.Tensor] = []
    for kernels in (True, False):
        step = PagedPrefill.of(
            table.tolist(),
            spans,
            queries=prefill_queries(heads[0] // heads[1]),
            device=kernel_device,
            kernels=kernels,
        )
        actual.append(step.attend(given, (cache[0], cache[1])))
    torch.testing.assert_close(actual[0], actual[1], rtol=1e-5, atol=1e-5)
