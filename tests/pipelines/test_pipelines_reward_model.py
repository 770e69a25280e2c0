"""The reward `model`: a frozen reward model on the device map, which scores batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rollick.algorithms.aggregation import token_mean
from rollick.cluster.devices import DeviceMap, plan_phases
from rollick.config.devices import parse_devices
from rollick.config.load import LoadedRecipe
from rollick.config.schema import RewardSpec
from rollick.data.batch import Batch
from rollick.data.collate import examples_to_batch
from rollick.errors import WorkerError
from rollick.pipelines.open_run import OpenRun, open_run
from rollick.pipelines.reward_model import RewardModelClient
from rollick.pipelines.run import run_recipe
from rollick.roles.handles import RewardModel
from rollick.testing.batches import recipe_of
from rollick.testing.fakes import prompt, sample
from rollick.trainer.reward_model import LocalRewardModel
from rollick.types import FloatArray, Sample, Score
from rollick.workers.scorer import RewardModelWorker

Toy = Callable[..., LoadedRecipe]
LETTERS = {"source": "rollick.testing.toys:letter_rows"}
ANSWERS = ("a", "bb", "b a", "abba")


@pytest.fixture(scope="module")
def scorer(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained reward model."""
    folder = tmp_path_factory.mktemp("scorer")
    LocalRewardModel(recipe_of(tiny_folder), trainable=False).export(folder)
    return folder


def load_recipe(toy: Toy, scorer: Path, *rewards: Any, **options: Any) -> LoadedRecipe:
    return toy(
        data={"domains": {"letters": LETTERS | {"rewards": list(rewards)}}},
        reward_model={"path": str(scorer)} | options,
    )


def make_samples(answers: tuple[str, ...]) -> list[Sample]:
    letters_prompt = prompt(domain="letters")
    return [sample(text, uid=(0, index), of=letters_prompt) for index, text in enumerate(answers)]


def compute_expected_scores(run: OpenRun, scorer: Path) -> list[float]:
    """The scores of the answers by the reference implementation."""
    codec, turns = run.episodes.codec, prompt(domain="letters").turns
    encoded = [codec.encode_example(turns, text)[0] for text in ANSWERS]
    examples = [[(ids, np.ones(len(ids), dtype=np.bool_))] for ids in encoded]
    batch = examples_to_batch(examples, aggregation=token_mean, max_tokens=64)
    return LocalRewardModel(recipe_of(scorer), trainable=False).scores(batch).tolist()


async def test_the_score_of_a_sample_is_that_of_the_model_times_the_weight(
    toy: Toy, scorer: Path
) -> None:
    loaded = load_recipe(toy, scorer, {"name": "model", "weight": 2.0}, batch_size=3)
    async with open_run(loaded) as run:
        scores = await asyncio.gather(*(run.scoring.score(item) for item in make_samples(ANSWERS)))
        expected = compute_expected_scores(run, scorer)
        call_metrics = run.scoring.rewards.call_counts.take_metrics()
    assert len(set(expected)) == len(ANSWERS)
    assert [score.value for score in scores] == pytest.approx(
        [2 * item for item in expected], abs=1e-5
    )
    assert call_metrics["reward/calls/model"] == len(ANSWERS)


async def test_it_works_beside_rewards_of_other_processes(toy: Toy, scorer: Path) -> None:
    loaded = load_recipe(toy, scorer, "model", {"name": "length", "options": {"max_length": 1}})
    async with open_run(loaded) as run:
        scores = [await run.scoring.score(item) for item in make_samples(ANSWERS)]
        expected = compute_expected_scores(run, scorer)
    assert [score.parts["model"] for score in scores] == pytest.approx(expected, abs=1e-5)
    assert [score.parts["length"] for score in scores] == [1.0, 1.0, 0.0, 1.0]


async def test_an_answer_that_is_too_long_is_a_failed_score(toy: Toy, scorer: Path) -> None:
    async with open_run(load_recipe(toy, scorer, "model", max_length=4)) as run:
        score = await run.scoring.score(make_samples(ANSWERS)[0])
    assert not score.ok
    assert "reward_model.max_length is 4" in score.detail


class FailingGroup:
    """A group whose reward model scores by length (or `constant`), and fails at some batches."""

    def __init__(self, *, fails_at: tuple[int, ...] = (), constant: float | None = None) -> None:
        self.device_map = DeviceMap({"reward_model": parse_devices("cpu")})
        self.sizes: list[int] = []
        self.fails_at, self.constant = fails_at, constant

    async def scatter(self, role: str, method: str, parts: list[Batch]) -> list[FloatArray]:
        assert (role, method) == ("reward_model", "scores")
        (batch,) = parts
        self.sizes.append(batch.rows)
        await asyncio.sleep(0)
        if len(self.sizes) - 1 in self.fails_at:
            raise WorkerError("reward_model 0 died")
        lengths = np.diff(batch.offsets_B1).astype(np.float32)
        return [lengths if self.constant is None else np.full_like(lengths, self.constant)]


async def score_all(toy: Toy, scorer: Path, group: FailingGroup) -> list[Score]:
    recipe = load_recipe(toy, scorer, "model", batch_size=4).recipe
    samples = make_samples(tuple("a" * (index + 1) for index in range(10)))
    handle = RewardModel(cast("Any", group), "reward_model")
    async with RewardModelClient.open(handle, recipe) as model:
        return await asyncio.gather(*(model.score(item) for item in samples))


async def test_samples_that_wait_are_scored_together(toy: Toy, scorer: Path) -> None:
    group = FailingGroup()
    scores = await score_all(toy, scorer, group)
    assert group.sizes == [4, 4, 2]
    assert [score.value - scores[0].value for score in scores] == list(range(10))


async def test_after_a_batch_that_the_model_fails_on_the_next_one_is_scored(
    toy: Toy, scorer: Path
) -> None:
    scores = await score_all(toy, scorer, FailingGroup(fails_at=(1,)))
    assert [score.ok for score in scores] == [True] * 4 + [False] * 4 + [True] * 2
    assert scores[4].detail == "the reward model failed: reward_model 0 died"


async def test_what_is_no_number_is_no_score(toy: Toy, scorer: Path) -> None:
    scores = await score_all(toy, scorer, FailingGroup(constant=float("inf")))
    assert {score.detail for score in scores} == {"the reward model returned inf"}


def test_a_run_masks_and_counts_samples_that_the_model_cannot_score(
    toy: Toy, scorer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failed_rows = RewardModelWorker.scores, list[int]()

    def fail_at_first(worker: RewardModelWorker, batch: Batch) -> FloatArray:
        if not failed_rows:
            failed_rows.append(batch.rows)
            raise RuntimeError("out of memory")
        return original(worker, batch)

    monkeypatch.setattr(RewardModelWorker, "scores", fail_at_first)
    run = run_recipe(load_recipe(toy, scorer, "model", batch_size=2))
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [sum(step["reward/failed/model"] for step in steps)] == failed_rows
    assert steps[0]["rollout/failed_scores"] > 0
    assert all(isfinite(step["score/mean"]) for step in steps)
    assert run.metrics["train/grad_norm"] > 0


def test_the_role_exists_during_sampling_only_if_a_reward_uses_it(toy: Toy, scorer: Path) -> None:
    recipe = load_recipe(toy, scorer, "model").recipe
    uses = {phase.name: phase.uses for phase in plan_phases(recipe)}
    assert uses["generate"] == ("generators", "reward_model")
    assert DeviceMap.of(toy().recipe).ranks("reward_model") == 0
    assert RewardSpec(name="model").uses_reward_model


def test_a_run_trains_on_scores_of_the_reward_model(toy: Toy, scorer: Path) -> None:
    run = run_recipe(load_recipe(toy, scorer, "model"))
    assert run.metrics["reward/calls/model"] + run.metrics["reward/cached/model"] > 0
    assert run.metrics["rollout/failed_scores"] == 0
    assert run.metrics["train/grad_norm"] > 0
