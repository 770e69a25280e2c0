"""A sandbox behind HTTP: the same results, and INFRASTRUCTURE for invalid responses."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollick.sandbox.base import CallCase, Isolation, Limits, Program, Result, Status, Tests
from rollick.sandbox.local import LocalSandbox
from rollick.sandbox.remote import HttpSandbox, program_from_json

LEVEL = Isolation.FULL if os.geteuid() == 0 else Isolation.USER
ADD = "def add(a, b):\n    return a + b\n"


@contextmanager
def run_server(sandbox: LocalSandbox, replies: list[str]) -> Iterator[str]:
    """Run a server that sends each of `replies` once, then runs programs in the sandbox."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            assert self.headers["Authorization"] == "Bearer secret"
            if replies:
                status, content = replies.pop(0).split(" ", 1)
            else:
                result = asyncio.run(sandbox.run(program_from_json(json.loads(body))))
                status, content = "200", json.dumps(result.to_json())
            if status == "raw":
                self.wfile.write(content.encode())
                return
            self.send_response(int(status))
            if status.startswith("3"):
                self.send_header("Location", content)
            self.end_headers()
            self.wfile.write(content.encode())

        do_GET = do_POST  # a client that follows a redirect may change the method

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_remote_sandbox_gives_the_same_results(sandbox: LocalSandbox) -> None:
    with run_server(sandbox, []) as url:
        remote = HttpSandbox(url, token="secret")
        result = await remote.run(Program("print(input())", stdin="x"))
        calls = [
            CallCase("add", (1, 2), 3),
            CallCase("add", ((1,), (2,)), (1, 2)),
            CallCase("add", (1, 2), 4),
        ]
        verdict = await remote.run(Program(ADD, tests=Tests(tuple(calls))))
    assert (result.status, result.stdout, result.isolation) == (Status.OK, "x\n", LEVEL)
    assert [outcome.passed for outcome in verdict.outcomes] == [True, True, False]


@pytest.mark.parametrize("failures", [["500 broken", "200 garbage"], ["408 late", "429 busy"]])
async def test_a_failing_remote_sandbox_is_retried(
    sandbox: LocalSandbox, failures: list[str]
) -> None:
    with run_server(sandbox, failures) as url:
        result = await HttpSandbox(url, token="secret").run(Program("print(1)"))
    assert result.stdout == "1\n"


@pytest.mark.parametrize("status", ["301", "302", "303", "307", "308"])
async def test_a_redirect_does_not_carry_the_token_to_another_server(
    sandbox: LocalSandbox, status: str
) -> None:
    with (
        run_server(sandbox, visited := ["200 {}"]) as other,
        run_server(sandbox, unused := [f"{status} {other}"] * 2) as url,
    ):
        result = await HttpSandbox(url, token="secret").run(Program("print(1)"))
    assert (len(visited), len(unused)) == (1, 1)
    assert result.status is Status.INFRASTRUCTURE
    assert status in result.detail


@pytest.mark.parametrize(
    "answer",
    [
        "500 broken",
        "200 {}",
        "200 [1",
        "200 [1]",
        "200 null",
        f"200 {'[' * 100_000}",
        "raw garbage",
        "raw HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        '200 {"status": "great", "isolation": "full"}',
        '200 {"status": "ok", "isolation": "full", "exit_code": Infinity}',
        '200 {"status": "ok", "isolation": "full", "seconds": 1e999}',
        '200 {"status": "ok", "isolation": "full", "outcomes": [["passed"]]}',
    ],
    ids=lambda answer: answer[:60],
)
async def test_a_remote_sandbox_that_keeps_failing_is_not_conclusive(
    sandbox: LocalSandbox, answer: str
) -> None:
    attempts = 3 if answer.startswith("500") else 1
    with run_server(sandbox, [answer] * attempts) as url:
        remote = HttpSandbox(url, token="secret", attempts=attempts)
        result = await remote.run(Program("print(1)"))
    assert result.status is Status.INFRASTRUCTURE


async def test_a_remote_sandbox_cannot_omit_tests(sandbox: LocalSandbox) -> None:
    short = Result(Status.OK, Isolation.FULL)
    with run_server(sandbox, [f"200 {json.dumps(short.to_json())}"] * 3) as url:
        tests = Tests(("assert add(1, 2) == 3",), entries=("add",))
        result = await HttpSandbox(url, token="secret").run(Program(ADD, tests=tests))
    assert result.status is Status.INFRASTRUCTURE


async def test_a_missing_server_is_unavailable_and_not_conclusive() -> None:
    remote = HttpSandbox("http://127.0.0.1:9/run", response_s=0.5)
    result = await remote.run(Program("print(1)", limits=Limits(wall_s=0.5)))
    assert (result.status, result.status.is_conclusive) == (Status.UNAVAILABLE, False)
