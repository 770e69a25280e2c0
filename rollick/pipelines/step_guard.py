"""Guards a run against steps that break the model: not finite, exploding, or of a collapsed policy.

    check(report, batch) after each training -> N bad steps in a row -> roll back, at most
    train.rollbacks times -> continue with new batches; else the run ends with an error

While steps are bad, no snapshot is taken. The first bad step was computed with the weights of the
newest snapshot, which may be broken already: a rollback restores the one before it.
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

MIN_ADVANTAGE = 1e-6
"""A smaller advantage gives no gradient worth comparing."""
MIN_BAD_STEPS_AT_END = 2
"""A run that ends with so many bad steps in a row ends with an error."""


@dataclass(frozen=True, slots=True, eq=False)
class _BadStep:
    number: int
    batch: Batch
    trouble: str
    """What is wrong with it."""
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
        self._bad_steps: dict[RoleName, list[_BadStep]] = {"policy": [], "critic": []}
        """The consecutive bad steps of each role, up to the newest step."""
        self._healthy_steps: Counter[RoleName] = Counter()
        """Steps since each role's last bad one."""

    def restore_history(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Restore the usual values from the metrics of a resumed run's earlier steps."""
        self._health["policy"].examine_rows(rows)

    @property
    def has_bad_steps(self) -> bool:
        return any(self._bad_steps.values())

    def check(
        self, report: TrainReport | CriticReport, batch: Batch, *, role: RoleName = "policy"
    ) -> None:
        """Record the step if it is bad. Raises if there are too many in a row, and they cannot be
        undone."""
        signals = _signals(report, batch)
        if signals is None:
            return
        trouble = self._health[role].examine(signals)
        bad_steps = self._bad_steps[role]
        if not trouble:
            self._healthy_steps[role] += 1
            if signals.is_evidence or self._healthy_steps[role] >= self._train.max_skipped_steps:
                bad_steps.clear()
            return
        self._healthy_steps[role] = 0
        cause = f"{trouble} (bad step {len(bad_steps) + 1} in a row)"
        if not signals.changed:
            cause += ": nothing was trained"
        kind = "exploded" if signals.changed else "not_finite"
        fault = self._faults.begin(role, 0, kind=kind, cause=cause)
        fault.mark_rejoined()
        bad_steps.append(_BadStep(fault.step + 1, batch, trouble, fault.detected_at))
        LOG.warning("a step of the %s went wrong: %s", role, cause)
        if len(bad_steps) >= self._train.max_skipped_steps and (why := self._cannot_roll_back()):
            raise self._error(role, why)

    async def roll_back_if_due(self, step: int) -> bool:
        """Undo the steps if too many in a row are bad. Returns whether it rolled back. The caller
        must then publish the weights and drop samples of the undone versions."""
        limit = self._train.max_skipped_steps
        roles: Sequence[RoleName] = [
            r for r, steps in self._bad_steps.items() if len(steps) >= limit
        ]
        if not roles:
            return False
        cause, path = self._describe(roles[0]), self._dump_batches()
        first = self._bad_steps[roles[0]][0]
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
        for bad_steps in self._bad_steps.values():
            bad_steps.clear()
        return True

    def check_end(self) -> None:
        """Raises if the run would end with a model that its last steps broke."""
        for role, bad_steps in self._bad_steps.items():
            if len(bad_steps) >= min(MIN_BAD_STEPS_AT_END, self._train.max_skipped_steps):
                raise self._error(role, "the run has ended")

    def _cannot_roll_back(self) -> str:
        """Why the steps cannot be undone; empty if they can."""
        if self.rollbacks >= self._train.rollbacks:
            return f"it already rolled back {self.rollbacks} times, the limit (train.rollbacks)"
        return self._recovery.rollback_obstacle()

    def _error(self, role: RoleName, why: str) -> RollickError:
        path, section = self._dump_batches(), "critic" if role == "critic" else "train"
        return RollickError(
            f"{self._describe(role)}; they cannot be undone: {why}",
            fix=f"lower {section}.optimizer.lr and resume from an earlier checkpoint; the batches "
            f"are in {path}",
        )

    def _describe(self, role: RoleName) -> str:
        bad_steps = self._bad_steps[role]
        steps = f"{len(bad_steps)} steps in a row"
        if all("not finite" in step.trouble for step in bad_steps):
            return f"{steps} had a non-finite gradient in the {role}"
        return f"{steps} broke the {role}: {bad_steps[-1].trouble}"

    def _dump_batches(self) -> Path:
        """Write the batches of the bad steps. Returns their folder."""
        path = self._dumps / "bad_steps"
        for role, bad_steps in self._bad_steps.items():
            for step in bad_steps:
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
        has_signal=bool(np.any(np.abs(batch.advantages_N) > MIN_ADVANTAGE)),
        changed=report.changed,
        entropy=means.get("entropy"),
        mismatch_kl=means.get("mismatch_kl"),
    )
