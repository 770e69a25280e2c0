"""MBPP and HumanEval: every reference solution passes its tests, and few mutants pass them."""

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

from rollick.rewards.code import run_tests
from rollick.sandbox.base import Isolation, Limits, Result, Sandbox
from rollick.sandbox.local import LocalSandbox

DATA = Path(__file__).parents[3] / "shared" / "data"
SHARED_ROWS = [367, 601, 927]
"""Rows of MBPP whose tests create objects of the solution's classes, which are not plain data."""
REFERENCE_LIMITS = Limits(wall_s=90.0, cpu_s=90)
"""MBPP's solution 123 runs for several seconds."""
MUTANT_LIMITS = Limits(wall_s=3.0, cpu_s=3)
"""A mutant that loops forever is wrong."""
MAX_SURVIVOR_RATE = 0.05
CONCURRENCY = 4
SAMPLE_EVERY = 20
"""A normal run tests one row in this many; the slow tests use all rows."""

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared datasets are not here")


def load_mbpp() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "mbpp.jsonl").read_text("utf-8").splitlines()]


def load_humaneval() -> list[dict[str, Any]]:
    with gzip.open(DATA / "humaneval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [row | {"reference": row["prompt"] + row["canonical_solution"]} for row in rows]


async def check_all(
    rows: Sequence[dict[str, Any]], codes: Sequence[str], limits: Limits
) -> list[Result]:
    with LocalSandbox(warm=CONCURRENCY, concurrency=CONCURRENCY) as sandbox:

        async def check_row(sandbox: Sandbox, row: dict[str, Any], code: str) -> Result:
            return await run_tests(sandbox, code, row, limits)

        checks = (check_row(sandbox, row, code) for row, code in zip(rows, codes, strict=True))
        return await asyncio.gather(*checks)


async def find_surviving_mutants(
    rows: Sequence[dict[str, Any]], column: str
) -> tuple[list[str], int]:
    """Names of the mutants that pass all tests, and the number of all mutants."""
    pairs = [(row, mutate(row[column], seed)) for seed, row in enumerate(rows)]
    mutants: list[tuple[dict[str, Any], Mutant]] = [
        (row, mutant) for row, mutant in pairs if mutant is not None
    ]
    results = await check_all(
        [row for row, _ in mutants], [mutant.code for _, mutant in mutants], MUTANT_LIMITS
    )
    assert all(verdict.status.is_conclusive for verdict in results)
    survivors = [
        f"{row['task_id']} {mutant.kind}@{mutant.line}"
        for (row, mutant), verdict in zip(mutants, results, strict=True)
        if verdict.all_passed
    ]
    return survivors, len(mutants)


@pytest.mark.parametrize("every", [SAMPLE_EVERY, pytest.param(1, marks=pytest.mark.slow)])
async def test_all_references_of_mbpp_pass(every: int) -> None:
    rows = [
        row for n, row in enumerate(load_mbpp()) if n % every == 0 or row["task_id"] in SHARED_ROWS
    ]
    results = await check_all(rows, [row["code"] for row in rows], REFERENCE_LIMITS)
    checked = list(zip(rows, results, strict=True))
    assert [
        (row["task_id"], result.detail) for row, result in checked if not result.all_passed
    ] == []
    shared = [row["task_id"] for row, result in checked if result.isolation is Isolation.SHARED]
    assert shared == SHARED_ROWS
    assert {result.isolation for row, result in checked if row["task_id"] not in shared} <= {
        Isolation.FULL,
        Isolation.USER,
    }


@pytest.mark.parametrize("every", [SAMPLE_EVERY, pytest.param(1, marks=pytest.mark.slow)])
async def test_all_references_of_humaneval_pass(every: int) -> None:
    rows = load_humaneval()[::every]
    results = await check_all(rows, [row["reference"] for row in rows], REFERENCE_LIMITS)
    checked = list(zip(rows, results, strict=True))
    assert [
        (row["task_id"], result.detail) for row, result in checked if not result.all_passed
    ] == []


def test_the_benchmark_reports_its_rate_and_the_isolation() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "sandbox.py"
    command = [sys.executable, script, "--json", "--rows", "3", "--data", DATA]
    figures = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (figures["rows"], figures["passed"], figures["fresh_boxes"]) == (3, 3, True)
    assert figures["verdicts_per_s"] > 0
    assert figures["isolation"] in ("full", "user")


@pytest.mark.slow
async def test_few_mutants_of_mbpp_survive() -> None:
    survivors, count = await find_surviving_mutants(load_mbpp(), "code")
    print(f"{len(survivors)} of {count} mutants of MBPP survive: {survivors}")
    assert count > 900
    assert len(survivors) <= MAX_SURVIVOR_RATE * count, survivors


@pytest.mark.slow
async def test_few_mutants_of_humaneval_survive() -> None:
    survivors, count = await find_surviving_mutants(load_humaneval(), "reference")
    print(f"{len(survivors)} of {count} mutants of HumanEval survive: {survivors}")
    assert count > 150
    assert len(survivors) <= MAX_SURVIVOR_RATE * count, survivors
