"""`rollick compare`: runs and seeds in one table and one picture; `rollick doctor`'s advice."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollick.commands.compare import choose_metrics, group_runs
from rollick.commands.doctor import diagnose_folder
from rollick.config.load import dump_recipe, recipe_from_dict
from rollick.errors import ConfigError, DataError
from rollick.observe.comparison import summarise
from rollick.testing.toys import toy_recipe

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes the folder of a run whose held-out score rises from 0 to `last` in two steps."""

    def make(
        name: str, *overrides: str, last: float = 0.5, code: str = "", **metrics: float
    ) -> Path:
        recipe = toy_recipe(tmp_path / "model", tmp_path, name=name)
        loaded = recipe_from_dict(recipe, overrides=overrides, objects=frozenset({"rows"}))
        folder = tmp_path / name
        (folder / "code").mkdir(parents=True)
        (folder / "recipe.yaml").write_text(dump_recipe(loaded.recipe))
        if code:
            (folder / "code/rewards.py").write_text(code)
        rows: list[dict[str, float]] = [
            {"step": 0, "eval/pass@1": 0.0},
            {"step": 1, "score/mean": 0.1, "time/step": 30.0, **metrics},
            {"step": 2, "score/mean": 0.2, "eval/pass@1": last, "time/step": 30.0, **metrics},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def run_compare(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollick.cli", "compare", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_seeds_of_one_recipe_are_one_line_with_mean_and_deviation(make_run: MakeRun) -> None:
    low_lr = "train.optimizer.lr=1e-6"
    folders = [
        make_run("a", "run.seed=1", last=0.4),
        make_run("b", low_lr, last=0.1),
        make_run("c", "run.seed=2", "observe.live=on", last=0.6),
    ]
    groups = group_runs([*folders, folders[0]])
    assert [group.label for group in groups] == ["lr=0.003", "lr=1e-06"]
    assert [[run.name for run in group.runs] for group in groups] == [["a", "c"], ["b"]]
    first, second = (summarise(group, "eval/pass@1") for group in groups)
    assert (first.seeds, first.steps, first.seconds) == ([1, 2], 2, 60.0)
    assert str(first.last) == "0.5 ± 0.14"
    assert (str(second.first), str(second.best)) == ("0", "0.1")
    loss = [summarise(group_runs([make_run("d", **{"train/loss": 2.0})])[0], "train/loss")]
    assert loss[0].best.mean == 2.0


def test_runs_with_other_code_or_many_other_settings_have_different_labels(
    make_run: MakeRun,
) -> None:
    code_groups = group_runs([make_run("a", code="x = 1\n"), make_run("b", code="x = 2\n")])
    assert len(code_groups) == 2
    assert all(group.label.startswith("code/rewards.py=") for group in code_groups)
    many_settings = ["run.steps=9", "train.optimizer.lr=1", "rollout.group_size=2", "infer.slots=3"]
    setting_groups = group_runs([make_run("c"), make_run("d", *many_settings)])
    assert [group.label for group in setting_groups] == ["c", "d"]
    custom_source = "data.domains.letters.source=object:rows"
    same_recipe = [
        make_run("g", custom_source),
        make_run("h", custom_source),
        make_run("i", custom_source, "run.seed=1"),
    ]
    assert [group.label for group in group_runs(same_recipe)] == ["g, i", "h"]
    other = make_run("j", custom_source, "run.steps=9")
    assert [group.label for group in group_runs([*same_recipe, other])] == ["g, i", "h", "j"]
    [only_group] = group_runs([make_run("e", "run.seed=1"), make_run("f", "run.seed=2")])
    assert only_group.label == "e, f"


def test_the_command_prints_a_table_and_draws_a_picture(make_run: MakeRun, tmp_path: Path) -> None:
    folders = [make_run("a", "rollout.group_size=2"), make_run("b", last=0.75)]
    child = run_compare(*folders, "--picture", tmp_path / "out/curves.png")
    assert child.returncode == 0, child.stderr
    assert "eval/pass@1" in child.stdout
    assert "group_size=2" in child.stdout
    assert "0.75" in child.stdout
    assert (tmp_path / "out/curves.png").read_bytes().startswith(b"\x89PNG")
    child = run_compare(
        *folders, "--picture", tmp_path / "2.png", "--metric", "score/mean", "--json"
    )
    report = json.loads(child.stdout)
    assert report["metric"] == "score/mean"
    assert [group["last"]["mean"] for group in report["groups"]] == [0.2, 0.2]


def test_incomparable_results_are_reported(make_run: MakeRun, tmp_path: Path) -> None:
    groups = group_runs([make_run("a"), make_run("b")])
    assert choose_metrics(groups, None) == ("eval/pass@1", ["eval/pass@1", "score/mean"])
    with pytest.raises(DataError, match=r"a has no metric 'score/men'. did you mean 'score/mean'"):
        choose_metrics(groups, "score/men")
    with pytest.raises(DataError, match="is not a run's folder"):
        group_runs([tmp_path])
    empty = make_run("c")
    (empty / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match="c has made no step"):
        group_runs([empty])
    with pytest.raises(ConfigError, match="typing_mistake is not a run's folder"):
        group_runs([tmp_path / "a", tmp_path / "typing_mistake"])


def test_a_pattern_may_match_evaluations_and_models_too(
    make_run: MakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, evaluation = make_run("a"), make_run("eval-1")
    (evaluation / "metrics.jsonl").unlink()
    (tmp_path / "exported").mkdir()
    [group] = group_runs([run, evaluation, tmp_path / "exported"])
    assert [member.name for member in group.runs] == ["a"]
    [message] = caplog.messages
    assert message == (
        f"skipped 2: {evaluation} has made no step; {tmp_path / 'exported'} is not a run's folder"
    )


def test_the_runs_that_lack_the_default_metrics_are_named(make_run: MakeRun) -> None:
    rows = {"a": {"step": 1, "score/mean": 0.5}, "b": {"step": 1, "train/loss": 0.5}}
    folders = [make_run(name) for name in rows]
    for folder in folders:
        (folder / "metrics.jsonl").write_text(json.dumps(rows[folder.name]) + "\n")
    groups = group_runs(folders)
    expected = (
        r"pass@1 is not in a and 1 more; .*; score/mean is not in b; train/loss is not in a\."
    )
    with pytest.raises(DataError, match=expected):
        choose_metrics(groups, None)


def test_runs_that_never_pass_are_compared_by_their_held_out_score(make_run: MakeRun) -> None:
    def choose_for_runs(**values: float) -> tuple[str, Sequence[str]]:
        runs = [make_run(f"{name}{values}", **{"eval/score": 0.2}, **values) for name in "ab"]
        return choose_metrics(group_runs(runs), None)

    assert choose_for_runs(last=0.0) == ("eval/score", ["eval/score", "score/mean"])
    assert choose_for_runs(last=0.1) == ("eval/pass@1", ["eval/pass@1", "score/mean"])


def test_the_doctor_names_what_keeps_a_run_from_learning(make_run: MakeRun) -> None:
    folder = make_run("a")
    row = {"score/mean": 0.1, "train/grad_norm": 0.0, "rollout/truncated": 0.9}
    lines = [json.dumps({"step": step, **row}) + "\n" for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    diagnosis = diagnose_folder(folder)
    assert list(diagnosis.learning) == ["no_gradient", "at_limit"]
    assert any(line.startswith("at_limit: 90% of the answers") for line in diagnosis.lines())
    (folder / "metrics.jsonl").unlink()
    assert diagnose_folder(folder).learning == {}
