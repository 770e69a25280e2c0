"""Boxes start and end, and leave nothing behind, however the process that started them ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rollick.errors import SandboxError
from rollick.sandbox import box as box_module
from rollick.sandbox.base import Isolation, Limits, Program, Status
from rollick.sandbox.box import Box, BoxStarter
from rollick.sandbox.host import UIDS_PER_PROCESS, SandboxHost, uid_range
from rollick.sandbox.local import LocalSandbox

LEVEL = Isolation.FULL if os.geteuid() == 0 else Isolation.USER


async def test_a_cancelled_program_leaves_no_process() -> None:
    before = find_children(os.getpid(), "bwrap")
    with LocalSandbox(warm=0) as sandbox:
        task = asyncio.create_task(sandbox.run(Program("import time; time.sleep(100)")))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert set(find_children(os.getpid(), "bwrap")) <= set(before)


def test_boxes_outlive_the_thread_that_requested_them() -> None:
    with LocalSandbox(warm=1) as sandbox:

        def start_box() -> None:
            asyncio.run(sandbox.run(Program("")))

        thread = threading.Thread(target=start_box)
        thread.start()
        thread.join()
        (box,) = sandbox._idle
        time.sleep(0.3)
        assert box.process.poll() is None


def test_boxes_that_are_closed_while_they_start_leave_no_process() -> None:
    before, uids = set(find_children(1, "bwrap")), {os.getuid()}
    for milliseconds in range(8):
        with LocalSandbox(warm=3) as sandbox:
            uids |= {box.uid for box in sandbox._idle if box.uid}
            time.sleep(milliseconds / 2000)
    leftovers = set(find_children(1, "bwrap")) - before
    assert [pid for pid in leftovers if Path(f"/proc/{pid}").stat().st_uid in uids] == []


async def test_a_box_that_could_not_be_killed_gets_no_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = find_children(os.getpid(), "bwrap")
    with LocalSandbox(warm=0) as sandbox:
        monkeypatch.setattr(Box, "open_init", lambda _: None)
        started = time.monotonic()
        result = await sandbox.run(Program("while True: pass", limits=Limits(wall_s=1)))
        assert time.monotonic() - started < 8
        assert set(find_children(os.getpid(), "bwrap")) <= set(before)
        monkeypatch.undo()
        after = await sandbox.run(Program("print(1)"))
    assert result.status is Status.INFRASTRUCTURE
    assert "init process" in result.detail
    assert (after.status, after.isolation) == (Status.OK, LEVEL)


FEW_DESCRIPTORS = """
import os, resource
from rollick.errors import SandboxError
from rollick.sandbox.base import Isolation
from rollick.sandbox.box import Box, BoxStarter
from rollick.sandbox.host import UIDS_PER_PROCESS, SandboxHost, uid_range

host = SandboxHost(Isolation.NONE)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
highest = max(map(int, os.listdir("/proc/self/fd")))
while (last := os.open(os.devnull, os.O_RDONLY)) <= highest:
    pass
before = os.listdir("/proc/self/fd")
for more in range(1, 20):
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + more, hard))
    try:
        box = Box.start(host)
        box.end_now()
        box.close()
        outcome = "started"
    except SandboxError as error:
        outcome = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print("nothing left" if os.listdir("/proc/self/fd") == before else "left open", outcome)
"""


def test_a_box_that_lacks_descriptors_leaves_none_open() -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    failed = [line for line in lines if line.endswith("allow more open files (ulimit -n)")]
    assert len(lines) == 19
    assert 12 <= len(failed) < 19
    assert lines[len(failed) :] == ["nothing left started"] * (19 - len(failed))
    assert all(line.startswith("nothing left") for line in failed)


def make_ends_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    end_now = Box.end_now

    def fail(box: Box) -> None:
        end_now(box)
        raise SandboxError("it did not end")

    monkeypatch.setattr(Box, "end_now", fail)


async def test_a_box_that_cannot_be_ended_does_not_keep_the_other_box_of_its_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair: list[Box] = []

    async def use_two(sandbox: LocalSandbox) -> None:
        async with sandbox._boxes(2, Limits()) as taken:
            pair.extend(taken)

    make_ends_fail(monkeypatch)
    with LocalSandbox(warm=0) as sandbox, pytest.raises(SandboxError, match="did not end"):
        await use_two(sandbox)
    assert [box.process.returncode is None for box in pair] == [False, False]
    assert [box.control.fileno() for box in pair] == [-1, -1]


def test_a_box_that_cannot_be_ended_does_not_keep_the_idle_boxes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = find_starter_threads()
    sandbox = LocalSandbox(warm=2).__enter__()
    waiting = list(sandbox._idle)
    make_ends_fail(monkeypatch)
    with pytest.raises(SandboxError, match="did not end"):
        sandbox.close()
    assert [box.process.returncode is None for box in waiting] == [False, False]
    assert [box.control.fileno() for box in waiting] == [-1, -1]
    assert find_starter_threads() <= before


async def test_a_box_that_does_not_end_is_killed_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LocalSandbox(warm=1) as sandbox:
        box = sandbox._idle.popleft()
        await box.wait_ready()
        monkeypatch.setattr(box_module, "END_TIMEOUT_S", 0.4)
        monkeypatch.setattr(Box, "kill", lambda _: None)
        with pytest.raises(SandboxError, match="did not end"):
            box.end_now()
        assert box.process.returncode == -signal.SIGKILL
        box.close()


def test_first_calls_from_two_threads_start_one_starter_thread(tmp_path: Path) -> None:
    host = SandboxHost(
        Isolation.USER, bwrap=str(tmp_path / "none"), sources={"prefix": sys.base_prefix}
    )
    before = find_starter_threads()
    for _ in range(50):
        starter, barrier, messages = BoxStarter(), threading.Barrier(2), list[str]()
        arguments = (starter, host, barrier, messages)
        threads = [
            threading.Thread(target=start_box, args=arguments, daemon=True) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        started = find_starter_threads() - before
        starter.close()
        assert (len(messages), len(started)) == (2, 1)


def start_box(
    starter: BoxStarter, host: SandboxHost, barrier: threading.Barrier, messages: list[str]
) -> None:
    barrier.wait()
    try:
        starter.start(host)
    except SandboxError as error:
        messages.append(str(error))


def find_starter_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("starts boxes")}


def test_a_closed_starter_raises() -> None:
    starter = BoxStarter()
    starter.close()
    with pytest.raises(SandboxError, match="closed"):
        starter.start(SandboxHost(Isolation.NONE))


def find_children(pid: int, name: str) -> list[int]:
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            if int(fields[2].split()[1]) == pid and name in fields[0]:
                pids.append(int(entry.name))
    return pids


RUN_AND_WAIT = """
import asyncio, sys
from rollick.sandbox.base import Isolation, Program
from rollick.sandbox.host import UIDS_PER_PROCESS, SandboxHost, uid_range
from rollick.sandbox.local import LocalSandbox
host = SandboxHost.detect()
if len(sys.argv) > 2:
    sources = {"prefix": sys.base_prefix}
    host = SandboxHost(Isolation.USER, bwrap=sys.argv[2], sources=sources)
with LocalSandbox(host=host) as sandbox:
    FORK
    asyncio.run(sandbox.run(Program(sys.argv[1])))
"""
FORK = "import os, time; os.fork() == 0 and time.sleep(100)"
SLEEP = "import subprocess; subprocess.run(['sleep', 'MARK'])"
CLEAR_SIGNAL = f"import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); {SLEEP}"
EXEC_IN_THREAD = """
import os, threading, time
try:
    os.setpgid(0, 0)
except OSError:
    pass
threading.Thread(target=os.execv, args=("/usr/bin/sleep", ["sleep", "MARK"])).start()
time.sleep(100)
"""


@pytest.mark.parametrize(
    "program",
    [SLEEP, CLEAR_SIGNAL, EXEC_IN_THREAD],
    ids=["plain", "clears its signal", "exec in a thread"],
)
def test_boxes_end_with_the_process_that_started_them(program: str) -> None:
    mark = f"{100 + random.random():.12f}"
    assert kill_and_find_leftovers(program.replace("MARK", mark), mark) == []


def test_boxes_end_although_a_forked_copy_of_their_process_is_alive() -> None:
    mark = f"{100 + random.random():.12f}"
    assert kill_and_find_leftovers(EXEC_IN_THREAD.replace("MARK", mark), mark, fork=True) == []


HALF_STARTED_BWRAP = """\
#!/bin/sh
while [ "$1" != --args ]; do shift; done
head -c 1 "/proc/self/fd/$2" > /dev/null
sleep MARK &
exec sleep MARK
"""


def test_a_box_whose_start_is_interrupted_by_a_kill_leaves_no_process(tmp_path: Path) -> None:
    """If bubblewrap is killed between two of its steps, its child waits forever. A script simulates
    this. Like bubblewrap, it waits for its options, which are sent once the guard knows the box."""
    mark = f"{100 + random.random():.12f}"
    broken = tmp_path / "bwrap"
    broken.write_text(HALF_STARTED_BWRAP.replace("MARK", mark))
    broken.chmod(0o755)
    tmp_path.chmod(0o755)
    assert kill_and_find_leftovers("", mark, bwrap=str(broken)) == []


START_MANY = """
import time
from rollick.sandbox.local import LocalSandbox
sandbox = LocalSandbox(warm=12)
print("starting", flush=True)
sandbox.__enter__()
time.sleep(100)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_start_leaves_no_process() -> None:
    before = set(find_children(1, "bwrap"))
    uids = {os.getuid()}
    first, _ = uid_range(Path("/proc/self/uid_map").read_text())
    for milliseconds in range(0, 60, 5):
        command = [sys.executable, "-c", START_MANY]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(milliseconds / 1000)
            child.kill()
        if LEVEL is Isolation.FULL:
            begin = first + child.pid * UIDS_PER_PROCESS
            uids |= set(range(begin, begin + UIDS_PER_PROCESS))

    def leftovers() -> list[int]:
        return [
            pid for pid in find_children(1, "bwrap") if pid not in before and get_uid(pid) in uids
        ]

    # A box whose parent is dead ends when its interpreter has started.
    wait_until(lambda: not leftovers(), 15.0)
    assert leftovers() == []


def get_uid(pid: int) -> int:
    with suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return -1


def kill_and_find_leftovers(
    program: str, mark: str, *, bwrap: str = "", fork: bool = False
) -> list[int]:
    """Start a process with a sandbox and kill it as soon as processes with the mark run. Returns
    the marked processes that still run after 10 s."""
    code = RUN_AND_WAIT.replace("FORK", FORK if fork else "pass")
    command = [sys.executable, "-c", code, program, *([bwrap] if bwrap else [])]
    child = subprocess.Popen(command, start_new_session=True)
    try:
        wait_until(lambda: bool(find_processes(mark)), 30.0)
        assert find_processes(mark)
        child.send_signal(signal.SIGKILL)
        wait_until(lambda: not find_processes(mark))
        return find_processes(mark)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pid in find_processes(mark):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def find_processes(mark: str) -> list[int]:
    """Living processes (zombies have no command line) that sleep for the time of the mark."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if f"sleep\0{mark}\0".encode() == (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
    return pids
