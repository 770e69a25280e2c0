"""HttpSandbox: runs programs on another machine, behind the Sandbox protocol.

    POST URL   {"code", "stdin", "limits": {...}, "tests": null | {...}}
    200        {"status", "isolation", "stdout", "stderr", "exit_code", "seconds", "outcomes", ...}

The response is Result.to_json. After an invalid response, and after the HTTP statuses 408, 429 and
5xx, the request is sent again, up to `attempts` times in all (a program may run twice). Then the
Result has the status INFRASTRUCTURE. A server that cannot be reached, or whose proxy reports that,
is tried until the deadline; then the status is UNAVAILABLE. A redirect is not followed: it would
send the token and the program to another server.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from rollick.sandbox import wire
from rollick.sandbox.base import CallCase, Limits, Program, Result, Status, Tests

MAX_RESPONSE = 64 << 20
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 4.0
RETRIED_STATUSES = (408, 429)
"""HTTP statuses below 500 after which the same request may succeed."""
UNAVAILABLE_STATUSES = (502, 503, 504)
"""HTTP statuses of a proxy whose server does not answer."""
FAILURES = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError)
"""What a broken connection or an invalid response raises."""
_executor = ThreadPoolExecutor(64, thread_name_prefix="sandbox")
"""Sends the requests. The threads of `asyncio.to_thread` are too few on a small machine: programs
that wait for one would reach their time limit."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Returns None, so that the redirect raises HTTPError like other statuses."""


_OPENER = urllib.request.build_opener(_NoRedirect)


@dataclass(frozen=True, slots=True)
class HttpSandbox:
    """Client of a sandbox server. The isolation that the server reports is not verified."""

    url: str
    token: str = ""
    """Sent as a bearer token if not empty."""
    attempts: int = 3
    response_s: float = 12.0
    """Added to the program's wall_s, for all attempts together: time for the network and to wait
    for a free box. The sum must be below rewards.timeout_s."""

    async def run(self, program: Program) -> Result:
        """Run the program on the server. If the server fails, the status is INFRASTRUCTURE; if it
        does not answer, UNAVAILABLE."""
        limit_s = program.limits.wall_s + self.response_s
        deadline, pause_s, num_failed = time.monotonic() + limit_s, FIRST_PAUSE_S, 0
        request = Future[Result]()
        problem = f"no response within {limit_s:g} s"
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while num_failed < self.attempts:
                    try:
                        request = _executor.submit(self._post, program, deadline)
                        return await asyncio.wrap_future(request)
                    except FAILURES as error:
                        problem = f"{type(error).__name__}: {error}"
                        num_failed += 0 if _is_unavailable(error) else 1
                        if isinstance(error, urllib.error.HTTPError):
                            error.close()
                            if error.code < 500 and error.code not in RETRIED_STATUSES:
                                break  # a retry would fail as well
                    # Jitter: requests that failed together must not retry together.
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)
                    await asyncio.sleep(pause_s * random.random())
        was_queued = request.cancel()  # false after its start: then the server is to blame
        status = Status.INFRASTRUCTURE if num_failed or was_queued else Status.UNAVAILABLE
        return Result.not_run(f"the sandbox at {self.url} failed: {problem}", status=status)

    def _post(self, program: Program, deadline: float) -> Result:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        body = json.dumps(program_to_json(program)).encode()
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        timeout_s = max(0.1, deadline - time.monotonic())
        with _OPENER.open(request, timeout=timeout_s) as response:
            content = response.read(MAX_RESPONSE + 1)
        if len(content) > MAX_RESPONSE:
            raise ValueError(f"the response has more than {MAX_RESPONSE} bytes")
        result = Result.from_json(json.loads(content))
        expected = 0 if program.tests is None or program.tests.module else len(program.tests.cases)
        if result.status is Status.OK and len(result.outcomes) < expected:
            raise ValueError(f"{len(result.outcomes)} outcomes for {expected} tests")
        return result


def _is_unavailable(error: Exception) -> bool:
    """Whether the server did not answer, or a proxy answered for it."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in UNAVAILABLE_STATUSES
    return isinstance(error, OSError)


def program_to_json(program: Program) -> dict[str, Any]:
    """The request body. wire.py encodes a CallCase, because JSON has no tuples and sets."""
    fields: dict[str, Any] = asdict(replace(program, tests=None))
    if program.tests is not None:
        cases = [_case_to_json(case) for case in program.tests.cases]
        fields["tests"] = {**asdict(replace(program.tests, cases=())), "cases": cases}
    return fields


def _case_to_json(case: str | CallCase) -> str | dict[str, str]:
    if isinstance(case, str):
        return case
    return {"call": wire.encode([case.entry, case.args, dict(case.kwargs), case.expected]).hex()}


def program_from_json(fields: Mapping[str, Any]) -> Program:
    """Parse a request, in a server. An invalid one raises ValueError, KeyError or TypeError."""
    tests = None
    if fields["tests"] is not None:
        values = cast("Mapping[str, Any]", fields["tests"])
        tests = Tests(
            cases=tuple(_case_from_json(case) for case in values["cases"]),
            setup=str(values["setup"]),
            entries=tuple(map(str, values["entries"])),
            module=str(values["module"]),
            shared=values["shared"] is True,
        )
    return Program(str(fields["code"]), str(fields["stdin"]), Limits(**fields["limits"]), tests)


def _case_from_json(case: Any) -> str | CallCase:
    if isinstance(case, str):
        return case
    entry, args, kwargs, expected = wire.decode(bytes.fromhex(case["call"]))
    return CallCase(entry, args, expected, kwargs)
