"""Per-domain settings of an RL run, as functions of a prompt or a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from rollick.algorithms.selection import DropReason, group_drop_reason, has_signal
from rollick.config.schema import Recipe, RlRecipe
from rollick.types import Group, Prompt, Sampling


def training_sampling(recipe: RlRecipe) -> Callable[[Prompt], Sampling]:
    by_domain = cache(recipe.training_sampling)
    return lambda prompt: by_domain(prompt.domain)


def validation_sampling(recipe: Recipe) -> Callable[[Prompt], Sampling]:
    by_domain = cache(recipe.evaluation_sampling)
    return lambda prompt: by_domain(prompt.domain)


def count_kept_no_signal(recipe: RlRecipe, groups: Sequence[Group]) -> dict[str, float]:
    """As a metric: the groups that are trained on although their scores are equal, for `doctor`.
    Nothing where the advantage needs no different scores, or such groups are dropped."""
    spreads = {
        name: recipe.rollout_of(name).min_spread
        for name in recipe.data.domains
        if recipe.keeps_no_signal(name)
    }
    kept = [group for group in groups if group.prompt.domain in spreads]
    equal = [g for g in kept if not has_signal(g, min_spread=spreads[g.prompt.domain])]
    return {"rollout/kept_no_signal": float(len(equal))} if spreads else {}


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
