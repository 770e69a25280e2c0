"""What the samples of a session do: those of domains with an environment play it, agents of the
user's own run (agents.py), the others answer once. A wiring of rollout/playing.py to a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollick.config.schema import DomainConfig, EnvironmentSpec
from rollick.data.collate import Example
from rollick.data.sources import task_seed
from rollick.rollout.episode import Access, Episode, RememberingCodec, SamplingOf, single_turn
from rollick.rollout.playing import Player, TaskOf, show_example
from rollick.rollout.transcript import Task
from rollick.types import Prompt, Sample, SampleId

if TYPE_CHECKING:
    from rollick.pipelines.base import Session


def playing_episode(
    session: Session, sampling: SamplingOf, domains: Mapping[str, DomainConfig], *, purpose: str
) -> Episode | None:
    """What a sample of these domains does; None if all of them are answered once."""
    if not has_environments(domains) and not has_agents(domains):
        return None
    seed = session.recipe.run.seed
    answer = single_turn(RememberingCodec(session.codec), sampling, seed=seed, purpose=purpose)
    player = _player(session, sampling, domains, purpose=purpose)

    async def live(uid: SampleId, prompt: Prompt, access: Access) -> Sample:
        domain = domains[prompt.domain]
        if domain.agent is not None:
            assert session.agents is not None, "a session with agents has a gateway"
            return await session.agents.play(
                domain.agent, uid, prompt, access, sampling=sampling(prompt), purpose=purpose
            )
        if domain.environment is not None:
            assert player is not None, "a session with environments has a pool"
            return await player.play(uid, prompt, access)
        return await answer(uid, prompt, access)

    return live


def has_environments(domains: Mapping[str, DomainConfig]) -> bool:
    return any(domain.environment for domain in domains.values())


def has_agents(domains: Mapping[str, DomainConfig]) -> bool:
    return any(domain.agent for domain in domains.values())


def _player(
    session: Session, sampling: SamplingOf, domains: Mapping[str, DomainConfig], *, purpose: str
) -> Player | None:
    if session.environments is None:
        return None
    return Player(
        codec=session.codec,
        pool=session.environments,
        task_of=tasks_of(domains),
        sampling=sampling,
        room=session.recipe.infer.max_length,
        seed=session.recipe.run.seed,
        purpose=purpose,
    )


def tasks_of(domains: Mapping[str, DomainConfig]) -> TaskOf:
    """Prompts of these domains as tasks of their environments."""

    def task_of(prompt: Prompt) -> Task:
        domain = domains[prompt.domain]
        spec = domain.environment
        assert spec is not None, prompt.uid
        columns = {name: prompt.row[name] for name in spec.columns}
        return Task(
            environment=spec.name,
            options={**spec.options, **columns},
            seed=_seed_of_row(spec, prompt) if domain.source else int(prompt.row["seed"]),
            turn_tokens=spec.turn_tokens,
            window=spec.window,
            carried=spec.carried,
            summary=spec.summary,
        )

    return task_of


def _seed_of_row(spec: EnvironmentSpec, prompt: Prompt) -> int:
    """A row of the user's own has no seed; its number, which is in its uid, gives it one."""
    return task_seed(spec.seed, "row", spec.name, int(prompt.uid.rpartition("/")[2]))


async def solved_examples(session: Session, prompt: Prompt) -> Sequence[Example]:
    """The episode of the environment's solver, to be imitated, segment by segment."""
    assert session.environments is not None, prompt.uid
    return await show_example(
        prompt,
        codec=session.codec,
        pool=session.environments,
        task_of=tasks_of(session.recipe.data.domains),
    )


def environment_metrics(session: Session) -> dict[str, float]:
    """Figures of the episodes since the last call; of their processes, since the run began."""
    pool = session.environments
    if pool is None:
        return {}
    found = session.plays.take()
    found |= {f"env/failed/{status}": float(n) for status, n in pool.stats.failures.items()}
    return found | {
        "env/seconds": pool.stats.seconds,
        "env/restarts": float(pool.stats.restarts),
    }
