"""Names the slow ranks of a sharded policy, and gives them less work.

A rank that is slow makes all ranks wait. Its part of each batch becomes smaller. In deterministic
mode it is only named: the division of a batch decides how its sums are rounded.
"""

from __future__ import annotations

import logging

from rollick.observe.faults import FaultLog
from rollick.roles.handles import Policy
from rollick.rollout.engine_speeds import MIN_TOKENS, EngineSpeeds

LOG = logging.getLogger("rollick")


class RankSpeeds:
    def __init__(self, policy: Policy, faults: FaultLog, *, adapts: bool) -> None:
        self._policy = policy
        self._faults = faults
        self._adapts = adapts
        self._speeds = EngineSpeeds()
        for rank in range(policy.ranks):
            self._speeds.add(rank)

    async def measure(self) -> None:
        """Compare the ranks after a step. The batches from now on are divided by their speeds."""
        if self._policy.ranks < 2:
            return
        for rank, seconds in enumerate(await self._policy.measure_speeds()):
            # The same work on each rank counts like the same number of tokens.
            self._speeds.observe(rank, tokens=MIN_TOKENS, seconds=seconds)
        for rank in self._speeds.end_step():
            share = self._speeds.share(rank)
            cause = f"computes at {share:.0%} of the others' speed"
            self._faults.begin("policy", rank, kind="slow", cause=cause)
            work = "; it gets less work" if self._adapts else ""
            LOG.warning("rank %d of the policy %s%s", rank, cause, work)
        if self._adapts:
            self._policy.divide_by([self._speeds.weight(r) for r in range(self._policy.ranks)])

    def metrics(self) -> dict[str, float]:
        if self._policy.ranks < 2:
            return {}
        return {"speed/slow_ranks": float(len(self._speeds.slow))}
