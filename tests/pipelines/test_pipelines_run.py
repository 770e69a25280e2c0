"""`rollick.train`, in a script and inside a running event loop."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollick
from rollick.config.load import load_recipe
from rollick.errors import ConfigError
from rollick.pipelines.run import wait_for

SCRIPT = """
import rollick

result = rollick.train(
    {model!r},
    ["say a", "say b"],
    lambda completion: completion.count("a") + 0.001 * sum(map(ord, completion)),
    run__steps=1, run__folder={folder!r}, run__name="script", run__threads=1,
    sampling__max_tokens=3, rollout={{"groups_per_step": 2, "group_size": 4}},
    infer__max_length=64, cluster__backend={backend!r}, observe__sinks=[],
)
print(f"step {{result.step}}")
"""
QUIET: dict[str, Any] = {
    "run__steps": 1,
    "run__threads": 1,
    "sampling__max_tokens": 3,
    "rollout": {"groups_per_step": 2, "group_size": 4},
    "infer__max_length": 64,
    "cluster__backend": "inline",
    "observe": {"sinks": [], "live": "off"},
}

Train = Callable[..., rollick.RunResult]


# A lambda is pickled by value. A function of this module would make the reward process import this
# module, and so torch.
reward = lambda completion: completion.count("a") + 0.001 * sum(map(ord, completion))  # noqa: E731


@pytest.fixture
def train(tiny_folder: Path, tmp_path: Path) -> Train:
    """Calls `rollick.train` on the tiny model with small settings, which options override."""

    def call(prompts: Any = ("say a", "say b"), score: Any = reward, **options: Any) -> Any:
        settings = {"run__folder": str(tmp_path), **QUIET, **options}
        return rollick.train(str(tiny_folder), prompts, score, **settings)

    return call


def test_a_script_without_a_main_guard_trains_with_a_lambda(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "script.py"
    text = SCRIPT.format(model=str(tiny_folder), folder=str(tmp_path), backend="inline")
    file.write_text(text)
    child = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["step 1"]


def test_the_result_has_the_folder_and_the_outcome(train: Train, tmp_path: Path) -> None:
    result = train(run__name="mine")
    assert (result.folder, result.step, result.interrupted) == (tmp_path / "mine", 1, False)
    assert result.score == result.metrics["score/mean"]
    assert math.isfinite(result.metrics["train/loss"])


def test_a_run_without_a_name_gets_one(train: Train, tmp_path: Path) -> None:
    assert train().folder.name.startswith("run-")


def test_with_validation_the_score_is_that_of_held_out_prompts(train: Train) -> None:
    result = train(validation=[{"prompt": "say c"}], evaluate__pass_threshold=0.0)
    assert result.score == result.metrics["eval/pass@1"] == 1.0
    assert result.metrics["eval/prompts/score"] > 0


async def test_it_runs_inside_an_event_loop(train: Train) -> None:
    asyncio.get_running_loop()
    assert train().step == 1


async def test_an_error_inside_an_event_loop_is_raised_unchanged(train: Train) -> None:
    with pytest.raises(rollick.RollickError, match="nowhere"):
        train(model__tokenizer="/nowhere/at/all")


async def test_waiting_inside_a_loop_gives_the_works_result_or_its_error() -> None:
    async def work(fails: bool) -> str:
        await asyncio.sleep(0)
        if fails:
            raise KeyError("missing")
        return "done"

    assert wait_for(work(False)) == "done"
    with pytest.raises(KeyError, match="missing"):
        wait_for(work(True))


def test_settings_come_by_dotted_name_and_by_section(train: Train) -> None:
    section = {"groups_per_step": 2}
    result = train(rollout=section, rollout__group_size=3, run__seed=5, run={"name": "both"})
    assert section == {"groups_per_step": 2}
    recipe = load_recipe(result.folder / "recipe.yaml", check=False).recipe
    assert (recipe.rollout.groups_per_step, recipe.rollout.group_size) == (2, 3)
    assert (recipe.run.seed, recipe.run.name, recipe.run.steps) == (5, "both", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run__stepz": 3}, r"run\.stepz: unknown key 'stepz'; did you mean 'steps'"),
        ({"rolout__group_size": 3}, r"unknown key 'rolout'; did you mean 'rollout'"),
        ({"rollout__group_size": "many"}, r"rollout\.group_size: must be a whole number"),
        ({"run": 3, "run__steps": 1}, "run"),
    ],
)
def test_a_wrong_option_is_named_with_the_nearest_right_one(
    train: Train, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(rollick.ConfigError, match=message):
        train(**options)


@pytest.mark.parametrize(
    ("prompts", "score", "message"),
    [
        (
            [{"prompt": "say a", "answer": "a"}],
            lambda completion, anser: 1.0,
            "rewards.0: reward needs 'anser', and the rows have prompt, answer; "
            "did you mean 'answer'?",
        ),
        ([{"question": "say a"}], reward, "no 'prompt' among question"),
        ([], reward, "data.domains.prompts.source: has no rows; add rows"),
    ],
)
def test_rows_and_rewards_that_do_not_fit_are_refused_before_anything_starts(
    train: Train, tmp_path: Path, prompts: Any, score: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        train(prompts, score, run__name="none")
    assert message in str(error.value)
    assert error.value.__context__ is None  # No "During handling of the above exception".
    assert not (tmp_path / "none").exists()


def test_several_rewards_are_added(train: Train) -> None:
    result = train(score={"one": lambda completion: 1.0, "other": reward})
    assert result.metrics["score/mean"] > 1


def test_a_reward_can_be_one_of_the_table(train: Train) -> None:
    rows = [{"prompt": "say a", "answer": "a"}, {"prompt": "say b", "answer": "b"}]
    result = train(rows, "exact_match", rollout__drop_no_signal=False)
    assert 0 <= result.metrics["score/mean"] <= 1


def test_prompts_can_come_from_a_function(train: Train) -> None:
    assert train(lambda: iter(["say a", "say b"])).step == 1


def test_a_finished_run_continues_with_more_steps(train: Train) -> None:
    train(run__name="longer")
    result = train(run__name="longer", run__steps=2, resume=True)
    assert result.step == 2


async def test_an_interrupt_of_the_waiting_thread_ends_the_work_too() -> None:
    ended: list[str] = []

    async def work() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cleaned up")

    # As in a notebook, where the interrupt is an exception in the thread that waits.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for(work())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["cleaned up"]
