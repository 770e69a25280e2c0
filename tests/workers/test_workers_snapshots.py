"""Snapshots of a trained worker that is on another machine than the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollick.trainer.snapshot import read_snapshot
from rollick.trainer.strategy import TrainState
from rollick.workers.model_worker import TrainedWorker


class FakeTrainer:
    def __init__(self) -> None:
        self.value = torch.zeros(1000)

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def save(self, path: Path) -> None: ...
    def load(self, path: Path) -> None: ...

    def state(self) -> TrainState:
        return TrainState({"master.a": self.value}, 1)

    def restore(self, state: TrainState) -> None:
        self.value.copy_(state.tensors["master.a"])


def test_a_snapshot_after_a_rollback_has_the_new_state() -> None:
    trainer = FakeTrainer()
    worker: TrainedWorker[Any] = TrainedWorker(trainer)
    try:
        for value in (1.0, 2.0):
            trainer.value.fill_(value)
            record = worker.write_snapshot("snapshot", "another machine")
            restored = read_snapshot(record).tensors["master.a"].clone()
            assert torch.equal(restored, trainer.value)
            worker.restore_snapshots([record])
    finally:
        worker.close()
