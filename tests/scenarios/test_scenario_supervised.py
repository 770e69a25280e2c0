"""Runs under `rollick train --restarts` whose controller is killed: the results stay the same,
and no process is left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from marked_processes import marked_environment, processes_with
from toy_runs import figures, learner_state, toy

from rollick import RunResult, run_recipe
from rollick.children.process_tree import find_descendants
from rollick.commands.supervise import find_unused_shared_memory, last_logged_step
from rollick.config.load import dump_recipe
from rollick.observe.diagnosis import read_run_snapshot
from rollick.observe.faults import read_faults

STEPS = 12
OPTIONS = ("run.deterministic=true", "checkpoint.every=1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    runs = tmp_path_factory.mktemp("undisturbed")
    return run_recipe(toy(tiny_folder, runs, *OPTIONS, steps=STEPS))


@contextmanager
def start_supervised(
    model: Path, runs: Path, *overrides: str, restarts: int = 3, options: Sequence[str] = ()
) -> Generator[tuple[subprocess.Popen[str], str]]:
    """The supervisor, and a mark that all processes of its run have in their environment."""
    loaded = toy(model, runs, *OPTIONS, *overrides, name="killed", steps=STEPS)
    (runs / "recipe.yaml").write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    mark, env = marked_environment()
    command = [sys.executable, "-m", "rollick.cli", "train", str(runs / "recipe.yaml")]
    with subprocess.Popen(
        [*command, "--restarts", str(restarts), *options],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, mark
        finally:
            process.kill()


def find_controller(supervisor: int) -> int | None:
    """The process of the run: a child of the supervisor that is not a standby."""
    return next((pid for pid, argv in find_programs(supervisor) if b"--wait" not in argv), None)


def find_standby(supervisor: int) -> int | None:
    return next((pid for pid, argv in find_programs(supervisor) if b"--wait" in argv), None)


def find_programs(supervisor: int) -> Iterator[tuple[int, list[bytes]]]:
    """The processes of `rollick train` below the supervisor, and their command lines."""
    for process in find_descendants(supervisor):
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        if b"train" in arguments and process.pid != supervisor:
            yield process.pid, arguments


def wait_for_faults(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    wait_until(process, lambda: len(read_faults(folder)) == count)


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    wait_until(process, lambda: (last_logged_step(folder) or 0) >= step)


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run made no progress in time"
        time.sleep(0.01)


def kill_controller(process: subprocess.Popen[str]) -> None:
    pid = find_controller(process.pid)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def check_equal_and_clean(undisturbed: RunResult, folder: Path, mark: str) -> None:
    killed = RunResult(folder, STEPS, {})
    assert learner_state(killed) == learner_state(undisturbed)
    assert figures(killed) == figures(undisturbed)
    assert processes_with(mark) == {}
    assert find_unused_shared_memory() == []


@pytest.mark.parametrize(
    ("backend", "kills"), [("inline", (1, 4, 9)), ("ray", (2, 6))], ids=["inline", "ray"]
)
def test_a_run_whose_controller_is_killed_ends_with_the_same_weights(
    undisturbed: RunResult, tiny_folder: Path, tmp_path: Path, backend: str, kills: Sequence[int]
) -> None:
    folder = tmp_path / "killed"
    with start_supervised(tiny_folder, tmp_path, f"cluster.backend={backend}") as (process, mark):
        for number, step in enumerate(kills):
            wait_for_faults(process, folder, number)
            wait_for_step(process, folder, step)
            kill_controller(process)
        wait_for_faults(process, folder, len(kills))
        _, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages
    assert messages.count("the run crashed: killed by SIGKILL") == len(kills)
    faults = read_faults(folder)
    assert [fault.role for fault in faults] == ["controller"] * len(kills)
    assert all(fault.rejoined_at for fault in faults)
    check_equal_and_clean(undisturbed, folder, mark)


def test_a_standby_resumes_with_the_same_weights(
    undisturbed: RunResult, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    with start_supervised(tiny_folder, tmp_path, options=["--standby"]) as (process, mark):
        wait_until(process, lambda: find_standby(process.pid) is not None)
        standby = find_standby(process.pid)
        kill_controller(process)
        wait_for_faults(process, folder, 1)
        wait_until(
            process,
            lambda: bool((snapshot := read_run_snapshot(folder)) and snapshot.pid == standby),
        )
        _, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages
    check_equal_and_clean(undisturbed, folder, mark)


def test_ten_kills_at_random_moments_change_nothing(
    undisturbed: RunResult, tiny_folder: Path, tmp_path: Path
) -> None:
    rng, folder = random.Random(7), tmp_path / "killed"
    with start_supervised(tiny_folder, tmp_path, restarts=10) as (process, mark):
        for number in range(10):
            last_step = (last_logged_step(folder) or 0) if rng.random() < 0.7 else -1
            wait_until(process, lambda: find_controller(process.pid) is not None)
            if 0 <= last_step < STEPS - 1:  # Otherwise, kill it while it starts.
                wait_for_step(process, folder, last_step + 1)
            time.sleep(rng.uniform(0, 0.5))  # The result is the same at any time.
            kill_controller(process)
            wait_for_faults(process, folder, number + 1)
        _, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages
    check_equal_and_clean(undisturbed, folder, mark)
