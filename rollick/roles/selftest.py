"""The workers of `rollick selftest`: one for each device, called like the ranks of a role."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from rollick.roles.calls import RoleHandle
from rollick.roles.protocols import Role
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Channel


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device, as its worker sees it."""

    device: str
    memory_gb: float
    machine: str
    torch: str


@dataclass(frozen=True, slots=True)
class AllReduceResult:
    is_exact: bool
    gb_per_s: float
    """Bytes of the tensor / seconds."""


@dataclass(frozen=True, slots=True)
class OffloadResult:
    """A model's tensors were moved to host memory and back."""

    freed_mb: float
    expected_mb: float
    is_intact: bool
    gb_per_s: float


class SelfTestRole(Role, Protocol):
    def describe(self) -> DeviceFacts: ...

    def all_reduce(self, megabytes: int) -> AllReduceResult:
        """Sum a tensor over all ranks, and compare it with the sum computed here."""
        ...

    def offload(self, megabytes: int) -> OffloadResult: ...

    def offer_weights(self, megabytes: int, channel: Channel) -> WeightManifest:
        """Offer random weights to rank 1."""
        ...

    def send_weights(self, channel: Channel) -> None: ...
    def receive_weights(self, manifest: WeightManifest) -> float:
        """Receive and verify. Returns the seconds."""
        ...


class SelfTestRanks(RoleHandle[SelfTestRole]):
    async def describe(self) -> list[DeviceFacts]:
        return await self.call_all(SelfTestRole.describe)

    async def all_reduce(self, megabytes: int) -> list[AllReduceResult]:
        results = await self.scatter(SelfTestRole.all_reduce, [megabytes] * self.ranks)
        return [result for result in results if result is not None]

    async def offload(self, megabytes: int) -> OffloadResult:
        """On the first rank."""
        return await self.call_rank(0, SelfTestRole.offload, megabytes)

    async def send_weights(self, megabytes: int, channel: Channel) -> float:
        """Send random weights from rank 0 to rank 1 twice. Returns the seconds of the second
        transfer, with the verification. Raises WeightError if a byte differs."""
        seconds = 0.0
        for _ in range(2):
            manifest = await self.call_rank(0, SelfTestRole.offer_weights, megabytes, channel)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.call_rank(0, SelfTestRole.send_weights, channel))
                receiving = tasks.create_task(
                    self.call_rank(1, SelfTestRole.receive_weights, manifest)
                )
            seconds = receiving.result()
        return seconds
