"""`rollick sandbox`: runs one program in a box, and lists the layers of isolation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LEVEL = "full" if os.geteuid() == 0 else "user"


def run(*arguments: str, stdin: str = "", path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1"} | ({"PATH": path} if path else {})
    command = [sys.executable, "-m", "rollick.cli", "sandbox", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=60, env=environment
    )


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text("import os\nprint(input()[::-1], os.environ.get('SECRET'))\n")
    return str(file)


def test_a_program_runs_and_its_end_is_one_line_of_json(program: str) -> None:
    child = run("run", program, "--stdin", "olleh", "--json")
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert (report["status"], report["stdout"], report["isolation"]) == (
        "ok",
        "hello None\n",
        LEVEL,
    )
    assert report["seconds"] > 0


def test_the_plain_output_shows_status_time_and_isolation(program: str) -> None:
    child = run("run", program, "--stdin", "-", stdin="olleh")
    assert child.stdout == "hello None\n"
    assert child.stderr.startswith("ok, 0.")
    assert f"isolation {LEVEL}" in child.stderr


def test_a_program_that_fails_gives_exit_code_one(program: str) -> None:
    child = run("run", program)
    assert child.returncode == 1
    assert "EOFError" in child.stderr
    assert "failed" in child.stderr


def test_without_isolation_it_refuses_unless_allow_unsafe_is_set(
    program: str, tmp_path: Path
) -> None:
    refused = run("run", program, "--stdin", "x", "--json", path=str(tmp_path))
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["status"] == "refused"
    unsafe = run("run", program, "--stdin", "x", "--json", "--allow-unsafe", path=str(tmp_path))
    report = json.loads(unsafe.stdout)
    assert (report["status"], report["isolation"]) == ("ok", "none")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    child = run("run", str(tmp_path / "none.py"))
    assert child.returncode == 2
    assert "none.py" in child.stderr


def test_the_layers_are_listed(tmp_path: Path) -> None:
    actual = json.loads(run("check", "--json").stdout)
    assert actual["isolation"] == LEVEL
    assert "seccomp" in actual["active"]
    without_bwrap = run("check", path=str(tmp_path))
    assert without_bwrap.returncode == 2
    assert "bwrap is not installed" in without_bwrap.stdout
