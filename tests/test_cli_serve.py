"""`rollick serve` in its own process: it starts, responds, and stops on a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from rollick import RunResult
from rollick.cli import main
from rollick.commands.serve import model_to_serve

QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}


@contextmanager
def run_server(*arguments: Any, token: str = "") -> Generator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yields the process and the address that it printed."""
    command = [sys.executable, "-m", "rollick.cli", "serve", *map(str, arguments), "--port", "0"]
    environment = QUIET | ({"ROLLICK_TOKEN": token} if token else {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("serving "), first
            yield process, first.split()[-1]
        finally:
            process.kill()


def test_serve_prints_a_token_once_responds_and_stops_on_a_signal(tiny_folder: Path):
    with run_server(tiny_folder, "--name", "small", "--slots", 2) as (process, address):
        assert process.stdout is not None
        word, token = process.stdout.readline().split()
        assert word == "token"
        assert len(token) >= 32
        with openai.OpenAI(base_url=address, api_key=token, max_retries=0) as client:
            stream = client.chat.completions.create(
                model="small",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=4,
                stream=True,
            )
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")
        unauthorized = openai.OpenAI(base_url=address, api_key="guess", max_retries=0)
        with unauthorized, pytest.raises(openai.AuthenticationError):
            unauthorized.models.list()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert token not in process.stdout.read()


@pytest.mark.slow
def test_a_token_that_was_given_is_not_printed(tiny_folder: Path):
    with run_server(tiny_folder, token="canary-token") as (process, address):
        with openai.OpenAI(base_url=address, api_key="canary-token", max_retries=0) as client:
            assert [model.id for model in client.models.list().data] == [tiny_folder.name]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_a_missing_model_gives_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["rollick", "serve", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert "does not exist" in capfd.readouterr().err


def test_a_run_folder_serves_the_policy_that_it_trained(run_toy: Callable[..., RunResult]):
    run = run_toy()
    with model_to_serve(str(run.folder)) as model:
        folder = Path(model.path)
        assert (folder / "model.safetensors").is_file()
        assert model.template == "chat"
    assert not folder.exists()
