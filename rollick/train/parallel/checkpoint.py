"""The files of a sharded learner: written by all ranks, read by any number of them.

Masters and moments are saved with torch's distributed checkpoints (DCP), each rank its part; what
is read is what this rank's parts need, however the writer was cut.

    learner.dcp/   the tensors            learner.json   counters
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor

from rollick.config.schema import ModelConfig
from rollick.errors import CheckpointError
from rollick.models.attention import VARLEN
from rollick.models.load import (
    empty_model,
    load_tokenizer,
    quietly,
    resolve_dtype,
    write_model,
)

FOLDER = "learner.dcp"
COUNTERS = "learner.json"
MASTER = "master."
"""Before the public name of a parameter, as the optimizer names its masters."""


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that lies over ranks as the parameter does; `local` is this rank's part of it."""
    if not isinstance(parameter, DTensor):
        return local
    # Not `from_local`: it would copy what is offloaded to the mesh's device, and a load would then
    # fill the copy.
    spec: Any = parameter._spec  # pyright: ignore[reportPrivateUsage]
    return DTensor(local, spec, requires_grad=False)


def save_state(path: Path, tensors: Mapping[str, torch.Tensor], *, steps: int) -> None:
    """Called by all ranks together."""
    path.mkdir(parents=True, exist_ok=True)
    random = {f"rng.{dist.get_rank()}": torch.get_rng_state()}
    dcp.save({**tensors, **random}, storage_writer=FileSystemWriter(path / FOLDER))
    if dist.get_rank() == 0:
        (path / COUNTERS).write_text(json.dumps({"steps": steps}))


def load_state(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write what was saved into the tensors, in place; returns the counted steps. Called by all
    ranks together."""
    saved = _metadata(path)
    try:
        steps = int(json.loads((path / COUNTERS).read_text())["steps"])
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    _demand_match(tensors, saved)
    own = f"rng.{dist.get_rank()}"
    random = {own: torch.get_rng_state()} if own in saved else {}
    state: dict[str, Any] = {**tensors, **random}
    dcp.load(state, storage_reader=FileSystemReader(path / FOLDER))
    if random:
        torch.set_rng_state(state[own])
    return steps


def is_sharded(path: Path) -> bool:
    """Whether the state in this folder is that of a sharded learner."""
    return (path / FOLDER).is_dir()


def export_state(path: Path, model: ModelConfig, out: Path) -> None:
    """Write a saved learner as a plain Hugging Face folder, in this process alone; one parameter
    at a time is in memory."""
    dtype = resolve_dtype(model, "cpu")
    tree = empty_model(model, attention=VARLEN)
    write_model(out, tree, _saved_parameters(path, dtype), dtype=dtype)
    tokenizer: Any = load_tokenizer(model)
    with quietly():
        tokenizer.save_pretrained(out)


def _saved_parameters(path: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for name, meta in _metadata(path).items():
        if name.startswith(MASTER):
            state = {name: torch.empty(meta.size, dtype=meta.properties.dtype)}
            with warnings.catch_warnings():  # It says that it reads in a single process.
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
        fix="resume from an earlier checkpoint; the strategies local and fsdp do not read each "
        "other's",
    )


def _demand_match(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    given = {name: tuple(meta.size) for name, meta in saved.items() if not name.startswith("rng.")}
    wanted = {name: tuple(value.shape) for name, value in tensors.items()}
    wrong = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
    if wrong:
        raise CheckpointError(
            f"the saved optimizer state is of another model: {len(wrong)} parameters differ, such "
            f"as {wrong[0]!r} ({wanted.get(wrong[0])} here, {given.get(wrong[0])} saved)",
            fix="resume with the model that the run was started with",
        )
