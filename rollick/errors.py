"""The error tree. Every error says what happened, the values, and what to do.

A bad sample is data (recorded and counted); a bad config or a dead worker is one of these.
"""

from __future__ import annotations


class RollickError(Exception):
    """Base of all errors that a user can act on. `fix` is the advice, one sentence."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message = message
        self.fix = fix
        super().__init__(f"{message}. {fix}" if fix else message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.fix))


def _rebuild(kind: type[RollickError], message: str, fix: str) -> RollickError:
    return kind(message, fix=fix)


class ConfigError(RollickError):
    """A recipe is wrong. The message carries every problem found, each with its place."""


class DataError(RollickError):
    """A dataset cannot be read, or has no usable row."""


class ModelError(RollickError):
    """A model or tokenizer cannot be loaded, or is not what it is said to be."""


class PlacementError(RollickError):
    """A worker could not be placed; says what is wanted and what is free."""


class WorkerError(RollickError):
    """A worker process died, or a call to it failed or ran past its deadline."""


class WeightError(RollickError):
    """A publish did not verify; the receiver still serves the version it had."""


class CheckpointError(RollickError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class RewardError(RollickError):
    """A reward function cannot be found or called (not: a sample that scored badly)."""


class SandboxError(RollickError):
    """No box can be had here, or one could not be started (not: a program that failed in it)."""


class EnvError(RollickError):
    """An environment cannot be found, made or called (not: an episode that fails)."""


class EngineError(RollickError):
    """An engine was asked for what it cannot do, or failed while generating."""


class EngineLost(EngineError):
    """An engine is gone, with all that it was generating; others can take it over."""


class StuckError(RollickError):
    """Nothing moved within a deadline; says who waits for whom."""


class NoSignalError(StuckError):
    """No group of a step can be trained on: all that were tried scored alike. Nothing hangs."""


class MissingExtra(RollickError):
    """An optional dependency is needed and not installed."""

    @classmethod
    def of(cls, package: str, extra: str) -> MissingExtra:
        return cls(
            f"{package} is not installed", fix=f"install it with: pip install 'rollick[{extra}]'"
        )
