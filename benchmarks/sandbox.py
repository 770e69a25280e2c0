"""Verdicts per second of the code sandbox, each in fresh boxes.

    python benchmarks/sandbox.py --json [--rows 300] [--at-once 4] [--data ../shared/data]

Runs MBPP's reference solutions against MBPP's tests: candidate and tests in two boxes, both started
for this verdict only. Prints verdicts_per_s over the rows, after a short warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path

from rollick.sandbox.base import Result
from rollick.sandbox.checks import check_asserts
from rollick.sandbox.local import LocalSandbox

WARM_UP = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=4)
    default = Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default)
    options = parser.parse_args()
    lines = (options.data / "mbpp.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: options.rows]]
    figures = asyncio.run(measure(rows, options.at_once))
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<18}{value}" for name, value in figures.items()))


async def measure(rows: list[dict[str, object]], at_once: int) -> dict[str, object]:
    with LocalSandbox(warm=at_once, concurrency=at_once) as sandbox:
        await asyncio.gather(*(check_row(sandbox, row) for row in rows[:WARM_UP]))
        begun, before = time.perf_counter(), os.times()
        verdicts = await asyncio.gather(*(check_row(sandbox, row) for row in rows))
        seconds, after = time.perf_counter() - begun, os.times()
    levels = Counter(str(verdict.isolation) for verdict in verdicts)
    return {
        "verdicts_per_s": round(len(rows) / seconds, 2),
        "rows": len(rows),
        "passed": sum(verdict.all_passed for verdict in verdicts),
        "seconds": round(seconds, 2),
        "isolation": levels.most_common(1)[0][0],
        "levels": dict(levels),
        "fresh_boxes": True,
        "at_once": at_once,
        "cpus": len(os.sched_getaffinity(0)),
        "parent_cpu_s": round(after.user + after.system - before.user - before.system, 2),
    }


async def check_row(sandbox: LocalSandbox, row: dict[str, object]) -> Result:
    tests = [str(test) for test in row["test_list"]]  # pyright: ignore
    setup, code = str(row["test_setup_code"]), str(row["code"])
    return await check_asserts(sandbox, code, asserts=tests, setup=setup, reference=code)


if __name__ == "__main__":
    main()
