"""Roles for tests of the cluster that count, wait and fail. Worker processes import them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.cluster.worker import HostContext
from rollick.errors import OpenFilesExhausted, WeightError


class Counter:
    """Counts calls and reports its host."""

    def __init__(self, context: HostContext, rank: int, log_file: Path | None) -> None:
        self.context = context
        self.rank = rank
        self.count = 0
        self._log_file = log_file
        self._waiting = 0
        self._cancelled = 0

    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    async def add_async(self, amount: int) -> int:
        return self.add(amount)

    def where(self) -> tuple[int, int, str, int]:
        """Rank, host, device, process id."""
        return self.rank, self.context.spec.index, self.context.device, os.getpid()

    def neighbours(self) -> list[str]:
        """Roles that the host created before this one."""
        return list(self.context.roles)

    def count_of(self, role: Any) -> int:
        """The count of another role in this process."""
        return int(self.context.roles[role].count)

    async def wait(self, seconds: float) -> str:
        self._waiting += 1
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._cancelled += 1
            raise
        finally:
            self._waiting -= 1
        return "waited"

    async def waiting(self) -> tuple[int, int]:
        """The number of running and of cancelled waits."""
        return self._waiting, self._cancelled

    def block(self, seconds: float) -> str:
        time.sleep(seconds)
        return "blocked"

    def interval(self, seconds: float) -> tuple[float, float]:
        """Sleep, and return the start and end on a clock that all processes share."""
        begin = time.monotonic()
        time.sleep(seconds)
        return begin, time.monotonic()

    def total(self, part: list[int], factor: int) -> int:
        return factor * sum(part)

    def mean(self, array: npt.NDArray[np.float64]) -> float:
        return float(array.mean())

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def refuse(self) -> None:
        raise WeightError("the fingerprint is ab, not cd", fix="publish again")

    def open_too_many_files(self) -> None:
        raise OpenFilesExhausted("no more files can be opened", fix="ulimit -n 4096")

    def divide(self) -> float:
        return self.count / 0

    async def divide_async(self) -> float:
        return self.count / 0

    def unsendable(self) -> object:
        """A value that cannot be pickled."""
        return threading.Lock()

    def die(self) -> None:
        os._exit(7)

    def close(self) -> None:
        if self._log_file is not None:
            with self._log_file.open("a") as file:
                file.write(f"{len(self.context.roles)} {self.rank}\n")


def make_counter(context: HostContext, rank: int, log_file: Path | None = None) -> Counter:
    """A role that appends a line to `log_file` when it closes."""
    return Counter(context, rank, log_file)


async def make_counter_on_the_loop(context: HostContext, rank: int) -> Counter:
    asyncio.get_running_loop()
    return Counter(context, rank, None)


def make_nothing(context: HostContext, rank: int) -> Counter:
    """A role that fails to start."""
    raise ValueError(f"rank {rank} on {context.device} has no model")
