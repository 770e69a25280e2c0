"""The episode of a sample: an environment, the user's agent, or a single answer.

Connects episodes/environment.py and agents.py to the domains of a recipe.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollick.config.load import LoadedRecipe
from rollick.config.schema import Domain, agent_of, environment_of
from rollick.data.chat import ChatCodec
from rollick.data.collate import Example
from rollick.data.sources import task_seed
from rollick.envs.pool import EnvLimits, EnvPool
from rollick.episodes.base import CachingCodec, EngineAccess, RunEpisode, SamplingFor
from rollick.episodes.environment import EnvEpisodeRunner, TaskFor, encode_solver_episode
from rollick.episodes.single_turn import single_turn
from rollick.episodes.transcript import EnvTask
from rollick.observe.faults import FaultLog
from rollick.types import Prompt, Sample, SampleId

if TYPE_CHECKING:
    # Its server needs the extra rollick[serve], which only runs with agents use.
    from rollick.pipelines.agents import Agents

Domains = Mapping[str, Domain]


@dataclass(frozen=True, slots=True)
class Episodes:
    codec: ChatCodec
    environments: EnvPool | None
    agents: Agents | None
    max_length: int
    seed: int

    def build(self, sampling: SamplingFor, domains: Domains, *, purpose: str) -> RunEpisode:
        codec, agents = CachingCodec(self.codec), self.agents
        answer = single_turn(codec, sampling, seed=self.seed, purpose=purpose)
        if not has_agents(domains) and not any(map(environment_of, domains.values())):
            return answer
        runner = self.environments and EnvEpisodeRunner(
            codec=self.codec,
            pool=self.environments,
            task_for=tasks_for(domains),
            sampling=sampling,
            max_length=self.max_length,
            seed=self.seed,
            purpose=purpose,
        )

        async def run_episode(uid: SampleId, prompt: Prompt, access: EngineAccess) -> Sample:
            domain = domains[prompt.domain]
            if (agent := agent_of(domain)) is not None:
                assert agents is not None, "a run with agents has a gateway"
                return await agents.play(
                    agent, uid, prompt, access, sampling=sampling(prompt), purpose=purpose
                )
            if environment_of(domain) is not None:
                assert runner is not None, "a run with environments has a pool"
                return await runner.run(uid, prompt, access)
            return await answer(uid, prompt, access)

        return run_episode

    async def solve(self, prompt: Prompt, domains: Domains) -> Sequence[Example]:
        """Run the environment's solver; returns the segments of its episode as examples."""
        assert self.environments is not None, prompt.uid
        return await encode_solver_episode(
            prompt, codec=self.codec, pool=self.environments, task_for=tasks_for(domains)
        )


def has_agents(domains: Domains) -> bool:
    return any(agent_of(domain) for domain in domains.values())


@asynccontextmanager
async def open_environments(
    loaded: LoadedRecipe, folder: Path, faults: FaultLog
) -> AsyncGenerator[EnvPool | None]:
    """Open processes for all environments of the domains; None if there are none."""
    recipe, config = loaded.recipe, loaded.recipe.environments
    domains = [*recipe.data.domains.values(), *recipe.data.validation.values()]
    named = [environment_of(domain) for domain in domains]
    names = sorted({environment.name for environment in named if environment is not None})
    if not names:
        yield None
        return
    async with EnvPool.open(
        {name: name for name in names},
        processes=config.processes,
        threads=config.threads,
        limits=EnvLimits(step_s=config.step_timeout_s, episode_s=config.episode_timeout_s),
        base=loaded.base_dir,
        output=folder / "environments.log",
        faults=faults,
    ) as pool:
        yield pool


def tasks_for(domains: Domains) -> TaskFor:
    def task_for(prompt: Prompt) -> EnvTask:
        domain = domains[prompt.domain]
        spec = environment_of(domain)
        assert spec is not None, prompt.uid
        window = spec.window
        columns = {name: prompt.row[name] for name in spec.columns}
        return EnvTask(
            environment=spec.name,
            options={**spec.options, **columns},
            # Rows of user data have no seed; it follows from the row number, the end of the uid.
            seed=task_seed(spec.seed, "row", spec.name, int(prompt.uid.rpartition("/")[2]))
            if domain.source
            else int(prompt.row["seed"]),
            turn_tokens=spec.turn_tokens,
            window=window.turns if window else 0,
            carried=window.carried if window else 0,
            summary=window.summary if window else None,
        )

    return task_for
