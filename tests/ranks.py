"""Processes that form a distributed group, for tests of collective operations.

    with Ranks(2) as ranks:
        assert ranks.run(work, 3) == [...]     # the results of work(3) by rank

The processes run until the block ends, so that many tests share one start. `work` must be an
importable function.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rollick.data.batch import Batch
    from rollick.trainer.fsdp import FsdpStrategy
    from rollick.trainer.parallel.model import ShardedModel
    from rollick.types import FloatArray

JOIN_S = 10.0

PRELOADED = ["rollick.trainer.fsdp", "rollick.testing.tiny", "rollick.testing.batches", "pytest"]
"""Modules that the fork server imports once, if installed; ranks are forked from it."""


class Ranks:
    """A gloo group on this machine, with one thread per rank."""

    def __init__(self, count: int, *, timeout_s: float = 100.0) -> None:
        self.count = count
        self.timeout_s = timeout_s
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Self:
        from rollick.trainer.parallel.mesh import open_rendezvous

        self._store, rendezvous = open_rendezvous(
            "127.0.0.1", ranks=self.count, timeout_s=self.timeout_s
        )
        multiprocessing.set_forkserver_preload(PRELOADED)
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.count):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(child_end, rendezvous, rank), daemon=True
            )
            process.start()
            child_end.close()
            self._processes.append(process)
            self._connections.append(parent_end)
        return self

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `work` on every rank and return the results by rank. Raises if a rank failed."""
        for connection in self._connections:
            connection.send((work, args))
        results: list[Any] = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(self.timeout_s):
                raise TimeoutError(f"rank {rank} did not finish {work.__name__}")
            results.append(connection.recv())
        failures = [
            f"rank {number}: {outcome[1]}"
            for number, outcome in enumerate(results)
            if not outcome[0]
        ]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in results]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(connection: Connection, rendezvous: Any, rank: int) -> None:
    import torch

    from rollick.trainer.parallel.mesh import join_process_group, leave_process_group

    torch.set_num_threads(1)
    join_process_group(rendezvous, rank, device="cpu")
    while True:
        try:
            work, args = connection.recv()
        except EOFError:
            break
        try:
            connection.send((True, work(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    leave_process_group()


def own_part(model: ShardedModel, batch: Batch) -> tuple[Batch, list[int]]:
    """The rows of a batch that the controller would send to this rank, and their numbers."""
    from rollick.trainer.parallel.shares import BatchSplit

    grid, split = model.grid, BatchSplit.of(model.recipe, model.cost)
    rows = list(
        split.plan(batch, ranks=grid.shape.replicas * grid.shape.ranks_per_replica)[grid.replica]
    )
    return batch.take(rows), rows


def all_logprobs(strategy: FsdpStrategy, batch: Batch) -> FloatArray:
    """The log-probs of the complete batch; each rank computes its rows. A collective."""
    import torch

    from rollick.trainer.parallel.collectives import all_sum
    from rollick.trainer.trainable_model import token_indices

    part, rows = own_part(strategy, batch)
    logprobs_N = torch.zeros(batch.tokens)
    own_N = torch.as_tensor(strategy.logprobs(part))
    if rows:
        logprobs_N[torch.as_tensor(token_indices(batch, rows))] = own_N
    if strategy.grid.shape.replicas > 1:
        all_sum(logprobs_N, strategy.grid.replica_mesh.get_group())
    return logprobs_N.numpy()
