"""Every run writes report.html with its task, model, settings, results and samples."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rollick.config.load import LoadedRecipe
from rollick.errors import StuckError
from rollick.observe.metrics import read_metrics
from rollick.pipelines import loop
from rollick.pipelines.run import run_recipe

Toy = Callable[..., LoadedRecipe]


class PageTexts(HTMLParser):
    """The texts of a page between its tags."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def texts_after(self, text: str, count: int = 1) -> list[str]:
        begin = self.texts.index(text) + 1
        return self.texts[begin : begin + count]


def test_the_report_of_an_rl_run_has_task_model_seed_results_and_samples(toy: Toy) -> None:
    algorithm = ("algorithm.advantage=rloo", "algorithm.loss=reinforce")
    options = ("observe.report=true", "evaluate.at_start=true", "evaluate.at_end=true")
    loaded = toy(*options, "run.seed=7", *algorithm, name="$\\frac$")
    folder = run_recipe(loaded).folder
    page, rows = PageTexts(folder / "report.html"), read_metrics(folder / "metrics.jsonl")
    assert page.texts.count("$\\frac$") == 2
    assert page.texts_after("task") == [
        "rlvr: letters (rollick.testing.toys:letter_rows, "
        "scored by rollick.testing.toys:nears_letter)"
    ]
    assert page.texts_after("model") == [loaded.recipe.model.path]
    assert page.texts_after("algorithm") == ["advantage rloo, loss reinforce"]
    assert page.texts_after("seed") == ["7"]
    assert page.texts_after("steps")[0].startswith("2 of 2, ")
    first, last = (row["eval/pass@1"] for row in rows if "eval/pass@1" in row)
    expected = [f"{value:.3g}" for value in (first, max(first, last), last)]
    assert page.texts_after("held-out: all", 3) == expected
    assert "Held-out prompts, first and last validation" in page.texts
    assert [f"say {letter}" in page.texts for letter in "abcdefgh"] == [True] * 8
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_validation_shows_its_last_samples_and_one_that_fails_has_a_report(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = toy("observe.report=true", "observe.samples_per_step=1")
    page = PageTexts(run_recipe(loaded).folder / "report.html")
    assert "Samples of the last step" in page.texts
    assert sum(text.startswith("say ") for text in page.texts) == 1

    async def fail(*args: Any) -> Any:
        raise StuckError("an engine does not answer")

    monkeypatch.setattr(loop, "evaluate_prompts", fail)
    loaded = toy("observe.report=true", "evaluate.at_end=true", name="fails")
    with pytest.raises(StuckError):
        run_recipe(loaded)
    assert (Path(loaded.recipe.run.folder) / "fails" / "report.html").is_file()


def test_the_report_of_sft_shows_the_loss_and_none_is_written_if_it_is_off(toy: Toy) -> None:
    domain = {"source": "rollick.testing.toys:letter_rows", "completion": "answer"}
    sections = {"pipeline": "sft", "data": {"domains": {"letters": domain}}}
    page = PageTexts(run_recipe(toy("observe.report=true", **sections)).folder / "report.html")
    first, best, last = (float(text) for text in page.texts_after("loss", 3))
    assert 0 < best <= min(first, last)
    assert not (run_recipe(toy(**sections)).folder / "report.html").exists()


def test_a_report_that_cannot_be_written_does_not_fail_the_run(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = toy("observe.report=true")
    (Path(loaded.recipe.run.folder) / loaded.recipe.run.name / "report.html").mkdir(parents=True)
    assert run_recipe(loaded).step == 2
    assert "report.html was not written: IsADirectoryError" in caplog.text
