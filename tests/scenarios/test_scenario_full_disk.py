"""A run on a disk that is full for a while (a real ENOSPC: a small tmpfs in a mount namespace)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marked_processes import marked_environment
from toy_runs import toy

from rollick.config.load import dump_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REWARD = """
import errno, time
from pathlib import Path
from rollick.testing.toys import nears_letter

COUNT, DISK = Path({count!r}), Path({disk!r})

def score(completion, answer):
    number = len(COUNT.read_bytes()) if COUNT.exists() else 0
    with COUNT.open("ab") as file:
        file.write(b"x")
    if number == {full_at}:
        while not (DISK / "full" / "checkpoints" / "step-000001").exists():
            time.sleep(0.01)
        with (DISK / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    if number == {free_at}:
        (DISK / "filler").unlink()
    return nears_letter(completion, answer)
"""

RUN = """
mount -t tmpfs -o size=32m none "$1" || exit 99
"$2" -m rollick.cli train "$3"
code=$?
cp -r "$1" "$4"
exit $code
"""


INLINE: tuple[str, ...] = ()
RAY = ("cluster.backend=ray", "devices.generators=cpu:1")
"""Checkpoints are written from snapshots, in the background."""


def run_on_small_disk(
    model: Path, folder: Path, backend: tuple[str, ...], *, full_at: int, free_at: int
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run six steps of 16 samples. The disk is full from one call of the reward to another."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    disk, copy = folder / "disk", folder / "copy"
    disk.mkdir()
    code = REWARD.format(
        count=str(folder / "count"), disk=str(disk), full_at=full_at, free_at=free_at
    )
    (folder / "mine.py").write_text(code)
    reward = f"data.domains.letters.rewards=[{folder / 'mine.py'}:score]"
    options = (reward, "checkpoint.every=1", "rewards.processes=1", "data.validation={}")
    loaded = toy(model, disk, *options, *backend, name="full", steps=6)
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    _, env = marked_environment()
    arguments = ("sh", str(disk), sys.executable, str(recipe), str(copy))
    completed = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", RUN, *arguments], env=env, capture_output=True, text=True
    )
    if completed.returncode == 99:
        pytest.skip("no mount namespace of one's own here")
    return completed, copy / "full"


@pytest.mark.parametrize("backend", [INLINE, RAY], ids=["inline", "ray"])
def test_a_disk_that_is_full_for_two_steps_costs_no_row_and_no_step(
    tiny_folder: Path, tmp_path: Path, backend: tuple[str, ...]
) -> None:
    completed, folder = run_on_small_disk(tiny_folder, tmp_path, backend, full_at=20, free_at=60)
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.count("metrics.jsonl cannot be written: No space left on device") == 1
    assert "was not saved" in completed.stderr
    for name in ("metrics.jsonl", "samples.jsonl"):
        steps = {json.loads(line)["step"] for line in (folder / name).read_text().splitlines()}
        assert steps == {1, 2, 3, 4, 5, 6}, name
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*"))[-1] == (
        "step-000006"
    )


@pytest.mark.parametrize("backend", [INLINE, RAY], ids=["inline", "ray"])
def test_a_disk_that_stays_full_ends_the_run_for_a_retry_with_the_last_checkpoint(
    tiny_folder: Path, tmp_path: Path, backend: tuple[str, ...]
) -> None:
    completed, folder = run_on_small_disk(tiny_folder, tmp_path, backend, full_at=20, free_at=10**9)
    assert completed.returncode == 69, completed.stderr
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000001"]
