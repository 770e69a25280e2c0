"""`rollick replay`: repeats one half of a dumped step.

A dump holds groups, batch and policy of one step. Generation shows whether the same ids sample
the same tokens. Training shows whether the learner agrees with the engine: before the first update
pi/mu is 1 and the KL is 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollick.commands.evaluate import load_scratch_recipe
from rollick.config.load import LoadedRecipe
from rollick.config.schema import rl_recipe
from rollick.data.store import load_batch, load_groups
from rollick.episodes.base import RunEpisode, SingleEngineAccess
from rollick.errors import ConfigError, StoppedBySignal
from rollick.pipelines.domains import training_sampling
from rollick.pipelines.open_run import OpenRun, open_run
from rollick.types import Group, PolicyVersion, Sample


def plan_replay(
    dump: Path, recipe: Path, overrides: Sequence[str], *, only: str
) -> Coroutine[Any, Any, TrainReplay | GenerateReplay]:
    halves = {"train": replay_training, "generate": replay_generation}
    if only not in halves:
        raise ConfigError(f"there is no half {only!r}", fix="--only takes generate or train")
    if not (dump / "learner").is_dir():
        fix = "write one with observe.dump_steps=[1]; see RUN/dumps/"
        raise ConfigError(f"{dump} is not a dump", fix=fix)
    return halves[only](load_scratch_recipe(recipe, overrides, purpose="replay"), dump)


@dataclass(frozen=True, slots=True)
class TrainReplay:
    """The result of training on a dumped batch."""

    max_ratio_error: float
    """Largest |pi/mu - 1| over the trained tokens before the update; 0 up to rounding at step 1."""
    kl: float
    """Mean k3 between pi and mu before the update."""
    loss: float
    grad_norm: float
    tokens: int


@dataclass(frozen=True, slots=True)
class GenerateReplay:
    """The result of generating the samples of a dump again."""

    samples: int
    identical: int
    """Samples with the same tokens as in the dump."""
    score_then: float
    score_now: float


async def replay_training(loaded: LoadedRecipe, dump: Path) -> TrainReplay:
    """The training half of a dumped step, from the policy that the step began with."""
    batch = load_batch(dump / "batch")
    async with open_run(loaded) as run:
        await run.roles.policy.load(dump / "learner")
        logprobs_N = await run.roles.policy.logprobs(batch)
        report = await run.roles.policy.train(batch)
    trained = batch.loss_mask_N
    difference = logprobs_N[trained] - batch.logprobs_N[trained]
    ratio = np.exp(difference)
    return TrainReplay(
        max_ratio_error=float(np.abs(ratio - 1).max()),
        kl=float((1 / ratio - 1 + difference).mean()),
        loss=report.loss,
        grad_norm=report.grad_norm,
        tokens=report.tokens,
    )


async def replay_generation(loaded: LoadedRecipe, dump: Path) -> GenerateReplay:
    """The generating half of a dumped step: the same prompts, ids and random streams."""
    groups = load_groups(dump / "groups")
    async with open_run(loaded) as run:
        await run.roles.policy.load(dump / "learner")
        await run.publisher.publish(PolicyVersion(0))
        async with run.phases.enter("generate"):
            samples = await run.state.until_stopped(_generate_again(run, groups))
        if samples is None:
            raise StoppedBySignal("a signal stopped the replay", fix="start it again")
        scores = [await run.scoring.score(sample) for sample in samples]
    dumped = {sample.uid: sample for group in groups for sample in group.samples}
    same = [np.array_equal(s.token_ids, dumped[s.uid].token_ids) for s in samples]
    scores_then = [m.score.value for group in groups for m in group.members if m.score.ok]
    return GenerateReplay(
        samples=len(samples),
        identical=sum(same),
        score_then=float(np.mean(scores_then)),
        score_now=float(np.mean([score.value for score in scores if score.ok])),
    )


async def _generate_again(run: OpenRun, groups: Sequence[Group]) -> list[Sample]:
    sampling = training_sampling(rl_recipe(run.recipe))
    run_episode = run.episodes.build(sampling, run.recipe.data.domains, purpose="train")
    engines = [SingleEngineAccess(engine) for engine in run.roles.generators.engines]
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(_sample(run_episode, sample, engines[group.uid % len(engines)]))
            for group in groups
            for sample in group.samples
        ]
    return [task.result() for task in running]


async def _sample(run_episode: RunEpisode, sample: Sample, engine: SingleEngineAccess) -> Sample:
    return await run_episode(sample.uid, sample.prompt, engine)
