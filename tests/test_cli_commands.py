"""The commands train, eval, export and replay on a tiny model; list and config preset."""

import json
import logging
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollick.cli import main
from rollick.config.load import dump_recipe, load_recipe, recipe_from_dict
from rollick.config.names import resolve
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.testing.toys import toy_recipe

Command = Callable[..., str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recipe(tiny_folder: Path, runs: Path) -> Path:
    """A recipe file: two steps with validation; the first one is dumped."""
    loaded = recipe_from_dict(
        toy_recipe(tiny_folder, runs, name="trained", steps=2),
        overrides=["run.deterministic=true", "observe.dump_steps=[1]", "evaluate.every=1"],
    )
    file = runs / "recipe.yaml"
    file.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    return file


@pytest.fixture
def rollick(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Generator[Command]:
    """Runs a command in this process; returns its stdout, or its stderr if `code` is not 0."""
    monkeypatch.setenv("COLUMNS", "200")
    root, rollick_logger = logging.getLogger(), logging.getLogger("rollick")
    handlers, level = list(root.handlers), rollick_logger.level

    def run(*arguments: Any, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["rollick", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capfd.readouterr()
        assert (exit_info.value.code or 0) == code, err
        return err if code else out

    yield run
    root.handlers[:] = handlers
    rollick_logger.setLevel(level)


@pytest.fixture
def trained(rollick: Command, recipe: Path, runs: Path) -> Path:
    """The folder of a run, which the first test with this fixture trains."""
    folder = runs / "trained"
    if not folder.exists():
        out = rollick("train", recipe)
        assert out.startswith(f"{folder}: step 2\n")
    return folder


def read_responses(folder: Path, name: str = "samples.jsonl") -> dict[str, str]:
    lines = (folder / name).read_text("utf-8").splitlines()
    return {row["prompt"]: row["response"] for row in map(json.loads, lines)}


def find_newest(runs: Path, purpose: str) -> Path:
    return max(runs.glob(f"{purpose}-*"), key=lambda path: path.stat().st_mtime)


def test_a_second_run_in_the_same_folder_is_refused_with_a_clear_message(
    rollick: Command, recipe: Path, trained: Path
) -> None:
    message = rollick("train", recipe, code=2)
    assert "already holds a run" in message
    assert "--resume" in message
    assert "Traceback" not in message


def test_resume_continues(rollick: Command, recipe: Path, trained: Path) -> None:
    assert f"{trained}: step 3\n" in rollick("train", recipe, "run.steps=3", "--resume")


def test_resuming_a_finished_run_changes_nothing_and_prints_its_score(
    rollick: Command, recipe: Path, trained: Path
) -> None:
    steps = len((trained / "metrics.jsonl").read_text().splitlines())
    outputs = [rollick("train", recipe, f"run.steps={steps}", "--resume") for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert "nan" not in outputs[0]
    assert len((trained / "metrics.jsonl").read_text().splitlines()) == steps


def test_eval_of_a_model_prints_a_table_and_keeps_the_samples(
    rollick: Command, recipe: Path, tiny_folder: Path, runs: Path
) -> None:
    settings = ["evaluate.samples=2", "evaluate.pass_k=[1,2]", "evaluate.sampling.temperature=1"]
    out = rollick("eval", tiny_folder, recipe, *settings)
    assert all(word in out for word in ("letters", "all", "pass@1", "pass@2", "samples:"))
    folder = find_newest(runs, "eval")
    assert str(folder) in out.replace("\n", "")
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 16
    assert json.loads((folder / "evaluation.json").read_text())["overall"]["samples"] == 16


def test_eval_of_a_run_evaluates_what_was_trained(
    rollick: Command, recipe: Path, trained: Path, runs: Path, tiny_folder: Path
) -> None:
    report = json.loads(rollick("eval", trained, recipe, "--json"))
    assert report["overall"]["prompts"] == 8
    run_responses = read_responses(find_newest(runs, "eval"))
    rows = (trained / "validation.jsonl").read_text("utf-8").splitlines()
    last = max(json.loads(row)["step"] for row in rows)
    last_responses = {
        row["prompt"]: row["response"] for row in map(json.loads, rows) if row["step"] == last
    }
    assert run_responses == last_responses
    rollick("eval", tiny_folder, recipe, "--json")
    assert read_responses(find_newest(runs, "eval")) != run_responses


def test_eval_without_held_out_prompts_is_refused(
    rollick: Command, recipe: Path, tiny_folder: Path, runs: Path
) -> None:
    before = len(list(runs.glob("eval-*")))
    settings = ["data.validation={}", "evaluate.every=0", "evaluate.at_start=null"]
    message = rollick("eval", tiny_folder, recipe, *settings, code=2)
    assert "the recipe has no held-out prompts" in message
    assert "--training" in message
    assert len(list(runs.glob("eval-*"))) == before


def test_eval_on_training_prompts_is_labelled_as_such(
    rollick: Command, recipe: Path, tiny_folder: Path, runs: Path
) -> None:
    assert "on held-out prompts" in rollick("eval", tiny_folder, recipe)
    assert "on training prompts" in rollick("eval", tiny_folder, recipe, "--training")
    report = json.loads(rollick("eval", tiny_folder, recipe, "--training", "--json"))
    assert report["prompts"] == "training"
    assert report == json.loads((find_newest(runs, "eval") / "evaluation.json").read_text())


def test_eval_of_a_run_without_a_checkpoint_is_an_error(
    rollick: Command, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe.read_text())
    assert "has no checkpoint" in rollick("eval", tmp_path, recipe, code=2)


def test_an_exported_policy_is_a_plain_folder_with_the_same_outputs(
    rollick: Command, recipe: Path, trained: Path, runs: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "exported"
    assert rollick("export", trained, out).strip() == str(out)
    rollick("eval", trained, recipe, "--json")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    for prompt, response in read_responses(find_newest(runs, "eval")).items():
        turns = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            token_ids = model.generate(**encoded, max_new_tokens=3, do_sample=False)
        text = tokenizer.decode(
            token_ids[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert text == response


def test_export_overwrites_neither_a_file_nor_the_run_nor_its_base_model(
    rollick: Command, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("text")
    output = rollick("export", trained, tmp_path / "file", code=2)
    assert f"{tmp_path / 'file'} cannot be written: " in output
    assert (tmp_path / "file").read_text() == "text"
    assert "is the run, and would be overwritten" in rollick("export", trained, trained, code=2)
    model = load_recipe(trained / "recipe.yaml", check=False).recipe.model.path
    assert "is the run's initial model" in rollick("export", trained, model, code=2)


def test_export_of_something_else_is_refused(rollick: Command, tmp_path: Path) -> None:
    assert "is not a run's folder" in rollick("export", tmp_path, tmp_path / "out", code=2)


def test_replay_of_both_halves_of_a_step(rollick: Command, recipe: Path, trained: Path) -> None:
    dump = trained / "dumps" / "step-000001"
    train = json.loads(rollick("replay", dump, recipe, "--json"))
    assert train["max_ratio_error"] < 1e-5
    assert train["tokens"] > 0
    generate = json.loads(rollick("replay", dump, recipe, "--only", "generate", "--json"))
    assert generate["identical"] == generate["samples"] == 16
    plain = rollick("replay", dump, recipe)
    assert [line.split()[0] for line in plain.splitlines()] == list(train)


def test_replay_of_something_else_is_refused(
    rollick: Command, recipe: Path, tmp_path: Path
) -> None:
    assert "is not a dump" in rollick("replay", tmp_path, recipe, code=2)


def test_a_preset_is_printed_as_a_section_that_a_recipe_can_have(rollick: Command) -> None:
    out = rollick("config", "preset", "dapo")
    comment, section = out.split("\n", 1)
    assert comment.startswith("# GRPO with clip-higher")
    assert comment.endswith("(arXiv 2503.14476)")
    algorithm = yaml.safe_load(section)["algorithm"]
    assert AlgorithmConfig.model_validate(algorithm) == AlgorithmConfig(preset="dapo")
    assert algorithm["loss"]["clip_high"] == 0.28


def test_an_unknown_preset_gets_a_message_with_the_nearest(rollick: Command) -> None:
    message = rollick("config", "preset", "dap", code=2)
    assert "'dap' is not one of the presets (ppo, grpo, " in message
    assert "did you mean 'dapo'?" in message


ALGORITHMS = {
    "advantages": "dr_grpo grpo rloo reinforce reinforce++ reinforce++_baseline lite_ppo max_rl "
    "gdpo gae step_return segment_return gigpo opd",
    "shapings": "normalise length_penalty truncated_mask difficulty_mask",
    "losses": "dppo_tv dppo_kl ppo gspo segment reinforce truncated_is topr cispo sapo gmpo kimi "
    "raft raft++ sft dpo ipo distillation",
    "value_losses": "value",
    "bonuses": "entropy",
    "divergences": "forward reverse js skewed skewed_reverse adaptive",
    "kl_forms": "k1 k2 k3",
    "kl_controllers": "fixed adaptive",
    "corrections": "bypass none token_tis sequence_tis icepop geometric k3 decoupled opsm",
    "aggregations": "token_mean sequence_mean_token_mean sequence_mean_token_sum fixed_length "
    "prompt_mean",
    "selections": "zero_variance retirement near_half",
    "presets": "ppo grpo dr_grpo dapo gspo reinforce++ rloo raft++ topr cispo lite_ppo gigpo "
    "max_rl sapo dppo",
}
"""The documented methods of each kind."""


def test_every_algorithm_is_listed_under_its_kind_and_there_is_code_for_it(
    rollick: Command,
) -> None:
    listed = json.loads(rollick("list", "--json"))
    for kind, names in ALGORITHMS.items():
        assert set(names.split()) <= set(listed[kind]), kind
        for name in names.split():
            assert resolve(kind, name) is not None
