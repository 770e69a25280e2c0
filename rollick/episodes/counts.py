"""Counts of the training episodes of a step, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from rollick.types import EpisodeRecord


@dataclass(slots=True)
class EpisodeCounts:
    """Sums over episodes. Its fields are in the checkpoint, so they are plain numbers."""

    episodes: int = 0
    judged: int = 0
    """Episodes whose environment did not fail."""
    solved: int = 0
    turns: int = 0
    summaries: int = 0
    validity_known: int = 0
    """Turns whose environment reports whether the reply could be parsed."""
    valid: int = 0
    effect_known: int = 0
    """Turns whose environment reports whether the reply changed its state."""
    effective: int = 0

    def add(self, episode: EpisodeRecord) -> None:
        self.episodes += 1
        self.judged += episode.score.ok
        self.solved += episode.score.ok and episode.success
        self.turns += len(episode.replies)
        self.summaries += len(episode.summaries)
        self.validity_known += len(episode.valid)
        self.valid += sum(episode.valid)
        self.effect_known += len(episode.effective)
        self.effective += sum(episode.effective)

    def metrics(self) -> dict[str, float]:
        """Metrics by name (see observe/metric_table.py). Omits metrics without a value."""
        shares = {
            "env/success": (self.solved, self.judged),
            "env/turns": (self.turns, self.episodes),
            "env/valid": (self.valid, self.validity_known),
            "env/effective": (self.effective, self.effect_known),
            "env/summaries": (self.summaries, self.episodes if self.summaries else 0),
        }
        metrics = {"env/episodes": float(self.episodes)} if self.episodes else {}
        return metrics | {name: part / total for name, (part, total) in shares.items() if total}
