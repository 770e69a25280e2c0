"""The figures of benchmarks/snapshots.py, without a run."""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


class FakeRecovery:
    """Recovery of a policy whose snapshot has `sizes` bytes by rank."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.seconds = sizes, 0.5
        self.snapshots = {"policy": self}

    def finish_step(self) -> None:
        pass

    async def take_snapshots(self) -> None:
        pass

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[list[Any]]:
        yield [(None, SimpleNamespace(bytes=size)) for size in self.sizes]


@pytest.mark.parametrize("sizes", [[3_000_000], [1_000_000, 2_000_000]])
async def test_the_size_of_a_snapshot_is_that_of_all_ranks(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("snapshots")

    async def step() -> None:
        pass

    @asynccontextmanager
    async def open_pipeline(loaded: Any) -> AsyncGenerator[tuple[Any, Any]]:
        run = SimpleNamespace(state=SimpleNamespace(step=0), recovery=FakeRecovery(sizes))
        yield run, SimpleNamespace(step=step)

    monkeypatch.setattr(benchmark, "load_smollm2", lambda folder: None)
    monkeypatch.setattr(benchmark, "open_pipeline", open_pipeline)
    # The steps must take a time above 0.
    monkeypatch.setattr(benchmark, "perf_counter", iter(range(100)).__next__)
    figures = await benchmark.measure_cost_on_cpu(tmp_path, steps=1)
    assert (figures["gb"], figures["share"]) == (0.003, 0.5)
