"""A server that stops before its engine has started."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollick.commands import serve
from rollick.commands.serve import ServedModel, serve_until_stopped
from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import EngineError
from rollick.serve.server import ServerAddress, ServeSettings


def make_served_model(create: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    monkeypatch.setattr(serve, "resolve", lambda kind, name: SimpleNamespace(create=create))
    return ServedModel(ModelConfig(path=str(folder)), InferConfig(), "tiny", "cpu")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_an_engines_start_that_hangs(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    started, released = threading.Event(), threading.Event()

    def hang(*args: Any, **options: Any) -> Any:
        started.set()
        released.wait(60)

    served = make_served_model(hang, tiny_folder, monkeypatch)
    announced: list[ServerAddress] = []
    try:
        async with asyncio.timeout(20):
            running = asyncio.create_task(
                serve_until_stopped(served, ServeSettings(), announced.append)
            )
            await asyncio.to_thread(started.wait, 20)
            os.kill(os.getpid(), number)
            await running
    finally:
        released.set()
    assert announced == []


async def test_the_error_of_an_engine_that_does_not_start_has_the_reason(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: Any, **options: Any) -> Any:
        raise EngineError("no memory")

    served = make_served_model(fail, tiny_folder, monkeypatch)
    with pytest.raises(EngineError, match="no memory"):
        await serve_until_stopped(served, ServeSettings(), lambda _: None)
