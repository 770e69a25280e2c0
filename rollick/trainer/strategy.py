"""Interfaces of training strategies: how a learner holds and updates its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rollick.algorithms.losses import LossInputs, ValueInputs
from rollick.algorithms.objective import Loss
from rollick.algorithms.reward import ScoreInputs
from rollick.data.batch import Batch
from rollick.types import FloatArray

WeightStream = Iterable[tuple[str, Any]]
"""Pairs of a parameter's public (Hugging Face) name and its torch tensor, in a fixed order."""


class Region(NamedTuple):
    """A part of a tensor: where it begins and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LocalShards:
    """The parameters of a sharded learner as its ranks have them."""

    rank: int
    regions: Callable[[], Sequence[Mapping[str, Region]]]
    """The part of each parameter that each rank has. A collective."""
    tensors: Callable[[], WeightStream]
    """The parts of this rank, in the compute dtype, each converted when the iteration reaches
    it."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardedWeights:
    """Full parameters of a sharded learner, each gathered when the iteration reaches it.
    `shapes`: the names and meta tensors of all parameters."""

    shapes: Sequence[tuple[str, Any]]
    stream: WeightStream
    shards: LocalShards | None = None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.stream)


LossFn = Callable[[LossInputs], Loss]
"""A loss with bound options: returns the loss of a micro-batch and its metric sums."""

ValueLossFn = Callable[[ValueInputs], Loss]
ScoreLossFn = Callable[[ScoreInputs], Loss]


@dataclass(frozen=True, slots=True)
class LossReport:
    """The result of one forward_backward over `tokens` trained tokens. `sums` are metric
    numerators; `maxima` are metrics that are merged by their maximum."""

    loss: float
    tokens: int
    sums: Mapping[str, float] = field(default_factory=dict[str, float])
    maxima: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, parts: Sequence[LossReport]) -> LossReport:
        """The report of a batch from those of its parts."""
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for part in parts:
            sums |= {name: sums.get(name, 0.0) + value for name, value in part.sums.items()}
            maxima |= {n: max(maxima.get(n, value), value) for n, value in part.maxima.items()}
        loss, tokens = sum(part.loss for part in parts), sum(part.tokens for part in parts)
        return cls(loss, tokens, sums, maxima)


@dataclass(frozen=True, slots=True)
class OptimReport:
    """The result of one optimizer step. A step is skipped if the gradient is not finite."""

    grad_norm: float
    lr: float
    skipped: bool = False


class Shard(NamedTuple):
    """The offsets of a rank's part of a tensor, and the shape of the full tensor."""

    offsets: tuple[int, ...]
    full: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrainState:
    """The training state of a model by name: masters, moments, random state. On a rank of a sharded
    model, the state of its shards."""

    tensors: Mapping[str, Any]
    steps: int
    """Optimizer steps that were applied."""
    shards: Mapping[str, Shard] = field(default_factory=dict[str, Shard])
    """Of the sharded tensors, by name."""


class TrainStrategy(Protocol):
    """Holds a model and trains it. Called from one thread.

    All ranks of a sharded strategy get the same calls in the same order, each with its own samples
    of a batch (parallel/shares.py). Reports cover all samples; per-token results cover the rank's.
    """

    @property
    def module(self) -> Any:
        """The live module, with parameters that an engine in the same process may share; None if
        they are sharded."""
        ...

    def logprobs(self, batch: Batch) -> FloatArray:
        """[N] float32: log-prob of each token in the loss mask, at the sample's temperature; 0 for
        all others and for first tokens."""
        ...

    def forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        """Accumulate the gradient of the loss. Does not depend on how the batch is split."""
        ...

    def step(self) -> OptimReport:
        """Clip the gradient and update the parameters in place. Skips a non-finite gradient."""
        ...

    def weights(self) -> WeightStream:
        """The live parameters under public names, in the compute dtype. A sharded strategy yields
        copies, one at a time; all ranks must iterate together."""
        ...

    def export(self, path: Path) -> None:
        """Write a plain Hugging Face folder."""
        ...

    def save(self, path: Path) -> None:
        """Write all state (masters, moments, schedule, RNG) as files in the folder."""
        ...

    def load(self, path: Path) -> None:
        """Load what `save` wrote, into the parameters in place."""
        ...

    def state(self) -> TrainState:
        """The live state of this rank, which the next step changes. Can be called while asleep."""
        ...

    def restore(self, state: TrainState) -> None:
        """Load a state that `state` returned, in place."""
        ...

    def sleep(self, *, keep_parameters: bool = False) -> None:
        """Free device memory, except parameters that an engine shares."""
        ...

    def wake(self) -> None: ...


@runtime_checkable
class IsSharded(Protocol):
    """A sharded strategy, whose ranks wait for each other."""

    def time_fixed_work(self) -> float:
        """Measure the seconds that this rank takes for a fixed amount of work."""
        ...

    def restore_all(self, states: Sequence[TrainState]) -> None:
        """Load the states of all ranks of another process group, of any size."""
        ...


@runtime_checkable
class SupportsAdapters(Protocol):
    """A strategy that can also train adapters over a frozen model."""

    @property
    def adapters(self) -> Any:
        """The Adapters of lora.py; None if all parameters are trained."""
        ...

    def reference_logprobs(self, batch: Batch) -> FloatArray:
        """As `logprobs`, with the adapters disabled."""
        ...
