"""Attention of packed sequences with the kernel of a paged engine.

The kernel reads the keys of a sequence in tiles that begin at its first token, independent of the
other queries in the batch. A learner that stores its keys in pages therefore gets, for every token,
the bits that the engine got when it sampled the next token. Used with decoder/batch_invariant.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollick.models.attention.options import AttentionOptions
from rollick.models.attention.paged import PAGE, PagedPrefill, QkvHeads, prefill_reference
from rollick.models.decoder.batch_invariant import with_gradient_of

_REFERENCE_QUERIES = 64


class PagePlan:
    """The pages of packed segments. `ancestors`: the segments before each one, root first."""

    def __init__(
        self, lengths: Sequence[int], ancestors: Sequence[Sequence[int]], *, device: str
    ) -> None:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._device = device
        self._spans: list[tuple[int, int]] = []
        self._pages: list[list[int]] = []
        tokens: list[np.ndarray[Any, Any]] = []
        num_pages = 0
        for segment, path in enumerate(ancestors):
            parts = [np.arange(offsets[b], offsets[b + 1]) for b in (*path, segment)]
            sequence = np.concatenate(parts)
            count = -(-len(sequence) // PAGE)
            tokens.append(np.pad(sequence, (0, count * PAGE - len(sequence)), mode="edge"))
            self._pages.append(list(range(num_pages, num_pages + count)))
            self._spans.append((len(sequence) - int(lengths[segment]), len(sequence)))
            num_pages += count
        self.token_C = torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device)
        """The packed token in each slot (C) of all pages."""
        self._steps: dict[tuple[int, bool], PagedPrefill] = {}

    def step(self, queries: int, *, kernels: bool) -> PagedPrefill:
        """The prefill in tiles of `queries` tokens, created once for all layers."""
        key = queries, kernels
        if key not in self._steps:
            self._steps[key] = PagedPrefill.of(
                self._pages, self._spans, queries=queries, device=self._device, kernels=kernels
            )
        return self._steps[key]


def attend_batch_invariant(
    packed: tuple[Tensor, Tensor, Tensor],
    plan: PagePlan,
    options: AttentionOptions,
    *,
    reference: Callable[..., Tensor],
) -> Tensor:
    """[1, H, N, D] and twice [1, K, N, D] -> [N, H, D], differentiable like `reference`."""

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = _to_pages(key[0], plan), _to_pages(value[0], plan)
        query_HND = query[0] if query.stride(-1) == 1 else query[0].contiguous()
        qkv = QkvHeads.of(query_HND, key[0], value[0], options)
        if not query.is_cuda:
            step = plan.step(_REFERENCE_QUERIES, kernels=False)
            return prefill_reference(qkv, cache, step=step)
        from rollick.models.attention.paged_kernels import prefill_queries

        step = plan.step(prefill_queries(query.shape[1] // key.shape[1]), kernels=True)
        return step.attend_stored(qkv.query, cache, qkv)

    return with_gradient_of(reference, kernel, *packed)


def _to_pages(heads_KND: Tensor, plan: PagePlan) -> Tensor:
    """[pages, K, PAGE, D]; slots past a sequence's end repeat its last token and are not read."""
    slots_KCD = heads_KND.index_select(1, plan.token_C)
    return slots_KCD.unflatten(1, (-1, PAGE)).transpose(0, 1).contiguous()
