"""A run whose Ray is stopped (SIGSTOP) ends within a minute, with or without a signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from marked_processes import marked_environment, processes_with
from node_cluster import wait_for_step
from toy_runs import toy

from rollick.checkpoint import CheckpointStore
from rollick.commands.supervise import last_logged_step
from rollick.config.load import dump_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OPTIONS = ("cluster.backend=ray", "checkpoint.every=1")


def find_raylets(mark: str) -> list[int]:
    return [pid for pid, line in processes_with(mark).items() if "raylet/raylet" in line]


@pytest.mark.parametrize(("signalled", "code"), [(True, 75), (False, 69)])
def test_a_run_with_a_stopped_raylet_ends_and_keeps_its_checkpoint(
    tiny_folder: Path, tmp_path: Path, signalled: bool, code: int
) -> None:
    loaded = toy(tiny_folder, tmp_path, *OPTIONS, name="stopped", steps=100_000)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    mark, env = marked_environment()
    command = [sys.executable, "-m", "rollick.cli", "train", str(tmp_path / "recipe.yaml")]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_step(process, tmp_path / "stopped", 3)
            (raylet,) = find_raylets(mark)
            os.kill(raylet, signal.SIGSTOP)
            if signalled:
                process.send_signal(signal.SIGTERM)
            _, messages = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, messages
    assert "processes of Ray have been stopped for 10 s" in messages
    time.sleep(1)  # The kernel ends Ray's processes after their parent.
    assert processes_with(mark) == {}
    store = CheckpointStore(tmp_path / "stopped" / "checkpoints", keep_last=1, keep_best=1)
    assert store.latest() is not None


def test_a_supervised_run_with_a_stopped_raylet_continues(
    tiny_folder: Path, tmp_path: Path
) -> None:
    loaded = toy(tiny_folder, tmp_path, *OPTIONS, name="stopped", steps=30)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    mark, env = marked_environment()
    command = [sys.executable, "-m", "rollick.cli", "train", str(tmp_path / "recipe.yaml")]
    with subprocess.Popen(
        [*command, "--restarts=1"], env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for_step(process, tmp_path / "stopped", 3)
            (raylet,) = find_raylets(mark)
            os.kill(raylet, signal.SIGSTOP)
            _, messages = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, messages
    assert "the run crashed: exit code 69" in messages
    assert last_logged_step(tmp_path / "stopped") == 30
    assert processes_with(mark) == {}
