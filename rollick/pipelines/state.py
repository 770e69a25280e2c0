"""The state of a run: its folder, its progress, and whether it should stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from rollick.errors import EXIT_INTERRUPTED
from rollick.run_folder import RunFolder
from rollick.types import PolicyVersion, RewardFn

LOG = logging.getLogger("rollick")

T = TypeVar("T")

INTERRUPTIBLE = frozenset({"generate", "validate"})
"""Phases that a signal may interrupt: they change no checkpointed state."""


@dataclass(frozen=True, slots=True)
class RunObjects:
    """Prompts and rewards given as Python objects, which a recipe names as object:NAME."""

    prompts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rewards: Mapping[str, RewardFn] = field(default_factory=dict[str, RewardFn])

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.prompts) | frozenset(self.rewards)


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """One validation. Step 0 is the model before training."""

    step: int
    score: float
    pass_at_1: float

    @classmethod
    def of(cls, row: Mapping[str, float]) -> HeldOutScore:
        """From a row of metrics."""
        nan = float("nan")
        return cls(int(row["step"]), row.get("eval/score", nan), row.get("eval/pass@1", nan))


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run. `str(result)` describes it in a few lines."""

    folder: Path
    step: int
    metrics: Mapping[str, float]
    """Of the last step."""
    interrupted: bool = False
    held_out: tuple[HeldOutScore, ...] = ()
    """All validations of the run, in order."""
    best_checkpoint: int | None = None
    """Step of the checkpoint with the best validation, which `rollick export --best` takes."""

    @property
    def score(self) -> float:
        """Validation's pass@1 if the last step had one, else `training_score`."""
        return self.metrics.get("eval/pass@1", self.training_score)

    @property
    def training_score(self) -> float:
        """Mean score of the last step's samples of training prompts; nan if there was none."""
        names = ("score/mean", "score/trained")
        values = [self.metrics[name] for name in names if name in self.metrics]
        return next((value for value in values if isfinite(value)), float("nan"))

    @property
    def best(self) -> HeldOutScore | None:
        """The validation with the highest pass@1; of equals the one with the highest score, then
        the newer one."""

        def sort_key(held_out: HeldOutScore) -> tuple[float, float, int]:
            return held_out.pass_at_1, held_out.score, held_out.step

        return max(self.held_out, key=sort_key, default=None)

    def __str__(self) -> str:
        lines = [f"{self.folder}: step {self.step}"]
        if isfinite(self.training_score):
            lines.append(f"  training score   {self.training_score:.4g} in the last step")
        if self.best is not None:
            lines += self._describe_held_out(self.best)
        export = f"rollick export {self.folder} OUT takes step {self.step}"
        if self.best_checkpoint not in (None, self.step):
            export += f"; with --best, step {self.best_checkpoint}"
        if self.best and self.best_checkpoint not in (None, self.best.step):
            export += f" (step {self.best.step} was not saved: lower checkpoint.every)"
        return "\n".join([*lines, f"  next             {export}"])

    def _describe_held_out(self, best: HeldOutScore) -> list[str]:
        """Before, best and last validation; pass@1 too if rewards give values between 0 and 1."""
        shown = {"best": best, "last": self.held_out[-1]}
        if self.held_out[0].step == 0:
            shown = {"before": self.held_out[0], **shown}
        rows = {"score": {name: each.score for name, each in shown.items()}}
        if any(each.score != each.pass_at_1 for each in shown.values()):
            rows["pass@1"] = {name: each.pass_at_1 for name, each in shown.items()}
        return [
            f"  {f'held-out {label}':<17}"
            + " → ".join(
                f"{value:.4g} {name} (step {shown[name].step})" for name, value in row.items()
            )
            for label, row in rows.items()
        ]


class RunInterrupted(SystemExit):
    """A signal stopped the run, which saved first. Ends a script or a sweep with exit code 75.

    It is not an Exception, so that it also ends a sweep that continues after failed runs. Catch it
    to continue; `result` is the run so far, and `resume=True` continues it.
    """

    def __init__(self, result: RunResult) -> None:
        super().__init__(EXIT_INTERRUPTED)
        self.result = result

    def __str__(self) -> str:
        stopped = f"{self.result.folder}: a signal stopped the run at step {self.result.step}"
        return f"{stopped}; continue it with --resume (in Python: resume=True)"


class RunState:
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.step = 0
        self.saved_step: int | None = None
        """Step of the newest checkpoint that this process wrote or restored."""
        self.version = PolicyVersion(0)
        self.weights_lock = asyncio.Lock()
        """Held while the learner's weights are not those of `version`."""
        self.stop = asyncio.Event()
        self.phase = "start"
        self.started_at = self.phase_since = time.time()

    def begin_phase(self, name: str) -> None:
        self.phase, self.phase_since = name, time.time()

    async def until_stopped(
        self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None
    ) -> T | None:
        """Return the work's result; None if a signal or the time limit interrupted it.

        A cancelled caller never gets None. It would save the step as not done while its training
        may still be running.
        """
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self.stop.wait())
        was_interrupted = False
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({task, stopped}, timeout=timeout_s, return_when=first)
            if not task.done() and self.phase in INTERRUPTIBLE:
                was_interrupted = task.cancel()
            await asyncio.wait({task})
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return None if was_interrupted and task.cancelled() else task.result()


@contextmanager
def stop_on_signals(stop: asyncio.Event) -> Generator[None]:
    """SIGINT and SIGTERM set `stop`: the run saves and ends. A second signal kills it."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: signal.Signals) -> None:
        LOG.warning("%s: saving and stopping; interrupt again to exit immediately", number.name)
        loop.remove_signal_handler(number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, request_stop, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
