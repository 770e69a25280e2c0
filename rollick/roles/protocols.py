"""What a worker of each role can do: one Protocol for each kind of role.

The worker class of a role (rollick.workers) subclasses the Protocol, and the role's handle (in this
package) names the Protocol's methods. So a renamed or changed method is a type error on both sides.

    Policy.train --PolicyRole.train--> RoleHandle --> WorkerGroup --> LearnerWorker.train

Coroutine methods run on the event loop of the worker's host, plain ones in the role's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from rollick.data.batch import Batch, BatchShare, TokenValues, TopTokens
from rollick.errors import RollickError
from rollick.infer.engine import Capability
from rollick.roles.reports import EngineRecord, TrainReport
from rollick.trainer.snapshot import SnapshotBytes, SnapshotRecord
from rollick.trainer.strategy import LossReport, OptimReport
from rollick.types import (
    Completion,
    EngineLoad,
    Fingerprint,
    FloatArray,
    PolicyVersion,
    Request,
    SampleId,
)
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.shards import ShardSource
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Channel, ProcessLocation, Route

POLL_TIMEOUT_S = 2.0
"""`GeneratorRole.poll_results` returns without results after this long, so that the controller sees
whether the engine answers, and how many tokens a long generation has."""


class EngineDescription(NamedTuple):
    capabilities: frozenset[Capability]
    load: EngineLoad


class NumberedRequest(NamedTuple):
    """A sample may be sent to an engine several times; each request has a number of its own."""

    number: int
    request: Request


class RequestResult(NamedTuple):
    number: int
    uid: SampleId
    result: Completion | RollickError


class PolledResults(NamedTuple):
    results: list[RequestResult]
    load: EngineLoad


class Role(Protocol):
    """What every role can do. A sleeping role has given its device memory back."""

    def sleep(self) -> Awaitable[None] | None: ...
    def wake(self) -> Awaitable[None] | None: ...

    def peak_memory(self) -> Awaitable[int] | int:
        """Peak bytes of this process since the role's construction began."""
        ...

    def machine_id(self) -> Awaitable[str]:
        """The worker's machine. Returns at once, also while the role computes."""
        ...


class TrainedRole(Role, Protocol):
    """A role with state: the policy or the critic."""

    def save(self, path: Path) -> None: ...
    def load(self, path: Path) -> None: ...
    def write_snapshot(self, path: str, machine_id: str) -> SnapshotRecord:
        """Write this rank's state to shared memory at `path` if `machine_id` is this machine,
        otherwise to memory of this process. The record has the path used."""
        ...

    def read_snapshot_part(self, path: str, offset: int, size: int) -> Awaitable[SnapshotBytes]:
        """A part of a snapshot in memory of this process."""
        ...

    def receive_snapshot_part(self, name: str, offset: int, part: SnapshotBytes) -> Awaitable[str]:
        """Receive a part of a snapshot from another machine. Returns the path of its memory."""
        ...

    def restore_snapshots(self, records: Sequence[SnapshotRecord]) -> None:
        """Restore this rank's snapshot, or reshard the snapshots of all ranks if the number of
        ranks changed."""
        ...


class PolicyRole(TrainedRole, Protocol):
    """The trained model. All ranks of a sharded policy are called together, each with its rows."""

    def train(self, share: BatchShare) -> TrainReport: ...
    def forward_backward(self, batch: Batch) -> LossReport: ...
    def optimizer_step(self) -> OptimReport: ...
    def logprobs(self, batch: Batch) -> FloatArray: ...
    def reference_logprobs(self, batch: Batch) -> FloatArray: ...
    def time_fixed_work(self) -> float:
        """See IsSharded.time_fixed_work; 0 for a strategy with one rank."""
        ...

    def process_location(self) -> ProcessLocation: ...
    def offer_weights(self, version: PolicyVersion, route: Route) -> WeightManifest | None: ...
    def send_weights(self, channel: Channel, shards: ShardSource | None = None) -> None: ...
    def release_weights(self, outcome: PublishOutcome) -> None: ...


class CriticRole(TrainedRole, Protocol):
    def values(self, batch: Batch) -> TokenValues: ...
    def train(self, share: BatchShare) -> TrainReport: ...


class ScorerRole(Role, Protocol):
    def logprobs(self, batch: Batch) -> FloatArray: ...
    def top_logprobs(self, batch: Batch) -> TopTokens: ...


class RewardModelRole(Role, Protocol):
    def scores(self, batch: Batch) -> FloatArray: ...


class GeneratorRole(Role, Protocol):
    async def describe(self) -> EngineDescription:
        """Also the health check: raises EngineLost if the engine died."""
        ...

    async def submit(
        self, requests: Sequence[NumberedRequest], abort_numbers: Sequence[int]
    ) -> None:
        """Start the requests; abort those of earlier calls with these numbers."""

    async def poll_results(self) -> PolledResults: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def process_location(self) -> ProcessLocation: ...
    async def check_weights(self) -> None: ...
    async def receive(self, manifest: WeightManifest) -> Fingerprint:
        """Receive and verify weights. Returns their fingerprint."""
        ...

    async def commit(self, version: PolicyVersion, keep_cache: bool = False) -> bool | None:
        """Load the received weights. Returns whether the engine now uses the offered memory; None
        for a partial update, which does not change this."""
        ...

    async def commit_shared(self, version: PolicyVersion, keep_cache: bool = False) -> None: ...
    async def take_record(self) -> EngineRecord: ...
    async def close(self) -> None: ...
