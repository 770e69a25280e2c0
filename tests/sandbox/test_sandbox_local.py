"""Programs and verdicts in real boxes; a sandbox that refuses; one behind HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollick.errors import SandboxError
from rollick.sandbox import box as boxes
from rollick.sandbox.base import Call, Isolation, Limits, Program, Result, Status, Tests
from rollick.sandbox.box import Box
from rollick.sandbox.host import Host
from rollick.sandbox.layers import find_layers
from rollick.sandbox.local import LocalSandbox
from rollick.sandbox.remote import HttpSandbox, program_from_json
from rollick.sandbox.starter import Starter
from rollick.sandbox.verdict import Case, check_asserts, check_cases, check_function, check_pytest

LEVEL = Isolation.FULL if os.geteuid() == 0 else Isolation.USER
ADD = "def add(a, b):\n    return a + b\n"


async def test_a_program_reads_its_input_and_prints(sandbox: LocalSandbox) -> None:
    result = await sandbox.run(Program("print(input()[::-1])", stdin="olleh\n"))
    assert (result.status, result.stdout, result.exit_code) == (Status.OK, "hello\n", 0)
    assert result.isolation is LEVEL


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", Status.FAILED),
        ("1 / 0", Status.FAILED),
        ("def (", Status.FAILED),
        ("import ctypes; ctypes.string_at(0)", Status.KILLED),
        ("x = bytearray(1 << 33)", Status.MEMORY),
        ("while True: pass", Status.TIMEOUT),
        ("while True: print('x' * 9999)", Status.OUTPUT_LIMIT),
        ("exit()", Status.OK),
    ],
)
async def test_the_end_of_a_program_is_told(
    sandbox: LocalSandbox, code: str, status: Status
) -> None:
    wall_s = 0.5 if status is Status.TIMEOUT else 20.0
    result = await sandbox.run(Program(code, limits=Limits(wall_s=wall_s)))
    assert result.status is status


async def test_a_traceback_is_the_programs_own(sandbox: LocalSandbox) -> None:
    result = await sandbox.run(Program("def f():\n    return 1 / 0\nf()"))
    assert "rollick" not in result.stderr
    assert "    return 1 / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


async def test_computing_is_bounded_apart_from_the_clock(sandbox: LocalSandbox) -> None:
    limits = Limits(wall_s=30.0, cpu_s=1)
    result = await sandbox.run(Program("while True: pass", limits=limits))
    assert result.status in (Status.TIMEOUT, Status.KILLED)
    assert result.seconds < 20


async def test_large_programs_and_inputs_arrive_whole(sandbox: LocalSandbox) -> None:
    code = f"x = {'y' * 400_000!r}\nimport sys\nprint(len(x) + len(sys.stdin.read()))"
    result = await sandbox.run(Program(code, stdin="z" * 500_000))
    assert result.stdout == "900000\n"


async def test_threads_processes_and_the_standard_library_work(sandbox: LocalSandbox) -> None:
    code = """
import json, math, multiprocessing, re, sqlite3, subprocess, tempfile, threading
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
threads = [threading.Thread(target=print) for _ in range(10)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout)
lock = multiprocessing.get_context("fork").Lock()
print(json.dumps(sqlite3.connect(":memory:").execute("select 1 + 1").fetchone()))
"""
    result = await sandbox.run(Program(code))
    assert result.status is Status.OK, result.stderr
    assert result.stdout.split() == ["child", "[2]"]


async def test_each_program_has_a_fresh_box(sandbox: LocalSandbox) -> None:
    code = "import os; print(os.listdir('/tmp')); open('/tmp/left', 'w').close()"
    results = [await sandbox.run(Program(code)) for _ in range(4)]
    assert [result.stdout for result in results] == ["[]\n"] * 4


async def test_a_box_does_not_pay_for_modules_that_its_program_does_not_use(
    sandbox: LocalSandbox,
) -> None:
    """Each of these costs every verdict milliseconds; together, as much as the interpreter."""
    check = "import sys\nassert not {'typing', 'collections', 'struct', 're'} & sys.modules.keys()"
    assert (await sandbox.run(Program(check))).status is Status.OK
    verdict = await check_asserts(
        sandbox, f"{check}\n{ADD}", asserts=[check, "assert add(1, 2) == 3"]
    )
    assert verdict.all_passed, verdict


async def test_many_programs_run_at_once_and_all_end(sandbox: LocalSandbox) -> None:
    results = await asyncio.gather(*(sandbox.run(Program(f"print({n})")) for n in range(20)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]


async def test_candidate_and_tests_have_different_uids() -> None:
    with LocalSandbox(warm=0) as sandbox:
        first, second = sandbox.host.next_uid(), sandbox.host.next_uid()
    assert first is None if LEVEL is Isolation.USER else first != second


async def test_a_cancelled_program_leaves_nothing() -> None:
    before = children_of(os.getpid(), "bwrap")
    with LocalSandbox(warm=0) as sandbox:
        task = asyncio.create_task(sandbox.run(Program("import time; time.sleep(100)")))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert set(children_of(os.getpid(), "bwrap")) <= set(before)


def test_boxes_outlive_the_thread_that_asked_for_them() -> None:
    with LocalSandbox(warm=1) as sandbox:

        def ask() -> None:
            asyncio.run(sandbox.run(Program("")))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        (box,) = sandbox._waiting
        time.sleep(0.3)
        assert box.process.poll() is None


def test_boxes_that_are_closed_while_they_start_leave_nothing() -> None:
    before, uids = set(children_of(1, "bwrap")), {os.getuid()}
    for milliseconds in range(8):
        with LocalSandbox(warm=3) as sandbox:
            uids |= {box.uid for box in sandbox._waiting if box.uid}
            time.sleep(milliseconds / 2000)
    left = set(children_of(1, "bwrap")) - before
    assert [pid for pid in left if Path(f"/proc/{pid}").stat().st_uid in uids] == []


async def test_a_box_that_could_not_be_killed_gets_no_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = children_of(os.getpid(), "bwrap")
    with LocalSandbox(warm=0) as sandbox:
        monkeypatch.setattr(Box, "find_first", lambda _: None)
        begun = time.monotonic()
        result = await sandbox.run(Program("while True: pass", limits=Limits(wall_s=1)))
        assert time.monotonic() - begun < 8
        assert set(children_of(os.getpid(), "bwrap")) <= set(before)
        monkeypatch.undo()
        after = await sandbox.run(Program("print(1)"))
    assert result.status is Status.INFRASTRUCTURE
    assert "first process" in result.detail
    assert (after.status, after.isolation) == (Status.OK, LEVEL)


FEW_DESCRIPTORS = """
import os, resource
from rollick.errors import SandboxError
from rollick.sandbox.base import Isolation
from rollick.sandbox.box import Box
from rollick.sandbox.host import Host

host = Host(Isolation.NONE)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
highest = max(map(int, os.listdir("/proc/self/fd")))
while (last := os.open(os.devnull, os.O_RDONLY)) <= highest:
    pass
before = os.listdir("/proc/self/fd")
for more in range(1, 20):
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + more, hard))
    try:
        box = Box.start(host, disk_mb=1)
        box.end_now()
        box.close()
        said = "started"
    except SandboxError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print("nothing left" if os.listdir("/proc/self/fd") == before else "left open", said)
"""


def test_a_box_for_which_descriptors_do_not_suffice_leaves_none_open() -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    failed = [line for line in lines if line.endswith("allow more open files (ulimit -n)")]
    assert len(lines) == 19
    assert 12 <= len(failed) < 19
    assert lines[len(failed) :] == ["nothing left started"] * (19 - len(failed))
    assert all(line.startswith("nothing left") for line in failed)


def let_ends_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    end_now = Box.end_now

    def fail(box: Box) -> None:
        end_now(box)
        raise SandboxError("it did not end")

    monkeypatch.setattr(Box, "end_now", fail)


async def test_a_box_that_cannot_be_ended_does_not_keep_the_other_of_its_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair: list[Box] = []

    async def use_two(sandbox: LocalSandbox) -> None:
        async with sandbox._boxes(2) as taken:
            pair.extend(taken)

    let_ends_fail(monkeypatch)
    with LocalSandbox(warm=0) as sandbox, pytest.raises(SandboxError, match="did not end"):
        await use_two(sandbox)
    assert [box.process.returncode is None for box in pair] == [False, False]
    assert [box.control.fileno() for box in pair] == [-1, -1]


def test_a_box_that_cannot_be_ended_does_not_keep_the_others_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threads_that_start_boxes()
    sandbox = LocalSandbox(warm=2).__enter__()
    waiting = list(sandbox._waiting)
    let_ends_fail(monkeypatch)
    with pytest.raises(SandboxError, match="did not end"):
        sandbox.close()
    assert [box.process.returncode is None for box in waiting] == [False, False]
    assert [box.control.fileno() for box in waiting] == [-1, -1]
    assert threads_that_start_boxes() <= before


async def test_a_box_that_does_not_end_is_killed_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LocalSandbox(warm=1) as sandbox:
        box = sandbox._waiting.popleft()
        await box.ready()
        monkeypatch.setattr(boxes, "END_SECONDS", 0.4)
        monkeypatch.setattr(Box, "kill", lambda _: None)
        with pytest.raises(SandboxError, match="did not end"):
            box.end_now()
        assert box.process.returncode == -signal.SIGKILL
        box.close()


def test_first_calls_from_two_threads_begin_one_starter(tmp_path: Path) -> None:
    host = Host(Isolation.USER, bwrap=str(tmp_path / "none"), sources={"prefix": sys.base_prefix})
    before = threads_that_start_boxes()
    for _ in range(50):
        starter, together, answers = Starter(), threading.Barrier(2), list[str]()
        asking = (starter, host, together, answers)
        threads = [threading.Thread(target=ask, args=asking, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        begun = threads_that_start_boxes() - before
        starter.close()
        assert (len(answers), len(begun)) == (2, 1)


def ask(starter: Starter, host: Host, together: threading.Barrier, answers: list[str]) -> None:
    together.wait()
    try:
        starter.start(host, disk_mb=8)
    except SandboxError as error:
        answers.append(str(error))


def threads_that_start_boxes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "starts boxes"}


def test_a_starter_that_is_closed_says_so() -> None:
    starter = Starter()
    starter.close()
    with pytest.raises(SandboxError, match="closed"):
        starter.start(Host(Isolation.NONE), disk_mb=8)


def children_of(pid: int, name: str) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            if int(words[2].split()[1]) == pid and name in words[0]:
                found.append(int(entry.name))
    return found


def test_boxes_end_with_the_process_that_started_them() -> None:
    code = """
import asyncio, sys
from rollick.sandbox.base import Program
from rollick.sandbox.local import LocalSandbox
with LocalSandbox() as sandbox:
    print(*(box.process.pid for box in sandbox._waiting), flush=True)
    asyncio.run(sandbox.run(Program("import time; time.sleep(100)")))
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    boxes = [int(word) for word in child.stdout.readline().split()]
    time.sleep(1.0)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    deadline = time.monotonic() + 10
    while any(alive(box) for box in boxes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [box for box in boxes if alive(box)] == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_calls_are_compared_with_their_types(sandbox: LocalSandbox) -> None:
    calls = [Call("pair", (1,), (1, 1)), Call("pair", (1,), [1, 1]), Call("pair", (2,), (2.0, 2))]
    verdict = await check_function(sandbox, "def pair(x):\n    return (x, x)\n", calls=calls)
    assert [outcome.passed for outcome in verdict.outcomes] == [True, False, True]
    assert verdict.share == pytest.approx(2 / 3)
    assert verdict.isolation is LEVEL


async def test_asserts_are_counted_one_by_one(sandbox: LocalSandbox) -> None:
    asserts = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add('a', 'b') == 'ab'"]
    verdict = await check_asserts(sandbox, ADD, asserts=asserts)
    assert [outcome.passed for outcome in verdict.outcomes] == [True, False, True]
    assert not verdict.all_passed


async def test_a_hang_costs_the_tests_that_were_not_reached(sandbox: LocalSandbox) -> None:
    code = "def f(x):\n    while x: pass\n    return x\n"
    asserts = ["assert f(0) == 0", "assert f(1) == 1", "assert f(0) == 0"]
    verdict = await check_asserts(sandbox, code, asserts=asserts, limits=Limits(wall_s=1.0))
    assert verdict.status is Status.TIMEOUT
    assert [outcome.passed for outcome in verdict.outcomes] == [True, False, False]


async def test_exceptions_of_the_candidate_reach_the_tests(sandbox: LocalSandbox) -> None:
    code = "class Mine(ValueError): ...\ndef f(x):\n    raise Mine('no')\n"
    test = """
try:
    f(1)
except ValueError as error:
    assert 'no' in str(error)
else:
    raise AssertionError
"""
    verdict = await check_asserts(sandbox, code, asserts=[test], entries=["f"])
    assert verdict.all_passed, verdict


async def test_tests_that_are_broken_are_no_verdict(sandbox: LocalSandbox) -> None:
    for asserts, setup in (
        (["assert add(1"], ""),
        (["assert add(1, 2) == 3"], "import nothing_at_all"),
    ):
        verdict = await check_asserts(sandbox, ADD, asserts=asserts, setup=setup, entries=["add"])
        assert not verdict.judged


async def test_rows_with_objects_run_in_one_box_and_say_so(sandbox: LocalSandbox) -> None:
    code = """
class Node:
    def __init__(self, x):
        self.x = x

def value(node):
    return node.x
"""
    asserts, setup = ["assert value(root) == 7", "assert value(root) == 8"], "root = Node(7)"
    verdict = await check_asserts(sandbox, code, asserts=asserts, setup=setup, reference=code)
    assert verdict.isolation is Isolation.SHARED
    assert [outcome.passed for outcome in verdict.outcomes] == [True, False]


async def test_a_pytest_file_counts_test_by_test(sandbox: LocalSandbox) -> None:
    file = """
import pytest
from solution import add, LIMIT
@pytest.mark.parametrize("n", [1, 2])
def test_sums(n):
    assert add(n, n) == 2 * n
def test_wrong():
    assert add(1, 1) == LIMIT
def test_raises():
    with pytest.raises(TypeError):
        add(1)
"""
    verdict = await check_pytest(sandbox, ADD + "LIMIT = 3\n", file=file, limits=Limits(wall_s=60))
    assert [outcome.passed for outcome in verdict.outcomes] == [True, True, False, True]
    assert verdict.isolation is LEVEL


async def test_scripts_are_judged_by_what_they_print(sandbox: LocalSandbox) -> None:
    code = "a, b = map(int, input().split())\nprint(a + b)"
    cases = [Case("1 2", "3"), Case("2 2", "5"), Case("x", "y")]
    verdict = await check_cases(sandbox, code, cases=cases)
    assert [outcome.passed for outcome in verdict.outcomes] == [True, False, False]


async def test_without_isolation_programs_are_refused() -> None:
    host = Host(Isolation.NONE, "bwrap is not installed")
    with LocalSandbox(host=host) as sandbox:
        result = await sandbox.run(Program("print(1)"))
        verdict = await check_asserts(sandbox, ADD, asserts=["assert add(1, 2) == 3"])
    assert (result.status, result.stdout) == (Status.REFUSED, "")
    assert "allow_unsafe" in result.detail
    assert not verdict.judged
    assert not verdict.all_passed


async def test_a_kernel_that_forbids_boxes_is_noticed_and_named(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    host = Host(Isolation.USER, bwrap=str(broken), sources={"prefix": sys.base_prefix})
    with LocalSandbox(host=host) as sandbox:
        result = await sandbox.run(Program("print(1)"))
    assert result.status is Status.REFUSED
    assert "No permissions" in result.detail


async def test_allow_unsafe_runs_and_every_result_says_so() -> None:
    host = Host(Isolation.NONE, "bwrap is not installed")
    with LocalSandbox(host=host, allow_unsafe=True) as sandbox:
        result = await sandbox.run(Program("print(1)"))
        verdict = await check_asserts(sandbox, ADD, asserts=["assert add(1, 2) == 3"])
    assert (result.status, result.stdout, result.isolation) == (Status.OK, "1\n", Isolation.NONE)
    assert (verdict.all_passed, verdict.isolation) == (True, Isolation.NONE)


async def test_the_layers_of_this_machine_are_found_by_trying() -> None:
    layers = await find_layers()
    assert layers.isolation is LEVEL, layers
    assert {"seccomp", "limits", "read-only system", "no /proc"} <= set(layers.active)


@contextmanager
def serving(sandbox: LocalSandbox, answers: list[str]) -> Iterator[str]:
    """A server that gives each of `answers` once, then runs programs in the sandbox."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Authorization"] == "Bearer secret"
            if answers:
                status, content = answers.pop(0).split(" ", 1)
            else:
                result = asyncio.run(sandbox.run(program_from_json(json.loads(body))))
                status, content = "200", json.dumps(result.to_json())
            self.send_response(int(status))
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_remote_sandbox_gives_the_same_results() -> None:
    with LocalSandbox() as local, serving(local, []) as url:
        remote = HttpSandbox(url, token="secret")
        result = await remote.run(Program("print(input())", stdin="x"))
        calls = [Call("add", (1, 2), 3), Call("add", ((1,), (2,)), (1, 2)), Call("add", (1, 2), 4)]
        verdict = await check_function(remote, ADD, calls=calls)
    assert (result.status, result.stdout, result.isolation) == (Status.OK, "x\n", LEVEL)
    assert [outcome.passed for outcome in verdict.outcomes] == [True, True, False]


async def test_a_remote_sandbox_that_fails_is_asked_again() -> None:
    with LocalSandbox() as local, serving(local, ["500 broken", "200 garbage"]) as url:
        result = await HttpSandbox(url, token="secret").run(Program("print(1)"))
    assert result.stdout == "1\n"


@pytest.mark.parametrize(
    "answer", ["500 broken", "200 {}", "200 [1", '200 {"status": "great", "isolation": "full"}']
)
async def test_a_remote_sandbox_that_keeps_failing_is_no_verdict(answer: str) -> None:
    with LocalSandbox() as local, serving(local, [answer] * 3) as url:
        result = await HttpSandbox(url, token="secret").run(Program("print(1)"))
    assert result.status is Status.INFRASTRUCTURE


async def test_a_remote_sandbox_cannot_leave_tests_out() -> None:
    short = Result(Status.OK, Isolation.FULL)
    with LocalSandbox() as local, serving(local, [f"200 {json.dumps(short.to_json())}"] * 3) as url:
        tests = Tests(("assert add(1, 2) == 3",), entries=("add",))
        result = await HttpSandbox(url, token="secret").run(Program(ADD, tests=tests))
    assert result.status is Status.INFRASTRUCTURE


async def test_a_server_that_is_not_there_is_no_verdict() -> None:
    result = await HttpSandbox("http://127.0.0.1:9/run", attempts=1).run(Program("print(1)"))
    assert result.status is Status.INFRASTRUCTURE
