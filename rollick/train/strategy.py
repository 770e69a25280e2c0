"""The seam between a learner and how its parameters are held and stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rollick.algorithms.losses import LossInputs
from rollick.algorithms.objective import Loss
from rollick.algorithms.reward import ScoreInputs
from rollick.algorithms.value import ValueInputs
from rollick.data.batch import Batch, TokenValues
from rollick.types import FloatArray

WeightStream = Iterable[tuple[str, Any]]
"""Pairs of a parameter's public (Hugging Face) name and its torch tensor, in a fixed order."""


class ShardedWeights:
    """Whole parameters of a sharded learner: each is put together when its turn comes, and need not
    be kept. `shapes` are their names with tensors without memory, known before."""

    def __init__(self, shapes: Sequence[tuple[str, Any]], stream: WeightStream) -> None:
        self.shapes = shapes
        self._stream = stream

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._stream)


LossFn = Callable[[LossInputs], Loss]
"""A loss with its options bound: what a micro-batch adds, and metrics summed over it."""

ValueLossFn = Callable[[ValueInputs], Loss]
"""The same of a critic."""


ScoreLossFn = Callable[[ScoreInputs], Loss]
"""The same of a reward model."""


@dataclass(frozen=True, slots=True)
class LossReport:
    """What one forward_backward gave. `sums` are metric numerators; `tokens` the trained tokens;
    `maxima` are metrics whose value over several reports is the largest of them."""

    loss: float
    tokens: int
    sums: Mapping[str, float] = field(default_factory=dict[str, float])
    maxima: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class OptimReport:
    """What one optimizer step did. A step is skipped if the gradient is not finite."""

    grad_norm: float
    lr: float
    skipped: bool = False


class TrainStrategy(Protocol):
    """Holds a model and trains it. Called from one thread.

    A sharded one is on many ranks. All are called alike, with the same arguments in the same order,
    and give the same answers: a batch is the whole batch, and they divide it.
    """

    @property
    def module(self) -> Any:
        """The live module, whose parameters an engine in the same process may share; None where
        this process has only a part of them."""
        ...

    def logprobs(self, batch: Batch) -> FloatArray:
        """[N] float32: log-prob of each token at the sample's temperature; 0 for first tokens."""
        ...

    def forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        """Accumulates the gradient of the loss; any split of a batch gives the same."""
        ...

    def step(self) -> OptimReport:
        """Clip, update the masters, write the parameters in place; skips when not finite."""
        ...

    def weights(self) -> WeightStream:
        """Compute dtype, public names; the live parameters, not copies. Of a sharded strategy:
        copies, one at a time, which all ranks must take together."""
        ...

    def export(self, path: Path) -> None:
        """Write a plain Hugging Face folder."""
        ...

    def save(self, path: Path) -> None:
        """Write all state (masters, moments, schedule, RNG) as files in the folder."""
        ...

    def load(self, path: Path) -> None: ...

    def sleep(self, *, keep_parameters: bool = False) -> None:
        """Give memory of the device back; that of parameters not, if an engine shares them."""
        ...

    def wake(self) -> None: ...


@runtime_checkable
class HasAdapters(Protocol):
    """What a strategy also is that can train adapters over a model which stays as it is."""

    @property
    def adapters(self) -> Any:
        """The Adapters of lora.py; None if all parameters are trained."""
        ...

    def reference_logprobs(self, batch: Batch) -> FloatArray:
        """As `logprobs`, of the model without its adapters."""
        ...


class CriticStrategy(Protocol):
    """Holds a critic and trains it. Called from one thread."""

    def values(self, batch: Batch) -> TokenValues:
        """Float32: of each token in the loss mask before it is drawn (0 for all others), and
        after the last token of each sample."""
        ...

    def forward_backward(self, batch: Batch, loss: ValueLossFn) -> LossReport:
        """Accumulates the gradient of the loss; any split of a batch gives the same."""
        ...

    def step(self) -> OptimReport:
        """As that of a policy."""
        ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...
