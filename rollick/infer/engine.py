"""The interface between the rollout and the engines that generate tokens.

An Engine serves one committed policy version. Each forward uses the parameters of exactly one
version, and `update` either replaces all weights or changes nothing. The `Supports...` protocols
are optional; stream.py serves engines that do not implement SupportsStreaming.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from rollick.types import (
    Completion,
    EngineLoad,
    Fingerprint,
    FloatArray,
    IntArray,
    PolicyVersion,
    Request,
    SampleId,
    StepRecord,
    StopReason,
)

WeightStream = Iterable[tuple[str, Any]]
"""Pairs of a parameter's public (Hugging Face) name and its torch tensor, in a fixed order."""

MIN_TEMPERATURE = 1e-3
"""The lowest temperature above 0 (greedy): logits divided by less overflow float32."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class StopRules:
    """Token ids that end every sequence, and the decoder that stop strings need."""

    stop_ids: tuple[int, ...] = ()
    decode: Decode | None = None


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedWeights:
    """A WeightStream whose bytes match the fingerprint. The memory stays valid until the update
    returns, so an engine neither stages nor checks it."""

    pairs: tuple[tuple[str, Any], ...]
    fingerprint: Fingerprint
    persistent: bool = False
    """The memory stays valid until the next update: an engine with ADOPT_WEIGHTS uses it as its
    parameters instead of copying."""
    base_fingerprint: Fingerprint | None = None
    """Set if these are not all parameters: the engine keeps the others."""
    adapter_scale: float | None = None
    """Set if these are adapters (models/loading/adapter.py): an engine with MERGE_ADAPTERS adds
    them, times this factor, to the base weights."""
    in_place: bool = False
    """Whether the engine's parameters contain them already (SupportsInPlaceUpdate)."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.pairs)


class Capability(StrEnum):
    """Optional abilities of an engine. Callers check for them before use."""

    SLEEP = "sleep"
    """Free device memory between `sleep` and `wake`."""
    SHARED_WEIGHTS = "shared_weights"
    """Use the parameters of a learner in the same process."""
    DETERMINISTIC = "deterministic"
    """Sample tokens that do not depend on the other requests of a batch."""
    TRUNCATED_SAMPLING = "truncated_sampling"
    """Top-k, top-p and min-p."""
    ADOPT_WEIGHTS = "adopt_weights"
    """Use received memory as its parameters (VerifiedWeights.persistent)."""
    KEEP_CACHE = "keep_cache"
    """Continue requests on their old cache after an update (`update(keep_cache=True)`)."""
    MERGE_ADAPTERS = "merge_adapters"
    """Add published adapters to its base weights (VerifiedWeights.adapter_scale)."""


class InferenceClient(Protocol):
    """The methods of an engine that the rollout calls, in this or another process."""

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    async def generate(self, request: Request) -> Completion:
        """Waits until the request stops or is aborted."""
        ...

    async def abort(self, uid: SampleId) -> None:
        """The pending `generate` returns ABORTED with its tokens so far. Ignores unknown ids."""

    def load(self) -> EngineLoad:
        """The latest snapshot; makes no remote call."""
        ...


class Engine(InferenceClient, Protocol):
    """Generates tokens. All methods are called from one event loop."""

    async def pause(self) -> None:
        """Waits until no forward runs. Running requests stay and continue after `resume`."""

    async def resume(self) -> None: ...

    async def update(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None = None,
        *,
        keep_cache: bool = False,
    ) -> Fingerprint:
        """Replace the weights. If their fingerprint is not `expected`, raises WeightError and
        changes nothing.

        Running requests recompute their cache. With `keep_cache` (a capability) they continue on
        the old one, and their later tokens are flagged (Completion.kept_cache). Requests that
        start later never reuse cache entries of an older version.
        """
        ...

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        """The learner has written `version` into the shared parameters."""

    async def sleep(self) -> None:
        """Free the cache, and the weights unless they are shared. Requests wait for `wake`."""

    async def wake(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The tokens generated since the previous delta. Only the last delta has a stop reason. A
    request's deltas, concatenated, are its Completion."""

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    stop: StopReason | None = None


@runtime_checkable
class SupportsStreaming(Protocol):
    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Closing the generator, or cancelling its reader, aborts the request."""
        ...


@runtime_checkable
class SupportsAdapterMerging(Protocol):
    """An engine with the capability MERGE_ADAPTERS."""

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of its weights without adapters. Called while no update runs."""
        ...


@runtime_checkable
class SupportsHealthCheck(Protocol):
    """An engine in another process, which can die between calls."""

    def check_alive(self) -> None:
        """Raises EngineLost if the process died; never waits."""


@runtime_checkable
class SupportsWeightCheck(Protocol):
    """An engine that does not share its weights, so that only an update may change them."""

    async def check_weights(self) -> None:
        """Compares their fingerprint with that of the last update. Raises EngineCorrupt if they
        differ: some of the tokens since the last check may be wrong."""


@runtime_checkable
class SupportsInPlaceUpdate(Protocol):
    """An engine whose parameters can be written by others."""

    async def begin_update(self, names: Sequence[str]) -> Sequence[Any] | None:
        """Stop generating until `finish_update`, and return the tensors of these parameters, which
        may then be written. None, without a change, if they cannot be: the engine shares them."""
        ...

    async def finish_update(
        self, version: PolicyVersion, fingerprint: Fingerprint, *, keep_cache: bool = False
    ) -> None:
        """Generate with the new weights. All of `begin_update` were written."""
        ...


@runtime_checkable
class SupportsStepRecords(Protocol):
    def record_steps(self, limit: int) -> None:
        """Start recording; keeps the latest `limit` steps."""

    def take_steps(self) -> list[StepRecord]:
        """The steps since the previous call, oldest first."""
        ...
