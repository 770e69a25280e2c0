"""Checkpoints of a sharded learner, in the format of torch's distributed checkpoints (DCP).

Each rank writes its shards of masters and moments, or one process writes those of all ranks from
their snapshots. On resume, each rank reads only what its shards need; the number of ranks may
differ. Snapshots are copied from memory instead.

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
from rollick.trainer.strategy import Region, Shard, TrainState

FOLDER = "learner.dcp"
COUNTERS = "learner.json"
MASTER_PREFIX = "master."
"""Comes before the parameter's public name in the name of its master."""


def save_state(
    path: Path, tensors: Mapping[str, Tensor], *, steps: int, random_state: bool = True
) -> None:
    """Write the state, with that of torch's random numbers if `random_state`. A collective: all
    ranks must call it."""
    path.mkdir(parents=True, exist_ok=True)
    rng_state = {f"rng.{dist.get_rank()}": torch.get_rng_state()} if random_state else {}
    dcp.save({**tensors, **rng_state}, storage_writer=FileSystemWriter(path / FOLDER))
    if dist.get_rank() == 0:
        _write_counters(path, steps)


class _ShardPlanner(DefaultSavePlanner):
    """Plans the write of shards, each with its offsets in the full tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[MetadataIndex, Tensor] = {}
        self.items: list[WriteItem] = []

    def add(self, name: str, local: Tensor, shard: Shard) -> None:
        """Add a shard, unless it is empty or a copy of one from another rank."""
        offsets = torch.Size(shard.offsets)
        index = MetadataIndex(name, offsets)
        if index in self.shards or not local.numel():
            return
        self.shards[index] = local
        chunk = ChunkStorageMetadata(offsets, local.shape)
        data = TensorWriteData(chunk, TensorProperties(local.dtype), torch.Size(shard.full))
        self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.shards[write_item.index]


def save_states(path: Path, states: Sequence[TrainState]) -> None:
    """Write the states of all ranks, as `save_state` does, in one process, without
    a process group."""
    path.mkdir(parents=True, exist_ok=True)
    planner = _ShardPlanner()
    for rank, state in enumerate(states):
        for name, tensor in state.tensors.items():
            if name == "rng.cpu":
                planner.add(f"rng.{rank}", tensor, _full_shard(tensor))
            elif not name.startswith("step."):
                planner.add(name, tensor, state.shards.get(name) or _full_shard(tensor))
    # To copy ahead, the writer would initialize CUDA in this process.
    writer = FileSystemWriter(path / FOLDER, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(True)
    plans, metadata = create_default_global_save_plan(
        [writer.prepare_local_plan(SavePlan(planner.items))], rewrite_index_hints=False
    )
    [plan] = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    _write_counters(path, states[0].steps)


def _full_shard(tensor: Tensor) -> Shard:
    return Shard((0,) * tensor.ndim, tuple(tensor.shape))


def _write_counters(path: Path, steps: int) -> None:
    (path / COUNTERS).write_text(json.dumps({"steps": steps}))


def load_state(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Load the saved state into the tensors in place; returns the number of steps. A collective:
    all ranks must call it."""
    metadata = _metadata(path)
    try:
        steps = int(json.loads((path / COUNTERS).read_text())["steps"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _read_error(path, error) from error
    check_same_model(
        {name: tuple(value.shape) for name, value in tensors.items()},
        {name: tuple(meta.size) for name, meta in metadata.items() if not name.startswith("rng.")},
    )
    rng_key = f"rng.{dist.get_rank()}"
    rng_state = {rng_key: torch.get_rng_state()} if rng_key in metadata else {}
    state: dict[str, Any] = {**tensors, **rng_state}
    dcp.load(state, storage_reader=FileSystemReader(path / FOLDER))
    if rng_state:
        torch.set_rng_state(state[rng_key])
    return steps


def describe_shards(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """This rank's shard of each sharded tensor."""
    shards: dict[str, Shard] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            shape, mesh, placements = tensor.shape, tensor.device_mesh, tensor.placements
            _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
            shards[name] = Shard(tuple(offsets), tuple(shape))
    return shards


def describe_regions(tensors: Mapping[str, Tensor]) -> dict[str, Region]:
    """The part of each tensor that this rank has."""
    shards = describe_shards(tensors)
    return {
        name: Region(
            shards[name].offsets if name in shards else (0,) * tensor.ndim,
            tuple(local_tensor(tensor).shape),
        )
        for name, tensor in tensors.items()
    }


def load_snapshots(states: Sequence[TrainState], tensors: Mapping[str, Tensor]) -> int:
    """Load the states of all ranks of another process group into this rank's tensors in place;
    returns the number of steps."""
    shards = describe_shards(tensors)
    for name, tensor in tensors.items():
        target = local_tensor(tensor)
        for state in states:
            _copy_overlap(state.tensors[name], state.shards.get(name), target, shards.get(name))
    rank = dist.get_rank()
    if rank < len(states) and "rng.cpu" in states[rank].tensors:
        torch.set_rng_state(states[rank].tensors["rng.cpu"])
    return states[0].steps


def _copy_overlap(
    source: Tensor, source_shard: Shard | None, target: Tensor, target_shard: Shard | None
) -> None:
    """Copy the overlap of two shards of a tensor. A shard of None is the full tensor."""
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
    module = empty_model(model, attention=VARLEN)
    write_model(out, module, _saved_parameters(path, dtype), dtype=dtype)
    save_with_tokenizer(None, model, out)


def _saved_parameters(path: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, meta in _metadata(path).items():
        if name.startswith(MASTER_PREFIX):
            state = {name: torch.empty(meta.size, dtype=meta.properties.dtype)}
            with warnings.catch_warnings():  # DCP warns about loading in a single process.
                warnings.simplefilter("ignore")
                dcp.load(state, storage_reader=FileSystemReader(path / FOLDER), no_dist=True)
            yield name.removeprefix(MASTER_PREFIX), state[name].to(dtype)


def _metadata(path: Path) -> Mapping[str, Any]:
    try:
        return FileSystemReader(path / FOLDER).read_metadata().state_dict_metadata
    except (OSError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        raise _read_error(path, error) from error


def _read_error(path: Path, error: Exception) -> RollickError:
    return open_files_exhausted(error) or CheckpointError(
        f"the learner's state in {path} cannot be read: {error}",
        fix="resume from an earlier checkpoint, saved with the same train.strategy",
    )
