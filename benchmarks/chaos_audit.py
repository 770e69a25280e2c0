"""Audits of chaos.py: the samples of a run, and what it leaves on the machine."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rollick.checkpoint import CheckpointStore
from rollick.rollout.ledger.events import (
    BatchTrained,
    CheckpointMarked,
    Event,
    GroupDropped,
    GroupStarted,
    RunRestored,
)
from rollick.rollout.ledger.log import read_log

MARK = "ROLLICK_CHAOS_MARK"
LISTENS = "0A"
END_S = 10.0
"""Time for the processes of an ended run to disappear."""


def effective_events(events: tuple[Event, ...]) -> list[Event]:
    """The events up to the last checkpoint, without those that a restart undid."""
    effective: list[Event] = []
    marks = {0: 0}
    for event in events:
        if isinstance(event, RunRestored):
            del effective[marks[event.step] :]
            marks = {step: at for step, at in marks.items() if at <= len(effective)}
            continue
        effective.append(event)
        if isinstance(event, CheckpointMarked):
            marks[event.step] = len(effective)
    return effective


def count_samples(folder: Path) -> tuple[int, int]:
    """Samples that were lost and that were trained on more than once.

    Lost: in a group that started before the last checkpoint, and that was neither trained on by
    then nor is in the checkpoint. The recipe drops none, so a dropped group counts as lost.
    """
    checkpoint = CheckpointStore(folder / "checkpoints", keep_last=1, keep_best=0).latest()
    if checkpoint is None:
        return 0, 0
    state = json.loads((checkpoint.path / "state.json").read_text("utf-8"))["rollout"]["ledger"]
    events = effective_events(read_log(folder / "ledger.jsonl").events)
    last = max(n for n, e in enumerate(events) if _marks(e, checkpoint.step))
    sizes = {e.group: e.size for e in events[:last] if isinstance(e, GroupStarted)}
    trained = Counter(g for e in events[:last] if isinstance(e, BatchTrained) for g in e.groups)
    dropped = {e.group for e in events[:last] if isinstance(e, GroupDropped)}
    waiting = {saved["uid"] for saved in (*state["groups"], *state["deferred"])}
    lost = dropped | (sizes.keys() - trained.keys() - waiting)
    doubled = sum(sizes[group] * (times - 1) for group, times in trained.items())
    return sum(sizes[group] for group in lost), doubled


def _marks(event: Event, step: int) -> bool:
    return isinstance(event, CheckpointMarked) and event.step == step


@dataclass(slots=True)
class Resources:
    """The processes, shared memory and listening sockets of a run. Its processes have a variable
    in common; what they hold is observed from time to time."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    memory: set[str] = field(default_factory=set[str])
    sockets: set[str] = field(default_factory=set[str])

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), MARK: self.mark}

    def observe(self) -> None:
        listening = set(_listening_ports())
        for pid in self._processes():
            for descriptor in _read_links(Path(f"/proc/{pid}/fd")):
                if descriptor.startswith("/dev/shm/"):
                    self.memory.add(descriptor.removesuffix(" (deleted)"))
                if descriptor.startswith("socket:["):
                    self.sockets.update({descriptor[8:-1]} & listening)

    def leftovers(self) -> list[str]:
        """What is left of an ended run."""
        deadline = time.monotonic() + END_S
        while (leftovers := self._find_leftovers()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return leftovers

    def _find_leftovers(self) -> list[str]:
        ports = _listening_ports()
        processes = [f"process {pid}: {words}" for pid, words in self._processes().items()]
        memory = [f"memory {path}" for path in sorted(self.memory) if os.path.exists(path)]
        return [*processes, *memory, *(f"port {ports[s]}" for s in self.sockets if s in ports)]

    def _processes(self) -> dict[int, str]:
        """Command lines by process id."""
        commands: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return commands


def _read_links(folder: Path) -> list[str]:
    targets: list[str] = []
    with suppress(OSError):
        for entry in os.listdir(folder):
            with suppress(OSError):
                targets.append(os.readlink(folder / entry))
    return targets


def _listening_ports() -> dict[str, int]:
    """Ports of listening sockets by inode."""
    ports: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENS:
                    ports[words[9]] = int(words[1].rpartition(":")[2], 16)
    return ports
