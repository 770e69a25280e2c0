"""Batch: the samples of one training step, packed end to end, never padded.

Shapes: B samples, N tokens over all of them. Token arrays (`*_N`) hold sample 0, then sample 1,
and so on; `lengths_B` cuts them. Numpy only, so that a batch crosses processes without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.types import BoolArray, FloatArray, IntArray, SampleId


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Per-token streams of a step.

    `logprobs_N` is the behaviour's; entry t speaks of drawing token t given what is before it.
    `weights_N` is each token's factor in the loss: the aggregation over the *global* batch is in
    it, so the loss of a batch is the plain sum over any split of it.
    """

    token_ids_N: IntArray
    lengths_B: IntArray
    uids: tuple[SampleId, ...]
    group_B: IntArray
    temperature_B: FloatArray
    loss_mask_N: BoolArray
    logprobs_N: FloatArray
    versions_N: IntArray
    advantages_N: FloatArray
    weights_N: FloatArray
    old_logprobs_N: FloatArray | None = None
    reference_logprobs_N: FloatArray | None = None

    @property
    def samples(self) -> int:
        return len(self.lengths_B)

    @property
    def tokens(self) -> int:
        return len(self.token_ids_N)

    @property
    def offsets_B1(self) -> npt.NDArray[np.int64]:
        """Where each sample begins, and after the last one the total."""
        return np.concatenate([[0], np.cumsum(self.lengths_B, dtype=np.int64)])

    def with_old_logprobs(self, logprobs_N: FloatArray) -> Batch:
        return replace(self, old_logprobs_N=logprobs_N)

    def with_reference_logprobs(self, logprobs_N: FloatArray) -> Batch:
        return replace(self, reference_logprobs_N=logprobs_N)

    def take(self, samples: Sequence[int]) -> Batch:
        """The batch of the samples at these places, in this order. Weights stay global."""
        offsets = self.offsets_B1
        spans = [np.arange(offsets[b], offsets[b + 1]) for b in samples]
        tokens = np.concatenate(spans) if spans else np.empty(0, np.int64)
        rows = np.asarray(samples, dtype=np.int64)
        picked: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None:
                picked[spec.name] = None
            elif spec.name == "uids":
                picked[spec.name] = tuple(self.uids[b] for b in samples)
            else:
                picked[spec.name] = value[tokens if spec.name.endswith("_N") else rows]
        return Batch(**picked)
