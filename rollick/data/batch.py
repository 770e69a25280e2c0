"""Batch: the samples of one training step, packed end to end, never padded.

Shapes: B samples, N tokens over all of them. Token arrays (`*_N`) hold sample 0, then sample 1,
and so on; `lengths_B` cuts them. A sample of several segments is here once for each, one after
another under the same id (`places`). Numpy only, so that a batch crosses processes without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollick.types import BoolArray, FloatArray, IntArray, SampleId


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Per-token streams of a step.

    Tokens: `logprobs_N` is the behaviour's; entry t speaks of drawing token t given what is before
    it. `scores_B` is the score of each sample, shaped.

    Credit, 0 until somebody gives it: `component_N` is the algorithm that a token is for.
    `weights_N` is its factor in the policy loss: denominator (over the *global* batch), correction
    and coefficients are in it, so the loss of a batch is the plain sum over any split of it.
    `kl_weights_N` and `entropy_weights_N` are the same of those two.

    Annotations, None if nobody asked: log-probs of other policies; of a teacher also its K
    likeliest tokens and their log-probs; values of a critic (of each token before it is drawn,
    and after the last one), and the returns that they are to meet.
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
    scores_B: FloatArray | None = None
    component_N: npt.NDArray[np.int8] | None = None
    kl_weights_N: FloatArray | None = None
    entropy_weights_N: FloatArray | None = None
    old_logprobs_N: FloatArray | None = None
    reference_logprobs_N: FloatArray | None = None
    teacher_logprobs_N: FloatArray | None = None
    teacher_ids_NK: IntArray | None = None
    teacher_top_NK: FloatArray | None = None
    values_N: FloatArray | None = None
    last_values_B: FloatArray | None = None
    returns_N: FloatArray | None = None
    version: int = 0
    """Policy version at the start of the step: a token's age is counted from it."""

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

    @property
    def trained_B(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample that are in the loss mask."""
        sums_N1 = np.concatenate([[0], np.cumsum(self.loss_mask_N, dtype=np.int64)])
        return np.diff(sums_N1[self.offsets_B1])

    def places(self) -> dict[SampleId, range]:
        """Where each sample is: one place, or as many as it has segments."""
        found: dict[SampleId, range] = {}
        for place, uid in enumerate(self.uids):
            known = found.get(uid)
            found[uid] = range(known.start if known else place, place + 1)
        return found

    def scaled(self, factor: float) -> Batch:
        """With every weight times the factor."""
        names = ("weights_N", "kl_weights_N", "entropy_weights_N")
        given = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: value * factor for name, value in given.items() if value is not None}
        )

    def take(self, samples: Sequence[int]) -> Batch:
        """The batch of the samples at these places, in this order. Weights stay global."""
        offsets = self.offsets_B1
        spans = [np.arange(offsets[b], offsets[b + 1]) for b in samples]
        tokens = np.concatenate(spans) if spans else np.empty(0, np.int64)
        rows = np.asarray(samples, dtype=np.int64)
        picked: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "uids":
                value = tuple(self.uids[b] for b in samples)
            elif isinstance(value, np.ndarray):
                value = value[rows if spec.name.endswith("_B") else tokens]
            picked[spec.name] = value
        return Batch(**picked)


class TokenValues(NamedTuple):
    """What a critic says of its part: before each token, and after the last of each sample."""

    values_N: FloatArray
    last_values_B: FloatArray


class TopTokens(NamedTuple):
    """A teacher's likeliest tokens at each position, and their log-probs."""

    ids_NK: IntArray
    logprobs_NK: FloatArray
