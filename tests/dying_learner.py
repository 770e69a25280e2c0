"""Training strategies, and a critic, whose process kills itself, or hangs, at named points.

DYING_LEARNER names a file with one death in each line:

    POINT:VISIT            at the VISIT-th time (from 1) that this process reaches POINT. The line
                           is then removed: the next process dies by the next line
    POINT:VISIT:always     the line stays
    POINT:VISIT:stop       the process is stopped instead (SIGSTOP)
    POINT:VISIT:hang       the thread blocks for ever instead, and the process runs

POINT is one of POINTS, or `copy`, which is in the middle of the copy of a snapshot.

`install` registers the strategies as `dying` and `dying_fsdp`, also in worker processes. A recipe
cannot name a critic: each process with the package on its path uses the dying critic.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugin_package import write_import_hook, write_plugins
from torch import Tensor

from rollick.data.batch import Batch
from rollick.models.loading.fingerprint import copy_and_fingerprint
from rollick.trainer import snapshot
from rollick.trainer.fsdp import FsdpStrategy
from rollick.trainer.local import LocalStrategy
from rollick.trainer.optimizer import MasterAdamW
from rollick.trainer.strategy import LossFn, LossReport, OptimReport, TrainState, WeightStream

VARIABLE = "DYING_LEARNER"
POINTS = (
    "forward",
    "loss",
    "backward",
    "before_update",
    "in_update",
    "after_update",
    "snapshot",
    "publish",
)
CRITIC_POINTS = (*POINTS[:-1], "values")
STRATEGIES = {
    "dying": "dying_learner:DyingLocal",
    "dying_fsdp": "dying_learner:DyingFsdp",
}
_VISITS: Counter[str] = Counter()


def install(folder: Path) -> str:
    """Write a package with the strategies as plugins; returns the value for PYTHONPATH."""
    write_plugins(folder, "train_strategies", STRATEGIES)
    return write_import_hook(folder, "rollick.trainer.critic", "dying_learner:replace_critic")


def die_at(point: str, *, rank: int = 0) -> None:
    """Die or hang if the first line of the plan names this visit; a `rank` above 0 never does."""
    plan = Path(os.environ.get(VARIABLE, "/nonexistent"))
    deaths = plan.read_text().splitlines() if plan.is_file() else []
    if rank or not deaths:
        return
    name, visit, *modes = deaths[0].split(":")
    _VISITS[point] += 1
    if name == point and _VISITS[point] == int(visit):
        if "always" not in modes:
            plan.write_text("\n".join(deaths[1:]))
        if "hang" in modes:
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGSTOP if "stop" in modes else signal.SIGKILL)


class _DyingMixin:
    """A mixin that adds the points to a strategy."""

    optimizer: MasterAdamW
    rank = 0

    def forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        die_at("forward", rank=self.rank)

        def dying_loss(inputs: Any) -> Any:
            die_at("loss", rank=self.rank)
            output_T = inputs.logprobs_T if hasattr(inputs, "logprobs_T") else inputs.values_T
            if output_T.requires_grad:
                output_T.register_hook(lambda _: die_at("backward", rank=self.rank))
            return loss(inputs)

        return super().forward_backward(batch, dying_loss)  # type: ignore[misc]

    def step(self) -> OptimReport:
        die_at("before_update", rank=self.rank)
        adamw, update = self.optimizer.adamw, self.optimizer.adamw.step

        def dying_update() -> Any:
            result = update()
            die_at("in_update", rank=self.rank)
            return result

        adamw.step = dying_update  # type: ignore[method-assign]
        try:
            report = super().step()  # type: ignore[misc]
        finally:
            adamw.step = update  # type: ignore[method-assign]
        die_at("after_update", rank=self.rank)
        return report

    def state(self) -> TrainState:
        die_at("snapshot", rank=self.rank)
        snapshot.copy_and_fingerprint = self._copy_half
        return super().state()  # type: ignore[misc]

    def _copy_half(self, named: Sequence[tuple[str, Tensor]], targets: Sequence[Tensor]) -> Any:
        """Copy a snapshot, with the point `copy` when half of it is written."""
        half = len(named) // 2
        copy_and_fingerprint(named[:half], targets[:half])
        die_at("copy", rank=self.rank)
        return copy_and_fingerprint(named, targets)

    def weights(self) -> WeightStream:
        die_at("publish", rank=self.rank)
        return super().weights()  # type: ignore[misc]


class DyingLocal(_DyingMixin, LocalStrategy):
    pass


class DyingFsdp(_DyingMixin, FsdpStrategy):
    """Rank 1 of two dies (it passes 0 to `die_at`), so that rank 0 waits in a collective."""

    @property
    def rank(self) -> int:  # type: ignore[override]
        return 0 if self.grid.rank == 1 else 1


def replace_critic(module: Any) -> None:
    """Replace the critic by one with the points of a strategy; `values` replaces `publish`."""

    class DyingCritic(_DyingMixin, module.LocalCritic):
        def values(self, batch: Batch) -> Any:
            die_at("values")
            return super().values(batch)

    module.LocalCritic = DyingCritic
