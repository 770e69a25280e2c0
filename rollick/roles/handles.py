"""Role handles: the API that the controller and custom training loops call.

    roles = Roles(group)
    report = await roles.policy.train(batch)
    batch = replace(batch, old_logprobs_N=await roles.policy.logprobs(batch))

A batch is divided over the ranks of a role, and results come back in the order of the batch. No
rank receives rows that it does not compute. A role that the run does not have has 0 ranks; calling
it raises PlacementError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollick.algorithms.value_targets import select_value_targets
from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import WorkerGroup
from rollick.cluster.machine import machine_id
from rollick.data.batch import Batch, TokenValues, TopTokens
from rollick.errors import CheckpointError
from rollick.roles.calls import EVEN_SPLIT, AnyHandle, RoleHandle
from rollick.roles.engines import EngineGroup, Generators
from rollick.roles.protocols import (
    CriticRole,
    PolicyRole,
    RewardModelRole,
    Role,
    ScorerRole,
    TrainedRole,
)
from rollick.roles.reports import CriticReport, TrainReport
from rollick.trainer.parallel.shares import BatchSplit, gather_samples, gather_tokens
from rollick.trainer.snapshot import SnapshotMemory, SnapshotRecord
from rollick.trainer.strategy import LossReport, OptimReport
from rollick.types import FloatArray, PolicyVersion, RoleName
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.shards import ShardSource
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Channel, ProcessLocation, Route

if TYPE_CHECKING:
    from rollick.roles.worker_recovery import WorkerRecovery

PART_BYTES = 32 << 20
"""Size of the parts in which snapshots are sent to and from other machines."""

Trained = TypeVar("Trained", bound=TrainedRole)


class TrainedHandle(RoleHandle[Trained]):
    """A role with state. Collective calls run on all ranks, one call at a time. On the controller's
    machine a worker maps the controller's memory for snapshots, and nothing is sent."""

    async def save(self, path: Path) -> None:
        """Write weights, optimizer state and random state into a folder."""
        await self.retry(lambda: self.call_collective(TrainedRole.save, path))

    async def load(self, path: Path) -> None:
        await self.call_collective(TrainedRole.load, path)

    async def write_snapshots(
        self, memories: Sequence[SnapshotMemory]
    ) -> list[SnapshotRecord | None]:
        """Each rank copies its state into its memory, or into memory of its own machine."""
        paths = [memory.path for memory in memories]
        return await self.scatter(TrainedRole.write_snapshot, paths, machine_id())

    async def fetch_snapshots(
        self, records: Sequence[SnapshotRecord | None], memories: Sequence[SnapshotMemory]
    ) -> list[SnapshotRecord]:
        """Copy snapshots on other machines into the controller's memory."""
        pairs = list(zip(records, memories, strict=True))
        return [await self._fetch(rank, *pair) for rank, pair in enumerate(pairs)]

    async def restore_snapshots(
        self, records: Sequence[SnapshotRecord], memories: Sequence[SnapshotMemory]
    ) -> None:
        """Restore the state of each rank from its snapshot. If the number of ranks has changed,
        each rank reads its shards from all snapshots."""
        pairs = list(zip(records, memories, strict=True))
        by_rank = [[pair] for pair in pairs] if len(pairs) == self.ranks else [pairs] * self.ranks
        records_by_rank: list[Sequence[SnapshotRecord]] = []
        for rank, needed in enumerate(by_rank):
            if await self.call_rank(rank, Role.machine_id) == machine_id():
                records_by_rank.append([record for record, _ in needed])
            else:
                records_by_rank.append([await self._send(rank, *pair) for pair in needed])
        await self.scatter(TrainedRole.restore_snapshots, records_by_rank)

    async def _fetch(
        self, rank: int, record: SnapshotRecord | None, memory: SnapshotMemory
    ) -> SnapshotRecord:
        """Copy a rank's snapshot into the controller's memory, unless the rank maps it. Raises
        CheckpointError if that has no room."""
        assert record is not None, "every rank writes a snapshot"
        if record.path == memory.path:
            return record
        memory.truncate(record.bytes)
        for offset in range(0, record.bytes, PART_BYTES):
            read = TrainedRole.read_snapshot_part
            part = await self.call_rank(rank, read, record.path, offset, PART_BYTES)
            try:
                await asyncio.to_thread(memory.write, offset, part)
            except OSError as error:
                raise CheckpointError(
                    f"no memory for a snapshot of {record.bytes / 1e9:.2f} GB: {error}",
                    fix="free memory of the controller's machine, or set checkpoint.snapshot=false",
                ) from error
        return replace(record, path=memory.path)

    async def _send(
        self, rank: int, record: SnapshotRecord, memory: SnapshotMemory
    ) -> SnapshotRecord:
        """Send a snapshot to a rank that cannot map it. Returns the record of the copy."""
        path = ""
        for offset in range(0, record.bytes, PART_BYTES):
            part = await asyncio.to_thread(memory.read, offset, PART_BYTES)
            receive = TrainedRole.receive_snapshot_part
            path = await self.call_rank(rank, receive, record.path, offset, part)
        return replace(record, path=path)


class Policy(TrainedHandle[PolicyRole]):
    """The trained model."""

    async def train(self, batch: Batch) -> TrainReport:
        """Train on one batch: all its epochs and mini-batches."""
        report = await self.retry(lambda: self._train(batch))
        if self.recovery is not None:
            self.recovery.trained(self.role, batch)
        return report

    async def forward_backward(self, batch: Batch) -> LossReport:
        """Add the gradient of the batch's loss to the accumulated gradient."""
        return (await self.split_collective(PolicyRole.forward_backward, batch))[0][0]

    async def optimizer_step(self) -> OptimReport:
        """Clip the accumulated gradient, update the weights, clear the gradient."""
        return await self.call_collective(PolicyRole.optimizer_step)

    async def logprobs(self, batch: Batch) -> FloatArray:
        """[N]: log-prob of each token at the sample's temperature."""
        return await self._logprobs(PolicyRole.logprobs, batch)

    async def reference_logprobs(self, batch: Batch) -> FloatArray:
        """[N]: like `logprobs`, but of the base model, with the LoRA adapters disabled."""
        return await self._logprobs(PolicyRole.reference_logprobs, batch)

    async def _train(self, batch: Batch) -> TrainReport:
        shares = self.batch_split.shares(batch, ranks=self.ranks)
        return (await self.scatter_collective(PolicyRole.train, shares))[0]

    async def _logprobs(
        self, method: Callable[[PolicyRole, Batch], FloatArray], batch: Batch
    ) -> FloatArray:
        results, plan = await self.retry(lambda: self.split_collective(method, batch))
        return gather_tokens(results, batch, plan)

    async def time_fixed_work(self) -> list[float]:
        """The seconds that each rank takes for the same work."""
        return await self.retry(lambda: self.call_all(PolicyRole.time_fixed_work))

    def set_rank_speeds(self, speeds: Sequence[float]) -> None:
        """From now on, divide batches by these relative speeds of the ranks."""
        self.batch_split = replace(self.batch_split, speeds=tuple(speeds))

    async def process_location(self) -> ProcessLocation:
        """Location of rank 0, the rank that sends the weights."""
        return await self.call_rank(0, PolicyRole.process_location)

    async def offer_weights(self, version: PolicyVersion, route: Route) -> WeightManifest:
        """Begin a publish: the weights must not change until `release_weights`."""
        manifest = await self.call_collective(PolicyRole.offer_weights, version, route)
        assert manifest is not None, "rank 0 must return a manifest"
        return manifest

    async def send_weights(self, channel: Channel, manifest: WeightManifest) -> None:
        """Send what was offered; from all ranks if each sends its shards."""
        if isinstance(manifest.source, ShardSource):
            await self.call_collective(PolicyRole.send_weights, channel, manifest.source)
        else:
            await self.call_rank(0, PolicyRole.send_weights, channel, None)

    async def release_weights(self, outcome: PublishOutcome) -> None:
        await self.call_collective(PolicyRole.release_weights, outcome)


class Critic(TrainedHandle[CriticRole]):
    """The model that estimates returns."""

    value_components: Sequence[int] = ()
    """Indices of the recipe's algorithms that read values."""

    async def values(self, batch: Batch) -> TokenValues:
        """The critic's value before each token, and after the last token of each sample."""
        results, plan = await self.retry(lambda: self.split(CriticRole.values, batch))
        values = [None if result is None else result.values_N for result in results]
        last = [None if result is None else result.last_values_B for result in results]
        return TokenValues(gather_tokens(values, batch, plan), gather_samples(last, batch, plan))

    async def train(self, batch: Batch) -> CriticReport:
        """Train on one batch: all its epochs and mini-batches."""
        targets, explained = select_value_targets(batch, self.value_components)
        if not targets.rows:
            return CriticReport(None, explained)
        report = await self.retry(lambda: self._train(targets))
        if self.recovery is not None:
            self.recovery.trained(self.role, batch)
        return CriticReport(report, explained)

    async def _train(self, targets: Batch) -> TrainReport:
        shares = self.batch_split.shares(targets, ranks=self.ranks)
        return (await self.scatter_collective(CriticRole.train, shares))[0]


class Scorer(RoleHandle[ScorerRole]):
    """A frozen language model: the reference or the teacher."""

    async def logprobs(self, batch: Batch) -> FloatArray:
        """[N]: log-prob of each token at the sample's temperature."""
        results, plan = await self.retry(lambda: self.split(ScorerRole.logprobs, batch))
        return gather_tokens(results, batch, plan)

    async def top_logprobs(self, batch: Batch) -> TopTokens:
        """The top-k tokens and their log-probs at each position of the loss mask."""
        results, plan = await self.retry(lambda: self.split(ScorerRole.top_logprobs, batch))
        ids = [None if result is None else result.ids_NK for result in results]
        logprobs = [None if result is None else result.logprobs_NK for result in results]
        return TopTokens(gather_tokens(ids, batch, plan), gather_tokens(logprobs, batch, plan))


class RewardModel(RoleHandle[RewardModelRole]):
    """A frozen model that computes one score per sample."""

    async def scores(self, batch: Batch) -> FloatArray:
        """[B]: one score per sample."""
        results, plan = await self.retry(lambda: self.split(RewardModelRole.scores, batch))
        return gather_samples(results, batch, plan)


class Roles:
    """The handles of all roles of a run; each attribute has the name of its role. With `recovery`,
    calls to lost workers are retried after a repair; EngineRestarter restarts lost engines.
    `splits`: how the ranks of a role divide a batch; evenly by default. `value_components`: indices
    of the algorithms that read values."""

    def __init__(
        self,
        group: WorkerGroup,
        recovery: WorkerRecovery | None = None,
        *,
        splits: Mapping[RoleName, BatchSplit] | None = None,
        value_components: Sequence[int] = (0,),
    ) -> None:
        def options(role: RoleName) -> dict[str, Any]:
            return {"batch_split": (splits or {}).get(role, EVEN_SPLIT)}

        self.group = group
        self.policy = Policy(group, "policy", recovery, **options("policy"))
        self.critic = Critic(group, "critic", recovery, **options("critic"))
        self.critic.value_components = value_components
        self.reference = Scorer(group, "reference", recovery, **options("reference"))
        self.teacher = Scorer(group, "teacher", recovery, **options("teacher"))
        self.reward_model = RewardModel(group, "reward_model", recovery, **options("reward_model"))
        self.judge = EngineGroup(group, "judge")
        self.generators = Generators(group, "generators")

    @property
    def device_map(self) -> DeviceMap:
        """The device map, which changes when a sharded policy continues with fewer ranks."""
        return self.group.device_map

    def handle(self, role: RoleName) -> AnyHandle:
        return getattr(self, role)
