"""A run whose learner is on two ranks, end to end on Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollick import RunResult
from rollick.commands.export import export_run

SHARDED = (
    "cluster.backend=ray",
    "devices.policy=cpu:0-1",
    "devices.generators=cpu:1-2",  # one in the process of rank 1, one by itself
    "train.strategy=fsdp",
    "train.parallel.data=2",
)


def column(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_two_ranks_is_that_on_one(run_toy: Callable[..., RunResult], tmp_path: Path):
    """Same seed, so the same prompts; engine and learner differ in rounding alone at first."""
    alone = run_toy("cluster.backend=ray", "checkpoint.every=1", name="alone", steps=2)
    sharded = run_toy(*SHARDED, "checkpoint.every=1", name="sharded", steps=2)
    loss, moved = "train/loss", "controller/batch_mb"
    first = column(alone.folder, loss)[0]
    assert column(sharded.folder, loss)[0] == pytest.approx(first, abs=1e-4)
    # Each rank gets its rows only: together they get what one rank gets.
    assert column(sharded.folder, moved)[0] == pytest.approx(column(alone.folder, moved)[0])
    assert column(alone.folder, moved)[0] > 0
    longer = run_toy(*SHARDED, "checkpoint.every=1", name="sharded", steps=3, resume=True)
    assert longer.step == 3
    out = export_run(longer.folder, tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0
