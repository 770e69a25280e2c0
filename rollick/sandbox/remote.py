"""HttpSandbox: programs run on another machine, behind the same protocol.

    POST URL   {"code", "stdin", "limits": {...}, "tests": null | {...}}
    200        {"status", "isolation", "stdout", "stderr", "exit_code", "seconds", "outcomes", ...}

The answer is Result.to_json. A server that does not answer, or answers something else, is a failure
of infrastructure; it is tried again a few times, because running a program twice does no harm.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from rollick.sandbox import wire
from rollick.sandbox.base import Call, Isolation, Limits, Program, Result, Status, Tests

MAX_ANSWER = 64 << 20
ANSWER_SECONDS = 30.0
"""Beyond the program's own time: for the way there and back and for a box to be free."""
FIRST_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class HttpSandbox:
    """A sandbox server. The isolation that it reports is taken at its word: choose it with care."""

    url: str
    token: str = ""
    """Sent as a bearer token, where not empty."""
    attempts: int = 3

    async def run(self, program: Program) -> Result:
        """Waits for the server; a failure of it is a Result with INFRASTRUCTURE."""
        problem = ""
        for attempt in range(self.attempts):
            if attempt:
                # Jitter: many programs that failed together must not come back together.
                await asyncio.sleep(FIRST_PAUSE_S * 2**attempt * random.random())
            try:
                return await asyncio.to_thread(self._post, program)
            except (OSError, ValueError, KeyError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    break  # asked wrongly: the same question gets the same answer
        detail = f"the sandbox at {self.url} failed: {problem}"
        return Result(Status.INFRASTRUCTURE, Isolation.NONE, detail=detail)

    def _post(self, program: Program) -> Result:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        body = json.dumps(program_to_json(program)).encode()
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        timeout_s = program.limits.wall_s + ANSWER_SECONDS
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            content = answer.read(MAX_ANSWER + 1)
        if len(content) > MAX_ANSWER:
            raise ValueError(f"the answer has more than {MAX_ANSWER} bytes")
        result = Result.from_json(json.loads(content))
        wanted = 0 if program.tests is None or program.tests.module else len(program.tests.cases)
        if result.status is Status.OK and len(result.outcomes) < wanted:
            raise ValueError(f"{len(result.outcomes)} outcomes for {wanted} tests")
        return result


def program_to_json(program: Program) -> dict[str, Any]:
    """JSON keeps no tuples and no sets: the data of calls go as the encoding between boxes."""
    tests = program.tests
    said: dict[str, Any] = {
        "code": program.code,
        "stdin": program.stdin,
        "limits": asdict(program.limits),
        "tests": None,
    }
    if tests is not None:
        cases = [
            case
            if isinstance(case, str)
            else {
                "call": wire.encode([case.entry, case.args, dict(case.kwargs), case.expected]).hex()
            }
            for case in tests.cases
        ]
        said["tests"] = {
            "cases": cases,
            "setup": tests.setup,
            "entries": list(tests.entries),
            "module": tests.module,
            "shared": tests.shared,
        }
    return said


def program_from_json(said: Mapping[str, Any]) -> Program:
    """For servers. ValueError, KeyError or TypeError if it is not what a client sends."""
    tests = None
    if said["tests"] is not None:
        given = cast("Mapping[str, Any]", said["tests"])
        tests = Tests(
            cases=tuple(_case_from_json(case) for case in given["cases"]),
            setup=str(given["setup"]),
            entries=tuple(map(str, given["entries"])),
            module=str(given["module"]),
            shared=given["shared"] is True,
        )
    return Program(str(said["code"]), str(said["stdin"]), Limits(**said["limits"]), tests)


def _case_from_json(case: Any) -> str | Call:
    if isinstance(case, str):
        return case
    entry, args, kwargs, expected = wire.decode(bytes.fromhex(case["call"]))
    return Call(entry, args, expected, kwargs)
