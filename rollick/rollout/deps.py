"""The arguments of a rollout: its config, the functions that it calls, and a saved state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollick.config.schema import RolloutConfig
from rollick.episodes.base import RunEpisode
from rollick.observe.sample_stage import SampleActivity
from rollick.rollout.ledger.events import Event
from rollick.rollout.ledger.ledger import Ledger
from rollick.rollout.ledger.staleness import StalenessPolicy, StalenessRule
from rollick.types import Group, Prompt, Sample, SampleId, Score

RecordSpan = Callable[[SampleId, SampleActivity, float, float], None]
"""Called with (sample id, activity, begin, end) when an activity ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDeps:
    config: RolloutConfig
    next_prompt: Callable[[], Prompt]
    episode: RunEpisode
    """Generates one sample for a prompt."""
    score: Callable[[Sample], Awaitable[Score]]
    stuck_after_s: float
    score_limit_s: float = 0.0
    """Time limit of one reward. Added to `stuck_after_s` while samples are being scored."""
    drop_reason: Callable[[Group], str | None] | None = None
    """Returns why a group is not trained on, or None to keep it."""
    on_group_scored: Callable[[Group], None] | None = None
    """Called once for each group: when scored, or without members if a staleness rule drops it."""
    on_progress: Callable[[int, int], None] | None = None
    """Called with (scored samples that are not yet in a batch, samples per step)."""
    record_event: Callable[[Event], None] | None = None
    """Called with each ledger event that is logged."""
    record_span: RecordSpan | None = None
    find_prompt: Callable[[str], Prompt] | None = None
    """Returns a prompt by its uid, to start the groups of `SavedRollout.started` again."""
    is_training: bool = True
    """If False, group ids are -1, -2, …: an evaluation must not reuse ids of the training run."""


@dataclass(frozen=True, slots=True)
class SavedRollout:
    """What a resumed run continues from."""

    state: Mapping[str, Any] | None = None
    """What `Rollout.state` returned; None without a checkpoint."""
    groups: Iterable[Group] = ()
    """What `Rollout.untrained` returned."""
    started: Iterable[tuple[int, str]] = ()
    """(group id, prompt uid) of groups that were started after the checkpoint, according to the
    event log."""


def make_ledger(deps: RolloutDeps) -> Ledger:
    config, rule = deps.config, StalenessRule(deps.config.staleness_rule)
    groups_per_step, max_staleness = config.groups_per_step, config.max_staleness
    return Ledger(
        StalenessPolicy(groups_per_step, max_staleness, rule, config.surplus_groups),
        config.group_size,
        spares=config.spare_samples,
        drops_allowed=config.drops_allowed,
        count_down=not deps.is_training,
        record=deps.record_event,
    )
