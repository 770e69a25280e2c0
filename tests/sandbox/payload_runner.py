"""Runs every payload, one after another, and says what went wrong with each: a line of JSON.

A program of its own, so that the same payloads can be run as root and as an ordinary user:

    payload_runner.py [NAME ...]     ->     {"name": ..., "problems": [...], "status": ..., ...}

Around the boxes lie canaries that a payload would touch if it got out: a secret in the environment
and in a file that everybody can write, servers on the loopback and on unix sockets, a process.
After each payload they must be as before, no process of a box may be left, and the box that was
started before the payload ran, and waited beside it, must be clean.
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
from rollick.sandbox.host import UIDS_PER_PROCESS, uid_range
from rollick.sandbox.local import LocalSandbox
from rollick.sandbox.verdict import Case, check_cases

PAYLOADS = Path(__file__).parent / "payloads"
SHORT_S, LONG_S = 0.7, 10.0
CLEAN = "import os\nprint(sorted(os.listdir('/tmp')), sorted(os.listdir('/dev')), os.getpid() == 1)"


@dataclass
class Canaries:
    """What a payload must not reach."""

    folder: Path
    secret: str
    victim: subprocess.Popen[bytes]
    server: socket.socket
    name: str
    visits: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.getsockname()[1]

    def fill(self, code: str) -> str:
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
def canaries() -> Iterator[Canaries]:
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
        watched = Canaries(folder, secret, victim, servers[0], secret)
        for server in servers:
            server.listen()
            threading.Thread(target=watch, args=(server, watched.visits), daemon=True).start()
        try:
            yield watched
        finally:
            victim.kill()
            victim.wait()
            for server in servers:
                server.close()


def watch(server: socket.socket, visits: list[str]) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()
            visits.append(str(server.getsockname()))


@dataclass(frozen=True)
class Payload:
    """A program that tries to get out, or a candidate that tries to forge a pass."""

    name: str
    role: str
    ends: tuple[str, ...]
    code: str

    @classmethod
    def read(cls, path: Path) -> Payload:
        code = path.read_text()
        found = re.match(r"# role: (\w+)\n# ends: ([\w ]+)\n", code)
        assert found, path
        return cls(path.stem, found[1], tuple(found[2].split()), code)


async def run(sandbox: LocalSandbox, payload: Payload, code: str, secrets: list[int]) -> Result:
    limits = Limits(wall_s=SHORT_S if "timeout" in payload.ends else LONG_S)
    if payload.role == "program":
        return await sandbox.run(Program(code, limits=limits))
    if payload.role == "cases":
        cases = [Case(str(number), str(secret)) for number, secret in enumerate(secrets)]
        verdict = await check_cases(sandbox, code, cases=cases, limits=limits)
        return Result(verdict.status, verdict.isolation, outcomes=verdict.outcomes)
    asserts = [f"assert answer({number}) == {secret}" for number, secret in enumerate(secrets)]
    if payload.role == "pytest":
        tests = [f"def test_{number}():\n    {text}\n" for number, text in enumerate(asserts)]
        whole = Tests(("from solution import answer\n" + "\n".join(tests),), module="solution")
    else:
        whole = Tests(tuple(asserts), entries=("answer",))
    return await sandbox.run(Program(code, limits=limits, tests=whole))


async def judge(sandbox: LocalSandbox, payload: Payload, watched: Canaries) -> dict[str, object]:
    problems: list[str] = []
    secrets = [random.randrange(10**8, 10**9) for _ in range(3)]
    result = await run(sandbox, payload, watched.fill(payload.code), secrets)
    if strangers := left_behind(sandbox, watched.victim.pid):
        problems.append(f"processes were left behind: {strangers}")
    if str(result.status) not in payload.ends:
        problems.append(f"it ended as {result.status}, not as {payload.ends}: {result.detail}")
    if "ESCAPED" in result.stdout or watched.secret in result.stdout + result.stderr:
        problems.append("it got out")
    if payload.role == "program" and payload.ends == ("ok",) and "held" not in result.stdout:
        problems.append("it did not come to its point")
    if payload.role != "program":
        if any(outcome.passed for outcome in result.outcomes) or not result.outcomes:
            problems.append(f"a pass was forged: {result.outcomes}")
        if any(str(secret) in result.stdout for secret in secrets):
            problems.append("it found what the tests expect")
    problems += watched.problems()
    after = await sandbox.run(Program(CLEAN))
    if (
        after.status is not Status.OK
        or not after.stdout.startswith("[] ")
        or "TRAPPED" in after.stdout
    ):
        problems.append(f"the next box was not clean: {after}")
    if problems:
        problems.append(f"{result.stdout[-1000:]} {result.stderr[-1000:]}")
    return {
        "name": payload.name,
        "problems": problems,
        "status": result.status,
        "isolation": result.isolation,
        "seconds": round(result.seconds, 3),
        "uid": os.getuid(),
    }


def left_behind(sandbox: LocalSandbox, victim: int) -> list[str]:
    """Processes with a uid of the boxes (of root's) or of this user, apart from waiting boxes."""
    if os.getuid() == 0:
        first, size = uid_range(Path("/proc/self/uid_map").read_text())
        begin = first + os.getpid() * UIDS_PER_PROCESS % size
        ours = range(begin, begin + UIDS_PER_PROCESS)
    else:
        ours = range(os.getuid(), os.getuid() + 1)
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{int(entry)}/status").read_text()
            parents[int(entry)] = int(re.search(r"^PPid:\s+(\d+)", status, re.M)[1])
            if int(re.search(r"^Uid:\s+(\d+)", status, re.M)[1]) in ours:
                lines[int(entry)] = " ".join(status.split()[:4])
    waiting = {box.process.pid for box in sandbox._waiting}
    allowed = {os.getpid(), victim}
    return [
        f"{pid} {line}"
        for pid, line in lines.items()
        if pid not in allowed and not in_family(pid, parents, waiting)
    ]


def in_family(pid: int, parents: dict[int, int], roots: set[int]) -> bool:
    while pid > 1:
        if pid in roots:
            return True
        pid = parents.get(pid, 0)
    return False


async def main(names: list[str]) -> None:
    paths = [path for path in sorted(PAYLOADS.glob("*.py")) if not names or path.stem in names]
    with canaries() as watched, LocalSandbox() as sandbox:
        for path in paths:
            report = await judge(sandbox, Payload.read(path), watched)
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
