"""The guard ends a run that cannot end itself, and no other run."""

import asyncio
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollick.pipelines.run_guard import STOPPED_S, RunGuard, guard_run

BLOCKED = """
import asyncio, sys, time
from rollick.pipelines import run_guard

async def main():
    asyncio.get_running_loop().add_signal_handler(15, lambda: None)
    saved = sys.argv[1] == "saved"
    with run_guard.guard_run(lambda: saved, stop_grace_s=0.1, blocked_limit_s=60):
        print("ready", flush=True)
        time.sleep(600)

asyncio.run(main())
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_guard(exit_codes: list[int], clock: Clock, *, has_checkpoint: bool = True) -> RunGuard:
    return RunGuard(lambda: has_checkpoint, 30.0, 60.0, end=exit_codes.append, clock=clock)


def test_a_responding_run_is_left_alone() -> None:
    exit_codes, clock = list[int](), Clock()
    guard = make_guard(exit_codes, clock)
    for clock.now in range(0, 1000, 10):
        guard.loop_seen_at = clock.now
        guard.end_if_stuck()
    assert exit_codes == []


@pytest.mark.parametrize(("has_checkpoint", "code"), [(True, 75), (False, 69)])
def test_a_stop_that_takes_longer_than_its_grace_ends_the_run(
    has_checkpoint: bool, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    exit_codes, clock = list[int](), Clock()
    guard = make_guard(exit_codes, clock, has_checkpoint=has_checkpoint)
    guard.signalled_at = 5.0
    clock.now = 35.0
    guard.end_if_stuck()
    assert exit_codes == []
    clock.now = 35.5
    guard.end_if_stuck()
    assert exit_codes == [code]
    assert "it did not stop within run.stop_grace_s=30 s of a signal" in caplog.text


def test_a_guard_without_a_free_file_descriptor_still_ends_a_stop_that_takes_too_long() -> None:
    exit_codes, clock = list[int](), Clock()
    guard = make_guard(exit_codes, clock)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        guard.end_if_stuck()
        guard.signalled_at = -31.0
        guard.end_if_stuck()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert exit_codes == [75]


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A sleeping process with the name of Ray's raylet."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    program = tmp_path / "raylet"
    program.symlink_to(Path(sleep).resolve())
    with subprocess.Popen([program, "600"]) as process:
        yield process
        process.kill()


def test_a_stopped_raylet_ends_the_run_with_the_code_for_a_retry(
    request: pytest.FixtureRequest,
) -> None:
    exit_codes, clock = list[int](), Clock()
    guard = make_guard(exit_codes, clock)
    process: subprocess.Popen[bytes] = request.getfixturevalue("raylet")
    guard.end_if_stuck()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    guard.end_if_stuck()
    clock.now = STOPPED_S + 1
    guard.loop_seen_at = clock.now
    guard.end_if_stuck()
    assert exit_codes == [69]
    assert process.wait(10) == -signal.SIGKILL


def test_a_raylet_that_is_stopped_for_a_moment_ends_nothing(
    request: pytest.FixtureRequest,
) -> None:
    exit_codes, clock = list[int](), Clock()
    guard = make_guard(exit_codes, clock)
    process: subprocess.Popen[bytes] = request.getfixturevalue("raylet")
    for number, state in ((signal.SIGSTOP, os.WSTOPPED), (signal.SIGCONT, os.WCONTINUED)):
        process.send_signal(number)
        os.waitid(os.P_PID, process.pid, state | os.WNOWAIT)
        clock.now += STOPPED_S + 1
        guard.loop_seen_at = clock.now
        guard.end_if_stuck()
    assert exit_codes == []


@pytest.mark.parametrize(("folder", "codes"), [("ray", [69]), ("other", [])])
def test_a_call_of_ray_that_blocks_the_event_loop_ends_the_run_and_no_other_call_does(
    tmp_path: Path, folder: str, codes: list[int]
) -> None:
    path = tmp_path / folder / "worker.py"
    path.parent.mkdir()
    path.write_text("def put(entered, event):\n    entered.set()\n    event.wait(30)\n")
    spec = importlib.util.spec_from_file_location("blocking", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    exit_codes, clock, entered, release = list[int](), Clock(), threading.Event(), threading.Event()
    guard = make_guard(exit_codes, clock)
    clock.now = 61.0

    def check_while_blocked() -> None:
        entered.wait(30)
        guard.end_if_stuck()
        release.set()

    thread = threading.Thread(target=check_while_blocked)
    thread.start()
    module.put(entered, release)
    thread.join()
    assert exit_codes == codes


async def test_signals_reach_asyncio_inside_the_guard_and_after_it() -> None:
    loop, received = asyncio.get_running_loop(), asyncio.Queue[int]()
    loop.add_signal_handler(signal.SIGTERM, received.put_nowait, 15)
    try:
        with guard_run(lambda: True, stop_grace_s=600, blocked_limit_s=600):
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(received.get(), 30) == 15
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(received.get(), 30) == 15
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@pytest.mark.parametrize(("saved", "code"), [("saved", 75), ("unsaved", 69)])
def test_a_signal_ends_a_run_whose_event_loop_is_blocked(saved: str, code: int) -> None:
    command = [sys.executable, "-c", BLOCKED, saved]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == code
        finally:
            process.kill()
