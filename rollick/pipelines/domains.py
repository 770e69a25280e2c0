"""What differs by domain in an RL run, as functions of a prompt or a group.

Recipe -> training_sampling, validation_sampling: Prompt -> Sampling
       -> group_filter: Group -> why it is dropped, or None
"""

from __future__ import annotations

from collections.abc import Callable

from rollick.algorithms.selection import DropReason, judge_group
from rollick.config.schema import Recipe
from rollick.types import Group, Prompt, Sampling


def training_sampling(recipe: Recipe) -> Callable[[Prompt], Sampling]:
    """How the samples of a training prompt are drawn."""
    by_domain = {name: _training_sampling(recipe, name) for name in recipe.data.domains}
    return lambda prompt: by_domain[prompt.domain]


def _training_sampling(recipe: Recipe, domain: str) -> Sampling:
    config = recipe.sampling_of(domain)
    return Sampling(
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        stop=config.stop,
        stop_ids=config.stop_ids,
    )


def validation_sampling(recipe: Recipe) -> Callable[[Prompt], Sampling]:
    """How the samples of a held-out prompt are drawn (of a training prompt, where there are no
    held-out ones and `rollick eval` takes those)."""
    data = recipe.data
    by_domain = {
        name: _validation_sampling(recipe, name) for name in data.validation | data.domains
    }
    return lambda prompt: by_domain[prompt.domain]


def _validation_sampling(recipe: Recipe, domain: str) -> Sampling:
    config, (stop, stop_ids) = recipe.evaluation_of(domain), recipe.stops_of(domain)
    return Sampling(
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        min_tokens=config.min_tokens,
        logit_bias=tuple(sorted(config.logit_bias.items())),
        stop=stop,
        stop_ids=stop_ids,
    )


def group_filter(recipe: Recipe) -> Callable[[Group], DropReason | None]:
    """Why a group is dropped, by the filters of its domain; None keeps it."""
    rollouts = {name: recipe.rollout_of(name) for name in recipe.data.domains}
    ranges = {name: domain.filters.scores for name, domain in recipe.data.domains.items()}

    def judge(group: Group) -> DropReason | None:
        rollout, scores = rollouts[group.prompt.domain], ranges[group.prompt.domain]
        if not rollout.drop_no_signal and scores is None:
            return None
        return judge_group(
            group,
            min_spread=rollout.min_spread,
            drop_no_signal=rollout.drop_no_signal,
            scores=scores,
        )

    return judge
