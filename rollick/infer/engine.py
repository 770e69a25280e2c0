"""The seam between the rollout and whatever draws tokens.

An Engine keeps a committed policy version. Each forward uses the parameters of exactly one
version; `update` is all or nothing. An engine may also implement Streams, which gives tokens while
they are drawn; stream.py serves those that do not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
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

LEAST_TEMPERATURE = 1e-3
"""Of a draw that is not greedy: logits over a smaller one are too large for float32."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedWeights:
    """A WeightStream whose bytes were found to be those of the fingerprint.

    Its memory stays as it is until the update returns, so an engine need neither stage nor check
    it. If it is `lasting`, it stays until the engine has taken another one: an engine with the
    capability ADOPTS_WEIGHTS makes it its own parameters instead of copying. With a `base` these
    are not all parameters: the rest are the engine's. With a `scale` they are adapters (see
    models/adapter.py), which an engine with the capability MERGES_ADAPTERS adds to the weights of
    the base.
    """

    pairs: tuple[tuple[str, Any], ...]
    fingerprint: Fingerprint
    lasting: bool = False
    base: Fingerprint | None = None
    scale: float | None = None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.pairs)


class Capability(StrEnum):
    """What an engine can do beyond generating; `rollick check` refuses what is absent."""

    SLEEP = "sleep"
    SHARED_WEIGHTS = "shared_weights"
    DETERMINISTIC = "deterministic"
    CUT_SUPPORT = "cut_support"
    ADOPTS_WEIGHTS = "adopts_weights"
    KEEP_CACHE = "keep_cache"
    MERGES_ADAPTERS = "merges_adapters"


class Engine(Protocol):
    """Generates. All methods are called from one event loop."""

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    async def generate(self, request: Request) -> Completion:
        """Waits until the request stops or is aborted."""
        ...

    async def abort(self, uid: SampleId) -> None:
        """The pending generate returns ABORTED with the tokens it has. Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Returns once no forward runs; running requests survive."""
        ...

    async def resume(self) -> None: ...

    async def update(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None = None,
        *,
        keep_cache: bool = False,
    ) -> Fingerprint:
        """Take new weights: all or nothing. A fingerprint other than `expected` changes nothing
        and raises WeightError.

        Running requests compute their cache anew, or, with `keep_cache` (a capability), go on over
        the old one: the tokens that they draw from then on are flagged (Completion.kept_cache).
        What begins later never finds anything that an older version computed.
        """
        ...

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        """The learner wrote the shared parameters in place: they are `version` from now on.
        `keep_cache`: as in `update`."""
        ...

    async def sleep(self) -> None:
        """Free the cache (and the weights, unless they are shared). Needs no running request."""
        ...

    async def wake(self) -> None: ...

    def load(self) -> EngineLoad:
        """The last snapshot; never a remote call."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """Tokens that were drawn since the last delta. The last one, and only it, says why it ended.

    All deltas of a request put together are its Completion.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    stop: StopReason | None = None


@runtime_checkable
class Streams(Protocol):
    """What an engine implements if it can give tokens while they are drawn."""

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Closing it (or cancelling who reads it) aborts the request."""
        ...


@runtime_checkable
class Merges(Protocol):
    """What an engine with the capability MERGES_ADAPTERS implements."""

    def fingerprint(self) -> Fingerprint:
        """Of its weights without adapters. Called while no update runs."""
        ...


@runtime_checkable
class CanBeLost(Protocol):
    """An engine that lives elsewhere and may be gone while nobody asks it for anything."""

    def check_alive(self) -> None:
        """Raises EngineLost if it is gone; never waits."""
        ...


@runtime_checkable
class RecordsSteps(Protocol):
    """An engine that can say what each of its steps had to do and how long it took."""

    def record_steps(self, most: int) -> None:
        """Keep a record of each step from now on, the newest `most`."""
        ...

    def take_steps(self) -> list[StepRecord]:
        """The steps since the last call, oldest first."""
        ...
