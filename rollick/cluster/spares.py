"""Spare workers: processes that have imported their packages and wait for a host.

    start(kind, n) -> n actors, each imports -> take_or_create(kind) -> it becomes a host; used once

A spare on a GPU has not touched it: importing needs no device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from rollick.children.process_tree import is_stopped
from rollick.cluster.machine import machine_id


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Settings that all worker processes of a run share."""

    threads: int
    """CPU threads of each; 0 leaves it to torch."""
    env: Mapping[str, str]
    """Additional environment variables."""
    modules: Sequence[str] = ()
    """The modules that spares import."""


@dataclass(slots=True)
class SpareWorkers:
    create: Callable[..., Any]
    """Creates an actor on a kind of device (cpu or cuda), and optionally on a given machine."""
    plan: WorkerPlan
    _idle: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict[str, Any])
    """By kind: each actor and its reply to `preload`, which arrives when it has imported."""

    def start(self, kind: str, count: int) -> None:
        """Start spares until `count` exist."""
        idle = self._idle.setdefault(kind, [])
        while len(idle) < count:
            actor = self.create(kind)
            idle.append((actor, actor.preload.remote(self.plan.modules)))

    def take_or_create(self, kind: str, node: str | None = None) -> Any:
        """Return a live spare or a new actor, on machine `node` if that is not None."""
        idle = self._idle.get(kind, [])
        for spare in list(idle):
            actor, preload_ref = spare
            if not _is_alive(preload_ref):
                idle.remove(spare)
                ray.kill(actor, no_restart=True)
            elif node in (None, _node_of(preload_ref)):
                idle.remove(spare)
                return actor
        return self.create(kind, node)

    def wait(self, timeout_s: float) -> None:
        """Wait until all spares have imported, or until the timeout."""
        refs = [preload_ref for idle in self._idle.values() for _, preload_ref in idle]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout_s)

    def kill(self) -> None:
        for idle in self._idle.values():
            for actor, _ in idle:
                ray.kill(actor, no_restart=True)
        self._idle.clear()


_prepared: SpareWorkers | None = None


def keep_prepared(spares: SpareWorkers) -> None:
    """Keep the spares, and Ray, for the next run of this process."""
    global _prepared
    _prepared = spares


def take_prepared() -> SpareWorkers | None:
    """Return the kept spares, if any; the next call returns None."""
    global _prepared
    prepared, _prepared = _prepared, None
    return prepared


def _is_alive(preload_ref: Any) -> bool:
    """Whether a spare has neither failed nor been stopped. It may still be importing."""
    with suppress(RayError):
        process = _process_of(preload_ref)
        return process is None or process.machine != machine_id() or not is_stopped(process.pid)
    return False


def _node_of(preload_ref: Any) -> str | None:
    process = _process_of(preload_ref)
    return process.node if process else None


def _process_of(preload_ref: Any) -> Any | None:
    """The HostProcess of a spare that has imported."""
    done, _ = ray.wait([preload_ref], timeout=0)
    return ray.get(preload_ref) if done else None
