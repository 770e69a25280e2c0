"""Weights from one process to another on GPUs of a machine: receivers map the learner's memory.

Parameters stay at fixed addresses, so handles to them are made once for each receiver and opened
once; after that a publish is a fingerprint on either side and the engine's own copy, on the GPU. A
parameter that moved (the learner slept) makes new handles for all. Handles are torch's own
(torch.multiprocessing): torch keeps the memory of a learner alive while a receiver has it mapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rollick.errors import WeightError
from rollick.models.fingerprint import fingerprint
from rollick.types import PolicyVersion
from rollick.weights.channels.base import Outcome
from rollick.weights.manifest import Pairs, TensorPlace, WeightManifest, lay_out


@dataclass(frozen=True, slots=True)
class IpcSource:
    """The arguments with which torch rebuilds each tensor, for each receiver its own. They are
    plain data; those of an export that a receiver has opened are not looked at again."""

    export: int
    handles: dict[int, tuple[tuple[Any, ...], ...]]


class IpcSender:
    """Exports the learner's own parameters."""

    def __init__(self) -> None:
        self.source: IpcSource | None = None
        self.exported: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def offer(self, pairs: Pairs, version: PolicyVersion, ranks: tuple[int, ...]) -> WeightManifest:
        places, _ = lay_out(pairs)
        for name, tensor in pairs:
            _demand_mappable(name, tensor)
        addresses = tuple(tensor.data_ptr() for _, tensor in pairs)
        if self.source is None or self.exported != (addresses, ranks):
            handles = {rank: tuple(_export(tensor) for _, tensor in pairs) for rank in ranks}
            self.source = IpcSource(next(_NUMBERS), handles)
            self.exported = (addresses, ranks)
        found = fingerprint(list(pairs))
        torch.cuda.synchronize()
        return WeightManifest(version, found, places, self.source)

    def send(self) -> None: ...

    def release(self, outcome: Outcome) -> None:
        if not outcome.committed:
            # A receiver that forgot what it opened cannot open the same handles once more.
            self.close()

    def close(self) -> None:
        self.source = self.exported = None


class IpcReceiver:
    """Keeps the tensors that it has opened."""

    # They are the learner's parameters, which change at its next step.
    lasting = False

    def __init__(self) -> None:
        self.export: int | None = None
        self.opened: list[Tensor] = []

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        source: IpcSource = manifest.source
        if self.export != source.export:
            self.forget()
            self.opened = [
                _open(place, handle)
                for place, handle in zip(manifest.places, source.handles[rank], strict=True)
            ]
            self.export = source.export
        names = [place.name for place in manifest.places]
        return list(zip(names, self.opened, strict=True))

    def forget(self) -> None:
        self.opened, self.export = [], None
        torch.cuda.ipc_collect()


_NUMBERS = count()


def _demand_mappable(name: str, tensor: Tensor) -> None:
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise WeightError(
            f"{name} is on {tensor.device}, contiguous: {tensor.is_contiguous()}; only contiguous "
            "GPU memory can be mapped",
            fix="use weights.channel=host",
        )


def _export(tensor: Tensor) -> tuple[Any, ...]:
    _, arguments = reductions.reduce_tensor(tensor.detach())
    # The first says which class to build, which is always a plain tensor.
    return tuple(arguments[1:])


def _open(place: TensorPlace, handle: tuple[Any, ...]) -> Tensor:
    try:
        return reductions.rebuild_cuda_tensor(torch.Tensor, *handle)
    except RuntimeError as error:
        raise WeightError(
            f"the GPU memory of {place.name} cannot be mapped: {error}",
            fix="the GPUs may not reach each other; use weights.channel=host",
        ) from error
