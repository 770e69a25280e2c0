"""The files of a sharded learner: written by all ranks, read by any number of them.

The shards of masters and moments are in the format of torch's distributed checkpoints (DCP). Each
rank writes its own, or one process writes those of all ranks from their snapshots. A rank reads
what its own shards need, however the writer was sharded. Snapshots of other ranks are copied from
memory.

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
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rollick.config.schema import ModelConfig
from rollick.errors import CheckpointError, RollickError, open_files_exhausted
from rollick.models.attention.varlen import VARLEN
from rollick.models.loading.load import empty_model, resolve_dtype, save_with_tokenizer, write_model
from rollick.trainer.optimizer import check_same_model
from rollick.trainer.parallel.shard import local_tensor
from rollick.trainer.strategy import Shard, TrainState

FOLDER = "learner.dcp"
COUNTERS = "learner.json"
MASTER = "master."
"""Prefix of a master's name, before the public name of its parameter."""


def save_state(path: Path, tensors: Mapping[str, Tensor], *, steps: int) -> None:
    """Write the state. A collective: all ranks must call it."""
    path.mkdir(parents=True, exist_ok=True)
    rng_state = {f"rng.{dist.get_rank()}": torch.get_rng_state()}
    dcp.save({**tensors, **rng_state}, storage_writer=FileSystemWriter(path / FOLDER))
    if dist.get_rank() == 0:
        _write_counters(path, steps)


class _Parts(DefaultSavePlanner):
    """Parts of tensors that this process has, each with its place in the complete tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[MetadataIndex, Tensor] = {}
        self.items: list[WriteItem] = []

    def add(self, name: str, part: Tensor, shard: Shard) -> None:
        """Add a part, unless another rank holds the same one."""
        offsets = torch.Size(shard.offsets)
        index = MetadataIndex(name, offsets)
        if index in self.parts or not part.numel():
            return
        self.parts[index] = part
        chunk = ChunkStorageMetadata(offsets, part.shape)
        data = TensorWriteData(chunk, TensorProperties(part.dtype), torch.Size(shard.full))
        self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.parts[write_item.index]


def save_states(path: Path, states: Sequence[TrainState]) -> None:
    """Write the states of all ranks, as `save_state` does, in one process without a group."""
    path.mkdir(parents=True, exist_ok=True)
    parts = _Parts()
    for rank, state in enumerate(states):
        for name, tensor in state.tensors.items():
            if name == "rng.cpu":
                parts.add(f"rng.{rank}", tensor, _complete(tensor))
            elif not name.startswith("step."):
                parts.add(name, tensor, state.shards.get(name) or _complete(tensor))
    # Without copying ahead, for which the writer would start CUDA in this process.
    writer = FileSystemWriter(path / FOLDER, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(True)
    plans, metadata = create_default_global_save_plan(
        [writer.prepare_local_plan(SavePlan(parts.items))], rewrite_index_hints=False
    )
    [plan] = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, parts).wait()])
    _write_counters(path, states[0].steps)


def _complete(tensor: Tensor) -> Shard:
    return Shard((0,) * tensor.ndim, tuple(tensor.shape))


def _write_counters(path: Path, steps: int) -> None:
    (path / COUNTERS).write_text(json.dumps({"steps": steps}))


def load_state(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Load the saved state into the tensors in place; returns the number of steps. A collective:
    all ranks must call it."""
    saved = _metadata(path)
    try:
        steps = int(json.loads((path / COUNTERS).read_text())["steps"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from error
    check_same_model(
        {name: tuple(value.shape) for name, value in tensors.items()},
        {name: tuple(meta.size) for name, meta in saved.items() if not name.startswith("rng.")},
    )
    own = f"rng.{dist.get_rank()}"
    rng_state = {own: torch.get_rng_state()} if own in saved else {}
    state: dict[str, Any] = {**tensors, **rng_state}
    dcp.load(state, storage_reader=FileSystemReader(path / FOLDER))
    if rng_state:
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
    the number of steps."""
    own = describe_shards(tensors)
    for name, tensor in tensors.items():
        target = local_tensor(tensor)
        for state in states:
            _copy_overlap(state.tensors[name], state.shards.get(name), target, own.get(name))
    if dist.get_rank() < len(states):
        torch.set_rng_state(states[dist.get_rank()].tensors["rng.cpu"])
    return states[0].steps


def _copy_overlap(
    source: Tensor, source_shard: Shard | None, target: Tensor, target_shard: Shard | None
) -> None:
    """Copy what two parts of a tensor have in common. A shard of None: the part is the complete
    tensor."""
    origin = (0,) * source.ndim
    source_offsets = source_shard.offsets if source_shard else origin
    target_offsets = target_shard.offsets if target_shard else origin
    offsets = zip(source_offsets, target_offsets, strict=True)
    for axis, (source_start, target_start) in enumerate(offsets):
        begin = max(source_start, target_start)
        end = min(source_start + source.shape[axis], target_start + target.shape[axis])
        if end <= begin:
            return
        source = source.narrow(axis, begin - source_start, end - begin)
        target = target.narrow(axis, begin - target_start, end - begin)
    target.copy_(source)


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


def _unreadable(path: Path, error: Exception) -> RollickError:
    return open_files_exhausted(error) or CheckpointError(
        f"the learner's state in {path} cannot be read: {error}",
        fix="resume from an earlier checkpoint, saved with the same train.strategy",
    )
