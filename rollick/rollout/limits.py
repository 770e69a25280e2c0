"""What a rollout does not put up with: the errors that stop it, and when. Pure.

Each says who or what is the trouble, with its values, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollick.config.schema import RolloutConfig
from rollick.errors import NoSignalError, RewardError, StuckError
from rollick.rollout.groups import LedgerError
from rollick.rollout.stats import StepWindow, token_ages
from rollick.types import Group, PolicyVersion


def check_scores(window: StepWindow, config: RolloutConfig, *, step: int) -> None:
    """Refuse a step of which too many samples could not be scored."""
    # A step that only finishes what others began is measured against a whole step.
    scored = max(window.scored, config.groups_per_step * config.group_size)
    if window.failed > config.max_failed_scores * scored:
        raise RewardError(
            f"{window.failed} of {window.scored} samples of step {step} could not be scored "
            f"(allowed: {config.max_failed_scores:.0%}); the first was {window.first_failure}",
            fix="mend the reward, or raise rollout.max_failed_scores",
        )


def nothing_can_be_scored(window: StepWindow, config: RolloutConfig) -> bool:
    """Whether as many samples as a whole step has were scored, and every one failed."""
    return window.failed == window.scored >= config.groups_per_step * config.group_size


def check_ages(batch: Sequence[Group], version: PolicyVersion, *, oldest_allowed: int) -> None:
    """The staleness bound, token by token: an error of ours if it does not hold."""
    oldest = int(token_ages(batch, version).max(initial=0))
    if oldest > oldest_allowed:
        raise LedgerError(
            f"a token of the batch of version {version} is {oldest} versions old; "
            f"rollout.max_staleness allows {oldest_allowed}"
        )


def no_signal_error(window: StepWindow) -> NoSignalError:
    """No group of a step can be trained on, and the allowance of drops is spent."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in window.dropped.items())
    return NoSignalError(
        f"all {window.dropped.total()} groups of the last step scored alike: mean score "
        f"{window.mean_score:.3g} (dropped: {reasons})",
        fix="near 0 the task is too hard or the reward never fires: try easier prompts, a larger "
        "rollout.group_size or a higher temperature; near its maximum the task is learned",
    )


def stuck_error(who: str, *, step: int, stuck_after_s: float) -> StuckError:
    return StuckError(
        f"step {step} waits for {who}; nothing moved for {stuck_after_s:g} s",
        fix="look at the engine or reward that holds it, or raise run.stuck_after_s",
    )
