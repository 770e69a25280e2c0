"""DPO and IPO with a tiny model: preference pairs, a frozen reference, no rollout."""

import json
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rollick.algorithms.aggregation import prompt_mean
from rollick.config.load import LoadedRecipe
from rollick.data.chat import ChatCodec
from rollick.data.collate import examples_to_batch
from rollick.errors import DataError
from rollick.models.loading.load import load_tokenizer
from rollick.observe.metric_table import is_documented
from rollick.observe.metrics import read_metrics
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects, RunResult
from rollick.trainer.local import LocalStrategy
from rollick.types import Turn

Toy = Callable[..., LoadedRecipe]
LETTERS = "abcdefgh"
# Each answer is good for one prompt and bad for another, so that the policy must use the prompt.
ROWS = [
    {"prompt": f"say {letter}", "good": letter * 2, "bad": other * 2}
    for letter, other in zip(LETTERS, LETTERS[1:] + LETTERS[:1], strict=True)
]
PAIRS = {"source": "object:rows", "chosen": "good", "rejected": "bad"}
SWAPPED = {"source": "object:rows", "chosen": "bad", "rejected": "good"}


def load_dpo(toy: Toy, *overrides: str, **options: Any) -> LoadedRecipe:
    data = options.pop("data", {"domains": {"letters": PAIRS}})
    return toy(
        "run.deterministic=true",
        "train.optimizer.lr=2e-3",
        "train.batch_size=8",
        *overrides,
        pipeline="dpo",
        data=data,
        **options,
    )


def run(loaded: LoadedRecipe, *, resume: bool = False, rows: Any = ROWS) -> RunResult:
    rewards = {"reward": lambda completion: float(len(completion) > 1)}
    return run_recipe(
        loaded, objects=RunObjects(prompts={"rows": rows}, rewards=rewards), resume=resume
    )


def read_metric_rows(result: RunResult) -> list[dict[str, float]]:
    rows = read_metrics(result.folder / "metrics.jsonl")
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows
    ]


def find_learner(result: RunResult) -> Path:
    return sorted((result.folder / "checkpoints").glob("step-*"))[-1] / "learner"


def compute_margins(loaded: LoadedRecipe, result: RunResult) -> npt.NDArray[np.float64]:
    """By row: how much training increased the log-prob of "good" against that of "bad"."""
    codec = ChatCodec(load_tokenizer(loaded.recipe.model), "chat")
    batch = examples_to_batch(
        [
            [
                codec.encode_example([Turn("user", row["prompt"])], row[key])
                for key in ("good", "bad")
            ]
            for row in ROWS
        ],
        aggregation=prompt_mean,
        max_tokens=3,
    )
    strategy = LocalStrategy(loaded.recipe)
    before_N = strategy.logprobs(batch)
    strategy.load(find_learner(result))
    gains_N = (strategy.logprobs(batch) - before_N) * batch.advantages_N
    return np.bincount(np.repeat(batch.group_B, batch.lengths_B), weights=gains_N)


@pytest.fixture(scope="module")
def full_run(toy: Toy) -> RunResult:
    return run(load_dpo(toy, steps=20))


def test_the_chosen_answers_become_the_preferred_ones(toy: Toy, full_run: RunResult) -> None:
    first, last = read_metric_rows(full_run)[0], read_metric_rows(full_run)[-1]
    # The policy starts as its own reference: every margin is 0.
    assert first["train/mean/margin"] == first["train/mean/preference_accuracy"] == 0
    assert first["train/loss"] == pytest.approx(log(2))
    assert last["train/mean/preference_accuracy"] > 0.9
    assert last["train/loss"] < 0.5 * first["train/loss"]
    assert (compute_margins(load_dpo(toy), full_run) > 0).mean() > 0.9


def test_swapped_labels_reverse_the_gradient(toy: Toy) -> None:
    loaded = load_dpo(toy, steps=20, data={"domains": {"letters": SWAPPED}})
    result = run(loaded)
    assert read_metric_rows(result)[-1]["train/mean/preference_accuracy"] > 0.9
    assert (compute_margins(loaded, result) < 0).mean() > 0.9


def test_ipo_brings_the_margin_to_its_target(toy: Toy) -> None:
    loaded = load_dpo(toy, algorithm={"loss": {"name": "ipo", "beta": 0.25}}, steps=60)
    result = run(loaded)
    assert compute_margins(loaded, result) == pytest.approx(np.full(8, 1 / (2 * 0.25)), rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "deterministic", "share_prefix"),
    [(30, "true", "true"), (30, "false", "false"), (10, "false", "true")],
)
def test_the_two_answers_of_a_pair_stay_in_one_microbatch(
    toy: Toy, full_run: RunResult, tokens: int, deterministic: str, share_prefix: str
) -> None:
    """A micro-batch has room for three answers, or for less than two. An answer without the other
    one of its pair would have another margin."""
    options = [
        f"train.tokens_per_microbatch={tokens}",
        f"run.deterministic={deterministic}",
        f"train.share_prefix={share_prefix}",
    ]
    small = read_metric_rows(run(load_dpo(toy, *options, steps=3)))
    for row, other in zip(small, read_metric_rows(full_run)[:3], strict=True):
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
        assert row["train/mean/margin"] == pytest.approx(other["train/mean/margin"], rel=1e-3)
    assert small[2]["train/mean/margin"] > 0.5


def test_minibatches_consist_of_complete_pairs(toy: Toy) -> None:
    result = run(load_dpo(toy, "train.minibatches=3", "train.epochs=2", steps=4))
    assert read_metric_rows(result)[-1]["train/mean/preference_accuracy"] > 0.5
    assert read_metric_rows(result)[0]["train/tokens"] == 2 * 8 * 6


def test_a_resumed_run_equals_an_uninterrupted_one(toy: Toy) -> None:
    uninterrupted = run(load_dpo(toy, steps=4, name="dpo_through"))
    run(load_dpo(toy, steps=2, name="dpo_halved"))
    resumed = run(load_dpo(toy, steps=4, name="dpo_halved"), resume=True)
    assert read_metric_rows(resumed) == read_metric_rows(uninterrupted)
    assert read_files(find_learner(resumed)) == read_files(find_learner(uninterrupted))


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_metric_is_documented(full_run: RunResult) -> None:
    logged = {name for row in read_metrics(full_run.folder / "metrics.jsonl") for name in row}
    assert {name for name in logged - {"step"} if not is_documented(name)} == set()


def test_it_validates_by_generating(toy: Toy) -> None:
    held_out = {"source": "object:rows", "rewards": ["object:reward"]}
    data = {"domains": {"letters": PAIRS}, "validation": {"held_out": held_out}}
    options = ["evaluate.every=2", "evaluate.at_end=true", "evaluate.at_start=true"]
    result = run(load_dpo(toy, *options, steps=3, data=data))
    rows = read_metric_rows(result)
    assert [row["step"] for row in rows if "eval/pass@1" in row] == [0, 2, 3]
    lines = (result.folder / "validation.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0] * 8 + [2] * 8 + [3] * 8


def test_a_row_without_a_preference_is_left_out(toy: Toy) -> None:
    equal_pair = {"prompt": "say a", "good": "a", "bad": "a"}
    with pytest.raises(DataError, match=r"1 of the 9 rows.*1 no_preference"):
        run(load_dpo(toy, steps=1), rows=[*ROWS, equal_pair])
    loaded = load_dpo(toy, "data.max_bad_rows=0.2", steps=1)
    assert run(loaded, rows=[*ROWS, equal_pair]).step == 1
