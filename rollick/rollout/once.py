"""Sampling once: a group of samples for each of some prompts, for validation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from rollick.config.schema import RolloutConfig
from rollick.infer.engine import Engine
from rollick.rollout.episode import ChatCodec, Episode, SamplingOf
from rollick.rollout.scheduler import Rollout
from rollick.types import Group, Prompt, Sample, Sampling, Score


async def sample_all(
    prompts: Sequence[Prompt],
    *,
    samples: int,
    sampling: Sampling | SamplingOf,
    engines: Sequence[Engine],
    codec: ChatCodec,
    score: Callable[[Sample], Awaitable[Score]],
    seed: int,
    purpose: str = "eval",
    progress: Callable[[int, int], None] | None = None,
    stuck_after_s: float = 600.0,
    follow: Callable[[Rollout], AbstractContextManager[None]] = nullcontext,
    episode: Episode | None = None,
) -> list[Group]:
    """A group of samples for each prompt, in the order of the prompts: a rollout of one step.

    Nothing is dropped, and failed scores are members. Ids are -1, -2, … (see Ledger); `purpose`
    keys the random streams. `progress` is told (groups done, groups in all);
    `follow` gives a block that the rollout is followed in while it is waited for. `episode` is what
    a sample does, if it is not a single turn.
    """
    if not prompts:
        return []
    config = RolloutConfig(
        groups_per_step=len(prompts), group_size=samples, drop_no_signal=False, max_failed_scores=1
    )
    remaining = iter(prompts)
    async with Rollout.open(
        config=config,
        sampling=sampling,
        prompts=lambda: next(remaining),
        engines=engines,
        codec=codec,
        score=score,
        seed=seed,
        stuck_after_s=stuck_after_s,
        version=min(engine.load().version for engine in engines),
        purpose=purpose,
        progress=progress,
        episode=episode,
    ) as rollout:
        with follow(rollout):
            return await rollout.take()
