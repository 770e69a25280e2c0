"""Distillation from given completions: a tiny student and a teacher with sharper distributions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rollick.config.load import LoadedRecipe
from rollick.config.names import NAMES
from rollick.config.schema import ModelConfig
from rollick.data.chat import ChatCodec
from rollick.errors import ConfigError
from rollick.models.loading.load import load_tokenizer, silence_transformers
from rollick.observe.metric_table import is_documented
from rollick.observe.metrics import read_metrics
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects, RunResult
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.types import Turn

Toy = Callable[..., LoadedRecipe]
ROWS = [{"prompt": f"say {letter}", "answer": letter * 3} for letter in "abcdefgh"]
ANSWERS = {"source": "object:rows", "completion": "answer"}
OBJECTS = RunObjects(prompts={"rows": ROWS}, rewards={"reward": lambda completion: 1.0})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokens, whose distributions are far from uniform."""
    folder = save_tiny(tmp_path_factory.mktemp("teacher"), seed=1)
    with silence_transformers(), torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(folder)
        model.get_input_embeddings().weight.mul_(8)
        model.save_pretrained(folder)
    return folder


def distill(
    toy: Toy, teacher: Path, *overrides: str, resume: bool = False, **options: Any
) -> RunResult:
    loss = {"name": "distillation", **options.pop("loss", {})}
    loaded = toy(
        "run.deterministic=true",
        "train.optimizer.lr=5e-3",
        "train.batch_size=8",
        *overrides,
        pipeline="distill",
        data=options.pop("data", {"domains": {"letters": ANSWERS}}),
        algorithm={"loss": loss},
        teacher={"path": str(teacher)},
        **options,
    )
    return run_recipe(loaded, objects=OBJECTS, resume=resume)


def read_metric_rows(result: RunResult) -> list[dict[str, float]]:
    rows = read_metrics(result.folder / "metrics.jsonl")
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows
    ]


def find_learner(result: RunResult) -> Path:
    return sorted((result.folder / "checkpoints").glob("step-*"))[-1] / "learner"


@pytest.mark.parametrize("divergence", NAMES["divergences"])
def test_each_divergence_falls_to_less_than_a_tenth(
    toy: Toy, teacher: Path, divergence: str
) -> None:
    rows = read_metric_rows(distill(toy, teacher, loss={"divergence": divergence}, steps=16))
    first, last = rows[0], rows[-1]
    assert first["train/mean/divergence"] > 0.5
    assert last["train/mean/divergence"] < 0.1 * first["train/mean/divergence"]
    # The loss is this mean over tokens.
    assert first["train/loss"] == pytest.approx(first["train/mean/divergence"], rel=1e-5)


def test_the_full_distribution_of_the_student_becomes_the_teachers(
    toy: Toy, teacher: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """Measured outside of the library, over the full vocabulary and not the most likely tokens."""
    result = distill(toy, teacher, steps=25)
    strategy = LocalStrategy(toy().recipe)
    strategy.load(find_learner(result))
    strategy.export(tmp_path / "student")
    before, after = (
        compute_kl(teacher, student) for student in (tiny_folder, tmp_path / "student")
    )
    assert before > 1
    assert after < 0.05 * before


@torch.no_grad()
def compute_kl(teacher: Path, student: Path) -> float:
    """KL(teacher || student) at the tokens of the answers."""
    codec = ChatCodec(load_tokenizer(ModelConfig(path=str(teacher))), "chat")
    with silence_transformers():
        models = [LlamaForCausalLM.from_pretrained(path) for path in (teacher, student)]
    total = 0.0
    for row in ROWS:
        ids, mask = codec.encode_example([Turn("user", row["prompt"])], row["answer"])
        input_ids = torch.tensor(ids[:-1].astype("int64"))[None]
        answer_mask = torch.tensor(mask[1:].copy())
        teacher_logprobs, student_logprobs = (
            model(input_ids).logits[0, answer_mask].log_softmax(-1) for model in models
        )
        total += (
            (teacher_logprobs.exp() * (teacher_logprobs - student_logprobs)).sum(-1).mean().item()
        )
    return total / len(ROWS)


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(toy: Toy, tiny_folder: Path) -> None:
    rows = read_metric_rows(distill(toy, tiny_folder, steps=1))
    assert rows[0]["train/mean/divergence"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["train/grad_norm"] < 1e-4


def test_a_resumed_run_equals_an_uninterrupted_one(toy: Toy, teacher: Path) -> None:
    uninterrupted = distill(toy, teacher, steps=4, name="distill_through")
    distill(toy, teacher, steps=2, name="distill_halved")
    resumed = distill(toy, teacher, steps=4, name="distill_halved", resume=True)
    assert read_metric_rows(resumed) == read_metric_rows(uninterrupted)
    assert read_files(find_learner(resumed)) == read_files(find_learner(uninterrupted))


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_validates_by_generating_and_every_metric_is_documented(toy: Toy, teacher: Path) -> None:
    held_out = {"source": "object:rows", "rewards": ["object:reward"]}
    data = {"domains": {"letters": ANSWERS}, "validation": {"held_out": held_out}}
    options = ["evaluate.every=2", "evaluate.at_end=true", "evaluate.at_start=true"]
    result = distill(toy, teacher, *options, steps=3, data=data)
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/pass@1" in row] == [0, 2, 3]
    assert result.score == 1.0
    lines = (result.folder / "validation.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0] * 8 + [2] * 8 + [3] * 8
    logged = {name for row in rows for name in row} - {"step"}
    assert {name for name in logged if not is_documented(name)} == set()


def test_a_teacher_with_other_tokens_is_refused(toy: Toy, tmp_path: Path) -> None:
    other = save_tiny(tmp_path, alphabet="abcdefghsy |")
    with pytest.raises(ConfigError, match="has other tokens than the policy"):
        distill(toy, other, steps=1)
