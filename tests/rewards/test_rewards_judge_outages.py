"""The judge behind a network that fails: a short outage costs no score; a long one gives a failed
score with the reason, at the deadline of the batch."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the extra rewards is not installed")

from proxy import Proxy

from rollick.rewards.judge import judge
from rollick.types import Score, ScoreStatus


@asynccontextmanager
async def open_judge_proxy(status: int = 200, *, delay_s: float = 0.0) -> AsyncGenerator[Proxy]:
    """A proxy to a judge that scores every response 8 of 10. `status` is the HTTP status of its
    replies."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])  # pyright: ignore
        request = json.loads(await reader.readexactly(size))
        seal = re.search(r'"seal": "(\w+)"', request["messages"][0]["content"])[1]  # pyright: ignore
        verdict = json.dumps({"reason": "fine", "score": 8, "seal": seal})
        body = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with Proxy(server.sockets[0].getsockname()[1], delay_s=delay_s) as proxy:
            yield proxy


async def request_score(proxy: Proxy, *, timeout_s: float, **options: Any) -> Score:
    options = {"retries": 0, "url": f"http://127.0.0.1:{proxy.port}/v1", "model": "m", **options}
    [score] = await judge(["2+2?"], ["4"], [{}], timeout_s=timeout_s, **options)
    return score


@pytest.mark.parametrize("fault", ["refuse", "hold"])
async def test_an_outage_that_is_shorter_than_the_time_limit_costs_no_score(fault: str) -> None:
    async with open_judge_proxy() as proxy:
        getattr(proxy, fault)()
        task = asyncio.create_task(request_score(proxy, timeout_s=30, request_s=0.5))
        await asyncio.sleep(1.5)
        assert not task.done()
        await asyncio.to_thread(proxy.restore)
        score = await task
    assert (score.value, score.status) == (0.8, ScoreStatus.OK)
    assert score.metrics["retries"] > 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("refuse", "ConnectError: All connection attempts failed"), ("hold", "no response within")],
)
async def test_a_judge_that_does_not_answer_is_unavailable_at_the_time_limit(
    fault: str, reason: str
) -> None:
    async with open_judge_proxy() as proxy:
        getattr(proxy, fault)()
        started_at = time.monotonic()
        score = await request_score(proxy, timeout_s=1.5, request_s=0.5)
        assert 1.4 < time.monotonic() - started_at < 10
    assert (score.ok, score.status) == (False, ScoreStatus.UNAVAILABLE)
    limit = f"no verdict of http://127.0.0.1:{proxy.port}/v1 within 1.5 s"
    assert score.detail.startswith(f"1 of 1 votes failed: {limit}; {reason}")


async def test_a_late_network_only_delays_the_verdict() -> None:
    async with open_judge_proxy(delay_s=0.2) as proxy:
        score = await request_score(proxy, timeout_s=30, request_s=20)
    assert (score.value, score.metrics["requests"]) == (0.8, 1)


async def test_a_proxy_without_its_judge_is_unavailable_and_a_rejected_request_is_not() -> None:
    async with open_judge_proxy(503) as proxy:
        assert (await request_score(proxy, timeout_s=1)).status is ScoreStatus.UNAVAILABLE
        assert proxy.connections > 1
    async with open_judge_proxy(500) as proxy:
        assert (await request_score(proxy, timeout_s=20)).status is ScoreStatus.FAILED
        assert proxy.connections == 1


async def test_a_url_that_is_none_is_not_tried_again() -> None:
    [score] = await judge(["2+2?"], ["4"], [{}], url="localhost:80/v1", model="m", timeout_s=20.0)
    assert score.status is ScoreStatus.FAILED
    assert "is not a valid URL" in score.detail
