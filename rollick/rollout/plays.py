"""Figures over the episodes that ended between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollick.types import Played


@dataclass(slots=True)
class PlayTally:
    """Counts episodes; `take` gives what was counted, and begins anew."""

    played: list[Played] = field(default_factory=list[Played])

    def add(self, played: Played) -> None:
        self.played.append(played)

    def take(self) -> dict[str, float]:
        """Under the names that observe/metrics.py documents; nothing where nobody played."""
        played, self.played = self.played, []
        if not played:
            return {}
        whole = [episode for episode in played if episode.score.ok]
        found = {
            "env/episodes": float(len(played)),
            "env/success": _share([episode.success for episode in whole]),
            "env/turns": sum(len(episode.replies) for episode in played) / len(played),
            "env/valid": _share([flag for episode in played for flag in episode.valid]),
            "env/effective": _share([flag for episode in played for flag in episode.effective]),
        }
        if summaries := sum(len(episode.summaries) for episode in played):
            found["env/summaries"] = summaries / len(played)
        # A share of nothing is no number.
        return {name: value for name, value in found.items() if value == value}


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else float("nan")
