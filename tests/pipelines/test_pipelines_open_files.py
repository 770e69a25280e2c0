"""The limit of open files: a run raises it at its start, and names it when it is reached."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollick.checkpoint import CheckpointStore
from rollick.config.load import LoadedRecipe, dump_recipe
from rollick.errors import EXIT_RETRY, MAX_OPEN_FILES, OpenFilesExhausted
from rollick.pipelines import run as run_module
from rollick.pipelines.run import run_recipe

LIMITS = """
import resource
from rollick.cluster.machine import raise_open_files_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
raise_open_files_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
OWN_CODE = """
import os, resource, time
from pathlib import Path
from rollick.testing.toys import nears_letter

FOLDER, CHECKPOINTS, KEPT = Path({folder!r}), Path({checkpoints!r}), []

def is_call(number):
    with (FOLDER / "calls").open("ab") as file:
        file.write(b"x")
        return file.tell() == number

def wait_for_step_2():
    while not (CHECKPOINTS / "step-000002").exists():
        time.sleep(0.01)

def exhaust_controller():
    wait_for_step_2()
    pid = os.getppid()
    used = len(os.listdir(f"/proc/{{pid}}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used - 1, used))

def lowers_limit(completion, answer):
    if is_call(40):  # In step 3.
        exhaust_controller()
    return nears_letter(completion, answer)

def lowers_limit_and_dies(completion, answer):
    if is_call(40):
        exhaust_controller()
        os._exit(1)
    return nears_letter(completion, answer)

def opens_files(inputs, options):
    from rollick.algorithms.losses import reinforce
    if is_call(3):
        wait_for_step_2()
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, used + 20))
        while True:
            KEPT.append(open("/dev/null"))
    return reinforce(inputs, options)
"""
"""Rewards that lower the controller's limit to its open files, and a loss that opens files."""


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    child = subprocess.run(
        [sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True
    )
    assert child.stdout == "(300, 300)\n"


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_a_machine_without_free_file_descriptors_is_named_and_the_run_can_be_retried(
    toy: Callable[..., LoadedRecipe], monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    async def exhaust(*args: Any, **options: Any) -> None:
        raise kind(errno.ENFILE, os.strerror(errno.ENFILE))

    monkeypatch.setattr(run_module, "resolve", lambda *names: exhaust)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with pytest.raises(OpenFilesExhausted, match="sysctl") as error:
            run_recipe(toy())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], MAX_OPEN_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert error.value.exit_code == 69


def train(recipe: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollick.cli", "train", str(recipe), *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


INLINE, RAY = ("cluster.backend=inline",), ("cluster.backend=ray", "devices.generators=cpu:1")
REWARD, LOSS = "data.domains.letters.rewards=[{}]", "algorithm.loss={}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("backend", "option", "function"),
    [
        pytest.param(INLINE, REWARD, "lowers_limit", id="the controller, in a save"),
        pytest.param(RAY, REWARD, "lowers_limit", id="the controller, on Ray"),
        pytest.param(INLINE, REWARD, "lowers_limit_and_dies", id="the controller, in a restart"),
        pytest.param(INLINE, LOSS, "opens_files", id="the learner"),
    ],
)
def test_a_run_that_exhausts_its_file_descriptors_ends_for_a_retry_and_can_be_resumed(
    toy: Callable[..., LoadedRecipe],
    tmp_path: Path,
    backend: tuple[str, ...],
    option: str,
    function: str,
) -> None:
    options = (*backend, option.format(f"{tmp_path / 'own.py'}:{function}"), "checkpoint.every=1")
    folder, sizes = tmp_path / "full", ("rewards.processes=1", "data.validation={}")
    code = OWN_CODE.format(folder=str(tmp_path), checkpoints=str(folder / "checkpoints"))
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    loaded = toy(*options, *sizes, f"run.folder={tmp_path}", name="full", steps=8)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")

    exhausted = train(recipe)
    assert exhausted.returncode == EXIT_RETRY, exhausted.stderr
    assert "Too many open files" in exhausted.stderr
    assert "ulimit -n" in exhausted.stderr
    assert "Exception in thread" not in exhausted.stderr
    newest = CheckpointStore(folder / "checkpoints", keep_last=2, keep_best=1).latest()
    assert newest is not None
    assert newest.step == 2

    resumed = train(recipe, "--resume")
    assert resumed.returncode == 0, resumed.stderr
