"""Weights between processes on GPUs of one machine: receivers map the learner's memory.

Parameters stay at fixed addresses, so each receiver opens their handles once. A later publish
costs a fingerprint on both sides and the engine's copy on the GPU. If a parameter moves (after the
learner was offloaded), all handles are exported again. torch.multiprocessing makes the handles and
keeps the learner's memory alive while a receiver maps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rollick.errors import WeightError
from rollick.models.loading.fingerprint import fingerprint
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.manifest import Pairs, TensorLayout, WeightManifest, plan_layout


@dataclass(frozen=True, slots=True)
class IpcSource:
    """The arguments from which torch rebuilds each tensor, by rank."""

    export_id: int
    """A receiver opens the handles of each export once."""
    handles: dict[int, tuple[tuple[Any, ...], ...]]


class IpcSender:
    """Exports handles to the learner's parameters."""

    def __init__(self) -> None:
        self.source: IpcSource | None = None
        self.exported: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def offer(self, pairs: Pairs, version: PolicyVersion, ranks: tuple[int, ...]) -> WeightManifest:
        layout, _ = plan_layout(pairs)
        for name, tensor in pairs:
            _check_mappable(name, tensor)
        addresses = tuple(tensor.data_ptr() for _, tensor in pairs)
        if self.source is None or self.exported != (addresses, ranks):
            handles = {rank: tuple(_export_handle(tensor) for _, tensor in pairs) for rank in ranks}
            self.source = IpcSource(next(_EXPORT_IDS), handles)
            self.exported = (addresses, ranks)
        digest = fingerprint(list(pairs))
        torch.cuda.synchronize()
        return WeightManifest(version, digest, layout, self.source)

    def send(self) -> None: ...

    def release(self, outcome: PublishOutcome) -> None:
        if not outcome.committed:
            # A receiver cannot open the same handles twice.
            self.close()

    def close(self) -> None:
        self.source = self.exported = None


class IpcReceiver:
    """Opens the handles of each export once and caches the tensors."""

    persistent = False  # the learner's next step changes the tensors

    def __init__(self) -> None:
        self.export_id: int | None = None
        self.opened: list[Tensor] = []

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        source: IpcSource = manifest.source
        if self.export_id != source.export_id:
            self.forget()
            handles = zip(manifest.layout, source.handles[rank], strict=True)
            self.opened = [_open_handle(spec, handle) for spec, handle in handles]
            self.export_id = source.export_id
        names = [spec.name for spec in manifest.layout]
        return list(zip(names, self.opened, strict=True))

    def forget(self) -> None:
        self.opened, self.export_id = [], None
        torch.cuda.ipc_collect()


_EXPORT_IDS = count()


def _check_mappable(name: str, tensor: Tensor) -> None:
    if not tensor.is_cuda or not tensor.is_contiguous():
        state = f"on {tensor.device}, contiguous: {tensor.is_contiguous()}"
        raise WeightError(
            f"{name} cannot be mapped: it must be contiguous and on a GPU, and is {state}",
            fix="use weights.channel=host",
        )


def _export_handle(tensor: Tensor) -> tuple[Any, ...]:
    _, arguments = reductions.reduce_tensor(tensor.detach())
    # The first argument is the class, which is always torch.Tensor.
    return tuple(arguments[1:])


def _open_handle(spec: TensorLayout, handle: tuple[Any, ...]) -> Tensor:
    try:
        return reductions.rebuild_cuda_tensor(torch.Tensor, *handle)
    except RuntimeError as error:
        raise WeightError(
            f"the GPU memory of {spec.name} cannot be mapped: {error}",
            fix="if the GPUs have no peer access, use weights.channel=host",
        ) from error
