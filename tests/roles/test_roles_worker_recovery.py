"""The rank of a policy that caused a failed call, and when it failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollick.errors import WorkerError, WorkerHung
from rollick.observe.faults import FaultLog
from rollick.observe.goodput import TimeAccount
from rollick.roles import worker_recovery
from rollick.roles.worker_recovery import WorkerRecovery

BEGUN_AT, STOPPED_AT = 100.0, 130.0
PEER_GONE = WorkerError("connection closed by peer")


class FakePolicy:
    """Rank 0 responds; rank 1 hangs, or was stopped by a signal."""

    ranks, is_sharded = 2, True

    def __init__(self, *, stopped: bool) -> None:
        self.stopped = stopped

    async def call_rank(self, rank: int, method: Any, *, timeout_s: float) -> None:
        if rank == 0:
            return
        if self.stopped:
            raise WorkerHung("rank 1 was stopped by a signal", failed_at=STOPPED_AT)
        await asyncio.sleep(timeout_s)
        raise WorkerHung("rank 1 did not answer", failed_at=STOPPED_AT + 60)


@pytest.mark.parametrize(("stopped", "failed_at"), [(False, BEGUN_AT), (True, STOPPED_AT)])
async def test_a_rank_that_hangs_for_its_peers_failed_in_their_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool, failed_at: float
) -> None:
    monkeypatch.setattr(worker_recovery, "PING_TIMEOUT_S", 0.05)
    policy = FakePolicy(stopped=stopped)
    roles: Any = SimpleNamespace(group=None, handle=lambda role: policy)
    account = TimeAccount.open(tmp_path, resume=False)
    faults = FaultLog(tmp_path)
    recovery = WorkerRecovery(roles, lambda devices: [], faults=faults, goodput=account, restarts=1)
    cause = await recovery._root_cause("policy", PEER_GONE, begun_at=BEGUN_AT)
    assert isinstance(cause, WorkerHung)
    assert cause.failed_at == failed_at
