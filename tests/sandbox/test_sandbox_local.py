"""Programs and tests in real boxes; a sandbox that refuses to run programs."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from rollick.sandbox.base import CallCase, Isolation, Limits, Program, Status, Tests
from rollick.sandbox.checks import (
    ScriptCase,
    check_asserts,
    check_scripts,
)
from rollick.sandbox.host import SandboxHost
from rollick.sandbox.layers import probe_layers
from rollick.sandbox.local import LocalSandbox

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
async def test_the_status_is_how_a_program_ended(
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


async def test_cpu_time_is_limited_separately_from_wall_time(sandbox: LocalSandbox) -> None:
    limits = Limits(wall_s=30.0, cpu_s=1)
    result = await sandbox.run(Program("while True: pass", limits=limits))
    assert result.status in (Status.TIMEOUT, Status.KILLED)
    assert result.seconds < 20


async def test_large_programs_and_inputs_arrive_completely(sandbox: LocalSandbox) -> None:
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


async def test_each_program_has_a_new_box(sandbox: LocalSandbox) -> None:
    code = "import os; print(os.listdir('/tmp')); open('/tmp/left', 'w').close()"
    results = [await sandbox.run(Program(code)) for _ in range(4)]
    assert [result.stdout for result in results] == ["[]\n"] * 4


async def test_a_box_does_not_import_modules_that_its_program_does_not_use(
    sandbox: LocalSandbox,
) -> None:
    """Each of these imports costs every check milliseconds; all of them, as much as the start of
    the interpreter."""
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


async def test_calls_are_compared_with_their_types(sandbox: LocalSandbox) -> None:
    calls = [
        CallCase("pair", (1,), (1, 1)),
        CallCase("pair", (1,), [1, 1]),
        CallCase("pair", (2,), (2.0, 2)),
    ]
    code = "def pair(x):\n    return (x, x)\n"
    verdict = await sandbox.run(Program(code, tests=Tests(tuple(calls))))
    assert [outcome.passed for outcome in verdict.outcomes] == [True, False, True]
    assert verdict.pass_rate == pytest.approx(2 / 3)
    assert verdict.isolation is LEVEL


async def test_types_inside_lists_tuples_sets_and_dicts_are_compared(
    sandbox: LocalSandbox,
) -> None:
    values = [[True], [1], (1, [True]), {"a": 1}, {1}, [1.0]]
    expected = [[1], [True], (1, [1]), {"a": True}, {True}, [1]]
    calls = [
        CallCase("same", (value,), other) for value, other in zip(values, expected, strict=True)
    ] + [CallCase("same", (value,), value) for value in values]
    code = "def same(x):\n    return x\n"
    verdict = await sandbox.run(Program(code, tests=Tests(tuple(calls))))
    passed = [outcome.passed for outcome in verdict.outcomes]
    assert passed == [False] * 5 + [True] + [True] * 6


async def test_asserts_are_counted_one_by_one(sandbox: LocalSandbox) -> None:
    asserts = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add('a', 'b') == 'ab'"]
    verdict = await check_asserts(sandbox, ADD, asserts=asserts)
    assert [outcome.passed for outcome in verdict.outcomes] == [True, False, True]
    assert not verdict.all_passed


async def test_a_hang_fails_the_tests_that_were_not_reached(sandbox: LocalSandbox) -> None:
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


async def test_invalid_tests_are_not_conclusive(sandbox: LocalSandbox) -> None:
    for asserts, setup in (
        (["assert add(1"], ""),
        (["assert add(1, 2) == 3"], "import nothing_at_all"),
    ):
        verdict = await check_asserts(sandbox, ADD, asserts=asserts, setup=setup, entries=["add"])
        assert not verdict.status.is_conclusive


async def test_tests_with_objects_run_in_one_box_and_report_shared_isolation(
    sandbox: LocalSandbox,
) -> None:
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
    tests = Tests((file,), module="solution")
    program = Program(ADD + "LIMIT = 3\n", limits=Limits(wall_s=60), tests=tests)
    verdict = await sandbox.run(program)
    assert [outcome.passed for outcome in verdict.outcomes] == [True, True, False, True]
    assert verdict.isolation is LEVEL


async def test_scripts_are_checked_by_their_output(sandbox: LocalSandbox) -> None:
    code = "a, b = map(int, input().split())\nprint(a + b)"
    cases = [ScriptCase("1 2", "3"), ScriptCase("2 2", "5"), ScriptCase("x", "y")]
    verdict = await check_scripts(sandbox, code, cases=cases)
    assert [outcome.passed for outcome in verdict.outcomes] == [True, False, False]


async def test_without_isolation_programs_are_refused() -> None:
    host = SandboxHost(Isolation.NONE, "bwrap is not installed")
    with LocalSandbox(host=host) as sandbox:
        result = await sandbox.run(Program("print(1)"))
        verdict = await check_asserts(sandbox, ADD, asserts=["assert add(1, 2) == 3"])
    assert (result.status, result.stdout) == (Status.REFUSED, "")
    assert "allow_unsafe" in result.detail
    assert not verdict.status.is_conclusive
    assert not verdict.all_passed


async def test_a_kernel_that_forbids_boxes_is_detected_and_reported(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    host = SandboxHost(Isolation.USER, bwrap=str(broken), sources={"prefix": sys.base_prefix})
    with LocalSandbox(host=host) as sandbox:
        result = await sandbox.run(Program("print(1)"))
    assert result.status is Status.REFUSED
    assert "No permissions" in result.detail


async def test_allow_unsafe_runs_and_every_result_reports_it() -> None:
    host = SandboxHost(Isolation.NONE, "bwrap is not installed")
    with LocalSandbox(host=host, allow_unsafe=True) as sandbox:
        result = await sandbox.run(Program("print(1)"))
        verdict = await check_asserts(sandbox, ADD, asserts=["assert add(1, 2) == 3"])
    assert (result.status, result.stdout, result.isolation) == (Status.OK, "1\n", Isolation.NONE)
    assert (verdict.all_passed, verdict.isolation) == (True, Isolation.NONE)


async def test_the_isolation_layers_are_probed() -> None:
    layers = await probe_layers()
    assert layers.isolation is LEVEL, layers
    assert {"seccomp", "limits", "read-only system", "no /proc"} <= set(layers.active)
