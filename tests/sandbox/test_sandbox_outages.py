"""A sandbox server behind a network that fails. A short outage loses no result. A long outage gives
the status UNAVAILABLE before the time limit of the reward."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from proxy import Proxy

from rollick.config.rules.run import SANDBOX_RESPONSE_S
from rollick.config.schema.run import RewardsConfig
from rollick.rewards.code import CodeSettings, score_code
from rollick.sandbox.base import Isolation, Limits, Program, Result, Status, TestOutcome
from rollick.sandbox.remote import HttpSandbox
from rollick.types import ScoreStatus

PASSED = Result(Status.OK, Isolation.FULL, stdout="1\n", outcomes=(TestOutcome(True),))


@contextmanager
def run_server_behind_proxy(*, delay_s: float = 0.0) -> Iterator[Proxy]:
    """Run a server on which every program passes its test, behind a proxy."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(PASSED.to_json()).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        with Proxy(server.server_port, delay_s=delay_s) as proxy:
            yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def run(proxy: Proxy, *, response_s: float) -> Result:
    remote = HttpSandbox(f"http://127.0.0.1:{proxy.port}/run", attempts=1, response_s=response_s)
    return await remote.run(Program("print(1)", limits=Limits(wall_s=0.5)))


@pytest.mark.parametrize("fault", ["refuse", "hold"])
async def test_an_outage_that_is_shorter_than_the_time_limit_costs_no_result(fault: str) -> None:
    with run_server_behind_proxy() as proxy:
        getattr(proxy, fault)()
        running = asyncio.create_task(run(proxy, response_s=30))
        await asyncio.sleep(1)
        assert not running.done()
        await asyncio.to_thread(proxy.restore)
        assert await running == PASSED


@pytest.mark.parametrize("fault", ["refuse", "hold"])
async def test_a_server_that_does_not_answer_is_unavailable_at_the_time_limit(fault: str) -> None:
    with run_server_behind_proxy() as proxy:
        getattr(proxy, fault)()
        begun = time.monotonic()
        result = await run(proxy, response_s=0.5)
        assert 0.9 < time.monotonic() - begun < 10
    assert (result.status, result.status.is_conclusive) == (Status.UNAVAILABLE, False)
    assert result.detail.startswith(f"the sandbox at http://127.0.0.1:{proxy.port}/run failed: ")


async def test_a_late_network_only_delays_the_result() -> None:
    with run_server_behind_proxy(delay_s=0.2) as proxy:
        assert await run(proxy, response_s=20) == PASSED
    assert proxy.connections == 1


async def test_programs_that_reach_their_time_limit_do_not_wait_for_the_threads_of_asyncio() -> (
    None
):
    with ThreadPoolExecutor(1) as executor, run_server_behind_proxy(delay_s=0.3) as proxy:
        asyncio.get_running_loop().set_default_executor(executor)
        programs = (run(proxy, response_s=5) for _ in range(16))
        assert await asyncio.gather(*programs) == 16 * [PASSED]


async def test_a_program_that_is_not_sent_in_time_says_nothing_about_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ThreadPoolExecutor(1) as executor, run_server_behind_proxy() as proxy:
        monkeypatch.setattr("rollick.sandbox.remote._executor", executor)
        is_over = threading.Event()
        executor.submit(is_over.wait)
        result = await run(proxy, response_s=0.5)
        is_over.set()
    assert (result.status, proxy.connections) == (Status.INFRASTRUCTURE, 0)


def test_by_default_the_server_gives_up_before_the_reward_process_is_killed() -> None:
    limit_s = CodeSettings().timeout_s + HttpSandbox("").response_s
    assert limit_s < RewardsConfig().timeout_s
    assert HttpSandbox("").response_s == SANDBOX_RESPONSE_S


async def test_the_score_of_a_program_whose_server_is_lost_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollick.rewards.code.HttpSandbox", partial(HttpSandbox, response_s=0.2))
    with run_server_behind_proxy() as proxy:
        proxy.hold()
        settings = CodeSettings(url=f"http://127.0.0.1:{proxy.port}/run", timeout_s=0.3)
        score = await score_code("x = 1", {"test_list": ["assert x"]}, settings)
    assert (score.ok, score.status) == (False, ScoreStatus.UNAVAILABLE)
    assert f"unavailable: the sandbox at {settings.url} failed: no response" in score.detail
