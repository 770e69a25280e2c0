"""What a sample in flight is doing: a stage, and the engine or tool.

The rollout sets it, trace.py writes it, timeline.py and the doctor read it.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import NamedTuple


class SampleStage(StrEnum):
    """The stages between a prompt and a scored sample.

    value: in trace.jsonl; text: in messages; span: in a timeline.
    """

    text: str
    span: str

    def __new__(cls, value: str, text: str, span: str) -> SampleStage:
        stage = str.__new__(cls, value)
        stage._value_, stage.text, stage.span = value, text, span
        return stage

    WAITING_FOR_ENGINE = "waiting_for_engine", "waiting for an engine", "queued"
    QUEUED_ON_ENGINE = "queued_on_engine", "queued on engine", "queued"
    """In the engine's own queue."""
    PREFILLING = "prefilling", "prefilling on engine", "prefill"
    """Until the first token."""
    GENERATING = "generating", "generating on engine", "decode"
    """Includes the prefill if the engine does not report it separately."""
    IN_ENVIRONMENT = "in_environment", "in environment", "environment"
    BETWEEN_TURNS = "between_turns", "between turns", "environment"
    SCORING = "scoring", "being scored", "reward"
    WAITING_FOR_GROUP = "waiting_for_group", "waiting for its group", "waiting"
    DEFERRED = "deferred", "deferred", "deferred"
    """Its group waits for a long round (rollout/ledger/staleness.py)."""
    CANCELLED = "cancelled", "cancelled", "cancelled"


class SampleActivity(NamedTuple):
    stage: SampleStage
    engine: int | None = None
    label: str = ""
    """The tool or environment, as the episode names it."""

    @property
    def text(self) -> str:
        """For messages: `generating on engine 3`, `in tool search`."""
        if self.label:
            return f"in {self.label}"
        return self.stage.text if self.engine is None else f"{self.stage.text} {self.engine}"


WAITING_FOR_ENGINE = SampleActivity(SampleStage.WAITING_FOR_ENGINE)
BETWEEN_TURNS = SampleActivity(SampleStage.BETWEEN_TURNS)
SCORING = SampleActivity(SampleStage.SCORING)
WAITING_FOR_GROUP = SampleActivity(SampleStage.WAITING_FOR_GROUP)
DEFERRED = SampleActivity(SampleStage.DEFERRED)
CANCELLED = SampleActivity(SampleStage.CANCELLED)


@cache
def on_engine(stage: SampleStage, engine: int) -> SampleActivity:
    """The activity of a stage that happens on an engine; one object for each pair."""
    return SampleActivity(stage, engine)
