"""Sandbox: the seam behind which untrusted programs run, and the nouns that cross it.

    Program (code, input, limits, perhaps tests) -> Sandbox.run -> Result (status, output, outcomes)

What a program does is data: a Result says how it ended and never raises for it. A failure of the
sandbox itself is a status too (INFRASTRUCTURE, REFUSED), so that it is never taken for a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Status(StrEnum):
    """How a program ended. The last two say nothing about the program."""

    OK = "ok"
    """It ended by itself with exit code 0; with tests: they have been run to their end."""
    FAILED = "failed"
    """An exception, or another exit code."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    """By a signal."""
    REFUSED = "refused"
    """It was not run: this machine lacks layers of isolation, and nobody allowed to go without."""
    INFRASTRUCTURE = "infrastructure"
    """The box could not be started, or was lost; or the tests are broken by themselves."""

    @property
    def judged(self) -> bool:
        """Whether the program was run, so that its failure is its own."""
        return self not in (Status.REFUSED, Status.INFRASTRUCTURE)


class Isolation(StrEnum):
    """What stood between a program and everything else."""

    FULL = "full"
    """All namespaces, seccomp, limits, and a throw-away uid for each box."""
    USER = "user"
    """All of it, except that the boxes have the uid of whoever runs rollick (who is not root)."""
    SHARED = "shared"
    """The box holds, but tests and candidate were in one of them: a forged pass is possible."""
    NONE = "none"
    """Limits only: `allow_unsafe` on a machine without the layers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use. Beyond it, the box ends."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """For each process of the box."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all of them together."""
    output_bytes: int = 1 << 20
    """Of standard output and error together."""
    processes: int = 32
    """Processes and threads at once."""
    open_files: int = 128
    file_mb: int = 32
    """The largest file; the size of the whole disk is the sandbox's."""


@dataclass(frozen=True, slots=True)
class Call:
    """A test that is data: the entry is called with these arguments and must give `expected`."""

    entry: str
    args: tuple[Any, ...]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Tests:
    """What the candidate must pass. It runs where the candidate cannot see it."""

    __test__ = False  # for pytest, which collects classes of such names

    cases: tuple[str | Call, ...]
    """Each is one test: statements that raise if it fails, a Call, or a pytest file (`module`)."""
    setup: str = ""
    """Run once before them; what it defines they see."""
    entries: tuple[str, ...] = ()
    """Names that the candidate defines and the tests use."""
    module: str = ""
    """The name by which a pytest file imports the candidate; not empty: the case is such a file."""
    shared: bool = False
    """Run candidate and tests in one box: for arguments that are not data."""


@dataclass(frozen=True, slots=True)
class Program:
    """Code to run: as a script with its input, or as a candidate with tests."""

    code: str
    stdin: str = ""
    limits: Limits = Limits()
    tests: Tests | None = None


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """One test: whether it passed, and if not, why."""

    __test__ = False

    passed: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended."""

    status: Status
    isolation: Isolation
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    """From the moment that the box got the program."""
    outcomes: tuple[TestOutcome, ...] = ()
    """One for each test, where tests were asked for; a test that was not reached has failed."""
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Result:
        """ValueError, KeyError or TypeError if it is not what `to_json` gives."""
        outcomes: Sequence[Mapping[str, Any]] = said.get("outcomes", ())
        exit_code = said.get("exit_code")
        return cls(
            status=Status(said["status"]),
            isolation=Isolation(said["isolation"]),
            stdout=str(said.get("stdout", "")),
            stderr=str(said.get("stderr", "")),
            exit_code=None if exit_code is None else int(exit_code),
            seconds=float(said.get("seconds", 0.0)),
            outcomes=tuple(
                TestOutcome(item["passed"] is True, str(item.get("message", "")))
                for item in outcomes
            ),
            detail=str(said.get("detail", "")),
        )


class Sandbox(Protocol):
    """Runs untrusted programs. Any number of `run` may be under way at once."""

    async def run(self, program: Program) -> Result:
        """Run one program to its end. Raises nothing for what the program does."""
        ...
