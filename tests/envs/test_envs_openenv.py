"""OpenEnv servers as TextEnvs, with the real package where it is installed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from rollick.envs.adapters.openenv_env import RemoteEnv, action_schema
from rollick.envs.base import find_env
from rollick.episodes.check_env import check_env
from rollick.errors import EnvError
from rollick.types import Turn

SERVER = '''
import sys
from random import Random
import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Seen(Observation):
    hint: str = ""
    tries: int = 0

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, most=9, **_):
        self.number, self.tries = Random(seed).randrange(most + 1), 0
        return Seen(hint=f"0 to {most}?")
    def step(self, action):
        self.tries += 1
        if action.number == 666:
            raise ValueError("bad luck")
        won = action.number == self.number
        hint = "yes" if won else "higher" if action.number < self.number else "lower"
        return Seen(hint=hint, tries=self.tries, done=won, reward=float(won))
    @property
    def state(self):
        return State()

class Counting(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        server = FastMCP("counting")
        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b
        super().__init__(server)
    def reset(self, seed=None, **_):
        return Observation(metadata={"seed": seed})
    def _step_impl(self, action, **_):
        raise ValueError("only tools")
    @property
    def state(self):
        return State()

app = FastAPI()
guessing = create_fastapi_app(Guessing, Guess, Seen, max_concurrent_envs=8)
counting = create_fastapi_app(Counting, CallToolAction, CallToolObservation, max_concurrent_envs=8)
app.mount("/guessing", guessing)
app.mount("/counting", counting)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
'''


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, unused_port: int) -> Iterator[str]:
    pytest.importorskip("openenv", reason="openenv is not installed")
    folder = tmp_path_factory.mktemp("openenv")
    (folder / "server.py").write_text(SERVER)
    command = [sys.executable, "server.py", str(unused_port)]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{unused_port}"
        wait_for(f"{address}/guessing/health", server, folder / "log")
        yield address
    finally:
        server.terminate()
        server.wait(timeout=20)


@pytest.fixture(scope="module")
def unused_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            urlopen(address, timeout=5).close()
            return
        except URLError:
            time.sleep(0.2)
    raise TimeoutError(log.read_text())


def test_the_reply_is_the_action_s_only_field(url: str) -> None:
    env = RemoteEnv(url=f"{url}/guessing", show="hint", reset={"most": 6})
    opening, _ = env.reset(3)
    assert str(opening).startswith("0 to 6?\n")
    assert env.step("nothing")[4] == {"valid": False, "effective": False}
    low, high, steps = 0, 6, 0
    while True:
        guess, steps = (low + high) // 2, steps + 1
        observation, reward, terminated, truncated, info = env.step(str(guess))
        assert info == {"valid": True}
        if terminated:
            break
        low, high = (guess + 1, high) if observation == "higher" else (low, guess - 1)
    env.close()
    assert (observation, reward, truncated) == ("yes", 1.0, False)
    assert steps <= 3


def test_without_a_field_to_show_the_full_observation_is_shown(url: str) -> None:
    env = RemoteEnv(url=f"{url}/guessing", max_steps=1)
    opening, _ = env.reset(0)
    assert str(opening).splitlines()[0] == '{"hint": "0 to 9?", "tries": 0}'
    observation, _, terminated, truncated, _ = env.step("99")
    assert observation == '{"hint": "lower", "tries": 1}'
    assert (terminated, truncated) == (False, True)
    env.close()


def test_the_seed_goes_to_the_server_and_episodes_do_not_disturb_each_other(url: str) -> None:
    options = {"url": f"{url}/guessing", "show": "hint", "max_steps": 4}
    assert [str(problem) for problem in check_env(RemoteEnv, options)] == []


def test_an_error_of_the_server_is_raised(url: str) -> None:
    env = RemoteEnv(url=f"{url}/guessing", show="hint")
    env.reset(0)
    with pytest.raises(RuntimeError, match="bad luck"):
        env.step("666")
    env.close()
    with pytest.raises(EnvError, match="the observation has no 'text'"):
        RemoteEnv(url=f"{url}/guessing", show="text").reset(0)
    with pytest.raises(EnvError, match="no OpenEnv server responds"):
        action_schema(f"{url}/nowhere")


def test_a_server_of_tools_offers_them(url: str) -> None:
    env = RemoteEnv(url=f"{url}/counting")
    opening, _ = env.reset(0)
    assert isinstance(opening, tuple)
    assert "Add two numbers." in opening[0].content
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    seen, _, terminated, _, info = env.step(call)
    assert isinstance(seen, tuple)
    [observation] = seen
    assert observation.role == "tool"
    assert '"data": 5' in observation.content or '"result": 5' in observation.content
    assert (terminated, info["valid"]) == (False, True)
    assert env.step("5")[:2] == ((Turn("tool", "error: call a tool"),), 0.0)
    assert env.step("<tool_call>{</tool_call>")[4]["valid"] is False
    env.close()


def test_it_has_a_name_and_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_env("openenv") is RemoteEnv
    with pytest.raises(EnvError, match="reset is not JSON"):
        RemoteEnv(url="http://x", reset="{")
    with pytest.raises(EnvError, match="reset must be a JSON object, not '3'"):
        RemoteEnv(url="http://x", reset="3")
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setattr("rollick.envs.adapters.openenv_env.action_schema", lambda _: {})
    with pytest.raises(EnvError, match=r"pip install 'openenv>=0\.10'"):
        RemoteEnv(url="http://x").reset(0)
