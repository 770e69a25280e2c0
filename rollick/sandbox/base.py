"""The sandbox interface, which runs untrusted programs, and its data types.

    Program (code, input, limits, tests) -> Sandbox.run -> Result (status, output, outcomes)

A Result describes how a program ended; `run` never raises because of what a program does. Failures
of the sandbox have separate statuses (INFRASTRUCTURE, REFUSED, UNAVAILABLE), so that they do not
count against the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import inf
from typing import Any, Protocol, cast


class Status(StrEnum):
    """How a program ended. REFUSED, INFRASTRUCTURE and UNAVAILABLE are not the program's fault."""

    OK = "ok"
    """Exit code 0; with tests: all of them have run."""
    FAILED = "failed"
    """An exception, or another exit code."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    """By a signal."""
    REFUSED = "refused"
    """Not run: this machine lacks isolation, and `allow_unsafe` is not set."""
    INFRASTRUCTURE = "infrastructure"
    """The box could not be started or was lost, or the tests cannot run."""
    UNAVAILABLE = "unavailable"
    """The sandbox server did not answer."""

    @property
    def is_conclusive(self) -> bool:
        """Whether the status is about the program."""
        return self not in (Status.REFUSED, Status.INFRASTRUCTURE, Status.UNAVAILABLE)


class Isolation(StrEnum):
    FULL = "full"
    """All namespaces, seccomp, resource limits, and a temporary uid for each box."""
    USER = "user"
    """The same, but boxes run under the uid that runs rollick (not root)."""
    SHARED = "shared"
    """Isolated from the machine, but with the tests in the candidate's box: it can fake a pass."""
    NONE = "none"
    """Resource limits only: `allow_unsafe` on a machine without isolation."""


class MemoryLimit(StrEnum):
    """What enforces the memory limit of a box."""

    CGROUP = "cgroup"
    """The kernel, for all memory that the box causes."""
    POLLED = "polled"
    """rlimits for each process, and a measurement of the box every 0.1 s. Shared anonymous mappings
    and large socket buffers are denied, because no measurement sees them."""
    RLIMITS = "rlimits"
    """rlimits for each process only: without isolation."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The wall, output and total memory limits kill the box; the others are rlimits."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """CPU time of each process of the box."""
    memory_mb: int = 512
    """Address space of each process, and memory of all processes together (MemoryLimit)."""
    output_bytes: int = 1 << 20
    """Size of stdout and stderr together."""
    processes: int = 32
    """Processes and threads at once."""
    open_files: int = 128
    file_mb: int = 32
    """Size of the largest file; the sandbox sets the size of the disk."""


@dataclass(frozen=True, slots=True)
class CallCase:
    """A test case as data: the call must return a value that is equal to `expected` and has its
    type; int and float count as one type."""

    entry: str
    args: tuple[Any, ...]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a candidate. They run in another box, where the candidate cannot see them."""

    __test__ = False  # or pytest would collect the class

    cases: tuple[str | CallCase, ...]
    """Each is statements that raise on failure, a CallCase, or a pytest file with its tests."""
    setup: str = ""
    """Runs once before the cases; they see its definitions."""
    entries: tuple[str, ...] = ()
    """Names that the candidate defines and the tests use."""
    module: str = ""
    """Module name under which a pytest file imports the candidate; empty without a pytest file."""
    shared: bool = False
    """Run candidate and tests in one box, for arguments that are not plain data."""


@dataclass(frozen=True, slots=True)
class Program:
    """Code to run: a script with its input, or a candidate with tests."""

    code: str
    stdin: str = ""
    limits: Limits = Limits()
    tests: Tests | None = None


@dataclass(frozen=True, slots=True)
class TestOutcome:
    __test__ = False

    passed: bool
    message: str = ""

    @classmethod
    def from_json(cls, fields: Any) -> TestOutcome:
        if not isinstance(fields, Mapping):
            raise TypeError(f"an outcome must be an object, not {type(fields).__name__}")
        values = cast("Mapping[str, Any]", fields)
        return cls(values["passed"] is True, str(values.get("message", "")))


@dataclass(frozen=True, slots=True)
class Result:
    status: Status
    isolation: Isolation
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    """Wall-clock time since the box received the program."""
    outcomes: tuple[TestOutcome, ...] = ()
    """One for each test; a test that did not run has failed."""
    detail: str = ""
    memory_limit: MemoryLimit = MemoryLimit.RLIMITS

    @property
    def level(self) -> str:
        """Isolation and memory limit, for display."""
        return f"{self.isolation}, memory {self.memory_limit}"

    @property
    def passed(self) -> int:
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def pass_rate(self) -> float:
        return self.passed / len(self.outcomes) if self.outcomes else 0.0

    @property
    def all_passed(self) -> bool:
        """Whether every test passed and the tests ran to their end."""
        return self.status is Status.OK and self.pass_rate == 1.0

    @classmethod
    def not_run(cls, detail: str, *, status: Status = Status.INFRASTRUCTURE) -> Result:
        """A result for a failure of the tests or of the sandbox."""
        return cls(status, Isolation.NONE, detail=detail)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> Result:
        """The inverse of `to_json`. Invalid fields raise ValueError, KeyError or TypeError."""
        if not isinstance(fields, Mapping):
            raise TypeError(f"a result must be an object, not {type(fields).__name__}")
        values = cast("Mapping[str, Any]", fields)
        exit_code, seconds = values.get("exit_code"), float(values.get("seconds", 0.0))
        if not (exit_code is None or isinstance(exit_code, int)):
            raise ValueError(f"exit_code must be an integer, not {exit_code!r}")
        if not 0 <= seconds < inf:
            raise ValueError(f"seconds must be finite and at least 0, not {seconds}")
        return cls(
            status=Status(values["status"]),
            isolation=Isolation(values["isolation"]),
            **{name: str(values.get(name, "")) for name in ("stdout", "stderr", "detail")},
            exit_code=exit_code,
            seconds=seconds,
            outcomes=tuple(map(TestOutcome.from_json, values.get("outcomes", ()))),
            memory_limit=MemoryLimit(values.get("memory_limit", MemoryLimit.RLIMITS)),
        )


class Sandbox(Protocol):
    """Runs untrusted programs; `run` may be called concurrently."""

    async def run(self, program: Program) -> Result:
        """Run one program to its end. Never raises for what the program does."""
        ...
