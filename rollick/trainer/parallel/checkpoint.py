"""The files of a sharded learner: written by all ranks, read by any number of them.

Each rank saves its shards of masters and moments with torch's distributed checkpoints (DCP). A rank
reads what its own shards need, however the writer was sharded. Snapshots of other ranks are read in
the same way, from memory.

    learner.dcp/   the tensors            learner.json   counters
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rollick.config.schema import ModelConfig
from rollick.errors import CheckpointError
from rollick.models.attention.varlen import VARLEN
from rollick.models.loading.load import empty_model, resolve_dtype, save_with_tokenizer, write_model
from rollick.trainer.optimizer import check_same_model
from rollick.trainer.strategy import Shard, TrainState

FOLDER = "learner.dcp"
COUNTERS = "learner.json"
MASTER = "master."
"""Prefix of a master's name, before the public name of its parameter."""


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor sharded like the parameter; `local` is this rank's shard."""
    if not isinstance(parameter, DTensor):
        return local
    # Not `from_local`: it would copy offloaded tensors to the mesh's device, and a load would
    # fill the copy.
    spec: Any = parameter._spec  # pyright: ignore[reportPrivateUsage]
    return DTensor(local, spec, requires_grad=False)


def save_state(path: Path, tensors: Mapping[str, Tensor], *, steps: int) -> None:
    """Write the state. A collective: all ranks must call it."""
    path.mkdir(parents=True, exist_ok=True)
    random = {f"rng.{dist.get_rank()}": torch.get_rng_state()}
    dcp.save({**tensors, **random}, storage_writer=FileSystemWriter(path / FOLDER))
    if dist.get_rank() == 0:
        (path / COUNTERS).write_text(json.dumps({"steps": steps}))


def load_state(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Load the saved state into the tensors in place; returns the number of steps. A collective:
    all ranks must call it."""
    saved = _metadata(path)
    try:
        steps = int(json.loads((path / COUNTERS).read_text())["steps"])
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    check_same_model(
        {name: tuple(value.shape) for name, value in tensors.items()},
        {name: tuple(meta.size) for name, meta in saved.items() if not name.startswith("rng.")},
    )
    own = f"rng.{dist.get_rank()}"
    random = {own: torch.get_rng_state()} if own in saved else {}
    state: dict[str, Any] = {**tensors, **random}
    dcp.load(state, storage_reader=FileSystemReader(path / FOLDER))
    if random:
        torch.set_rng_state(state[own])
    return steps


def describe_shards(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Where this rank's part of each tensor is."""
    shards: dict[str, Shard] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            shape, mesh, spec = tensor.shape, tensor.device_mesh, tensor.placements
            _, offsets = compute_local_shape_and_global_offset(shape, mesh, spec)
            shards[name] = Shard(tuple(offsets), tuple(shape))
    return shards


def load_snapshots(states: Sequence[TrainState], tensors: Mapping[str, Tensor]) -> int:
    """Load the states of all ranks of another group into the tensors of this rank in place; returns
    the number of steps. A collective: all ranks must call it."""
    dcp.load(dict(tensors), storage_reader=_SnapshotReader(states))
    if dist.get_rank() < len(states):
        torch.set_rng_state(states[dist.get_rank()].tensors["rng.cpu"])
    return states[0].steps


class _SnapshotReader(StorageReader):
    """Lets torch's distributed checkpoints read the states of all ranks from memory."""

    def __init__(self, states: Sequence[TrainState]) -> None:
        self.chunks: dict[MetadataIndex, Tensor] = {}
        self.metadata = Metadata({})
        for state in states:
            for name, tensor in state.tensors.items():
                self._add(name, tensor, state.shards.get(name))

    def _add(self, name: str, tensor: Tensor, shard: Shard | None) -> None:
        full = tensor.shape if shard is None else torch.Size(shard.full)
        offsets = torch.Size([0] * tensor.ndim if shard is None else shard.offsets)
        index = MetadataIndex(name, offsets)
        if index in self.chunks:  # Several ranks have it.
            return
        self.chunks[index] = tensor
        properties = TensorProperties(dtype=tensor.dtype)
        described = self.metadata.state_dict_metadata.setdefault(
            name, TensorStorageMetadata(properties, full, [])
        )
        assert isinstance(described, TensorStorageMetadata)
        described.chunks.append(ChunkStorageMetadata(offsets, tensor.shape))

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for item in plan.items:
            source = self.chunks[item.storage_index]
            for axis, (begin, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                source = source.narrow(axis, begin, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, **_: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def is_sharded(path: Path) -> bool:
    """Whether this folder holds the state of a sharded learner."""
    return (path / FOLDER).is_dir()


def export_state(path: Path, model: ModelConfig, out: Path) -> None:
    """Write a saved learner as a plain Hugging Face folder, in one process. Loads one parameter
    at a time."""
    dtype = resolve_dtype(model, "cpu")
    tree = empty_model(model, attention=VARLEN)
    write_model(out, tree, _saved_parameters(path, dtype), dtype=dtype)
    save_with_tokenizer(None, model, out)


def _saved_parameters(path: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, meta in _metadata(path).items():
        if name.startswith(MASTER):
            state = {name: torch.empty(meta.size, dtype=meta.properties.dtype)}
            with warnings.catch_warnings():  # Warns about reading in a single process.
                warnings.simplefilter("ignore")
                dcp.load(state, storage_reader=FileSystemReader(path / FOLDER), no_dist=True)
            yield name.removeprefix(MASTER), state[name].to(dtype)


def _metadata(path: Path) -> Mapping[str, Any]:
    try:
        return FileSystemReader(path / FOLDER).read_metadata().state_dict_metadata
    except (OSError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the learner's state in {path} cannot be read: {error}",
        fix="resume from an earlier checkpoint, saved with the same train.strategy",
    )
