"""Runs without free memory: full shared memory (a small tmpfs in a mount namespace), or a learner
that cannot allocate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from marked_processes import marked_environment
from toy_runs import checkpoint_state, figures, toy

from rollick import RunResult, run_recipe
from rollick.checkpoint import CheckpointStore
from rollick.cluster.ray_start import start_ray
from rollick.commands.doctor import diagnose_folder
from rollick.config.load import dump_recipe
from rollick.errors import EXIT_RETRY, WorkerOutOfMemory
from rollick.observe.faults import read_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RAY = ("cluster.backend=ray", "devices.generators=cpu:1")
LARGE = (
    "rewards.processes=1",
    "rollout.groups_per_step=8",
    "rollout.group_size=8",
    "sampling.max_tokens=48",
)
"""Batches that Ray puts into shared memory."""
FILLING = """
import errno
from pathlib import Path
from rollick.testing.toys import nears_letter

COUNT = Path({count!r})

def score(completion, answer):
    number = len(COUNT.read_bytes()) if COUNT.exists() else 0
    with COUNT.open("ab") as file:
        file.write(b"x")
    if number == 70:  # In step 2.
        with open("/dev/shm/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return nears_letter(completion, answer)
"""
IN_NAMESPACE = """
mount -t tmpfs -o size=200m none /dev/shm || exit 99
exec "$1" -m rollick.cli train "$2"
"""
STARVING = """
import resource
from pathlib import Path
import torch
from rollick.algorithms.losses import reinforce

PLAN = Path({plan!r})

def starving(inputs, options):
    lines = PLAN.read_text().splitlines()
    if lines:
        PLAN.write_text("\\n".join(lines[1:]))
        if lines[0] == "starve":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
            torch.zeros(1 << 30)
    return reinforce(inputs, options)
"""
"""A loss that exhausts the memory of its process. Each line of a plan is for one call."""

Run = Callable[..., RunResult]


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    assert start_ray(None)
    yield
    ray.shutdown()


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, _ray: None) -> Run:
    def start(name: str, plan: str) -> RunResult:
        (tmp_path / "plan").write_text(plan)
        (tmp_path / "own.py").write_text(STARVING.format(plan=str(tmp_path / "plan")))
        loss = f"algorithm.loss={tmp_path / 'own.py'}:starving"
        options = (*RAY, loss, "run.deterministic=true", "checkpoint.every=1")
        return run_recipe(toy(tiny_folder, tmp_path, *options, name=name, steps=4))

    return start


def test_a_learner_that_cannot_allocate_gets_a_new_process_and_loses_nothing(run: Run) -> None:
    baseline = run("calm", "")
    starved = run("starved", "go\ngo\nstarve")
    [fault] = [fault for fault in read_faults(starved.folder) if fault.role == "policy"]
    assert fault.rejoined_at is not None
    assert "can't allocate memory" in fault.cause
    assert checkpoint_state(starved) == checkpoint_state(baseline)
    assert figures(starved) == figures(baseline)


def test_a_learner_that_never_can_allocate_ends_the_run_for_a_retry_with_its_checkpoint(
    run: Run, tmp_path: Path
) -> None:
    with pytest.raises(WorkerOutOfMemory, match="can't allocate memory") as ended:
        run("starved", "go\ngo\n" + "starve\n" * 9)
    assert ended.value.exit_code == EXIT_RETRY
    newest = CheckpointStore(
        tmp_path / "starved" / "checkpoints", keep_last=2, keep_best=1
    ).latest()
    assert newest is not None
    assert newest.step == 2


def run_with_full_shared_memory(model: Path, folder: Path) -> tuple[Any, Path]:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    (folder / "mine.py").write_text(FILLING.format(count=str(folder / "count")))
    reward = f"data.domains.letters.rewards=[{folder / 'mine.py'}:score]"
    options = (*RAY, *LARGE, reward, "checkpoint.every=1", "data.validation={}")
    loaded = toy(model, folder, *options, name="full", steps=6)
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    _, env = marked_environment()
    # Smaller than /dev/shm, or Ray would use /tmp.
    env["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"] = str(100 << 20)
    command = ["unshare", "-Urm", "sh", "-c", IN_NAMESPACE, "sh", sys.executable, str(recipe)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    if ended.returncode == 99:
        pytest.skip("no mount namespace of one's own here")
    return ended, folder / "full"


def test_a_run_whose_shared_memory_fills_up_makes_all_its_steps_and_warns_once(
    tiny_folder: Path, tmp_path: Path
) -> None:
    ended, folder = run_with_full_shared_memory(tiny_folder, tmp_path)
    assert os.path.getsize(tmp_path / "count") > 70, "the memory was never full"
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert ended.stderr.count("Ray keeps messages to workers there") == 1
    [fault] = read_faults(folder)
    assert (fault.role, fault.kind) == ("controller", "shared_memory")
    assert "faults of controller: 1 shared memory" in diagnose_folder(folder).lines()
