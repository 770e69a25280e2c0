"""Environments of verifiers as TextEnvs, with the real package where it is installed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rollick.config.load import recipe_from_dict
from rollick.envs.adapters.verifiers_env import VerifiersEnv
from rollick.envs.adapters.verifiers_host import HARNESS, VerifiersHost, create_host, shared_host
from rollick.envs.base import find_env
from rollick.envs.child import EnvStatus
from rollick.envs.pool import EnvLimits, EnvPool
from rollick.errors import EnvError
from rollick.types import Turn

TASKS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, task, trace) -> float:
        if trace.last_reply == "!":
            raise ValueError("no such answer")
        return float(trace.last_reply == task.answer)
    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a in range(10):
            data = SumData(prompt=f"{a}+1=", system_prompt="Add.", answer=str(a + 1))
            yield SumTask(data, self.config.task)

__all__ = ["Sums"]
"""
GUESSES = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    number: int = 0

class GuessTask(vf.Task[Data]):
    pass

class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Guess(vf.Env[EnvConfig]):
    """The environment answers as the user, until the number is found."""
    async def run(self, task, agents):
        number, found = task.data.number, False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                said = int(segment.last_reply)
                if found := said == number:
                    break
                segment = await interaction.turn("higher" if said < number else "lower")
        interaction.trace.record_reward("found", float(found))

class Guesses(vf.Taskset[GuessTask]):
    INFINITE = True
    def load(self):
        n = 0
        while True:
            yield GuessTask(Data(prompt="Guess!", number=n % 7), self.config.task)
            n += 1

__all__ = ["Guess", "Guesses"]
'''
TOOLS = '''
import verifiers.v1 as vf

class Arithmetic(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    @vf.tool
    async def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

class ToolTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Arithmetic(vf.ToolsetConfig())]
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == "42")

class ToolTasks(vf.Taskset[ToolTask]):
    def load(self):
        yield ToolTask(vf.TaskData(prompt="6*7"), self.config.task)

__all__ = ["ToolTasks"]

if __name__ == "__main__":
    Arithmetic.run()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    task_folder = tmp_path_factory.mktemp("verifiers")
    for name, text in (("vf_sums", TASKS), ("vf_guesses", GUESSES), ("vf_tools", TOOLS)):
        (task_folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        # Tool servers and pools run in separate processes.
        patch.setenv("PYTHONPATH", str(task_folder), prepend=os.pathsep)
        patch.syspath_prepend(str(task_folder))
        yield task_folder
    shared_host().close()
    create_host.cache_clear()


def play_episode(replies: list[str], *, seed: int = 0, **options: Any) -> list[Any]:
    env = VerifiersEnv(**options)
    try:
        return [env.reset(seed), *(env.step(reply) for reply in replies)]
    finally:
        env.close()


def test_a_question_is_answered_once_and_scored_by_its_own_rewards(folder: Path) -> None:
    (opening, _), right = play_episode(["2"], taskset="vf-sums", tasks=2)
    assert opening == (Turn("system", "Add."), Turn("user", "1+1="))
    info = {"valid": True, "success": True, "metrics": {"length": 1.0}}
    assert right == ("", 1.0, True, False, info)
    _, wrong = play_episode(["17"], taskset="vf-sums", tasks=2)
    assert wrong[1:3] == (0.0, True)
    assert wrong[4]["metrics"] == {"length": 2.0}


def test_the_seed_chooses_the_task_and_nothing_else_does(folder: Path) -> None:
    seen = [play_episode([], seed=seed, taskset="vf-sums")[0][0] for seed in range(20)]
    assert seen == [play_episode([], seed=seed, taskset="vf-sums")[0][0] for seed in range(20)]
    assert 5 < len(set(seen)) <= 10


def test_an_environment_that_answers_shows_what_is_new_in_each_turn(folder: Path) -> None:
    env = VerifiersEnv(taskset="vf-guesses", tasks=7)
    opening, _ = env.reset(0)
    assert opening == (Turn("user", "Guess!"),)
    low, high, steps = 0, 6, 0
    while True:
        guess, steps = (low + high) // 2, steps + 1
        text, reward, terminated, truncated, _ = env.step(str(guess))
        if terminated:
            break
        assert (reward, truncated) == (0.0, False)
        assert text in ((Turn("user", "higher"),), (Turn("user", "lower"),))
        low, high = (guess + 1, high) if "higher" in str(text) else (low, guess - 1)
    assert (reward, truncated) == (1.0, False)
    assert steps <= 3


def test_too_many_turns_are_truncated_and_scored_as_they_are(folder: Path) -> None:
    replies = ["9", "9", "9"]
    *_, last = play_episode(replies, taskset="vf-guesses", max_steps=3)
    assert last[:4] == ("", 0.0, False, True)


@pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")
def test_tools_are_offered_called_and_answered(folder: Path) -> None:
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    unknown = '<tool_call>{"name": "divide", "arguments": {}}</tool_call>'
    (opening, _), strange, called, last = play_episode([unknown, call, "42"], taskset="vf-tools")
    assert opening[0].role == "system"
    assert "Multiply two numbers." in opening[0].content
    assert opening[1] == Turn("user", "6*7")
    assert strange[0] == (Turn("tool", "error: there is no tool divide"),)
    assert [step[4]["valid"] for step in (strange, called, last)] == [False, True, True]
    assert called[0] == (Turn("tool", "42"),)
    assert last[1:3] == (1.0, True)


class ModelledUser(BaseHTTPRequestHandler):
    """A user simulator that asks one question and accepts the first reply."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = "One and one?" if len(body["messages"]) == 2 else "###DONE###"
        choice = {"index": 0, "finish_reason": "stop"}
        message = {"role": "assistant", "content": text}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "user"}
        content = json.dumps(answer | {"choices": [choice | {"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def user_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), ModelledUser) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


USER = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
"""The default harness would start a program."""


def test_of_two_seats_the_policy_plays_its_own(folder: Path, user_url: str) -> None:
    client = {"type": "eval", "base_url": user_url, "api_key_var": "ROLLICK_NO_KEY"}
    config = {"user": {**USER, "client": client}}
    (opening, _), last = play_episode(
        ["2"], taskset="vf-sums", env="user-sim", seat="assistant", tasks=2, config=config
    )
    assert opening == (Turn("system", "Add."), Turn("user", "One and one?"))
    info = {"valid": True, "success": True, "metrics": {"length": 1.0, "user_turns": 2.0}}
    assert last == ("", 1.0, True, False, info)


def test_a_seat_without_a_client_is_not_played_by_the_policy(folder: Path) -> None:
    options: dict[str, Any] = {"taskset": "vf-sums", "env": "user-sim", "config": {"user": USER}}
    with pytest.raises(EnvError, match="set a client for it"):
        play_episode([], seat="assistant", **options)
    with pytest.raises(EnvError, match="the seats assistant, user"):
        play_episode([], **options)


def test_threads_that_begin_at_once_share_host_and_environment(folder: Path) -> None:
    shared_host().close()
    create_host.cache_clear()
    config = {"taskset": {"id": "vf-sums"}}
    with ThreadPoolExecutor(8) as threads:
        host_futures = [threads.submit(shared_host) for _ in range(8)]
        [host] = {future.result() for future in host_futures}
        open_environment = partial(host.open, config, seat="", tasks=3, max_turns=1)
        opening = [threads.submit(open_environment) for _ in range(8)]
        assert len({id(future.result()) for future in opening}) == 1


def test_a_failure_of_verifiers_is_raised(folder: Path) -> None:
    with pytest.raises(EnvError, match="no such answer"):
        play_episode(["!"], taskset="vf-sums")
    with pytest.raises(EnvError, match="invalid literal for int"):
        play_episode(["seven"], taskset="vf-guesses")
    with pytest.raises(EnvError, match="vf_nothing"):
        play_episode([], taskset="vf-nothing")
    with pytest.raises(EnvError, match=r"there is no seat 'agent'\. use player"):
        play_episode([], taskset="vf-guesses", seat="agent")


async def test_many_episodes_of_one_process_do_not_disturb_each_other(folder: Path) -> None:
    options = {"taskset": "vf-sums", "tasks": 10}
    async with EnvPool.open(
        {"sums": "verifiers"}, processes=1, base=folder, limits=EnvLimits(step_s=60)
    ) as pool:
        sessions = [await pool.reset("sums", options, seed) for seed in range(8)]
        right = []
        for session in sessions:
            assert session.opening.response is not None
            right.append(str(int(session.opening.response.text[5]) + 1))
        replies = [
            await session.step(answer) for session, answer in zip(sessions, right, strict=True)
        ]
        for session in sessions:
            session.close()
    assert {reply.status for reply in replies} == {EnvStatus.OK}
    assert [reply.response.reward for reply in replies if reply.response] == [1.0] * 8


def test_it_has_a_name_and_reports_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_env("verifiers") is VerifiersEnv
    recipe = {
        "pipeline": "agentic",
        "model": {"path": "x"},
        "data": {"domains": {"a": {"environment": {"name": "verifiers"}}}},
    }
    loaded = recipe_from_dict(recipe).recipe.data.domains["a"].environment
    assert loaded is not None
    with pytest.raises(EnvError, match="config is not JSON"):
        VerifiersEnv(taskset="x", config="{")
    with pytest.raises(EnvError, match=r"config must be a JSON object, not '\[1\]'"):
        VerifiersEnv(taskset="x", config="[1]")
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(EnvError, match=r"pip install 'verifiers>=0\.4'"):
        VerifiersHost()
