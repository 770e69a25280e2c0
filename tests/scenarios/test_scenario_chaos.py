"""A run under random faults (benchmarks/chaos.py): no sample is lost or trained on twice, and
nothing is left on the machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "chaos.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_three_minutes_of_random_faults_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    options = ["--minutes", "3", "--every", "20", "--only", "recovery", "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHMARK), "--json", *options]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    log = (tmp_path / "recovery.log").read_text()
    assert completed.returncode == 0, completed.stderr + log
    report = json.loads(completed.stdout)
    (run,) = report["runs"]["recovery"]
    assert run["exit_code"] == 0, log
    assert sum(run["faults"].values()) >= 6
    assert (report["lost"], report["doubled"], report["leftovers"]) == (0, 0, 0), run
    assert run["steps"] == report["steps"]
    assert report["score"] is not None
