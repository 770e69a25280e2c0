"""API keys in the environment of a run: nothing that the run writes contains them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from toy_runs import toy

sys.path.insert(0, str(Path(__file__).parents[1]))
from stand_ins.judge_server import Judge

from rollick.config.load import dump_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

TRACKER = """
import json, os
from pathlib import Path

assert os.environ["WANDB_API_KEY"]

class Run:
    def __init__(self, folder, options):
        self.file = Path(folder, "tracker.jsonl").open("w")
        self.file.write(json.dumps(options) + chr(10))
    def log(self, metrics, step):
        self.file.write(json.dumps(metrics) + chr(10))
    def finish(self):
        self.file.close()

def init(dir, **options):
    return Run(dir, options)
"""
"""A fake `wandb` module that writes its options and metrics to a file."""


class EchoingJudge(Judge):
    """Rejects every fifth request with a reply that contains the key."""

    keys: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.keys.append(self.headers["Authorization"])
        if len(self.keys) % 5:
            super().do_POST()
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"error": f"a wrong key: {self.headers['Authorization']}"}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def judge_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), EchoingJudge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def read_contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file below the folder, and of each member of an archive."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()
        if path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    yield f"{path}: {name}", archive.read(name)


def test_no_file_of_a_run_has_the_key_of_its_judge_or_tracker(
    tiny_folder: Path, tmp_path: Path, judge_url: str
) -> None:
    judge_key, tracker_key = f"canary-{secrets.token_hex(8)}", f"canary-{secrets.token_hex(8)}"
    (tmp_path / "wandb.py").write_text(TRACKER)
    options = {"url": judge_url, "model": "m", "key_env": "CANARY_KEY"}
    reward = json.dumps([{"name": "judge", "options": options}])
    overrides = (
        f"data.domains.letters.rewards={reward}",
        "data.validation={}",
        "checkpoint.every=1",
        "rollout.max_failed_scores=1",
        "observe.sinks=[wandb,tensorboard]",
        "observe.report=true",
        "observe.samples_per_step=1000",
        "observe.dump_steps=[1,2]",
        "observe.engine_steps=true",
    )
    recipe = tmp_path / "recipe.yaml"
    loaded = toy(tiny_folder, tmp_path / "runs", *overrides, name="canary", steps=2)
    recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "CANARY_KEY": judge_key,
        "WANDB_API_KEY": tracker_key,
    }
    command = [sys.executable, "-m", "rollick.cli", "train", str(recipe)]
    completed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)

    folder = tmp_path / "runs" / "canary"
    assert completed.returncode == 0, completed.stderr
    assert set(EchoingJudge.keys) == {f"Bearer {judge_key}"}
    assert "a wrong key" in (folder / "samples.jsonl").read_text("utf-8")
    assert (folder / "tracker.jsonl").is_file(), completed.stderr
    files = dict(read_contents(folder))
    assert {"dumps", "checkpoints", "tensorboard"} <= {
        Path(name).relative_to(folder).parts[0] for name in files if ": " not in name
    }
    for key in (judge_key, tracker_key):
        assert [name for name, content in files.items() if key.encode() in content] == []
        assert key not in completed.stdout + completed.stderr
