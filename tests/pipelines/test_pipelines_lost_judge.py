"""A judge whose process is killed: it is restarted, and its requests are retried."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollick import RunResult, run_recipe
from rollick.config.load import LoadedRecipe
from rollick.observe.faults import read_faults
from rollick.observe.metrics import read_metrics
from rollick.pipelines.judge import JudgeRestarter
from rollick.pipelines.open_run import open_run
from rollick.roles.engines import EngineGroup
from rollick.testing.tiny import save_tiny, tiny_tokenizer
from rollick.types import Completion, Request, StopReason

Toy = Callable[..., LoadedRecipe]
LETTERS = {"source": "rollick.testing.toys:letter_rows", "rewards": ["judge"]}
REQUEST = {"model": "judge", "messages": [{"role": "user", "content": "a"}], "max_tokens": 40}
LONG_TIMEOUTS = {"max_tokens": 8, "timeout_s": 100, "request_s": 90}
NOT_REPRODUCIBLE = ("time/", "speed/", "controller/", "memory/", "reward/seconds/")


def kill(judge: EngineGroup) -> None:
    host = judge.group.device_map.host_of("judge", 0)
    transport: Any = judge.group.transport
    os.kill(transport.processes[host.index].pid, signal.SIGKILL)


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
            coroutine = client.post(f"{endpoint.base_url}/chat/completions", json=REQUEST)
            reply_task = asyncio.create_task(coroutine)
            while not judge.engines[0].pending:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            kill(judge)
            reply = await reply_task
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"]
        folder = run.state.folder.path
    [fault] = [fault for fault in read_faults(folder) if fault.role == "judge"]
    assert fault.kind == "killed"
    assert fault.rejoined_at is not None


class ScriptedVerdicts:
    """Replaces each reply of the judge by a scripted verdict, because a tiny model gives none. The
    judge still generates the reply. Kills the judge's process during request `kill_at`."""

    def __init__(self, *, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.requests = 0
        self._tokenizer = tiny_tokenizer(string.printable)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        generate = JudgeRestarter.generate

        async def generate_verdict(judge: JudgeRestarter, request: Request) -> Completion:
            self.requests += 1
            completion_task = asyncio.create_task(generate(judge, request))
            if self.requests == self.kill_at:
                while not judge.group.engines[0].pending:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                kill(judge.group)
            return self._verdict(request, await completion_task)

        monkeypatch.setattr(JudgeRestarter, "generate", generate_verdict)

    def _verdict(self, request: Request, completion: Completion) -> Completion:
        prompt = self._tokenizer.decode(request.token_ids)
        seal = re.search(r'"seal": "(\w+)"', prompt)
        response = re.search(r"<<<(\w+) RESPONSE\n(.*)\n\1 RESPONSE>>>", prompt, re.DOTALL)
        assert seal is not None
        assert response is not None
        verdict = {"reason": "", "score": sum(map(ord, response[2])) % 11, "seal": seal[1]}
        ids = np.asarray(self._tokenizer.encode(json.dumps(verdict)), np.int32)
        return replace(
            completion,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            stop=StopReason.STOP,
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_judge_is_killed_while_it_scores_ends_with_the_same_weights(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path, alphabet=string.printable)

    def run(*, kill_at: int | None) -> RunResult:
        verdicts = ScriptedVerdicts(kill_at=kill_at)
        with monkeypatch.context() as patch:
            verdicts.install(patch)
            result = run_recipe(
                toy(
                    "run.deterministic=true",
                    "cluster.backend=ray",
                    "rewards.timeout_s=120",
                    data={"domains": {"letters": LETTERS | {"rewards": [judge]}}},
                    judge={"path": str(folder)},
                    devices={"judge": "cpu:1"},
                    steps=3,
                )
            )
        assert verdicts.requests > (kill_at or 0)
        return result

    judge = {"name": "judge", "options": LONG_TIMEOUTS}
    without_fault, with_fault = run(kill_at=None), run(kill_at=10)
    [fault] = [fault for fault in read_faults(with_fault.folder) if fault.role == "judge"]
    assert fault.kind == "killed"
    assert fault.rejoined_at is not None
    assert read_learner_files(with_fault) == read_learner_files(without_fault)
    assert read_metric_rows(with_fault) == read_metric_rows(without_fault)
    assert any(row["score/mean"] > 0 for row in read_metric_rows(without_fault))


def read_metric_rows(result: RunResult) -> list[dict[str, float]]:
    """The metrics of each step, without those that depend on time and machine."""
    rows = read_metrics(result.folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(NOT_REPRODUCIBLE)} for row in rows]


def read_learner_files(result: RunResult) -> dict[str, bytes]:
    newest = sorted((result.folder / "checkpoints").glob("step-*"))[-1]
    files = (path for path in (newest / "learner").rglob("*") if path.is_file())
    return {path.name: path.read_bytes() for path in files}
