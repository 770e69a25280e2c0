"""Guards a run against steps that break the model: not finite, exploding, or of a collapsed policy.

    check(report, batch) after each training -> N troubled steps in a row -> roll back, at most
    train.rollbacks times -> go on with new batches; else the run ends with an error

While steps are troubled, no snapshot is taken. The first troubled step was computed with the
weights of the newest snapshot, which may be broken already: a rollback restores the one before it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollick.config.schema import Recipe
from rollick.data.batch import Batch
from rollick.data.store import save_batch
from rollick.errors import RollickError
from rollick.observe.faults import FaultLog
from rollick.observe.step_health import StepHealth, StepSignals
from rollick.roles.reports import CriticReport, TrainReport
from rollick.roles.worker_recovery import WorkerRecovery
from rollick.types import RoleName

LOG = logging.getLogger("rollick")

MIN_SIGNAL = 1e-6
"""Smallest advantage that is a reason to learn."""
MIN_TROUBLED_AT_END = 2
"""A run whose last steps, at least so many in a row, were troubled ends with an error."""


@dataclass(frozen=True, slots=True, eq=False)
class _TroubledStep:
    number: int
    batch: Batch
    trouble: str
    detected_at: float


class StepGuard:
    def __init__(
        self, recipe: Recipe, dumps: Path, faults: FaultLog, recovery: WorkerRecovery
    ) -> None:
        self.rollbacks = 0
        """How often this process rolled back."""
        self._train = recipe.train
        self._dumps = dumps
        self._faults = faults
        self._recovery = recovery
        self._health: dict[RoleName, StepHealth] = {"policy": StepHealth(), "critic": StepHealth()}
        self._troubled: dict[RoleName, list[_TroubledStep]] = {"policy": [], "critic": []}
        """Each role's latest steps in a row that were troubled."""
        self._calm: Counter[RoleName] = Counter()
        """Steps since each role's last troubled one."""

    def recall(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Learn from a resumed run's earlier steps what is usual; `rows`: their metrics."""
        self._health["policy"].examine_rows(rows)

    @property
    def is_troubled(self) -> bool:
        return any(self._troubled.values())

    def check(
        self, report: TrainReport | CriticReport, batch: Batch, *, role: RoleName = "policy"
    ) -> None:
        """Record whether the step was troubled. Raises if there were too many in a row, and they
        cannot be undone."""
        signals = _signals(report, batch)
        if signals is None:
            return
        trouble = self._health[role].examine(signals)
        troubled = self._troubled[role]
        if not trouble:
            self._calm[role] += 1
            if signals.is_evidence or self._calm[role] >= self._train.max_skipped_steps:
                troubled.clear()
            return
        self._calm[role] = 0
        cause = f"{trouble}, in {len(troubled) + 1} steps in a row"
        if not signals.changed:
            cause += ": nothing was trained"
        kind = "exploded" if signals.changed else "not_finite"
        fault = self._faults.begin(role, 0, kind=kind, cause=cause)
        fault.mark_rejoined()
        troubled.append(_TroubledStep(fault.step + 1, batch, trouble, fault.detected_at))
        LOG.warning("a step of the %s went wrong: %s", role, cause)
        if len(troubled) >= self._train.max_skipped_steps and (why := self._cannot_roll_back()):
            raise self._error(role, why)

    async def roll_back_if_due(self, step: int) -> bool:
        """Undo the steps if too many in a row were troubled. Returns whether that was done: then
        the weights must be published, and what the old ones generated must be dropped."""
        limit = self._train.max_skipped_steps
        roles: Sequence[RoleName] = [
            r for r, steps in self._troubled.items() if len(steps) >= limit
        ]
        if not roles:
            return False
        cause, path = self._describe(roles[0]), self._quarantine()
        first = self._troubled[roles[0]][0]
        fault = self._faults.begin(
            roles[0], 0, kind="rolled_back", cause=cause, failed_at=first.detected_at
        )
        undone = await self._recovery.roll_back(step)
        fault.mark_rejoined(redone_steps=undone, lost=self._recovery.goodput.claim_lost_time())
        self.rollbacks += 1
        LOG.error(
            "%s: rolled back by %d steps at step %d (%d of %d rollbacks); the batches are in %s",
            *(cause, undone, step, self.rollbacks, self._train.rollbacks, path),
        )
        for troubled in self._troubled.values():
            troubled.clear()
        return True

    def check_end(self) -> None:
        """Raises if the run would end with a model that its last steps broke."""
        for role, troubled in self._troubled.items():
            if len(troubled) >= min(MIN_TROUBLED_AT_END, self._train.max_skipped_steps):
                raise self._error(role, "the run is over")

    def _cannot_roll_back(self) -> str:
        """Why the steps cannot be undone; empty if they can."""
        if self.rollbacks >= self._train.rollbacks:
            return f"the run may roll back {self._train.rollbacks} times (train.rollbacks)"
        return self._recovery.cannot_roll_back()

    def _error(self, role: RoleName, why: str) -> RollickError:
        path, section = self._quarantine(), "critic" if role == "critic" else "train"
        return RollickError(
            f"{self._describe(role)}; they cannot be undone: {why}",
            fix=f"the batches are in {path}; lower {section}.optimizer.lr or look at their scores, "
            "and resume from a checkpoint of a step before",
        )

    def _describe(self, role: RoleName) -> str:
        troubled = self._troubled[role]
        steps = f"{len(troubled)} steps in a row"
        if all("not finite" in step.trouble for step in troubled):
            return f"{steps} had a non-finite gradient in the {role}"
        return f"{steps} broke the {role}: {troubled[-1].trouble}"

    def _quarantine(self) -> Path:
        """Write the batches of the troubled steps; returns their folder."""
        path = self._dumps / "troubled_steps"
        for role, troubled in self._troubled.items():
            for step in troubled:
                folder = path / f"{role}-{step.number:06d}"
                folder.mkdir(parents=True, exist_ok=True)
                save_batch(folder / "batch", step.batch)
        return path


def _signals(report: TrainReport | CriticReport, batch: Batch) -> StepSignals | None:
    if isinstance(report, CriticReport):
        train = report.train
        if train is None:
            return None
        return StepSignals(train.grad_norm, train.loss, changed=train.changed, may_vanish=True)
    means = report.means
    return StepSignals(
        report.grad_norm,
        report.loss,
        has_signal=bool(np.any(np.abs(batch.advantages_N) > MIN_SIGNAL)),
        changed=report.changed,
        entropy=means.get("entropy"),
        mismatch_kl=means.get("mismatch_kl"),
    )
