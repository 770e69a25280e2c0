"""What a rollout works with: its settings, and the functions that it calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollick.config.schema import RolloutConfig
from rollick.rollout.episode import Episode
from rollick.rollout.events import Event
from rollick.rollout.ledger import Ledger
from rollick.types import Group, Prompt, Sample, SampleId, Score

Span = Callable[[SampleId, str, float, float], None]
"""Told of every stretch of a sample's life: (sample, what it did, begin, end)."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """See Rollout.open."""

    config: RolloutConfig
    prompts: Callable[[], Prompt]
    episode: Episode
    score: Callable[[Sample], Awaitable[Score]]
    signal: Callable[[Group], str | None] | None
    judged: Callable[[Group], None] | None
    purpose: str
    stuck_after_s: float
    progress: Callable[[int, int], None] | None
    record: Callable[[Event], None] | None
    span: Span | None
    find_prompt: Callable[[str], Prompt] | None


def make_ledger(wiring: Wiring) -> Ledger:
    """An empty ledger by the settings. What is not trained on counts its ids down."""
    config = wiring.config
    options = {} if wiring.record is None else {"record": wiring.record}
    return Ledger(
        config.groups_per_step,
        config.group_size,
        config.max_staleness,
        spares=config.spare_samples,
        rule=config.staleness_rule,
        surplus=config.surplus_groups,
        drops_allowed=config.drops_allowed,
        count_down=wiring.purpose != "train",
        **options,
    )
