"""Reports that roles return to the controller."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollick.types import SampleId, StepRecord


@dataclass(frozen=True, slots=True)
class TrainReport:
    """Result of training on one batch: mean loss, maximum grad_norm and last lr of its steps."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    optimizer_steps: int
    skipped_steps: int
    optimizer_seconds: float = 0.0
    """Seconds spent in the optimizer, included in `seconds`; independent of the token count."""
    means: dict[str, float] = field(default_factory=dict[str, float])
    maxima: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def changed(self) -> bool:
        """Whether the weights changed: False if every optimizer step was skipped."""
        return self.skipped_steps < self.optimizer_steps

    def metrics(self) -> dict[str, float]:
        """Metrics by name; for the names see observe/metrics.py."""
        metrics: dict[str, float] = {}
        if mean_square := self.means.get("ratio_squared"):
            # mean(r)^2 / mean(r^2) for the ratios r = pi / mu; 1 on-policy.
            metrics["train/effective_sample_size"] = self.means["ratio"] ** 2 / mean_square
        maxima = {f"train/max/{name}": value for name, value in self.maxima.items()}
        return metrics | self.common_metrics("train") | maxima

    def common_metrics(self, role: str) -> dict[str, float]:
        """The metrics of both the policy (`role` is `train`) and the critic."""
        return {
            f"{role}/loss": self.loss,
            f"{role}/grad_norm": self.grad_norm,
            f"{role}/lr": self.lr,
            f"{role}/tokens": float(self.tokens),
            f"{role}/skipped_steps": float(self.skipped_steps),
            **{f"{role}/mean/{name}": value for name, value in self.means.items()},
        }


@dataclass(frozen=True, slots=True)
class CriticReport:
    """Result of training the critic on one batch. `train` is None if no token has a return."""

    train: TrainReport | None
    explained_variance: float
    """Share of the returns' variance that the values predicted before this training step."""

    @property
    def changed(self) -> bool:
        """False if every optimizer step was skipped; True if there was nothing to train on."""
        return self.train is None or self.train.changed

    def metrics(self) -> dict[str, float]:
        if self.train is None:
            return {}
        explained = {"critic/explained_variance": self.explained_variance}
        return self.train.common_metrics("critic") | explained


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """Steps and completions of an engine since its last record (option observe.engine_steps)."""

    steps: list[StepRecord]
    answers: list[tuple[SampleId, float]]
    """Each completed sample and its generation time in seconds."""
