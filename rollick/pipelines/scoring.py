"""Scores samples: the rewards of their domain plus the score of their environment."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollick.config.load import LoadedRecipe
from rollick.config.schema import Domain, Recipe, rewards_of
from rollick.envs.pool import EnvPool
from rollick.episodes.counts import EpisodeCounts
from rollick.observe.faults import FaultLog
from rollick.pipelines.judge import JudgeEndpoint, open_judge
from rollick.pipelines.reward_model import RewardModelClient
from rollick.pipelines.state import RunObjects
from rollick.rewards.pool import InProcessReward, RewardPool
from rollick.roles.handles import Roles
from rollick.roles.worker_recovery import WorkerRecovery
from rollick.types import RewardFn, Sample, Score


@dataclass(slots=True)
class Scoring:
    """Scores the samples of a run. `pool` is None if the run samples nothing."""

    recipe: Recipe
    pool: RewardPool | None
    judge: JudgeEndpoint | None
    environments: EnvPool | None
    episodes: EpisodeCounts = field(default_factory=EpisodeCounts)
    """Training episodes since the last call of `metrics`."""

    @property
    def rewards(self) -> RewardPool:
        assert self.pool is not None, "a run that samples has a pool of rewards"
        return self.pool

    @property
    def held_out(self) -> Mapping[str, Domain]:
        """The domains to validate on; defaults to the training domains."""
        return self.recipe.data.validation or self.recipe.data.domains

    async def score(self, sample: Sample) -> Score:
        """The score of a training sample: 0 if its domain has neither environment nor rewards."""
        if sample.episode is not None:
            self.episodes.add(sample.episode)
        return await self._score(sample, self.recipe.data.domains[sample.prompt.domain])

    async def score_held_out(self, sample: Sample) -> Score:
        return await self._score(sample, self.held_out[sample.prompt.domain])

    async def _score(self, sample: Sample, domain: Domain) -> Score:
        earned = Score(0.0) if sample.episode is None else sample.episode.score
        specs = rewards_of(domain)
        if not earned.ok or not specs:
            return earned
        if self.judge is not None:
            specs = [self.judge.with_address(spec) for spec in specs]
        score = await self.rewards.score(sample, specs)
        if not score.ok or sample.episode is None:
            return score
        value, parts = earned.value + score.value, {**earned.parts, **score.parts}
        return replace(score, value=value, parts=parts, turn_rewards=earned.turn_rewards)

    def metrics(self) -> dict[str, float]:
        """Rewards and episodes since the last call, and totals of environment processes."""
        metrics, episodes = self.rewards.call_counts.take_metrics(), self.episodes
        self.episodes = EpisodeCounts()
        if self.environments is None:
            return metrics
        stats = self.environments.stats
        metrics |= episodes.metrics()
        metrics |= {f"env/failed/{status}": float(n) for status, n in stats.failures.items()}
        if stats.episode_restarts:
            metrics["env/episode_restarts"] = float(stats.episode_restarts)
        return metrics | {"env/seconds": stats.seconds, "env/restarts": float(stats.restarts)}

    def state(self) -> dict[str, Any]:
        """What `metrics` counts since the last step, and the rewards' totals, as JSON."""
        return {"rewards": self.rewards.call_counts.state(), "episodes": asdict(self.episodes)}

    def restore(self, state: dict[str, Any]) -> None:
        self.rewards.call_counts.restore(state["rewards"])
        self.episodes = EpisodeCounts(**state["episodes"])


@asynccontextmanager
async def open_scoring(
    loaded: LoadedRecipe,
    objects: RunObjects,
    roles: Roles,
    environments: EnvPool | None,
    recovery: WorkerRecovery,
    faults: FaultLog,
) -> AsyncGenerator[Scoring]:
    """Open the judge, reward model and reward processes that the recipe uses."""
    recipe = loaded.recipe
    async with AsyncExitStack() as stack:
        judge, rewards = None, None
        if roles.generators.ranks:
            if roles.judge.ranks:
                opening = open_judge(roles.judge, recipe, recovery, faults)
                judge = await stack.enter_async_context(opening)
            in_process: dict[str, InProcessReward] = {}
            if roles.reward_model.ranks:
                opening = RewardModelClient.open(roles.reward_model, recipe)
                in_process["model"] = (await stack.enter_async_context(opening)).score
            opening = RewardPool.open(
                _reward_functions(recipe, objects, without=in_process),
                processes=recipe.rewards.processes,
                timeout_s=recipe.rewards.timeout_s,
                base=loaded.base_dir,
                secrets=judge.secrets if judge else {},
                in_process=in_process,
                faults=faults,
            )
            rewards = await stack.enter_async_context(opening)
        yield Scoring(recipe, rewards, judge, environments)


def _reward_functions(
    recipe: Recipe, objects: RunObjects, *, without: Mapping[str, InProcessReward]
) -> dict[str, RewardFn | str]:
    """The rewards of all domains by name: user functions, or names to import."""
    names = sorted({reward.name for reward in recipe.all_rewards} - set(without))
    functions = {
        name: objects.rewards.get(name.removeprefix("object:")) for name in names if ":" in name
    }
    return {name: functions.get(name) or name for name in names}
