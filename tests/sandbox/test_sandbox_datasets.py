"""MBPP and HumanEval: every reference solution passes its tests, and hardly a wrong one does."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant, mutate

from rollick.rewards.code import judge
from rollick.sandbox.base import Isolation, Limits, Sandbox
from rollick.sandbox.local import LocalSandbox
from rollick.sandbox.verdict import Verdict

DATA = Path(__file__).parents[3] / "shared" / "data"
SHARED_ROWS = [367, 601, 927]
"""Rows of MBPP whose tests make objects of a class that the solution defines: they are not data."""
PATIENT = Limits(wall_s=90.0, cpu_s=90)
"""One of MBPP's solutions (123) computes for some seconds."""
MUTANT_LIMITS = Limits(wall_s=3.0, cpu_s=3)
"""A mutant that loops for ever is wrong."""
MOST_SURVIVORS = 0.05
AT_ONCE = 4
SOME = 20
"""One row in so many is tried in every run of the tests, all of them in the slow ones."""

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared datasets are not here")


def mbpp() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "mbpp.jsonl").read_text("utf-8").splitlines()]


def humaneval() -> list[dict[str, Any]]:
    with gzip.open(DATA / "humaneval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [row | {"reference": row["prompt"] + row["canonical_solution"]} for row in rows]


async def judge_all(
    rows: Sequence[dict[str, Any]], codes: Sequence[str], limits: Limits
) -> list[Verdict]:
    with LocalSandbox(warm=AT_ONCE, at_once=AT_ONCE) as sandbox:

        async def one(sandbox: Sandbox, row: dict[str, Any], code: str) -> Verdict:
            return await judge(sandbox, f"```python\n{code}\n```", row, limits)

        work = (one(sandbox, row, code) for row, code in zip(rows, codes, strict=True))
        return await asyncio.gather(*work)


async def surviving_mutants(rows: Sequence[dict[str, Any]], column: str) -> tuple[list[str], int]:
    """The mutants that pass all tests, by name and line, and how many there were."""
    made = [(row, mutate(row[column], seed)) for seed, row in enumerate(rows)]
    mutants: list[tuple[dict[str, Any], Mutant]] = [(row, it) for row, it in made if it is not None]
    verdicts = await judge_all(
        [row for row, _ in mutants], [it.code for _, it in mutants], MUTANT_LIMITS
    )
    assert all(verdict.judged for verdict in verdicts)
    survivors = [
        f"{row['task_id']} {mutant.kind}@{mutant.line}"
        for (row, mutant), verdict in zip(mutants, verdicts, strict=True)
        if verdict.all_passed
    ]
    return survivors, len(mutants)


@pytest.mark.parametrize("every", [SOME, pytest.param(1, marks=pytest.mark.slow)])
async def test_all_references_of_mbpp_pass(every: int) -> None:
    rows = [row for n, row in enumerate(mbpp()) if n % every == 0 or row["task_id"] in SHARED_ROWS]
    verdicts = await judge_all(rows, [row["code"] for row in rows], PATIENT)
    judged = list(zip(rows, verdicts, strict=True))
    assert [(row["task_id"], it.detail) for row, it in judged if not it.all_passed] == []
    shared = [row["task_id"] for row, it in judged if it.isolation is Isolation.SHARED]
    assert shared == SHARED_ROWS
    assert {it.isolation for row, it in judged if row["task_id"] not in shared} <= {
        Isolation.FULL,
        Isolation.USER,
    }


@pytest.mark.parametrize("every", [SOME, pytest.param(1, marks=pytest.mark.slow)])
async def test_all_references_of_humaneval_pass(every: int) -> None:
    rows = humaneval()[::every]
    verdicts = await judge_all(rows, [row["reference"] for row in rows], PATIENT)
    judged = list(zip(rows, verdicts, strict=True))
    assert [(row["task_id"], it.detail) for row, it in judged if not it.all_passed] == []


def test_the_benchmark_says_its_rate_and_the_isolation_that_it_was_measured_at() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "sandbox.py"
    command = [sys.executable, script, "--json", "--rows", "3", "--data", DATA]
    figures = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (figures["rows"], figures["passed"], figures["fresh_boxes"]) == (3, 3, True)
    assert figures["verdicts_per_s"] > 0
    assert figures["isolation"] in ("full", "user")


@pytest.mark.slow
async def test_hardly_a_mutant_of_mbpp_survives() -> None:
    survivors, count = await surviving_mutants(mbpp(), "code")
    print(f"{len(survivors)} of {count} mutants of MBPP survive: {survivors}")
    assert count > 900
    assert len(survivors) <= MOST_SURVIVORS * count, survivors


@pytest.mark.slow
async def test_hardly_a_mutant_of_humaneval_survives() -> None:
    survivors, count = await surviving_mutants(humaneval(), "reference")
    print(f"{len(survivors)} of {count} mutants of HumanEval survive: {survivors}")
    assert count > 150
    assert len(survivors) <= MOST_SURVIVORS * count, survivors
