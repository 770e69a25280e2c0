"""The demo: held-out prompts are not trained on, and the policy learns."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollick.testing.demo import (
    DOMAINS,
    HELD_OUT,
    WARM_UP,
    dr_grpo_on_shuffled_scores,
    largest_first,
    letters_in_order,
    make_tasks,
)
from rollick.testing.fakes import group


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_prompts_are_in_neither_the_warm_up_nor_the_training(seed: int) -> None:
    tasks = make_tasks(seed)
    for domain in DOMAINS:
        parts = [
            {row["prompt"] for row in part[domain]}
            for part in (tasks.held_out, tasks.warm_up, tasks.training)
        ]
        assert [len(part) for part in parts[:2]] == [HELD_OUT, WARM_UP]
        assert len(set.union(*parts)) == sum(len(part) for part in parts)


def test_every_answer_is_the_prompts_symbols_in_the_order_of_its_domain() -> None:
    tasks = make_tasks(0)
    for row in tasks.training["letters"]:
        assert list(row["answer"]) == sorted(row["prompt"].removesuffix(">"))
    for row in tasks.training["digits"]:
        assert list(row["answer"]) == sorted(row["prompt"].removesuffix("<"), reverse=True)


@pytest.mark.parametrize("reward", [letters_in_order, largest_first])
@pytest.mark.parametrize(
    ("completion", "score"),
    [("abcde", 1.0), ("abced", 0.3), ("edcba", 0.1), ("abcd", 0.0), ("abcdef", 0.0), ("", 0.0)],
)
def test_only_the_full_answer_scores_one(reward: Any, completion: str, score: float) -> None:
    assert reward(completion, "abcde") == pytest.approx(score)


def test_the_control_shuffles_the_scores_among_samples() -> None:
    groups = [group(scores=[0, 0, 0, 0]), group(scores=[1, 1, 1, 1])]
    advantages = dr_grpo_on_shuffled_scores(groups, {})
    assert sum(len(members) for members in advantages) == 8
    assert any(value != 0 for members in advantages for value in members)
    assert advantages == dr_grpo_on_shuffled_scores(groups, {})


def _run_demo(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "rollick.cli", "demo", "--json", "--folder", str(folder)]
    child = subprocess.run([*command, *options], capture_output=True, text=True, timeout=400)
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_both_domains_on_held_out_prompts(tmp_path: Path, seed: int) -> None:
    result = _run_demo(tmp_path, "--seed", str(seed))
    assert result["before"] <= 0.4
    assert result["after"] >= 0.9
    assert all(domain["after"] >= 0.85 for domain in result["domains"].values())
    (report,) = tmp_path.glob("*/rl/report.html")
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_shuffled_scores_the_demo_learns_nothing(tmp_path: Path, seed: int) -> None:
    result = _run_demo(tmp_path, "--control", "--seed", str(seed))
    assert result["after"] <= result["before"] + 0.1
