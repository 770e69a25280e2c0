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


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_two_ranks_is_that_on_one(run_toy: Callable[..., RunResult], tmp_path: Path):
    """Same seed, so the same prompts; engine and learner differ in rounding alone at first."""
    alone = run_toy("cluster.backend=ray", "checkpoint.every=1", name="alone", steps=2)
    sharded = run_toy(*SHARDED, "checkpoint.every=1", name="sharded", steps=2)
    assert losses(sharded.folder)[0] == pytest.approx(losses(alone.folder)[0], abs=1e-4)
    longer = run_toy(*SHARDED, "checkpoint.every=1", name="sharded", steps=3, resume=True)
    assert longer.step == 3
    out = export_run(longer.folder, tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0
