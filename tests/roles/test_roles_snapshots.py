"""Snapshots of roles: when they are taken, their contents, and a lack of memory for them."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollick.cluster import machine
from rollick.cluster.devices import DeviceMap, HostSpec
from rollick.cluster.group import open_group
from rollick.cluster.worker import HostContext, RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig
from rollick.errors import CheckpointError, RollickError, WeightError, WorkerError, WorkerLost
from rollick.observe.faults import FaultLog, LostTime
from rollick.observe.goodput import TimeAccount
from rollick.roles import worker_recovery
from rollick.roles.handles import Critic, Policy, Roles
from rollick.roles.protocols import Role
from rollick.roles.snapshots import RoleSnapshots
from rollick.roles.worker_recovery import WorkerRecovery
from rollick.testing.batches import random_batch
from rollick.trainer.snapshot import SnapshotMemory, SnapshotRecord
from rollick.types import Fingerprint, RoleName

BATCH = random_batch([5, 6])
BATCH = replace(BATCH, values_N=BATCH.advantages_N, returns_N=BATCH.advantages_N)
TRAINED: tuple[RoleName, ...] = ("policy", "critic")


@dataclass
class CountingLearner:
    """A policy or critic whose state is the number of batches that it was trained on."""

    batches: int = 0
    written: int = 0
    """The number of snapshots."""
    has_memory: bool = True
    busy_s: float = 0.05
    restore_error: RollickError | None = None
    is_lost: bool = False

    def train(self, batch: Any) -> None:
        time.sleep(self.busy_s)
        self.batches += 1

    def write_snapshot(self, path: str, machine_id: str) -> SnapshotRecord:
        if self.is_lost:
            raise WorkerLost("the process ended")
        if not self.has_memory:
            raise CheckpointError("no memory for a snapshot of 3.00 GB")
        self.written += 1
        return SnapshotRecord(path, Fingerprint(""), self.batches, 8)

    async def machine_id(self) -> str:
        return machine.machine_id()

    def restore_snapshots(self, records: list[SnapshotRecord]) -> None:
        time.sleep(0.05)
        if self.restore_error is not None:
            raise self.restore_error
        self.batches = records[0].steps

    def peak_memory(self) -> int:
        """A call that reads the state, such as the one for log-probs."""
        if self.is_lost:
            raise WorkerLost("the process ended")
        return self.batches


@dataclass
class Run:
    """The policy and the critic of a run, and the recovery that takes their snapshots."""

    learners: dict[RoleName, CountingLearner]
    """The learners of the newest processes."""
    roles: Roles
    recovery: WorkerRecovery
    faults: FaultLog
    now: float = 1000.0

    def handle(self, role: RoleName) -> Policy | Critic:
        return self.roles.policy if role == "policy" else self.roles.critic

    def snapshots(self, role: RoleName) -> RoleSnapshots:
        return self.recovery.snapshots[role]

    async def repair(self, role: RoleName) -> None:
        """Repair the role, as the controller does as soon as the role's process ends."""
        host = self.roles.device_map.host_of(role, 0)
        await self.recovery.repair_host(host, WorkerLost(f"{role} 0 was lost"), repairs=0)


LEARNERS: dict[RoleName, CountingLearner] = {}
"""The learner of each role's newest process."""


def create(context: HostContext, rank: int, role: RoleName) -> CountingLearner:
    old = LEARNERS.get(role, CountingLearner())
    LEARNERS[role] = CountingLearner(restore_error=old.restore_error)
    return LEARNERS[role]


OpenRun = Callable[..., AbstractAsyncContextManager[Run]]


@pytest.fixture
def open_run(tmp_path: Path) -> OpenRun:
    @asynccontextmanager
    async def enter_run(restarts: int = 3, policy: str = "cpu:0") -> AsyncGenerator[Run]:
        LEARNERS.clear()
        devices = DeviceMap(
            {"policy": parse_devices(policy), "critic": parse_devices("cpu:2")},
            sharded=frozenset({"policy"}),
        )
        specs = [RoleSpec(role, f"{__name__}:create", (role,)) for role in TRAINED]
        cluster = ClusterConfig(backend="inline")
        async with open_group(devices, specs, cluster=cluster, threads=1) as group:
            faults, goodput = FaultLog(tmp_path), TimeAccount.open(tmp_path, resume=False)
            recovery = WorkerRecovery(
                Roles(group), lambda _: specs, faults=faults, goodput=goodput, restarts=restarts
            )
            async with recovery.open(snapshots=True):
                yield Run(LEARNERS, Roles(group, recovery), recovery, faults)

    return enter_run


@pytest.mark.parametrize("role", TRAINED)
async def test_a_snapshot_that_waits_for_a_training_contains_its_batch(
    open_run: OpenRun, role: RoleName
) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        training = asyncio.create_task(run.handle(role).train(BATCH))
        await asyncio.sleep(0.01)
        await run.snapshots(role).take()
        await training
        await run.snapshots(role).restore()
        await run.snapshots(role).replay()
        assert run.learners[role].batches == 1


@pytest.mark.parametrize("role", TRAINED)
async def test_a_batch_after_the_snapshot_is_trained_on_again(
    open_run: OpenRun, role: RoleName
) -> None:
    async with open_run() as run:
        await run.handle(role).train(BATCH)
        taking = asyncio.create_task(run.snapshots(role).take())
        await asyncio.sleep(0.01)
        await run.handle(role).train(BATCH)
        await taking
        await run.repair(role)
        assert run.learners[role].batches == 2


@pytest.mark.parametrize("role", TRAINED)
async def test_a_call_during_a_repair_waits_until_the_new_process_has_its_state(
    open_run: OpenRun, role: RoleName
) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        await run.handle(role).train(BATCH)
        old = run.learners[role]
        repairing = asyncio.create_task(run.repair(role))
        while run.learners[role] is old:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        read, _ = await asyncio.gather(
            run.handle(role).peak_memory(0), run.handle(role).train(BATCH)
        )
        await repairing
        assert read == 1, "a process without its state was called"
        assert run.learners[role].batches == 2, "a training was lost"


@pytest.mark.parametrize("role", TRAINED)
@pytest.mark.parametrize(
    "error", [CheckpointError("the snapshot is damaged"), WorkerError("the state does not fit")]
)
async def test_a_new_process_that_cannot_get_its_state_is_never_called(
    open_run: OpenRun, role: RoleName, error: RollickError
) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        run.learners[role].restore_error = error
        with pytest.raises(type(error), match=error.message):
            await run.repair(role)
        for _ in range(2):
            with pytest.raises(type(error), match=error.message):
                await run.handle(role).train(BATCH)
            run.recovery.finish_step(hold=True)
        assert run.learners[role].batches == 0
        assert run.faults.faults[-1].gave_up


async def test_a_damaged_snapshot_does_not_become_a_checkpoint(open_run: OpenRun) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        run.learners["policy"].restore_error = CheckpointError("the snapshot is damaged")
        with pytest.raises(CheckpointError):
            await run.repair("policy")
        async with run.snapshots("policy").hold() as held:
            assert held is None


async def test_a_snapshot_that_was_overwritten_in_part_is_not_rolled_back_to(
    open_run: OpenRun,
) -> None:
    async with open_run() as run:
        snapshots = run.snapshots("policy")
        await snapshots.take()
        await snapshots.take()
        assert snapshots.can_roll_back
        LEARNERS["policy"].is_lost = True
        with pytest.raises(WorkerLost):
            await snapshots.take()
        assert not snapshots.can_roll_back


async def test_a_call_to_another_role_does_not_wait_for_a_repair(open_run: OpenRun) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        repairing = asyncio.create_task(run.repair("critic"))
        await asyncio.sleep(0)
        await run.handle("policy").peak_memory(0)
        assert not repairing.done()
        await repairing


@pytest.mark.parametrize("role", TRAINED)
async def test_without_memory_for_snapshots_the_run_warns_and_continues(
    open_run: OpenRun, role: RoleName, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        run.learners[role].has_memory = False
        for _ in range(3):
            await run.handle(role).train(BATCH)
            run.recovery.finish_step()
            await run.recovery.settle()
        warnings = [record.message for record in caplog.records if "no snapshots" in record.message]
        assert warnings == [
            f"no snapshots from now on, so the loss of the {role} ends the run: "
            "no memory for a snapshot of 3.00 GB"
        ]
        assert run.snapshots(role).later_batches == [], "batches that nothing needs stay in memory"
        assert run.learners[role].written == 1
        async with run.snapshots(role).hold() as held:
            assert held is None, "a checkpoint must not be written from an old snapshot"
        assert run.recovery.rollback_obstacle() == "there is no snapshot from before them"


async def test_without_memory_for_snapshots_the_loss_of_the_role_ends_the_run(
    open_run: OpenRun,
) -> None:
    async with open_run() as run:
        run.learners["critic"].has_memory = False
        await run.recovery.take_snapshots()

        async def attempt() -> None:
            raise WorkerLost("critic 0 was lost")

        with pytest.raises(WorkerLost, match="critic 0 was lost"):
            await run.recovery.run("critic", attempt)
        [fault] = run.faults.faults
        assert fault.gave_up == "there is no memory for snapshots of the critic"


async def test_a_policy_with_fewer_ranks_and_no_file_descriptors_continues_without_snapshots(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> SnapshotMemory:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with open_run(policy="cpu:0-1") as run:
        await run.recovery.take_snapshots()
        run.roles.group.shrink("policy", [0])
        monkeypatch.setattr(SnapshotMemory, "create", fail)
        run.recovery.finish_step()
        await run.recovery.settle()
        assert not run.snapshots("policy").is_enabled
        assert run.snapshots("critic").is_enabled
    assert "no snapshots from now on, so the loss of the policy ends the run" in caplog.text
    assert "no more files can be opened" in caplog.text


async def test_snapshots_take_at_most_five_percent_of_a_run_that_does_not_generate(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_run() as run:
        clock = SimpleNamespace(monotonic=lambda: run.now)
        monkeypatch.setattr(worker_recovery, "time", clock)
        for learner in run.learners.values():
            learner.busy_s = 0
        started_at, step_s, snapshot_s = run.now, 1.0, 0.2
        for _ in range(100):
            for role in TRAINED:
                await run.handle(role).train(BATCH)
            run.now += step_s
            run.recovery.finish_step(amortise=True)
            await run.recovery.settle()
            for role in TRAINED:
                run.snapshots(role).seconds = snapshot_s / 2
        spent = run.learners["policy"].written * snapshot_s
        assert 0.04 < spent / (run.now - started_at) <= 0.051
        assert len(run.snapshots("policy").later_batches) <= 4


async def test_a_run_that_generates_takes_a_snapshot_after_each_step(open_run: OpenRun) -> None:
    async with open_run() as run:
        for _ in range(5):
            await run.handle("policy").train(BATCH)
            run.recovery.finish_step()
            await run.recovery.settle()
        assert run.learners["policy"].written == 5


@pytest.mark.parametrize("role", TRAINED)
async def test_a_snapshot_that_waits_during_a_repair_contains_the_batches_that_it_counts(
    open_run: OpenRun, role: RoleName
) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        for _ in range(4):
            await run.handle(role).train(BATCH)
        # Simulates a checkpoint that is written from the memory of the next snapshot.
        async with run.snapshots(role)._older.in_use:
            taking = asyncio.create_task(run.recovery.take_snapshots())
            await asyncio.sleep(0.01)
            old = run.learners[role]
            repairing = asyncio.create_task(run.repair(role))
            while run.learners[role] is old or run.learners[role].batches == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.gather(repairing, taking)
        assert run.learners[role].batches == 4, "a batch was not trained on again"
        async with run.snapshots(role).hold() as held:
            assert held is not None
            assert held[0][1].steps == 4


async def test_a_memory_is_not_closed_while_a_checkpoint_is_written_from_it(
    open_run: OpenRun,
) -> None:
    async with open_run() as run:
        snapshots = run.snapshots("policy")
        await snapshots.take()
        async with snapshots.hold() as held:
            assert held is not None
            await snapshots.take()
            held[0][0].truncate(8)
            snapshots._older.memories.append(SnapshotMemory.create("of a rank that left"))
            taking = asyncio.create_task(snapshots.take())
            await asyncio.sleep(0.01)
            assert len(held[0][0].read(0, 8)) == 8
        await taking
        assert len(snapshots._buffers[0].memories) == 1


async def test_a_call_of_an_earlier_attempt_does_not_reach_a_process_without_its_state(
    open_run: OpenRun,
) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        old, is_new, reads = run.learners["policy"], asyncio.Event(), list[int]()

        async def publish() -> None:  # Several calls, between which the policy may be replaced.
            await is_new.wait()
            reads.append(await run.roles.policy.call_rank(0, Role.peak_memory))

        await run.handle("policy").train(BATCH)
        publishing = asyncio.create_task(run.roles.policy.retry(publish, others=True))
        await asyncio.sleep(0)
        repairing = asyncio.create_task(run.repair("policy"))
        while run.learners["policy"] is old:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        is_new.set()
        await asyncio.gather(publishing, repairing)
        assert reads == [1]


async def test_a_publish_whose_receiver_notices_the_loss_of_the_policy_first_is_retried(
    open_run: OpenRun,
) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        old = run.learners["policy"]
        old.is_lost = True

        async def publish() -> int:
            if run.learners["policy"] is old:
                raise WeightError("the weights of version 2 are not available")
            return await run.roles.policy.call_rank(0, Role.peak_memory)

        assert await run.roles.policy.retry(publish, others=True) == 0


@pytest.mark.parametrize("role", TRAINED)
@pytest.mark.parametrize("error", [asyncio.CancelledError(), RuntimeError("a bug")], ids=repr)
async def test_a_call_after_an_interrupted_repair_repairs_the_role(
    open_run: OpenRun, role: RoleName, error: BaseException
) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        await run.handle(role).train(BATCH)
        old = run.learners[role]

        async def interrupt(host: HostSpec) -> None:
            run.recovery.on_replaced = worker_recovery._do_nothing
            raise error

        run.recovery.on_replaced = interrupt
        repairing = asyncio.create_task(run.repair(role))
        while run.learners[role] is old:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        reading = asyncio.create_task(run.handle(role).peak_memory(0))
        with pytest.raises(type(error)):
            await repairing
        assert await reading == 1, "a process without its state was called"
        assert "interrupted" in str(run.faults.faults[0].gave_up)


async def test_a_repair_that_a_signal_interrupts_does_not_use_up_a_restart(
    open_run: OpenRun,
) -> None:
    async with open_run(restarts=1) as run:
        await run.recovery.take_snapshots()
        await run.handle("policy").train(BATCH)
        repairing = asyncio.create_task(run.repair("policy"))
        await asyncio.sleep(0.01)
        repairing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await repairing
        assert await run.handle("policy").peak_memory(0) == 1


async def test_a_repair_that_fails_with_fewer_ranks_is_made_again_with_these(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_run(policy="cpu:0-1") as run:
        await run.recovery.take_snapshots()
        replaced: list[list[int]] = []

        async def replace(hosts: Sequence[HostSpec]) -> Sequence[HostSpec]:
            replaced.append([host.index for host in hosts])
            return hosts[1:]  # There is no room for the second rank.

        async def fail_once(host: HostSpec) -> None:
            if len(replaced) == 1:
                raise WorkerLost("the new process ended")

        monkeypatch.setattr(run.roles.group.transport, "replace", replace)
        run.recovery.on_replaced = fail_once
        host = run.roles.device_map.host_of("policy", 1)
        await run.recovery.repair_host(host, WorkerLost("policy 1 was lost"), repairs=0)
        assert replaced == [[0, 1], [0]]
        assert run.roles.policy.ranks == 1


async def test_an_engine_of_a_host_that_is_replaced_may_wait_for_the_last_restart(
    open_run: OpenRun,
) -> None:
    async with open_run(restarts=1) as run:
        await run.recovery.take_snapshots()
        host = run.roles.device_map.host_of("policy", 0)
        repairing = asyncio.create_task(run.repair("policy"))
        await asyncio.sleep(0.01)
        assert run.recovery.can_repair(host)
        await asyncio.gather(repairing, run.repair("policy"))
        assert not run.recovery.can_repair(host)


async def test_a_snapshot_in_the_background_books_no_time_for_a_repair(open_run: OpenRun) -> None:
    async with open_run() as run:
        await run.recovery.take_snapshots()
        for learner in run.learners.values():
            learner.is_lost = True
        run.recovery.finish_step()
        await run.recovery.settle()
        assert run.learners["policy"].written == 1
        lost_times = [run.recovery.goodput.claim_lost_time()]
        lost_times += [LostTime(fault.recover_s, fault.redo_s) for fault in run.faults.faults]
        assert not any(map(any, lost_times)), "the step did not wait"
