"""The samples that no check of their engine's weights covers yet.

    a request ends -> record(engine, sample)    a batch is ready -> check() -> samples to drop

A check that passes covers all tokens that the engine has generated since its last update, and an
update checks the weights that it replaces. So a sample is checked once, before it is trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass, field

from rollick.errors import EngineCorrupt, EngineLost, RollickError
from rollick.infer.engine import InferenceClient, SupportsWeightCheck
from rollick.types import SampleId

DAMAGED = "damaged_engine"
"""Drop reason of groups with tokens of an engine whose weights are damaged."""


@dataclass(slots=True, eq=False)
class _Engine:
    client: SupportsWeightCheck
    samples: set[SampleId] = field(default_factory=set[SampleId])


class UncheckedSamples:
    """Unchecked samples by engine. Engines that left the fleet are kept: their results may arrive
    later."""

    def __init__(self) -> None:
        self._engines: dict[int, _Engine] = {}

    def add(self, number: int, client: InferenceClient) -> None:
        """A new engine; ignored if it cannot be checked."""
        if isinstance(client, SupportsWeightCheck):
            self._engines[number] = _Engine(client)

    def record(self, number: int, uid: SampleId) -> None:
        """The sample has tokens of the engine."""
        if number in self._engines:
            self._engines[number].samples.add(uid)

    def contains_any(self, groups: Container[int]) -> bool:
        """Whether a sample of these groups is unchecked."""
        engines = self._engines.values()
        return any(uid.group in groups for engine in engines for uid in engine.samples)

    async def check(self) -> tuple[dict[int, EngineLost], set[SampleId]]:
        """Check the engines of all unchecked samples. Returns the lost engines by number, and the
        samples of engines with damaged weights. The samples of an engine that died cannot be
        checked and count as good: otherwise each killed engine would cost samples."""
        due = [(n, engine, set(engine.samples)) for n, engine in self._engines.items()]
        due = [(number, engine, samples) for number, engine, samples in due if samples]
        checks = (engine.client.check_weights() for _, engine, _ in due)
        errors = await asyncio.gather(*checks, return_exceptions=True)
        lost: dict[int, EngineLost] = {}
        damaged: set[SampleId] = set()
        for (number, engine, samples), error in zip(due, errors, strict=True):
            engine.samples -= samples
            if error is not None and not isinstance(error, RollickError):
                raise error
            if isinstance(error, EngineLost):
                lost[number] = error
            if isinstance(error, EngineCorrupt):
                damaged |= samples
        return lost, damaged
