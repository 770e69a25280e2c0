"""Processes that form a group of ranks, for tests of what ranks do together.

    with Ranks(2) as ranks:
        assert ranks.run(work, 3) == [...]     # work(3) in both, their answers by rank

The processes live until the block ends, so that many tests pay for one start. What is run must be
importable: a function of a module.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

JOIN_S = 10.0

PRELOADED = ["rollick.train.fsdp", "rollick.testing.tiny", "rollick.testing.batches", "pytest"]
"""One process imports these (where they are installed), and the ranks are forks of it."""


class Ranks:
    """Some ranks over gloo on this machine, one thread each."""

    def __init__(self, count: int, *, timeout_s: float = 100.0) -> None:
        self.count = count
        self.timeout_s = timeout_s
        self._processes: list[Any] = []
        self._lines: list[Connection] = []

    def __enter__(self) -> Self:
        from rollick.train.parallel.mesh import open_meeting

        self._store, meeting = open_meeting("127.0.0.1", ranks=self.count, timeout_s=self.timeout_s)
        multiprocessing.set_forkserver_preload(PRELOADED)
        spawn = multiprocessing.get_context("forkserver")
        for rank in range(self.count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, meeting, rank), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._lines.append(ours)
        return self

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank's call gave, by rank; the first error, if there is one."""
        for line in self._lines:
            line.send((work, args))
        answers: list[Any] = []
        for rank, line in enumerate(self._lines):
            if not line.poll(self.timeout_s):
                raise TimeoutError(f"rank {rank} did not finish {work.__name__}")
            answers.append(line.recv())
        failures = [f"rank {r}: {a[1]}" for r, a in enumerate(answers) if not a[0]]
        if failures:
            raise AssertionError("\n".join(failures))
        return [answer for _, answer in answers]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(line: Connection, meeting: Any, rank: int) -> None:
    import torch

    from rollick.train.parallel.mesh import join, leave

    torch.set_num_threads(1)
    join(meeting, rank, device="cpu")
    while True:
        try:
            work, args = line.recv()
        except EOFError:
            break
        try:
            line.send((True, work(*args)))
        except BaseException:
            line.send((False, traceback.format_exc()))
    leave()
