"""The vLLM engine when vLLM hangs, dies or miscounts.

These tests use a fake client; those with the real one are in test_infer_vllm.py.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollick.config.schema import InferConfig
from rollick.errors import EngineError, EngineLost, WeightError
from rollick.infer.engine import StopRules
from rollick.infer.vllm import client as client_module
from rollick.infer.vllm import engine as engine_module
from rollick.infer.vllm import weight_staging
from rollick.infer.vllm.engine import VllmEngine
from rollick.infer.vllm.request import VllmRequest
from rollick.infer.vllm.weight_staging import choose_folder, remove_leftovers, stage_file
from rollick.infer.vllm.worker import read_bundle
from rollick.models.loading.fingerprint import fingerprint
from rollick.testing.tiny import tiny_model, tiny_tokenizer
from rollick.types import PolicyVersion, Request, SampleId, Sampling, StopReason, frozen_array

MODEL = tiny_model(len(tiny_tokenizer()), seed=0)


def make_output(tokens: list[int], logprobs: list[float], finish: str | None = None) -> Any:
    """An output of vLLM."""
    part = SimpleNamespace(
        token_ids=tokens, logprobs=SimpleNamespace(logprobs=logprobs), finish_reason=finish
    )
    return SimpleNamespace(outputs=[part], metrics=None)


class FakeClient:
    """The part of vLLM's AsyncLLM that the engine uses. Each segment yields `outputs` and waits; an
    aborted segment then yields `last`. `hanging` is the name of a method that never returns."""

    def __init__(self, *outputs: Any, last: Any = None, hanging: str = "") -> None:
        self.outputs = outputs
        self.last = last or make_output([], [], "abort")
        self.hanging = hanging
        self.errored = False
        self.started: list[str] = []
        self.ended: dict[str, asyncio.Event] = {}
        self.files: list[bool] = []
        self.loaded = ""

    async def generate(self, prompt: Any, params: Any, part: str) -> AsyncGenerator[Any]:
        ended = self.ended[part] = asyncio.Event()
        for output in self.outputs:
            yield output
        self.started.append(part)
        await ended.wait()
        yield self.last

    async def abort(self, parts: list[str]) -> None:
        await self._hang_if_chosen("abort")
        for part in parts:
            if part in self.ended:
                self.ended[part].set()

    async def pause_generation(self, **options: Any) -> None:
        await self._hang_if_chosen("pause")

    async def resume_generation(self) -> None: ...

    async def sleep(self, level: int) -> None:
        await self._hang_if_chosen("sleep")

    async def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[str]:
        for path in args:
            self.files.append(Path(path).exists())  # noqa: ASYNC240
            self.loaded = fingerprint(read_bundle(path))
        await self._hang_if_chosen(method)
        return [self.loaded]

    async def _hang_if_chosen(self, method: str) -> None:
        if method == self.hanging:
            await asyncio.Event().wait()

    def shutdown(self) -> None: ...


class FakeStats:
    running = kv_tokens = kv_capacity = preempted = generated_tokens = 0
    busy_seconds = 0.0

    def start_clock(self) -> None: ...


def make_engine(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    monkeypatch.setattr(VllmEngine, "_segment_inputs", lambda self, request: ((), ()))
    return VllmEngine(
        client,
        FakeStats(),
        InferConfig(max_length=64),
        skeleton=MODEL,
        device="cuda:0",
        stops=StopRules(),
    )


def request(index: int = 0, **sampling: Any) -> Request:
    ids = frozen_array([1, 8, 9], np.int32)
    return Request(SampleId(0, index), ids, Sampling(**sampling), stream=index)


async def wait_until_started(client: FakeClient, segments: int) -> None:
    async with asyncio.timeout(10):
        while len(client.started) < segments:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_an_interrupted_segment_that_repeats_its_log_probs_keeps_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient(
        make_output([5], [-0.5]),
        make_output([6, 7], [-0.6, -0.7]),
        last=make_output([], [-0.5, -0.6, -0.7], "abort"),
    )
    engine = make_engine(client, monkeypatch)
    task = asyncio.create_task(engine.generate(request()))
    await wait_until_started(client, 1)
    await engine.abort(SampleId(0, 0))
    completion = await task
    assert (completion.stop, completion.token_ids.tolist()) == (StopReason.ABORTED, [5, 6, 7])
    assert completion.logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.7])
    await engine.close()


def test_surplus_log_probs_belong_to_earlier_tokens() -> None:
    generated = VllmRequest(request())
    generated.add([5, 6], [-1.0, -2.0], 0)
    generated.add([7], [-1.0, -2.0, -3.0], 1)
    assert (generated.token_ids, generated.logprobs, generated.versions) == (
        [5, 6, 7],
        [-1.0, -2.0, -3.0],
        [0, 0, 1],
    )


async def test_fewer_log_probs_than_tokens_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(FakeClient(make_output([5, 6], [-1.0])), monkeypatch)
    with pytest.raises(EngineError, match="2 tokens and the log-probs of 1"):
        await engine.generate(request())
    await engine.close()


def update(engine: VllmEngine) -> Awaitable[Any]:
    return engine.update(list(MODEL.named_parameters()), PolicyVersion(1))


@pytest.mark.parametrize(
    ("hanging", "call"),
    [
        ("pause", lambda engine: engine.pause()),
        ("abort", lambda engine: engine.abort(SampleId(0, 0))),
        ("rollick_file_fingerprint", update),
        ("rollick_reload", update),
        ("sleep", lambda engine: engine.sleep()),
    ],
)
async def test_an_engine_that_misses_a_deadline_fails_all_pending_requests(
    monkeypatch: pytest.MonkeyPatch, hanging: str, call: Callable[[VllmEngine], Awaitable[Any]]
) -> None:
    monkeypatch.setattr(client_module, "CALL_TIMEOUT_S", 0.2)
    client = FakeClient(hanging=hanging)
    engine = make_engine(client, monkeypatch)
    pending = [asyncio.create_task(engine.generate(request(index))) for index in range(3)]
    await wait_until_started(client, 3)
    async with asyncio.timeout(20):
        with pytest.raises(EngineLost, match=r"within 0\.2 s"):
            await call(engine)
        ended = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(error) for error in ended] == [EngineLost] * 3
    with pytest.raises(EngineLost):
        engine.check_alive()
    with pytest.raises(EngineLost):
        await engine.generate(request(4))
    await engine.close()


async def test_requests_that_wait_for_a_paused_engine_fail_when_it_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "CALL_TIMEOUT_S", 0.2)
    client = FakeClient()
    engine = make_engine(client, monkeypatch)
    await engine.pause()
    waiting = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0)
    client.hanging = "sleep"
    async with asyncio.timeout(20):
        with pytest.raises(EngineLost):
            await engine.sleep()
        with pytest.raises(EngineLost):
            await waiting
    await engine.close()


async def test_the_end_of_the_process_fails_pending_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "WATCH_INTERVAL_S", 0.01)
    client = FakeClient()
    engine = make_engine(client, monkeypatch)
    task = asyncio.create_task(engine.generate(request()))
    await wait_until_started(client, 1)
    client.errored = True
    async with asyncio.timeout(20):
        with pytest.raises(EngineLost, match="process has ended"):
            await task
    await engine.close()


async def test_an_idle_engine_whose_process_ended_is_not_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    engine = make_engine(client, monkeypatch)
    engine.check_alive()
    client.errored = True
    with pytest.raises(EngineLost, match="process has ended"):
        engine.check_alive()
    await engine.close()


async def test_a_caller_that_is_cancelled_as_the_engine_is_lost_stays_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    engine = make_engine(client, monkeypatch)
    task = asyncio.create_task(engine.generate(request()))
    await wait_until_started(client, 1)
    client.errored = True
    with pytest.raises(EngineLost):
        engine.check_alive()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.close()


async def test_a_temperature_below_vllms_minimum_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(FakeClient(), monkeypatch)
    with pytest.raises(EngineError, match=r"temperature is 0.005"):
        await engine.generate(request(temperature=0.005))
    await engine.close()


def test_weights_are_staged_in_the_first_folder_with_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    free = {small: 5 << 20, large: 500 << 20}
    monkeypatch.setattr(weight_staging, "staging_folders", lambda: (small, large))
    monkeypatch.setattr(
        weight_staging.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder])
    )
    assert choose_folder(1 << 20) == small
    assert choose_folder(100 << 20) == large
    with pytest.raises(WeightError, match=r"1\.00 GB of weights.*small has 0\.01 GB.*large"):
        choose_folder(10**9)


async def test_weights_that_cannot_be_staged_do_not_change_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = FakeClient()
    engine = make_engine(client, monkeypatch)
    monkeypatch.setattr(weight_staging, "staging_folders", lambda: (tmp_path / "missing",))
    with pytest.raises(WeightError, match="TMPDIR"):
        await update(engine)
    monkeypatch.setattr(weight_staging, "staging_folders", lambda: (tmp_path,))
    monkeypatch.setattr(engine_module, "write_bundle", _raise_full_disk)
    with pytest.raises(WeightError, match=r"No space left.*TMPDIR"):
        await update(engine)
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240
    engine.check_alive()
    assert engine.load().version == 0
    await engine.close()


def _raise_full_disk(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


async def test_the_staged_file_exists_for_the_workers_and_is_removed_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = FakeClient()
    engine = make_engine(client, monkeypatch)
    monkeypatch.setattr(weight_staging, "staging_folders", lambda: (tmp_path,))
    assert await update(engine) == fingerprint(MODEL.named_parameters())
    assert (client.files, list(tmp_path.iterdir())) == ([True, True], [])  # noqa: ASYNC240
    await engine.close()


def test_only_folders_of_ended_processes_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended_process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    dead = tmp_path / f"rollick-vllm-{int(ended_process.stdout)}-abc"
    other = tmp_path / "rollick-vllm-x-abc"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(b"x")
    monkeypatch.setattr(weight_staging, "staging_folders", lambda: (tmp_path,))
    with stage_file(10) as path:
        used = Path(path).parent
        remove_leftovers()
        assert sorted(tmp_path.iterdir()) == sorted([used, other])
        # As for a process in another container: only the lock shows that the folder is in use.
        monkeypatch.setattr(weight_staging, "process_exists", lambda process: False)
        remove_leftovers()
        assert used.exists()
    assert list(tmp_path.iterdir()) == [other]
