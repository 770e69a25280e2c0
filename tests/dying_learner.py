"""Training strategies, and a critic, whose process kills itself, or hangs, at named points.

DYING_LEARNER names a file with one death in each line:

    POINT:VISIT            at the VISIT-th time (from 1) that this process reaches POINT. The line
                           is then removed: the next process dies by the next line
    POINT:VISIT:always     the line stays
    POINT:VISIT:stop       the process is stopped instead (SIGSTOP)
    POINT:VISIT:hang       the thread blocks for ever instead, and the process runs

`install` makes them known under the names `dying` and `dying_fsdp`, also to worker processes. A
recipe cannot name a critic: in each process with the package on its path, every critic is a dying
one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from plugin_package import write_plugins

from rollick.data.batch import Batch
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
REPLACE_CRITIC = """
import importlib.abc, importlib.util, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "rollick.trainer.critic":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_replace(module):
            execute(module)
            import dying_learner

            module.LocalCritic = dying_learner.dying_critic(module.LocalCritic)

        spec.loader.exec_module = execute_and_replace
        return spec


sys.meta_path.insert(0, Finder())
"""
_VISITS: Counter[str] = Counter()


def install(folder: Path) -> str:
    """Writes a package with the strategies as plugins; returns the value for PYTHONPATH."""
    path = write_plugins(folder, "train_strategies", STRATEGIES)
    (folder / "sitecustomize.py").write_text(REPLACE_CRITIC)
    return path


def die_at(point: str, *, rank: int = 0) -> None:
    """`rank`: only this rank of a sharded learner dies."""
    plan = Path(os.environ.get(VARIABLE, "/nonexistent"))
    deaths = plan.read_text().splitlines() if plan.is_file() else []
    if rank or not deaths:
        return
    name, visit, *how = deaths[0].split(":")
    _VISITS[point] += 1
    if name == point and _VISITS[point] == int(visit):
        if "always" not in how:
            plan.write_text("\n".join(deaths[1:]))
        if "hang" in how:
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGSTOP if "stop" in how else signal.SIGKILL)


class _Dying:
    """The points of a strategy; mixed into the real ones."""

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
        return super().state()  # type: ignore[misc]

    def weights(self) -> WeightStream:
        die_at("publish", rank=self.rank)
        return super().weights()  # type: ignore[misc]


class DyingLocal(_Dying, LocalStrategy):
    pass


class DyingFsdp(_Dying, FsdpStrategy):
    """Rank 1 of two dies, so that rank 0 waits in a collective."""

    @property
    def rank(self) -> int:  # type: ignore[override]
        return 0 if self.grid.rank == 1 else 1


def dying_critic(critic: Any) -> Any:
    """A critic class with the points of a strategy, but `values` instead of `publish`."""

    class DyingCritic(_Dying, critic):
        def values(self, batch: Batch) -> Any:
            die_at("values")
            return super().values(batch)

    return DyingCritic
