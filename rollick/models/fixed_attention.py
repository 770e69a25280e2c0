"""Attention of packed sequences with the kernel that a paged engine attends with.

The kernel goes over the keys of a sequence in tiles that begin at its first token, whatever queries
stand beside: so a learner that lays its keys out in pages gets, for every token, the bits that the
engine got when it drew the next one. Used with fixed.py.

    PackedLayout -> FixedPlan: which token lies in which page, which queries make a program
    attend_fixed: keys and values into pages, one kernel call; the gradient is plain attention's
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollick.models.fixed import through
from rollick.models.paged_attention import (
    NO_WINDOW,
    PAGE,
    Heads,
    PagedPrefill,
    prefill_reference,
)

_REFERENCE_QUERIES = 64


class FixedPlan:
    """Where the tokens of packed segments lie in pages. `ways` names, for each segment, the
    segments that it continues, first one first."""

    def __init__(
        self, lengths: Sequence[int], ways: Sequence[Sequence[int]], *, device: str
    ) -> None:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._device = device
        self._spans: list[tuple[int, int]] = []
        self._pages: list[list[int]] = []
        tokens: list[np.ndarray[Any, Any]] = []
        used = 0
        for segment, before in enumerate(ways):
            seen = [np.arange(offsets[b], offsets[b + 1]) for b in (*before, segment)]
            whole = np.concatenate(seen)
            count = -(-len(whole) // PAGE)
            tokens.append(np.pad(whole, (0, count * PAGE - len(whole)), mode="edge"))
            self._pages.append(list(range(used, used + count)))
            self._spans.append((len(whole) - int(lengths[segment]), len(whole)))
            used += count
        self.token_C = torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device)
        self._steps: dict[tuple[int, bool], PagedPrefill] = {}

    def step(self, queries: int, *, kernels: bool) -> PagedPrefill:
        """The programs of `queries` tokens each; made once for all layers."""
        key = queries, kernels
        if key not in self._steps:
            self._steps[key] = PagedPrefill.of(
                self._pages, self._spans, queries=queries, device=self._device, kernels=kernels
            )
        return self._steps[key]


def attend_fixed(
    packed: tuple[Tensor, Tensor, Tensor],
    plan: FixedPlan,
    *,
    scale: float | None,
    window: int | None,
    plain: Callable[..., Tensor],
) -> Tensor:
    """query [1, H, N, D], key and value [1, K, N, D] -> [N, H, D]; `plain` has the gradient."""

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = tuple(_in_pages(x[0], plan) for x in (key, value))
        given = Heads(
            query[0] if query.stride(-1) == 1 else query[0].contiguous(),
            key[0],
            value[0],
            query.shape[-1] ** -0.5 if scale is None else scale,
            NO_WINDOW if window is None else window,
        )
        if not query.is_cuda:
            step = plan.step(_REFERENCE_QUERIES, kernels=False)
            return prefill_reference(given, (cache[0], cache[1]), step=step)
        from rollick.models.paged_kernels import launch_prefill, prefill_queries

        step = plan.step(prefill_queries(query.shape[1] // key.shape[1]), kernels=True)
        return launch_prefill(
            given.query,
            (cache[0], cache[1]),
            table=step.table_BP,
            tiles=step.tiles_T4,
            scale=given.scale,
            window=given.window,
        )

    return through(kernel, plain, *packed)


def _in_pages(heads_KND: Tensor, plan: FixedPlan) -> Tensor:
    """[pages, K, PAGE, D]; a page's last places, behind a sequence's end, hold what nobody sees."""
    chosen = heads_KND.index_select(1, plan.token_C)
    return chosen.unflatten(1, (-1, PAGE)).transpose(0, 1).contiguous()
