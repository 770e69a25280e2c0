"""Environments of other packages as TextEnvs."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from rollick.envs.base import TextEnv
from rollick.episodes.check_env import check_env
from rollick.episodes.in_process import random_policy, run_episodes, solver_policy
from rollick.errors import EnvError, MissingExtra


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture
def gym() -> Any:
    skip_without("gymnasium")
    from rollick.envs.adapters.gymnasium_env import GymEnv

    return GymEnv


def test_a_gymnasium_environment_with_text_observations_is_played(gym: Any) -> None:
    options = {"id": "FrozenLake-v1", "actions": ["Left", "Down", "Right", "Up"], "max_steps": 30}
    env = gym(**options)
    text, _ = env.reset(0)
    assert text.startswith("[S]FFF\nFHFH\n")
    assert text.endswith("Reply in the form <answer>Left or Down or Right or Up</answer>.")
    assert env.step("<answer>down</answer>")[4]["valid"]
    assert env.step("<answer>2</answer>")[4]["valid"]
    for invalid in ("<answer>9</answer>", "<answer>jump</answer>", "down"):
        assert env.step(invalid)[4]["valid"] is False
    report = run_episodes(gym, range(50), options=options, policy=random_policy)
    assert report.errors == 0


def test_a_gymnasium_environment_without_text_shows_its_numbers(gym: Any) -> None:
    env = gym(id="CartPole-v1", style="plain")
    text, _ = env.reset(1)
    assert text.startswith("[") and text.count(",") == 3  # noqa: PT018
    _, reward, terminated, truncated, _ = env.step("1")
    assert (reward, terminated, truncated) == (1.0, False, False)
    assert check_env(gym, {"id": "CartPole-v1", "style": "plain"}) == []


def test_text_actions_pass_through(gym: Any) -> None:
    import gymnasium

    class Echo(gymnasium.Env[str, str]):
        action_space = gymnasium.spaces.Text(5)
        observation_space = gymnasium.spaces.Text(5)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return "say hi", {}

        def step(self, action: str) -> Any:
            return action, float(action == "hi"), True, False, {}

    gymnasium.register("rollick/Echo-v0", lambda: Echo(), disable_env_checker=True)
    env = gym(id="rollick/Echo-v0", style="plain")
    env.reset(0)
    assert env.step("much too long")[4]["valid"] is False
    assert env.step("hi")[:3] == ("hi", 1.0, True)


def test_what_cannot_be_written_as_text_is_refused(gym: Any) -> None:
    with pytest.raises(EnvError, match="a Discrete or Text action space"):
        gym(id="Pendulum-v1")
    with pytest.raises(EnvError, match="4 actions, but 2 names"):
        gym(id="FrozenLake-v1", actions=["a", "b"])
    with pytest.raises(EnvError, match="gymnasium cannot make 'Nothing-v0'"):
        gym(id="Nothing-v0")


def test_minigrid_observations_are_text() -> None:
    skip_without("minigrid")
    skip_without("pygame")
    from rollick.envs.adapters.minigrid_env import minigrid_env

    env = minigrid_env(id="MiniGrid-Empty-5x5-v0", style="plain")
    text, _ = env.reset(0)
    assert "Mission: get to the green goal square." in text
    assert "green goal 2 ahead and 2 to the right" in text
    for action in ("forward", "forward", "right", "forward"):
        assert not env.step(action)[2]
    assert env.step("forward")[2]
    options = {"id": "MiniGrid-DoorKey-5x5-v0", "max_steps": 20}
    assert check_env(minigrid_env, options) == []


def test_reasoning_gym_scores_its_own_answers() -> None:
    skip_without("reasoning_gym")
    try:
        from rollick.envs.adapters.reasoning_gym_env import ReasoningGymEnv

        ReasoningGymEnv()
    except MissingExtra as error:
        pytest.skip(f"reasoning_gym is not installed whole: {error}")
    for task in ("basic_arithmetic", "leg_counting"):
        options = {"task": task}
        assert check_env(ReasoningGymEnv, options) == []
        report = run_episodes(ReasoningGymEnv, range(50), options=options, policy=solver_policy)
        assert (report.success, report.errors) == (1.0, 0)


def test_textarena_s_episodes_have_random_numbers_of_their_own() -> None:
    skip_without("textarena")
    try:
        from rollick.envs.adapters.textarena_env import TextArenaEnv

        env: TextEnv = TextArenaEnv(id="GuessTheNumber-v0")
    except MissingExtra as error:
        pytest.skip(f"textarena is not installed whole: {error}")
    random.seed(5)
    before = random.getstate()
    text, _ = env.reset(3)
    assert "Guess The Number" in str(text)
    rewards = [0.0]
    for guess in range(1, 21):
        _, reward, terminated, _, info = env.step(f"[{guess}]")
        rewards.append(reward)
        if terminated:
            break
    assert max(rewards) > 0
    assert info["success"] == (rewards[-1] >= 1)
    assert random.getstate() == before
    assert check_env(TextArenaEnv, {"id": "GuessTheNumber-v0"}) == []
