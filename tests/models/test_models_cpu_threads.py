"""Helpers of a thread are there while it computes, and end when it gives them back."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rollick.models.cpu_threads import release_openmp_threads


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def product() -> torch.Tensor:
    return torch.ones(400, 400) @ torch.ones(400, 400)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_thread_that_releases_its_helper_threads_continues_with_new_ones():
    with ThreadPoolExecutor(1) as one:
        one.submit(torch.set_num_threads, 3).result()
        before = threads()
        one.submit(product).result()
        assert len(threads() - before) == 2
        assert one.submit(release_openmp_threads).result()
        assert threads() == before
        assert float(one.submit(product).result()[0, 0]) == 400.0
        assert len(threads() - before) == 2
        one.submit(release_openmp_threads).result()
