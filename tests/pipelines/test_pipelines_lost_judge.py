"""A judge whose process is killed: it is restarted, and its requests are made again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollick.config.load import LoadedRecipe
from rollick.observe.faults import read_faults
from rollick.pipelines.open_run import open_run

Toy = Callable[..., LoadedRecipe]
LETTERS = {"source": "rollick.testing.toys:letter_rows", "rewards": ["judge"]}
REQUEST = {"model": "judge", "messages": [{"role": "user", "content": "a"}], "max_tokens": 40}


@pytest.mark.timeout(180)
async def test_a_judge_killed_on_ray_answers_the_same_request_from_a_new_process(
    toy: Toy, tiny_folder: Path
) -> None:
    httpx = pytest.importorskip("httpx", reason="the extra rewards is not installed")
    loaded = toy(
        "cluster.backend=ray",
        data={"domains": {"letters": LETTERS}},
        judge={"path": str(tiny_folder)},
        devices={"judge": "cpu:1"},
    )
    async with open_run(loaded) as run:
        judge, endpoint = run.roles.judge, run.scoring.judge
        assert endpoint is not None
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        async with httpx.AsyncClient(headers=headers, timeout=120) as client:
            posting = client.post(f"{endpoint.base_url}/chat/completions", json=REQUEST)
            asking = asyncio.create_task(posting)
            while not judge.engines[0].pending:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            host = judge.group.device_map.host_of("judge", 0)
            transport: Any = judge.group.transport
            os.kill(transport.processes[host.index].pid, signal.SIGKILL)
            reply = await asking
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"]
        folder = run.state.folder.path
    [fault] = [fault for fault in read_faults(folder) if fault.role == "judge"]
    assert fault.kind == "killed"
    assert fault.rejoined_at is not None
