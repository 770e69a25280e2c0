"""Spare workers: processes that have imported their packages and wait for a host.

    start(kind, n) -> n actors, each imports -> take(kind) -> it becomes a host; used once

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
    """What all worker processes of a run have in common."""

    threads: int
    """CPU threads of each; 0 leaves it to torch."""
    env: Mapping[str, str]
    """Additional environment variables."""
    modules: Sequence[str] = ()
    """What spares import."""


@dataclass(slots=True)
class SpareWorkers:
    create: Callable[..., Any]
    """Creates an actor on a kind of device, cpu or cuda, and on a machine, if one is given."""
    plan: WorkerPlan
    _idle: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict[str, Any])
    """By kind: actors, and the replies that they have imported."""

    def start(self, kind: str, count: int) -> None:
        """Start so many spares that `count` exist."""
        idle = self._idle.setdefault(kind, [])
        while len(idle) < count:
            actor = self.create(kind)
            idle.append((actor, actor.preload.remote(self.plan.modules)))

    def take_or_create(self, kind: str, node: str | None = None) -> Any:
        """A spare that is alive, or a new actor; on the machine `node`, if it is given."""
        idle = self._idle.get(kind, [])
        for spare in list(idle):
            actor, imported = spare
            if not _is_alive(imported):
                idle.remove(spare)
                ray.kill(actor, no_restart=True)
            elif node in (None, _node_of(imported)):
                idle.remove(spare)
                return actor
        return self.create(kind, node)

    def wait(self, timeout_s: float) -> None:
        """Returns when all have imported, or when the time is up."""
        refs = [imported for idle in self._idle.values() for _, imported in idle]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout_s)

    def kill(self) -> None:
        for idle in self._idle.values():
            for actor, _ in idle:
                ray.kill(actor, no_restart=True)
        self._idle.clear()


_prepared: SpareWorkers | None = None


def keep_prepared(spares: SpareWorkers) -> None:
    """Keep these, and Ray, for the next run of this process."""
    global _prepared
    _prepared = spares


def take_prepared() -> SpareWorkers | None:
    """Return the kept spares, if any; the next call returns None."""
    global _prepared
    prepared, _prepared = _prepared, None
    return prepared


def _is_alive(imported: Any) -> bool:
    """Whether it has neither failed nor been stopped; it may not have imported yet."""
    with suppress(RayError):
        process = _process_of(imported)
        return process is None or process.machine != machine_id() or not is_stopped(process.pid)
    return False


def _node_of(imported: Any) -> str | None:
    process = _process_of(imported)
    return process.node if process else None


def _process_of(imported: Any) -> Any | None:
    """The HostProcess of a spare that has imported."""
    done, _ = ray.wait([imported], timeout=0)
    return ray.get(imported) if done else None
