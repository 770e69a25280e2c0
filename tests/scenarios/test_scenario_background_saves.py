"""Checkpoints on Ray: written from snapshots by the controller, while the run trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from toy_runs import toy

from rollick import run_recipe
from rollick.checkpoint import CheckpointStore
from rollick.cluster.ray_start import start_ray
from rollick.pipelines.rl import RLPipeline
from rollick.roles.handles import TrainedHandle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RAY = ("cluster.backend=ray", "checkpoint.every=1", "data.validation={}")
FSDP = "train.strategy=fsdp"
WAIT_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    assert start_ray(None)
    yield
    ray.shutdown()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Delays the files of each checkpoint until the second step is done. The list has an entry per
    checkpoint: whether that happened within WAIT_S. Workers must not write files."""
    step, second_step, waits = RLPipeline.step, threading.Event(), list[bool]()

    def delay_files(store: CheckpointStore, point: str) -> None:
        if point == "created":
            waits.append(second_step.wait(WAIT_S if all(waits) else 0))

    async def count_step(pipeline: RLPipeline) -> Any:
        report = await step(pipeline)
        if pipeline.state.step == 1:
            second_step.set()
        return report

    async def fail_on_save(handle: Any, path: Path) -> None:
        raise AssertionError(f"the {handle.role} was asked to write its own files")

    monkeypatch.setattr(CheckpointStore, "_at_point", delay_files)
    monkeypatch.setattr(RLPipeline, "step", count_step)
    monkeypatch.setattr(TrainedHandle, "save", fail_on_save)
    return waits


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("devices.generators=cpu:1",), id="one rank"),
        pytest.param(("algorithm=ppo", "devices.critic=cpu:1"), id="with a critic"),
        pytest.param((FSDP, "devices.generators=cpu:1"), id="one rank of a sharded learner"),
        pytest.param((FSDP, "devices.policy=cpu:0-1", "devices.generators=cpu:2"), id="two ranks"),
    ],
)
def test_training_continues_while_a_checkpoint_is_written_from_snapshots(
    tiny_folder: Path, tmp_path: Path, waits: list[bool], options: tuple[str, ...]
) -> None:
    result = run_recipe(toy(tiny_folder, tmp_path, *RAY, *options, name="run", steps=2))
    assert len(waits) == 2
    assert all(waits), "the second step waited for the files of the first checkpoint"
    newest = CheckpointStore(result.folder / "checkpoints", keep_last=1, keep_best=1).latest()
    assert newest is not None
    assert newest.step == 2
    longer = toy(tiny_folder, tmp_path, *RAY, *options, name="run", steps=3)
    assert run_recipe(longer, resume=True).step == 3
