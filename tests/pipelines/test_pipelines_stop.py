"""The state that a run saves when a signal, a second signal or a failed step ends it."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollick import checkpoint
from rollick.checkpoint import CheckpointStore
from rollick.config.load import LoadedRecipe
from rollick.data.store import load_batch
from rollick.errors import RollickError, StuckError
from rollick.observe.metrics import read_metrics
from rollick.pipelines import loop
from rollick.pipelines.rl import RLPipeline
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunInterrupted, RunObjects, RunState
from rollick.run_folder import RunFolder
from rollick.types import Score

Toy = Callable[..., LoadedRecipe]


def find_saved_step(loaded: LoadedRecipe) -> tuple[Path, int | None]:
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    newest = CheckpointStore(folder / "checkpoints", keep_last=1, keep_best=1).latest()
    return folder, newest.step if newest else None


def make_sft_sections() -> dict[str, Any]:
    """The sections that make the toy recipe an SFT recipe with validation."""
    domain = {"source": "rollick.testing.toys:letter_rows", "completion": "answer"}
    held_out = {"source": domain["source"], "rewards": ["rollick.testing.toys:says_letter"]}
    data = {"domains": {"letters": domain}, "validation": {"letters": held_out}}
    return {"pipeline": "sft", "data": data}


@pytest.fixture
async def state(toy: Toy, tmp_path: Path) -> RunState:
    return RunState(RunFolder(tmp_path, toy().recipe))


@pytest.mark.parametrize(("phase", "result"), [("generate", None), ("train", "trained")])
async def test_a_signal_cuts_short_only_what_leaves_nothing_half_done(
    state: RunState, phase: str, result: str | None
) -> None:
    async def step() -> str:
        state.phase = phase
        state.stop.set()
        await asyncio.sleep(0.05)
        return "trained"

    assert await state.until_stopped(step()) == result


async def test_a_second_signal_is_not_taken_for_a_step_that_was_cut_short(
    state: RunState,
) -> None:
    ended: list[str] = []

    async def step() -> None:
        state.phase = "train"
        state.stop.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("step")

    run = asyncio.create_task(state.until_stopped(step()))
    await asyncio.sleep(0.05)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ended == ["step"]


def test_a_run_that_finds_no_more_signal_saves_and_can_be_resumed(toy: Toy) -> None:
    rows = [{"prompt": "say a", "spread": n < 4} for n in range(40)]
    domain = {"source": "object:rows", "rewards": ["object:reward"]}

    def reward(completion: str, spread: bool) -> float:
        return sum(map(ord, completion)) if spread else 1.0

    objects = RunObjects(prompts={"rows": rows}, rewards={"reward": reward})

    def load(*overrides: str) -> LoadedRecipe:
        options = ["data.shuffle=false", "rollout.max_drops_per_step=4", *overrides]
        return toy(*options, name="learned", steps=2, data={"domains": {"letters": domain}})

    with pytest.raises(StuckError, match="scored the same"):
        run_recipe(load(), objects=objects)
    _, step = find_saved_step(load())
    assert step == 1
    # Drops of the failed step do not count when it is repeated.
    with pytest.raises(StuckError, match="all 8 groups of the last step all samples"):
        run_recipe(load(), objects=objects, resume=True)
    result = run_recipe(load("rollout.drop_no_signal=false"), objects=objects, resume=True)
    assert result.step == 2


@pytest.mark.parametrize("pipeline", ["rlvr", "sft"])
def test_a_validation_that_fails_does_not_cost_the_steps_before_it(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, pipeline: str
) -> None:
    async def fail(*args: Any) -> Any:
        raise StuckError("an engine does not answer")

    monkeypatch.setattr(loop, "evaluate_prompts", fail)
    loaded = toy("evaluate.at_end=true", **(make_sft_sections() if pipeline == "sft" else {}))
    with pytest.raises(StuckError, match="an engine does not answer"):
        run_recipe(loaded)
    folder, step = find_saved_step(loaded)
    assert step == 2
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("pipeline", ["rlvr", "sft"])
@pytest.mark.parametrize("point", ["created", "synced"])
def test_a_failed_periodic_checkpoint_is_reported_and_the_last_one_is_retried(
    toy: Toy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pipeline: str,
    point: str,
) -> None:
    """It fails while the files are written, or in the background while they are hashed."""
    attempts = 0

    def fail_at_first(store: CheckpointStore, name: str) -> None:
        nonlocal attempts
        attempts += name == point
        if name == point and attempts <= 2:
            raise OSError("no space left on device")

    monkeypatch.setattr(CheckpointStore, "_at_point", fail_at_first)
    loaded = toy("checkpoint.every=1", **(make_sft_sections() if pipeline == "sft" else {}))
    assert run_recipe(loaded).step == 2
    assert attempts == 3
    assert find_saved_step(loaded)[1] == 2
    assert re.search(r"step 1 was not saved in .*: no space left on device", caplog.text)


def test_training_continues_while_a_checkpoint_is_hashed(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_file, step = checkpoint._hash_file, RLPipeline.step
    second_step, waits = threading.Event(), list[bool]()

    def hash_later(path: Path) -> str:
        waits.append(second_step.wait(10 if all(waits) else 0))
        return hash_file(path)

    async def count_step(pipeline: RLPipeline) -> Any:
        report = await step(pipeline)
        if pipeline.state.step == 1:
            second_step.set()
        return report

    monkeypatch.setattr(checkpoint, "_hash_file", hash_later)
    monkeypatch.setattr(RLPipeline, "step", count_step)
    loaded = toy("checkpoint.every=1")
    run_recipe(loaded)
    assert all(waits), "the second step ended before the first checkpoint was hashed"
    assert find_saved_step(loaded)[1] == 2


@pytest.mark.parametrize("every_s", [0, 0.001, 900])
def test_a_run_saves_by_the_clock_and_warns_if_it_would_never_save(
    toy: Toy, caplog: pytest.LogCaptureFixture, every_s: float
) -> None:
    loaded = toy(f"checkpoint.every_s={every_s}", "checkpoint.keep_last=9", steps=3)
    result = run_recipe(loaded)
    checkpoints = sorted(path.name for path in (result.folder / "checkpoints").glob("step-*"))
    steps = [1, 2, 3] if every_s == 0.001 else [3]
    assert checkpoints == [f"step-{step:06d}" for step in steps]
    assert ("a crash loses all steps" in caplog.text) is (every_s == 0)


def test_a_signal_ends_a_sweep_and_the_run_is_saved(
    toy: Toy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    domain = {"source": "object:rows", "rewards": ["object:reward"]}
    rows = [{"prompt": f"say {letter}"} for letter in "abcdefgh"]
    controller, trained = os.getpid(), list[str]()

    def reward(completion: str, prompt: str) -> float:
        # Runs in another process. Sends only one signal: a second one kills the controller.
        if prompt == "say h":
            with suppress(FileExistsError):
                (tmp_path / "sent").mkdir()
                os.kill(controller, signal.SIGTERM)
        return sum(map(ord, completion))

    objects = RunObjects(prompts={"rows": rows}, rewards={"reward": reward})
    data = {"domains": {"letters": domain}}

    def sweep() -> None:
        for name in ("first", "second"):
            trained.append(name)
            # A sweep that tolerates failed runs must end too.
            with suppress(Exception):
                loaded = toy("data.shuffle=false", name=name, steps=100, data=data)
                run_recipe(loaded, objects=objects)

    with pytest.raises(RunInterrupted) as ended:
        sweep()
    assert trained == ["first"]
    assert ended.value.code == 75
    step = ended.value.result.step
    assert find_saved_step(toy(name="first"))[1] == step < 100
    advice = f"at step {step}; continue it with --resume (in Python: resume=True)"
    assert advice in str(ended.value)
    assert advice in caplog.text  # Python prints no message for a SystemExit.


def test_rewards_called_before_a_signal_are_in_the_metrics_of_the_resumed_step(
    toy: Toy, tmp_path: Path
) -> None:
    """The checkpoint has the samples of the interrupted step, which are not scored again. Their
    reward calls and costs must not be lost."""
    controller, per_step = os.getpid(), 16

    def reward(completion: str) -> Score:
        # Runs in the only reward process. The signal interrupts the last call of step 2.
        with (tmp_path / "calls").open("a") as calls:
            calls.write("x")
        if (tmp_path / "calls").stat().st_size == 2 * per_step:
            os.kill(controller, signal.SIGTERM)
            time.sleep(60)
        return Score(float(sum(map(ord, completion))), metrics={"cost": 1.0})

    domain = {"source": "rollick.testing.toys:echo_rows", "rewards": ["object:reward"]}
    data, objects = {"domains": {"letters": domain}}, RunObjects(rewards={"reward": reward})
    loaded = toy("rewards.processes=1", name="costly", steps=3, data=data)
    with pytest.raises(RunInterrupted) as ended:
        run_recipe(loaded, objects=objects)
    assert ended.value.result.step == 1
    result = run_recipe(loaded, objects=objects, resume=True)
    rows = read_metrics(result.folder / "metrics.jsonl")
    calls = [row["reward/calls/object:reward"] for row in rows]
    cost = [row["reward/total/object:reward/cost"] for row in rows]
    assert calls == [per_step] * 3
    assert cost == [per_step, 2 * per_step, 3 * per_step]
    total_calls = (tmp_path / "calls").stat().st_size
    assert total_calls == 3 * per_step + 1, "only the call that the signal cut is made again"


def test_an_sft_whose_gradients_are_not_finite_stops(toy: Toy) -> None:
    # The first update makes the weights huge.
    options = ["train.optimizer.lr=1e30", "train.max_skipped_steps=2"]
    loaded = toy(*options, steps=8, **make_sft_sections())
    with pytest.raises(RollickError, match="2 steps in a row had a non-finite gradient"):
        run_recipe(loaded)
    folder, _ = find_saved_step(loaded)
    assert load_batch(folder / "dumps" / "bad_steps" / "policy-000003" / "batch").rows > 0
