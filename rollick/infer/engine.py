"""The seam between the rollout and whatever draws tokens.

An Engine keeps a committed policy version. Each forward uses the parameters of exactly one
version; `update` is all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Protocol

from rollick.types import (
    Completion,
    EngineLoad,
    Fingerprint,
    PolicyVersion,
    Request,
    SampleId,
)

WeightStream = Iterable[tuple[str, Any]]
"""Pairs of a parameter's public (Hugging Face) name and its torch tensor, in a fixed order."""


class Capability(StrEnum):
    """What an engine can do beyond generating; `rollick check` refuses what is absent."""

    SLEEP = "sleep"
    SHARED_WEIGHTS = "shared_weights"
    DETERMINISTIC = "deterministic"
    CUT_SUPPORT = "cut_support"


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
        self, weights: WeightStream, version: PolicyVersion, expected: Fingerprint | None = None
    ) -> Fingerprint:
        """Take new weights: all or nothing. A fingerprint other than `expected` changes nothing
        and raises WeightError."""
        ...

    async def commit_shared(self, version: PolicyVersion) -> None:
        """The learner wrote the shared parameters in place: they are `version` from now on."""
        ...

    async def sleep(self) -> None:
        """Free the cache (and the weights, unless they are shared). Needs no running request."""
        ...

    async def wake(self) -> None: ...

    def load(self) -> EngineLoad:
        """The last snapshot; never a remote call."""
        ...

    async def close(self) -> None: ...
