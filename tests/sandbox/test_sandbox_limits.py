"""Limits of memory, time and CPU: what enforces them, and one box does not starve another."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollick.sandbox.base import Isolation, Limits, MemoryLimit, Program, Result, Status
from rollick.sandbox.checks import ScriptCase, check_scripts
from rollick.sandbox.host import SandboxHost
from rollick.sandbox.layers import probe_layers
from rollick.sandbox.local import LocalSandbox
from rollick.sandbox.memory import (
    CPU_WEIGHT,
    NAME_PREFIX,
    VERSIONS,
    MemoryGroups,
    count_sockets,
    find_mounts,
    measure_memory,
    read_socket_bytes,
)

FORKS = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = b"x" * (150 << 20)
        time.sleep(60)
time.sleep(60)
"""


def test_the_memory_of_a_process_whose_first_thread_has_exited_is_measured() -> None:
    code = """
import ctypes, platform, threading, time
def fill():
    kept = b"x" * (60 << 20)
    print("filled", flush=True)
    time.sleep(60)
threading.Thread(target=fill).start()
number = (60, 93)[("x86_64", "aarch64").index(platform.machine())]
ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_long(0))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            sockets = count_sockets(process.pid) * read_socket_bytes()
            assert measure_memory(process.pid, 1 << 50) - sockets > 60 << 20
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("line", "version", "path", "folder"),
    [
        ("1 2 0:3 / /cg/memory rw - cgroup cgroup rw,memory", "cgroup", "/a/b", "/cg/memory/a/b"),
        ("1 2 0:3 /a /cg/memory rw - cgroup cgroup rw,memory", "cgroup", "/a/b", "/cg/memory/b"),
        ("1 2 0:3 / /cg/cpu rw - cgroup cgroup rw,cpu", "cgroup", "/a/b", None),
        ("1 2 0:3 / /cg rw shared:4 - cgroup2 cgroup2 rw", "cgroup2", "/user", "/cg/user"),
        ("1 2 0:3 /other /cg rw - cgroup2 cgroup2 rw", "cgroup2", "/user", None),
    ],
)
def test_the_folder_of_a_cgroup_is_found_by_its_mount(
    line: str, version: str, path: str, folder: str | None
) -> None:
    expected = [] if folder is None else [(Path(folder), version)]
    controllers = {"memory"} if version == "cgroup" else set[str]()
    assert list(find_mounts(line + "\n", version, path, controllers)) == expected


async def test_the_level_names_what_limits_the_memory(sandbox: LocalSandbox) -> None:
    result = await sandbox.run(Program("print(1)"))
    expected = MemoryLimit.POLLED if sandbox.host.memory is None else MemoryLimit.CGROUP
    assert result.memory_limit is expected
    assert result.level == f"{result.isolation}, memory {expected}"
    assert Result.from_json(result.to_json()) == result
    layers = await probe_layers()
    has_group = "memory cgroup" in layers.active
    assert (has_group, "memory cgroup" in layers.missing) == (
        expected is MemoryLimit.CGROUP,
        expected is MemoryLimit.POLLED,
    )


async def test_memory_is_limited_with_and_without_a_cgroup() -> None:
    for groups in {MemoryGroups.detect(), None}:
        host = SandboxHost.detect()
        host.memory = groups
        with LocalSandbox(warm=0, host=host) as sandbox:
            result = await sandbox.run(Program(FORKS))
        assert result.status is Status.MEMORY, result


async def test_without_a_cgroup_shared_anonymous_memory_is_denied() -> None:
    host = SandboxHost.detect()
    host.memory = None
    with LocalSandbox(warm=0, host=host) as sandbox:
        result = await sandbox.run(Program("import mmap; mmap.mmap(-1, 4096)"))
        zeros = await sandbox.run(Program("print(open('/dev/zero', 'rb').read(2))"))
    assert result.stderr.endswith("PermissionError: [Errno 1] Operation not permitted\n")
    assert (result.memory_limit, zeros.stdout) == (MemoryLimit.POLLED, "b'\\x00\\x00'\n")


def test_groups_are_removed_with_their_boxes_and_after_a_kill() -> None:
    groups = MemoryGroups.detect()
    if groups is None:
        pytest.skip("no memory cgroup can be had on this machine")
    ended = subprocess.Popen(["true"])
    ended.wait()
    parents = {groups.folder} if groups.cpu is None else {groups.folder, groups.cpu[0]}
    for parent in parents:
        (parent / f"{NAME_PREFIX}-{ended.pid}-0").mkdir()
    with LocalSandbox(warm=0) as sandbox:
        asyncio.run(sandbox.run(Program("print(1)")))
    for parent in parents:
        assert not list(parent.glob(f"{NAME_PREFIX}-{ended.pid}-*"))
        assert not list(parent.glob(f"{NAME_PREFIX}-{os.getpid()}-*"))


@pytest.mark.parametrize("version", ["cgroup", "cgroup2"])
def test_the_groups_of_all_boxes_have_one_cpu_weight(tmp_path: Path, version: str) -> None:
    """The folders imitate those of the kernel: version 1 has a folder for each controller."""
    memory, cpu = tmp_path / "memory", tmp_path / ("cpu" if version == "cgroup" else "memory")
    memory.mkdir()
    cpu.mkdir(exist_ok=True)
    groups = MemoryGroups(memory, VERSIONS[version], (cpu, version))
    file, weight = CPU_WEIGHT[version]
    for pid in (11, 12):
        groups.create(1 << 20).add(pid)
    members = [(each / "cgroup.procs").read_text() for each in sorted(cpu.iterdir())]
    assert members == ["11", "12"]
    assert [(each / file).read_text() for each in cpu.iterdir()] == [weight, weight]
    assert len(list(memory.iterdir())) == 2


async def test_a_running_box_is_in_its_cpu_group(sandbox: LocalSandbox) -> None:
    groups = sandbox.host.memory
    if groups is None or groups.cpu is None:
        pytest.skip("no memory cgroup can be had on this machine, or no cpu cgroup")
    run = asyncio.create_task(sandbox.run(Program("input()\nimport time; time.sleep(1)", "\n")))
    members: list[str] = []
    while not run.done() and not any(members):
        await asyncio.sleep(0.02)
        folders = list(groups.cpu[0].glob(f"{NAME_PREFIX}-{os.getpid()}-*"))
        members = [(folder / "cgroup.procs").read_text() for folder in folders]
    assert any(members)
    assert (await run).status is Status.OK


BUSY = """
import os, time
for _ in range(29):
    if os.fork() == 0:
        try:
            os.setsid()
        except OSError:
            pass
        break
end = time.monotonic() + 3.0
while time.monotonic() < end:
    pass
if os.getpid() == 1:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
times = os.times()
print(times.user + times.system + times.children_user + times.children_system)
"""
ALONE = """
import time
begin = time.monotonic()
while time.monotonic() < begin + 2.0:
    pass
print(time.process_time())
"""


AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
HAS_AUTOGROUP = AUTOGROUP.exists() and AUTOGROUP.read_text() == "1\n"


async def test_a_box_with_many_busy_processes_does_not_starve_another(
    sandbox: LocalSandbox,
) -> None:
    """On one CPU, each box gets half of it."""
    has_groups = sandbox.host.memory is not None and sandbox.host.memory.cpu is not None
    if not has_groups and not HAS_AUTOGROUP:
        pytest.skip("the scheduler does not divide the CPU by session")
    cpu = min(os.sched_getaffinity(0))
    pin = f"import os; os.sched_setaffinity(0, [{cpu}])\n"
    limits = Limits(wall_s=30.0)

    async def run(code: str, pause_s: float) -> float:
        await asyncio.sleep(pause_s)
        result = await sandbox.run(Program(pin + code, limits=limits))
        assert result.status is Status.OK, result
        return float(result.stdout.split()[-1])

    busy, alone = await asyncio.gather(run(BUSY, 0.0), run(ALONE, 0.3))
    assert alone > 0.2 * busy


async def test_all_cases_of_a_script_share_one_clock(sandbox: LocalSandbox) -> None:
    code = "import time\ntime.sleep(0.4 * int(input()))\nprint('done')"
    cases = [ScriptCase(seconds, "done") for seconds in ("0", "1", "9", "0", "0")]
    verdict = await check_scripts(sandbox, code, cases=cases, limits=Limits(wall_s=1.0))
    assert [outcome.passed for outcome in verdict.outcomes] == [True, True, False, False, False]
    assert verdict.status is Status.TIMEOUT
    assert verdict.seconds < 2.0
    assert "timeout" in verdict.outcomes[4].message


async def test_a_case_that_fails_leaves_its_time_to_the_others(sandbox: LocalSandbox) -> None:
    code = "value = int(input())\nprint(1 // value)"
    cases = [ScriptCase("0", "0"), ScriptCase("1", "1")]
    verdict = await check_scripts(sandbox, code, cases=cases)
    assert [outcome.passed for outcome in verdict.outcomes] == [False, True]
    assert verdict.isolation in (Isolation.FULL, Isolation.USER)
