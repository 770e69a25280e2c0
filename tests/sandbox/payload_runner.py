"""Runs each payload and prints its problems as a line of JSON.

This is a separate program, so that the same payloads can run as root and as an ordinary user:

    payload_runner.py [NAME ...]     ->     {"name": ..., "problems": [...], "status": ..., ...}

Canaries detect a payload that escapes: a secret in the environment and in a world-writable file,
servers on the loopback interface and on unix sockets, and a process. After each payload, the
canaries must be unchanged, no process of a box may remain, and the next box (idle until then) must
be clean.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollick.sandbox.base import Limits, Program, Result, Status, Tests
from rollick.sandbox.checks import ScriptCase, check_scripts
from rollick.sandbox.host import UIDS_PER_PROCESS, uid_range
from rollick.sandbox.local import LocalSandbox

PAYLOADS = Path(__file__).parent / "payloads"
SHORT_S, LONG_S = 0.7, 10.0
CLEAN = "import os\nprint(sorted(os.listdir('/tmp')), sorted(os.listdir('/dev')), os.getpid() == 1)"


@dataclass
class Canaries:
    """The secret, files, servers and process of the host that a payload must not reach."""

    folder: Path
    secret: str
    victim: subprocess.Popen[bytes]
    server: socket.socket
    name: str
    visits: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.getsockname()[1]

    def fill_placeholders(self, code: str) -> str:
        code = code.replace("CANARY_FOLDER", str(self.folder)).replace("CANARY_SOCKET", self.name)
        return code.replace("CANARY_PORT", str(self.port)).replace(
            "VICTIM_PID", str(self.victim.pid)
        )

    def problems(self) -> Iterator[str]:
        if self.victim.poll() is not None:
            yield "a process of the host was ended"
        if sorted(os.listdir(self.folder)) != ["secret", "socket"]:
            yield f"the folder of the host has changed: {os.listdir(self.folder)}"
        if (self.folder / "secret").read_text() != self.secret:
            yield "a file of the host has changed"
        if self.visits:
            yield f"a server of the host was reached: {self.visits}"


@contextlib.contextmanager
def start_canaries() -> Iterator[Canaries]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        secret = f"canary-{random.getrandbits(64):x}"
        os.environ["CANARY_TOKEN"] = secret
        (folder / "secret").write_text(secret)
        (folder / "secret").chmod(0o666)
        servers = [
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
        ]
        servers[1].bind("\0" + secret)
        servers[2].bind(str(folder / "socket"))
        victim = subprocess.Popen(
            ["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        canaries = Canaries(folder, secret, victim, servers[0], secret)
        for server in servers:
            server.listen()
            threading.Thread(
                target=record_visits, args=(server, canaries.visits), daemon=True
            ).start()
        try:
            yield canaries
        finally:
            victim.kill()
            victim.wait()
            for server in servers:
                server.close()


def record_visits(server: socket.socket, visits: list[str]) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()
            visits.append(str(server.getsockname()))


@dataclass(frozen=True)
class Payload:
    """A program that tries to get out, or a candidate that tries to forge a pass."""

    name: str
    role: str
    statuses: tuple[str, ...]
    code: str

    @classmethod
    def read(cls, path: Path) -> Payload:
        code = path.read_text()
        header = re.match(r"# role: (\w+)\n# ends: ([\w ]+)\n", code)
        assert header, path
        return cls(path.stem, header[1], tuple(header[2].split()), code)


async def run(sandbox: LocalSandbox, payload: Payload, code: str, secrets: list[int]) -> Result:
    limits = Limits(wall_s=SHORT_S if "timeout" in payload.statuses else LONG_S)
    if payload.role == "program":
        return await sandbox.run(Program(code, limits=limits))
    if payload.role == "cases":
        cases = [ScriptCase(str(number), str(secret)) for number, secret in enumerate(secrets)]
        result = await check_scripts(sandbox, code, cases=cases, limits=limits)
        return Result(result.status, result.isolation, outcomes=result.outcomes)
    return await sandbox.run(Program(code, limits=limits, tests=make_tests(payload.role, secrets)))


def make_tests(role: str, secrets: list[int]) -> Tests:
    """Tests that no candidate passes, because it does not know the secrets."""
    asserts = [f"assert answer({number}) == {secret}" for number, secret in enumerate(secrets)]
    if role == "pytest":
        return make_pytest_file(asserts)
    if role == "pytest_easy":  # only the last test is hard
        return make_pytest_file([*["assert answer(1) == 1"] * 40, asserts[0]])
    if role == "parametrized":
        file = "import pytest\nfrom solution import VALUES, answer\n"
        file += '@pytest.mark.parametrize("value", VALUES)\ndef test_answer(value):\n'
        return Tests((f"{file}    assert answer(value) == {secrets[0]}\n",), module="solution")
    if role == "setup":
        return Tests(tuple(asserts), "begin = answer(0)", entries=("answer",))
    if role == "mapped":
        pairs = list(enumerate(secrets))
        test = f"assert all(map(lambda pair: answer(pair[0]) == pair[1], {pairs}))"
        return Tests((test,), entries=("answer",))
    return Tests(tuple(asserts), entries=("answer",), shared=role == "shared")


def make_pytest_file(asserts: list[str]) -> Tests:
    tests = [f"def test_{number}():\n    {text}\n" for number, text in enumerate(asserts)]
    return Tests(("from solution import answer\n" + "\n".join(tests),), module="solution")


async def check_payload(
    sandbox: LocalSandbox, payload: Payload, canaries: Canaries
) -> dict[str, object]:
    problems: list[str] = []
    secrets = [random.randrange(10**8, 10**9) for _ in range(3)]
    result = await run(sandbox, payload, canaries.fill_placeholders(payload.code), secrets)
    if leftovers := find_leftover_processes(sandbox, canaries.victim.pid):
        problems.append(f"processes were left behind: {leftovers}")
    if str(result.status) not in payload.statuses:
        problems.append(f"it ended as {result.status}, not as {payload.statuses}: {result.detail}")
    if "ESCAPED" in result.stdout or canaries.secret in result.stdout + result.stderr:
        problems.append("it escaped")
    if payload.role == "program" and payload.statuses == ("ok",) and "held" not in result.stdout:
        problems.append("it did not run to its end")
    if payload.role in ("shared", "pytest_easy"):
        # A candidate that shares the box of the tests can forge a pass, but not extra outcomes.
        if result.all_passed or not 1 <= len(result.outcomes) <= 41:
            problems.append(f"all tests passed, or there are too many: {len(result.outcomes)}")
    elif payload.role != "program":
        if any(outcome.passed for outcome in result.outcomes) or not result.outcomes:
            problems.append(f"a pass was forged: {result.outcomes}")
        if any(str(secret) in result.stdout for secret in secrets):
            problems.append("it found what the tests expect")
    problems += canaries.problems()
    next_result = await sandbox.run(Program(CLEAN))
    if (
        next_result.status is not Status.OK
        or not next_result.stdout.startswith("[] ")
        or "TRAPPED" in next_result.stdout
    ):
        problems.append(f"the next box was not clean: {next_result}")
    if problems:
        problems.append(f"{result.stdout[-1000:]} {result.stderr[-1000:]}")
    return {
        "name": payload.name,
        "role": payload.role,
        "problems": problems,
        "status": result.status,
        "isolation": result.isolation,
        "seconds": round(result.seconds, 3),
        "uid": os.getuid(),
    }


def find_leftover_processes(sandbox: LocalSandbox, victim: int) -> list[str]:
    """Processes with a uid of the boxes (as root) or of this user, except idle boxes."""
    if os.getuid() == 0:
        first, size = uid_range(Path("/proc/self/uid_map").read_text())
        begin = first + os.getpid() * UIDS_PER_PROCESS % size
        uids = range(begin, begin + UIDS_PER_PROCESS)
    else:
        uids = range(os.getuid(), os.getuid() + 1)
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{int(entry)}/status").read_text()
            parents[int(entry)] = int(re.search(r"^PPid:\s+(\d+)", status, re.M)[1])
            if int(re.search(r"^Uid:\s+(\d+)", status, re.M)[1]) in uids:
                lines[int(entry)] = " ".join(status.split()[:4])
    idle_pids = {box.process.pid for box in sandbox._idle}
    guard = sandbox._starter._guard
    allowed = {os.getpid(), victim, guard.process.pid if guard else 0}
    return [
        f"{pid} {line}"
        for pid, line in lines.items()
        if pid not in allowed and not descends_from(pid, parents, idle_pids)
    ]


def descends_from(pid: int, parents: dict[int, int], roots: set[int]) -> bool:
    while pid > 1:
        if pid in roots:
            return True
        pid = parents.get(pid, 0)
    return False


async def main(names: list[str]) -> None:
    paths = [path for path in sorted(PAYLOADS.glob("*.py")) if not names or path.stem in names]
    with start_canaries() as canaries, LocalSandbox() as sandbox:
        for path in paths:
            report = await check_payload(sandbox, Payload.read(path), canaries)
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
