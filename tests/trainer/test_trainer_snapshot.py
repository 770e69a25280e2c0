"""Snapshots: the state of a trained model in memory that outlives its process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rollick.errors import CheckpointError, OpenFilesExhausted
from rollick.testing.batches import recipe_of
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.trainer.parallel import checkpoint
from rollick.trainer.parallel.checkpoint import save_states
from rollick.trainer.snapshot import SnapshotMemory, SnapshotRecord, SnapshotWriter, read_snapshot
from rollick.trainer.strategy import TrainState
from rollick.types import Fingerprint


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "master.b": torch.randn(3, 5),
        "master.a": torch.randn(70, 30),
        "step.a": torch.tensor(3.0),
        "master.low": torch.randn(7).bfloat16(),
        "master.double": torch.randn(4, dtype=torch.float64),
        "rng.cpu": torch.get_rng_state(),
    }


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    memory = SnapshotMemory.create("test")
    yield memory
    memory.close()


def test_a_snapshot_holds_the_values_at_the_time_it_was_written(memory: SnapshotMemory):
    state = tensors()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    record = SnapshotWriter().write(memory.path, TrainState(state, 3))
    state["master.a"].zero_()
    restored = read_snapshot(record)
    assert restored.steps == 3
    assert restored.tensors.keys() == expected.keys()
    assert all(torch.equal(restored.tensors[name], value) for name, value in expected.items())


def test_a_snapshot_is_a_safetensors_file_byte_for_byte(memory: SnapshotMemory, tmp_path: Path):
    SnapshotWriter().write(memory.path, TrainState(tensors(), 3))
    memory.copy_to(tmp_path / "snapshot.safetensors")
    save_file(tensors(), tmp_path / "saved.safetensors")
    saved = (tmp_path / "saved.safetensors").read_bytes()
    assert (tmp_path / "snapshot.safetensors").read_bytes() == saved


def test_a_later_snapshot_with_more_tensors_replaces_the_first(memory: SnapshotMemory):
    writer, state = SnapshotWriter(), tensors()
    writer.write(memory.path, TrainState({"master.a": state["master.a"]}, 0))
    record = writer.write(memory.path, TrainState(state, 1))
    assert read_snapshot(record).tensors.keys() == state.keys()


def test_a_snapshot_that_was_overwritten_or_damaged_is_refused(memory: SnapshotMemory):
    record = SnapshotWriter().write(memory.path, TrainState(tensors(), 3))
    os.pwrite(memory.descriptor, b"\x7f", record.bytes - 9000)
    with pytest.raises(CheckpointError, match="is damaged: its fingerprint differs"):
        read_snapshot(record)


def test_a_snapshot_whose_controller_has_ended_is_refused():
    lost_record = SnapshotRecord("/proc/999999999/fd/3", Fingerprint("0" * 32), 1, 100)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_snapshot(lost_record)


def test_the_memory_outlives_the_process_that_wrote_it(memory: SnapshotMemory):
    code = (
        "import sys, torch\n"
        "from rollick.trainer.snapshot import SnapshotWriter\n"
        "from rollick.trainer.strategy import TrainState\n"
        "r = SnapshotWriter().write(sys.argv[1], TrainState({'a': torch.arange(9.0)}, 5))\n"
        "print(r.fingerprint, r.bytes)\n"
    )
    command = [sys.executable, "-c", code, memory.path]
    child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    fingerprint, size = child.stdout.split()
    record = SnapshotRecord(memory.path, Fingerprint(fingerprint), 5, int(size))
    assert torch.equal(read_snapshot(record).tensors["a"], torch.arange(9.0))


def test_without_room_for_it_a_snapshot_is_an_error_and_not_a_crash(memory: SnapshotMemory):
    code = (
        "import resource, sys, torch\n"
        "from rollick.errors import CheckpointError\n"
        "from rollick.trainer.snapshot import SnapshotWriter\n"
        "from rollick.trainer.strategy import TrainState\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try:\n"
        "    SnapshotWriter().write(sys.argv[1], TrainState({'a': torch.zeros(1 << 20)}, 1))\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, memory.path]
    child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "no memory for a snapshot of 0.00 GB" in child.stdout
    assert "checkpoint.snapshot=false" in child.stdout


@contextmanager
def forbid_open_files() -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def make_open_calls(folder: Path) -> dict[str, Callable[[], object]]:
    memory = SnapshotMemory.create("test")
    state = TrainState(tensors(), 1)
    record = SnapshotWriter().write(memory.path, state)
    strategy = LocalStrategy(recipe_of(save_tiny(folder / "tiny")))
    strategy.save(folder / "local")
    save_states(folder / "sharded", [state])
    return {
        "write": lambda: SnapshotWriter().write(memory.path, state),
        "read": lambda: read_snapshot(record),
        "load": lambda: strategy.load(folder / "local"),
        "metadata": lambda: checkpoint._metadata(folder / "sharded"),
    }


@pytest.mark.parametrize("call", ["write", "read", "load", "metadata"])
def test_a_state_that_cannot_be_opened_for_lack_of_files_is_not_damaged(tmp_path: Path, call: str):
    open_state = make_open_calls(tmp_path)[call]
    with pytest.raises(OpenFilesExhausted), forbid_open_files():
        open_state()
