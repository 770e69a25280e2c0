"""`rollick reward test`: one reward on a few rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollick.cli.options import parse_options
from rollick.commands.reward import read_test_rows, sample_of_row
from rollick.config.names import NAMES
from rollick.errors import ConfigError, DataError, RewardError
from rollick.rewards.examples import EXAMPLES

NEEDS_MORE = {"judge", "code", "model"}
"""Built-in rewards that cannot be tested without a server, a sandbox or a run."""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollick.cli", "reward", "test", *arguments]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, env=environment
    )


def test_a_built_in_reward_runs_on_its_examples(tmp_path: Path):
    child = run(tmp_path, "math", "--json")
    assert child.returncode == 0, child.stderr
    rows = [json.loads(line) for line in child.stdout.splitlines()]
    assert [row["value"] for row in rows] == [1.0, 1.0, 0.0, 1.0]
    assert all(row["isolation"] == "process" and row["seconds"] > 0 for row in rows)


def test_a_custom_reward_runs_on_rows_with_options(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def short(question, answer, limit=3):\n"
        "    if question == 'bad': raise ValueError('no good')\n"
        "    return len(question) <= limit\n"
    )
    rows = [{"question": text, "answer": 1} for text in ("abcd", "ab", "bad")]
    # The reward gets `question` from the row; the completion has a column of its own.
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({**row, "text": row["question"]}) + "\n" for row in rows)
    )
    arguments = ("mine.py:short", "rows.jsonl", "--completion", "text", "--option", "limit=4")
    child = run(tmp_path, *arguments)
    assert child.returncode == 1, child.stderr
    assert "no good" in child.stdout
    results = [json.loads(line) for line in run(tmp_path, *arguments, "--json").stdout.splitlines()]
    assert [(row["value"], row["status"]) for row in results] == [
        (1.0, "ok"),
        (1.0, "ok"),
        (None, "failed"),
    ]


def test_a_reward_that_cannot_be_tested_gives_a_clear_error(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"answer": 1}\n')
    assert "did you mean exact_match" in run(tmp_path, "exact_mach", "rows.jsonl").stderr
    with pytest.raises(DataError, match="no rows to test your own reward"):
        read_test_rows("mine.py:short", None, limit=4, base=tmp_path)
    [row] = read_test_rows("exact_match", "rows.jsonl", limit=4, base=tmp_path)
    with pytest.raises(RewardError, match="no column 'completion'") as error:
        sample_of_row(row, 0)
    assert "--completion" in error.value.fix
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_options(["x"])


def test_every_built_in_reward_has_examples():
    assert set(NAMES["rewards"]) - NEEDS_MORE == set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("reward", sorted(EXAMPLES))
def test_the_examples_of_every_reward_score_high_and_low(tmp_path: Path, reward: str):
    child = run(tmp_path, reward, "--json")
    assert child.returncode == 0, child.stderr
    values = [json.loads(line)["value"] for line in child.stdout.splitlines()]
    assert max(values) > min(values)
