"""Per-domain settings of an RL run, as functions of a prompt or a group."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from rollick.algorithms.selection import DropReason, group_drop_reason
from rollick.config.schema import Recipe, RlRecipe
from rollick.types import Group, Prompt, Sampling


def training_sampling(recipe: RlRecipe) -> Callable[[Prompt], Sampling]:
    by_domain = cache(recipe.training_sampling)
    return lambda prompt: by_domain(prompt.domain)


def validation_sampling(recipe: Recipe) -> Callable[[Prompt], Sampling]:
    by_domain = cache(recipe.evaluation_sampling)
    return lambda prompt: by_domain(prompt.domain)


def group_filter(recipe: RlRecipe) -> Callable[[Group], DropReason | None]:
    """The drop reason of a group by the filters of its domain; None keeps it."""
    drops = {name: recipe.drops_no_signal(name) for name in recipe.data.domains}
    spreads = {name: recipe.rollout_of(name).min_spread for name in recipe.data.domains}
    ranges = {name: domain.filters.scores for name, domain in recipe.data.domains.items()}

    def drop_reason(group: Group) -> DropReason | None:
        domain = group.prompt.domain
        drop, spread, scores = drops[domain], spreads[domain], ranges[domain]
        if not drop and scores is None:
            return None
        return group_drop_reason(group, min_spread=spread, drop_no_signal=drop, scores=scores)

    return drop_reason
