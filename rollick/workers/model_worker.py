"""Base classes of the workers: sleep, snapshots, and the peak memory of their process."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

import torch

from rollick.cluster import machine
from rollick.cluster.worker import HostContext
from rollick.config.schema import ParallelConfig, Recipe
from rollick.trainer.parallel.mesh import Rendezvous, join_process_group, leave_process_group
from rollick.trainer.snapshot import (
    SnapshotBytes,
    SnapshotMemory,
    SnapshotRecord,
    SnapshotWriter,
    read_snapshot,
)
from rollick.trainer.strategy import IsSharded, TrainState
from rollick.types import RoleName

STATUS = Path("/proc/self/status")


class Meter:
    """Measures peak memory since its construction. On a GPU: torch's peak allocation. On the CPU:
    the peak growth of resident memory, including libraries that were imported later."""

    def __init__(self) -> None:
        with suppress(OSError):
            # Linux: reset the peak to the current resident memory. Elsewhere, a higher old
            # peak hides a new one.
            Path("/proc/self/clear_refs").write_text("5", "ascii")
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self.initial_bytes = resident_bytes()
        self._peak_bytes = 0

    def peak(self) -> int:
        if torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated()
        # The kernel's own peak is approximate, and a newer Meter of this process resets it.
        growth = resident_bytes(peak=True) - self.initial_bytes
        self._peak_bytes = max(self._peak_bytes, growth)
        return self._peak_bytes


def resident_bytes(*, peak: bool = False) -> int:
    """Resident memory of this process, current or peak."""
    name = "VmHWM:" if peak else "VmRSS:"
    with suppress(OSError):
        for line in STATUS.read_text("ascii").splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _CanSleep(Protocol):
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


Sleeper = TypeVar("Sleeper", bound=_CanSleep)


class MeteredWorker:
    def __init__(self) -> None:
        self.meter = Meter()

    def peak_memory(self) -> int:
        return self.meter.peak()

    async def machine_id(self) -> str:
        return machine.machine_id()


class StrategyWorker(MeteredWorker, Generic[Sleeper]):
    """A worker whose model belongs to a training strategy."""

    def __init__(self, strategy: Sleeper) -> None:
        super().__init__()
        self.strategy = strategy

    def sleep(self) -> None:
        self.strategy.sleep()

    def wake(self) -> None:
        self.strategy.wake()

    def close(self) -> None:
        leave_process_group()


class _CanTrain(_CanSleep, Protocol):
    def state(self) -> TrainState: ...
    def restore(self, state: TrainState) -> None: ...
    def save(self, path: Path) -> None: ...
    def load(self, path: Path) -> None: ...


Trainer = TypeVar("Trainer", bound=_CanTrain)


class TrainedWorker(StrategyWorker[Trainer]):
    """A worker whose model is trained, so that its state must not be lost."""

    def __init__(self, strategy: Trainer) -> None:
        super().__init__(strategy)
        self.snapshots = SnapshotWriter()
        self.memories: dict[str, SnapshotMemory] = {}
        """Snapshots in memory of this process, by name; used if the controller is on another
        machine, so that its memory cannot be mapped."""

    def save(self, path: Path) -> None:
        self.strategy.save(path)

    def load(self, path: Path) -> None:
        self.strategy.load(path)

    def write_snapshot(self, path: str, machine_id: str) -> SnapshotRecord:
        if machine_id != machine.machine_id():
            path = self._memory(path).path
        return self.snapshots.write(path, self.strategy.state())

    async def read_snapshot_part(self, path: str, offset: int, size: int) -> SnapshotBytes:
        memory = next(memory for memory in self.memories.values() if memory.path == path)
        return memory.read(offset, size)

    async def receive_snapshot_part(self, name: str, offset: int, part: SnapshotBytes) -> str:
        memory = self._memory(name)
        memory.write(offset, part)
        return memory.path

    def restore_snapshots(self, records: Sequence[SnapshotRecord]) -> None:
        states = [read_snapshot(record) for record in records]
        if len(states) == 1:
            self.strategy.restore(states[0])
        else:
            assert isinstance(self.strategy, IsSharded), "only a sharded role has several ranks"
            self.strategy.restore_all(states)
        # The tensors map the memories, which the kernel frees only when nothing maps them.
        del states
        self._close_memories()

    def _memory(self, name: str) -> SnapshotMemory:
        if name not in self.memories:
            self.memories[name] = SnapshotMemory.create("remote")
        return self.memories[name]

    def _close_memories(self) -> None:
        for memory in self.memories.values():
            self.snapshots.unmap(memory.path)  # The next memory may get the same path.
            memory.close()
        self.memories.clear()

    def close(self) -> None:
        self.snapshots.close()
        self._close_memories()
        super().close()


def join_role(
    context: HostContext, rank: int, recipe: Recipe, role: RoleName, rendezvous: Rendezvous | None
) -> ParallelConfig | None:
    """Join the process group of a sharded role, and return how it is sharded. None if the role has
    no rendezvous: it is not sharded."""
    if rendezvous is None:
        return None
    join_process_group(rendezvous, rank, device=context.device)
    return recipe.parallel_of(role)


Arguments = ParamSpec("Arguments")
Worker = TypeVar("Worker", bound=MeteredWorker)


def builds_worker(
    build: Callable[Concatenate[HostContext, int, Arguments], Worker],
) -> Callable[Concatenate[HostContext, int, Arguments], Worker]:
    """Set the number of torch's threads before the build, and measure memory from its start."""

    @wraps(build)
    def build_measured(
        context: HostContext, rank: int, *args: Arguments.args, **options: Arguments.kwargs
    ) -> Worker:
        meter = Meter()
        torch.set_num_threads(context.threads)
        worker = build(context, rank, *args, **options)
        worker.meter = meter
        return worker

    return build_measured
