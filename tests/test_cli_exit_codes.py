"""The exit code of `rollick train`, by which a supervisor decides whether to retry."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollick.checkpoint import CheckpointStore
from rollick.config.load import dump_recipe, recipe_from_dict
from rollick.errors import (
    ConfigError,
    EngineLost,
    NoSignalError,
    RollickError,
    ServiceUnavailable,
    StoppedBySignal,
    StuckError,
    WorkerError,
    WorkerLost,
)
from rollick.testing.toys import toy_recipe

LOSSES = "import os\ndef die(*arguments, **options): os._exit(7)\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (WorkerError, 2),  # The worker's code raised: a retry raises again.
        (NoSignalError, 2),
        (WorkerLost, 69),
        (EngineLost, 69),
        (StuckError, 69),
        (ServiceUnavailable, 69),
        (StoppedBySignal, 75),
    ],
)
def test_an_error_has_the_exit_code_for_its_remedy(error: type[RollickError], code: int) -> None:
    assert error("it failed", fix="look").copy().exit_code == code


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_lost_worker_exits_with_the_code_for_a_retry(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    recipe = toy_recipe(tiny_folder, tmp_path, name="lost") | {"cluster": {"backend": "ray"}}
    recipe["algorithm"] = {"loss": "losses.py:die"}
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe_from_dict(recipe, base_dir=tmp_path).recipe))
    root = str(Path(__file__).parents[1])
    completed = subprocess.run(
        [sys.executable, "-m", "rollick.cli", "train", str(file)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert "was lost in 'train'" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert completed.returncode == 69


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_signal_to_the_whole_group_saves_a_run_on_ray(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(tiny_folder, tmp_path, name="stopped", steps=100_000)
    recipe |= {"cluster": {"backend": "ray"}}
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe_from_dict(recipe).recipe))
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "rollick.cli", "train", str(tmp_path / "recipe.yaml")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        deadline = time.monotonic() + 120
        while not metrics.exists():
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert "stopped: step" in out
    assert "continue it with --resume" in err
    store = CheckpointStore(tmp_path / "stopped" / "checkpoints", keep_last=1, keep_best=1)
    newest = store.latest()
    assert newest is not None
    assert newest.step == len(metrics.read_text().splitlines())
