"""Batch: the samples of one training step, packed end to end without padding.

Shapes: B rows, N tokens over all rows. Token arrays (`*_N`) hold row 0, then row 1, and so on;
`lengths_B` has the length of each row. A row is a sample; a sample with several segments has one
row per segment, consecutive and with the same id (`rows_by_sample`). Numpy only, so that a batch
can be sent between processes without torch.
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
    """The tokens of a step, their credit and their annotations.

    Tokens: `logprobs_N` are those of the behaviour policy; entry t is the log-prob of token t given
    the tokens before it. `scores_B` are the shaped scores.

    Credit, 0 until assigned (algorithms/credit.py): `component_N` is the index of a token's
    algorithm. `weights_N` is its factor in the policy loss and includes the denominator over the
    global batch, the correction and the coefficients, so the loss of a batch is the sum over any
    split of it. `kl_weights_N` and `entropy_weights_N` are the factors of KL and entropy.

    Annotations, None if not computed: log-probs of other policies; the teacher's K most likely
    tokens with their log-probs; the critic's values before each token and after the last one, and
    the returns, which are the targets of these values.
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
    """Policy version at the start of the step; ages of tokens are relative to it."""

    @property
    def rows(self) -> int:
        return len(self.lengths_B)

    @property
    def tokens(self) -> int:
        return len(self.token_ids_N)

    @property
    def nbytes(self) -> int:
        values = (getattr(self, spec.name) for spec in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    @property
    def offsets_B1(self) -> npt.NDArray[np.int64]:
        """The first token of each row, followed by the number of tokens."""
        return np.concatenate([[0], np.cumsum(self.lengths_B, dtype=np.int64)])

    @property
    def trained_B(self) -> npt.NDArray[np.int64]:
        """Tokens of each row inside the loss mask."""
        sums_N1 = np.concatenate([[0], np.cumsum(self.loss_mask_N, dtype=np.int64)])
        return np.diff(sums_N1[self.offsets_B1])

    def rows_by_sample(self) -> dict[SampleId, range]:
        """The rows of each sample: one for each segment."""
        rows: dict[SampleId, range] = {}
        for row, uid in enumerate(self.uids):
            rows[uid] = range(rows[uid].start if uid in rows else row, row + 1)
        return rows

    def scale_weights(self, factor: float) -> Batch:
        names = ("weights_N", "kl_weights_N", "entropy_weights_N")
        weights = {name: w for name in names if (w := getattr(self, name)) is not None}
        return replace(self, **{name: weight * factor for name, weight in weights.items()})

    def take(self, rows: Sequence[int]) -> Batch:
        """The batch of these rows, in this order. Weights still refer to the global batch."""
        offsets = self.offsets_B1
        spans = [np.arange(offsets[b], offsets[b + 1]) for b in rows]
        tokens = np.concatenate([np.empty(0, np.int64), *spans])
        indices = np.asarray(rows, dtype=np.int64)
        selected: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "uids":
                value = tuple(self.uids[b] for b in rows)
            elif isinstance(value, np.ndarray):
                value = value[indices if spec.name.endswith("_B") else tokens]
            selected[spec.name] = value
        return Batch(**selected)


@dataclass(frozen=True, slots=True, eq=False)
class BatchShare:
    """One rank's rows of a batch, by mini-batch. A mini-batch may be empty."""

    minibatches: tuple[Batch, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.minibatches)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.minibatches)


class TokenValues(NamedTuple):
    """A critic's values before each token, and after the last token of each row."""

    values_N: FloatArray
    last_values_B: FloatArray


class TopTokens(NamedTuple):
    """A teacher's most likely tokens at each position, and their log-probs."""

    ids_NK: IntArray
    logprobs_NK: FloatArray
