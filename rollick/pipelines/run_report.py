"""report.html of a run: what was trained, how the scores moved, and samples before and after."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollick.config.schema import Domain, Recipe, RlRecipe, agent_of, environment_of, rewards_of
from rollick.observe.diagnosis import format_duration
from rollick.observe.goodput_report import Reliability
from rollick.observe.learning_advice import find_advice
from rollick.observe.metrics import read_metrics
from rollick.observe.report import SampleComparison, write_report
from rollick.observe.row_file import read_rows

LOG = logging.getLogger("rollick")

SAMPLES_PER_DOMAIN = 12

SampleRow = Mapping[str, Any]


def report_run(folder: Path, recipe: Recipe) -> None:
    """Write report.html and report.png if the run has metrics. A failure is logged."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return
    try:
        rows = read_metrics(metrics)
        write_report(
            folder / "report.html",
            rows,
            title=recipe.run.name,
            facts=_facts(recipe, rows),
            advice=find_advice(rows),
            comparisons=_compare_samples(folder, recipe),
            reliability=Reliability.read(folder),
        )
    except Exception as error:  # A picture must not cost a finished run.
        LOG.warning("report.html was not written: %s: %s", type(error).__name__, error)


def _facts(recipe: Recipe, rows: list[dict[str, float]]) -> dict[str, str]:
    domains = [f"{name} ({_describe_domain(each)})" for name, each in recipe.data.domains.items()]
    facts = {"task": f"{recipe.pipeline}: {', '.join(domains)}", "model": recipe.model.path}
    if isinstance(recipe, RlRecipe):
        advantage, loss = recipe.algorithm.advantage.name, recipe.algorithm.loss.name
        facts["algorithm"] = f"advantage {advantage}, loss {loss}"
    seconds = sum(row.get("time/step", 0.0) for row in rows)
    done = int(rows[-1]["step"]) if rows else 0
    return facts | {
        "seed": str(recipe.run.seed),
        "steps": f"{done} of {recipe.run.steps}, {format_duration(seconds)}",
    }


def _describe_domain(domain: Domain) -> str:
    environment, agent = environment_of(domain), agent_of(domain)
    what = environment.name if environment else agent or domain.source
    rewards = ", ".join(reward.name for reward in rewards_of(domain))
    return f"{what}, scored by {rewards}" if rewards else what


def _compare_samples(folder: Path, recipe: Recipe) -> list[SampleComparison]:
    """Held-out prompts at the first and last validation; without one, samples of the last step."""
    held_out = folder / "validation.jsonl"
    first, last = _first_and_last(held_out if held_out.is_file() else folder / "samples.jsonl")
    before = {row["prompt_uid"]: row for row in first} if held_out.is_file() else {}
    threshold = recipe.evaluate.pass_threshold

    def passed(row: SampleRow | None) -> bool:
        return row is not None and row["score"] is not None and row["score"] >= threshold

    comparisons: list[SampleComparison] = []
    for row in last:
        earlier = before.get(row["prompt_uid"])
        text = earlier["response"] if earlier is not None else None
        texts = (row["domain"], row["prompt"], text, row["response"])
        comparisons.append(SampleComparison(*texts, passed(earlier), passed(row)))
    return comparisons


def _first_and_last(path: Path) -> tuple[list[SampleRow], list[SampleRow]]:
    """A few rows of each domain from the first step; those of the last step, if it is another."""
    first: list[SampleRow] = []
    last: list[SampleRow] = []
    for row in _few_rows(path):
        if not first or row["step"] == first[0]["step"]:
            first.append(row)
            continue
        if last and row["step"] != last[0]["step"]:
            last.clear()
        last.append(row)
    return (first, last) if last else ([], first)


def _few_rows(path: Path) -> Iterator[SampleRow]:
    """The first sample of SAMPLES_PER_DOMAIN prompts of each domain, at each step."""
    if not path.is_file():
        return
    step, prompts = None, dict[str, set[str]]()
    for row in read_rows(path):
        if row["step"] != step:
            step, prompts = row["step"], {}
        shown = prompts.setdefault(row["domain"], set())
        if len(shown) < SAMPLES_PER_DOMAIN and row["prompt_uid"] not in shown:
            shown.add(row["prompt_uid"])
            yield row
