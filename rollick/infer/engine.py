"""The seam between the rollout and whatever draws tokens.

An Engine keeps a committed policy version. Each forward uses the parameters of exactly one
version; `update` is all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from rollick.types import (
    Completion,
    EngineLoad,
    Fingerprint,
    PolicyVersion,
    Request,
    SampleId,
    StepRecord,
)

WeightStream = Iterable[tuple[str, Any]]
"""Pairs of a parameter's public (Hugging Face) name and its torch tensor, in a fixed order."""


class Capability(StrEnum):
    """What an engine can do beyond generating; `rollick check` refuses what is absent."""

    SLEEP = "sleep"
    SHARED_WEIGHTS = "shared_weights"
    DETERMINISTIC = "deterministic"
    CUT_SUPPORT = "cut_support"
    KEEP_CACHE = "keep_cache"


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


@runtime_checkable
class RecordsSteps(Protocol):
    """An engine that can say what each of its steps had to do and how long it took."""

    def record_steps(self, most: int) -> None:
        """Keep a record of each step from now on, the newest `most`."""
        ...

    def take_steps(self) -> list[StepRecord]:
        """The steps since the last call, oldest first."""
        ...
