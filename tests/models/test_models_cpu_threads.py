"""The OpenMP threads of a thread: they start when it computes, and end when it releases them."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rollick.models.cpu_threads import release_openmp_threads


def list_threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def compute_product() -> torch.Tensor:
    return torch.ones(400, 400) @ torch.ones(400, 400)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_thread_that_releases_its_helper_threads_continues_with_new_ones():
    with ThreadPoolExecutor(1) as executor:
        executor.submit(torch.set_num_threads, 3).result()
        before = list_threads()
        executor.submit(compute_product).result()
        assert len(list_threads() - before) == 2
        assert executor.submit(release_openmp_threads).result()
        assert list_threads() == before
        assert float(executor.submit(compute_product).result()[0, 0]) == 400.0
        assert len(list_threads() - before) == 2
        executor.submit(release_openmp_threads).result()
