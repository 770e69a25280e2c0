"""Payloads that try to get out of a box or to forge a pass, as root and as an ordinary user.

Each file in payloads/ is one payload; its name is the requirement. For each kind of user, a runner
(payload_runner.py) runs all payloads, and each test waits for the report of its payload.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollick.sandbox.host import STAGE, packages_folder, stage_folders

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
NAMES = sorted(path.stem for path in (HERE / "payloads").glob("*.py"))
ORDINARY_USER = str(20_000 + os.getpid() % 10_000)
"""A uid that only this run uses, because a runner checks for leftover processes of its user."""
REPORT_SECONDS = 110
END_SECONDS = 30


class Runner:
    """A runner process and the reports that it has written so far."""

    def __init__(
        self, command: list[str], environment: dict[str, str], inherit: tuple[int, ...]
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            pass_fds=inherit,
        )
        self.reports: dict[str, dict[str, Any]] = {}
        self.new_report = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            report = json.loads(line)
            with self.new_report:
                self.reports[report["name"]] = report
                self.new_report.notify_all()

    def report(self, name: str) -> dict[str, Any]:
        def is_available() -> bool:
            return name in self.reports or not self.reader.is_alive()

        with self.new_report:
            while not is_available() and self.new_report.wait(1.0):
                pass
            self.new_report.wait_for(is_available, REPORT_SECONDS)
        if name not in self.reports and not self.reader.is_alive():
            assert self.process.stderr is not None
            pytest.fail(f"the runner ended: {self.process.stderr.read().decode()[-2000:]}")
        return self.reports[name]

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.process.kill()
        self.process.wait()
        self.reader.join(END_SECONDS)


def run_as_this_user() -> Runner:
    paths = os.pathsep.join([str(PROJECT), *filter(None, sys.path)])
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": paths}
    return Runner([sys.executable, "-P", str(HERE / "payload_runner.py")], environment, ())


def run_as_ordinary_user(resources: ExitStack) -> Runner:
    """Run in a mount namespace where every user can read the interpreter and the project."""
    folders = {"prefix": sys.base_prefix, "project": str(PROJECT)} | packages_folder()
    mounts = stage_folders(folders)
    resources.callback(os.close, mounts)
    python = f"{STAGE}/prefix/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    environment = {
        "PATH": "/usr/bin:/bin",
        "LD_LIBRARY_PATH": f"{STAGE}/prefix/lib",
        "PYTHONPATH": f"{STAGE}/project:{STAGE}/packages",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    enter = ["nsenter", f"--mount=/proc/self/fd/{mounts}", "--setuid", ORDINARY_USER]
    enter += ["--setgid", ORDINARY_USER]
    script = f"{STAGE}/project/tests/sandbox/payload_runner.py"
    return Runner([*enter, "--", python, "-P", script], environment, (mounts,))


@pytest.fixture(scope="session")
def runners() -> Iterator[dict[str, Runner]]:
    """One runner for each kind of user. They run concurrently, because they mostly wait."""
    with ExitStack() as resources:
        if os.geteuid() == 0:
            started = {
                "root": run_as_this_user(),
                "an ordinary user": run_as_ordinary_user(resources),
            }
        else:
            started = {"an ordinary user": run_as_this_user()}
        for runner in started.values():
            resources.callback(runner.close)
        yield started


@pytest.mark.parametrize("user", ["root", "an ordinary user"])
@pytest.mark.parametrize("name", NAMES)
def test_the_box_contains_the_attack(runners: dict[str, Runner], name: str, user: str) -> None:
    if user not in runners:
        pytest.skip("only root can run payloads as root")
    report = runners[user].report(name)
    assert report["problems"] == []
    level = "full" if user == "root" else "user"
    assert report["isolation"] == ("shared" if report["role"] == "shared" else level)
    assert (report["uid"] == 0) == (user == "root")


def test_there_are_enough_payloads() -> None:
    assert len(NAMES) >= 120
