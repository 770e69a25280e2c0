"""Samples each of some prompts once, for an evaluation: a rollout of one step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from rollick.config.schema import RolloutConfig
from rollick.episodes.base import RunEpisode
from rollick.infer.engine import InferenceClient
from rollick.rollout.deps import RolloutDeps
from rollick.rollout.scheduler import Rollout
from rollick.types import Prompt, Sample, Score


def open_prompt_sampling(
    prompts: Sequence[Prompt],
    engines: Sequence[InferenceClient],
    *,
    samples: int,
    episode: RunEpisode,
    score: Callable[[Sample], Awaitable[Score]],
    stuck_after_s: float,
    score_limit_s: float = 0.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> AbstractAsyncContextManager[Rollout]:
    """A rollout whose only batch has a group of `samples` for each prompt, in their order. No group
    is dropped, and samples whose score failed are members."""
    config = RolloutConfig(
        groups_per_step=len(prompts), group_size=samples, drop_no_signal=False, max_failed_scores=1
    )
    deps = RolloutDeps(
        config=config,
        next_prompt=iter(prompts).__next__,
        episode=episode,
        score=score,
        stuck_after_s=stuck_after_s,
        score_limit_s=score_limit_s,
        on_progress=on_progress,
        is_training=False,
    )
    version = min(engine.load().version for engine in engines)
    return Rollout.open(deps, engines, version=version)
