"""What a run keeps when it is cut short: by a signal, by a second one, by a step that fails."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollick.checkpoint import CheckpointStore
from rollick.config.load import LoadedRecipe
from rollick.data.store import load_batch
from rollick.errors import CheckpointError, RollickError, StuckError
from rollick.observe.metrics import read_metrics
from rollick.pipelines import rl, supervised
from rollick.pipelines.base import RunObjects, Session
from rollick.pipelines.folder import RunFolder
from rollick.pipelines.run import run_recipe

Toy = Callable[..., LoadedRecipe]


def saved_steps(loaded: LoadedRecipe) -> tuple[Path, int | None]:
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    newest = CheckpointStore(folder / "checkpoints", keep_last=1, keep_best=1).latest()
    return folder, newest.step if newest else None


def imitating() -> dict[str, Any]:
    """The sections that make the toy recipe one of SFT, with validation."""
    domain = {"source": "rollick.testing.toys:letter_rows", "completion": "answer"}
    rewarded = domain | {"rewards": ["rollick.testing.toys:says_letter"]}
    data = {"domains": {"letters": domain}, "validation": {"letters": rewarded}}
    return {"pipeline": "sft", "rollout": {}, "data": data}


@pytest.fixture
async def session(toy: Toy, tmp_path: Path) -> Session:
    """A session that nothing was opened for."""
    loaded = toy()
    return Session(loaded, RunFolder(tmp_path, loaded.recipe), RunObjects())


@pytest.mark.parametrize(("phase", "result"), [("generate", None), ("train", "trained")])
async def test_a_signal_cuts_short_only_what_leaves_nothing_half_done(
    session: Session, phase: str, result: str | None
) -> None:
    async def step() -> str:
        session.phase_name = phase
        session.stop.set()
        await asyncio.sleep(0.05)
        return "trained"

    assert await session.until_stopped(step()) == result


async def test_a_second_signal_is_not_taken_for_a_step_that_was_cut_short(
    session: Session,
) -> None:
    ended: list[str] = []

    async def step() -> None:
        session.phase_name = "train"
        session.stop.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("step")

    run = asyncio.create_task(session.until_stopped(step()))
    await asyncio.sleep(0.05)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ended == ["step"]


def test_a_run_that_finds_no_more_signal_keeps_what_it_learned_and_can_go_on(toy: Toy) -> None:
    rows = [{"prompt": "say a", "spread": n < 4} for n in range(40)]
    domain = {"source": "object:rows", "rewards": ["object:reward"]}

    def reward(completion: str, spread: bool) -> float:
        return sum(map(ord, completion)) if spread else 1.0

    objects = RunObjects(prompts={"rows": rows}, rewards={"reward": reward})

    def load(*overrides: str) -> LoadedRecipe:
        options = ["data.shuffle=false", "rollout.max_drops_per_step=4", *overrides]
        return toy(*options, name="learned", steps=2, data={"domains": {"letters": domain}})

    with pytest.raises(StuckError, match="scored alike"):
        run_recipe(load(), objects=objects)
    _, step = saved_steps(load())
    assert step == 1
    # Drops of the step that failed do not count against it when it is made again.
    with pytest.raises(StuckError, match="all 8 groups of the last step scored alike"):
        run_recipe(load(), objects=objects, resume=True)
    result = run_recipe(load("rollout.drop_no_signal=false"), objects=objects, resume=True)
    assert result.step == 2


@pytest.mark.parametrize("pipeline", ["rlvr", "sft"])
def test_a_validation_that_fails_does_not_cost_the_steps_before_it(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, pipeline: str
) -> None:
    async def fails(*args: Any) -> Any:
        raise StuckError("an engine does not answer")

    for module in (rl, supervised):
        monkeypatch.setattr(module, "evaluate_prompts", fails)
    loaded = toy("evaluate.at_end=true", **(imitating() if pipeline == "sft" else {}))
    with pytest.raises(StuckError, match="an engine does not answer"):
        run_recipe(loaded)
    folder, step = saved_steps(loaded)
    assert step == 2
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("pipeline", ["rlvr", "sft"])
def test_a_checkpoint_on_the_way_that_fails_is_told_and_the_last_one_is_tried_again(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pipeline: str
) -> None:
    save, tried = CheckpointStore.save, list[int]()

    def full_at_first(store: CheckpointStore, step: int, *args: Any, **options: Any) -> Path:
        tried.append(step)
        if len(tried) <= 2:
            raise CheckpointError(f"step {step} was not saved: no space left on device")
        return save(store, step, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", full_at_first)
    loaded = toy("checkpoint.every=1", **(imitating() if pipeline == "sft" else {}))
    assert run_recipe(loaded).step == 2
    assert tried == [1, 2, 2]
    assert saved_steps(loaded)[1] == 2
    assert "step 1 was not saved: no space left on device" in caplog.text


def test_an_sft_whose_gradients_are_not_finite_stops(toy: Toy) -> None:
    # The first update throws the weights out of all bounds.
    options = ["train.optimizer.lr=1e30", "train.max_skipped_steps=2"]
    loaded = toy(*options, steps=8, **imitating())
    with pytest.raises(RollickError, match="2 steps in a row had a non-finite gradient"):
        run_recipe(loaded)
    folder, _ = saved_steps(loaded)
    assert load_batch(folder / "dumps" / "non_finite" / "batch").samples > 0
