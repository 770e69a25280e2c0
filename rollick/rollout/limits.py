"""The conditions under which a rollout stops with an error."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from rollick.config.schema import RolloutConfig
from rollick.errors import (
    UNAVAILABLE_FIX,
    CheckpointError,
    NoSignalError,
    RewardError,
    ServiceUnavailable,
    StuckError,
)
from rollick.rollout.ledger.group_record import LedgerError
from rollick.rollout.stats import StepWindow, token_ages
from rollick.types import Group, PolicyVersion, SampleId


def check_step(
    window: StepWindow, config: RolloutConfig, step: int, *, has_batch: bool, exhausted: bool
) -> None:
    """Raises if too many scores of a step failed, or if no batch can follow (`exhausted`)."""
    full_step = config.groups_per_step * config.group_size
    # Failed scores are counted when the step ends; earlier only if a full step's all failed.
    is_counted = has_batch or exhausted or window.failed == window.scored >= full_step
    # A step that only finishes samples of earlier steps is compared with a full step.
    allowed = config.max_failed_scores * max(window.scored, full_step)
    if is_counted and window.failed > allowed:
        message = (
            f"{window.failed} of {window.scored} samples of step {step} could not be scored "
            f"(allowed: {config.max_failed_scores:.0%}); the first was "
        )
        if window.failed - window.unavailable <= allowed:
            raise ServiceUnavailable(message + window.first_unavailable, fix=UNAVAILABLE_FIX)
        fix = "fix the reward, or raise rollout.max_failed_scores"
        raise RewardError(message + window.first_failure, fix=fix)
    if exhausted:
        raise _no_signal_error(window)


def check_token_ages(batch: Sequence[Group], version: PolicyVersion, *, max_age: int) -> None:
    """Assert the staleness bound for every token."""
    oldest = int(token_ages(batch, version).max(initial=0))
    if oldest > max_age:
        raise LedgerError(
            f"a token of the batch of version {version} is {oldest} versions old; "
            f"rollout.max_staleness allows {max_age}"
        )


def check_saved_ages(saved: Sequence[Group], version: PolicyVersion, max_staleness: float) -> None:
    """Raises if saved samples are older than the current max_staleness allows."""
    oldest = int(token_ages(saved, version).max(initial=0))
    if oldest > ceil(max_staleness):
        raise CheckpointError(
            f"the checkpoint has samples with tokens {oldest} versions old, and "
            f"rollout.max_staleness is {max_staleness:g}",
            fix=f"resume with rollout.max_staleness={oldest}",
        )


def _no_signal_error(window: StepWindow) -> NoSignalError:
    """No group of a step can be trained on, and the allowance of drops is spent."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in window.dropped.items())
    return NoSignalError(
        f"in all {window.dropped.total()} groups of the last step all samples scored the same: "
        f"mean score {window.mean_score:.3g} (dropped: {reasons})",
        fix="near 0 the task is too hard or the reward never fires: try easier prompts, a larger "
        "rollout.group_size or a higher temperature; near its maximum the task is learned; if all "
        "answers are equal, the policy may have collapsed: lower train.optimizer.lr, and resume "
        "from an earlier checkpoint",
    )


def abort_error(running: Sequence[SampleId]) -> StuckError:
    text = f"{len(running)} aborted samples still run, {running[0] if running else ''} among them"
    return StuckError(text, fix="an engine does not answer; see its log")


def stuck_error(waits: str, *, step: int, stuck_after_s: float) -> StuckError:
    return StuckError(
        f"step {step} waits for {waits}; no sample made progress for {stuck_after_s:g} s",
        fix="look at the engine or reward that it waits for, or raise run.stuck_after_s",
    )
