"""Rules about a recipe, and the Context that they read.

A rule is a function of a Context that yields Problems. It declares which settings it reads, and is
skipped if one of them is already known to be wrong: one mistake gives one problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollick.config.devices import Device, parse_devices
from rollick.config.problems import KeyPath, Problem, dotted
from rollick.config.schema import (
    Domain,
    EnvironmentSpec,
    Recipe,
    RewardSpec,
    RlRecipe,
    environment_of,
    rewards_of,
)
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.source import Node
from rollick.errors import ConfigError

D = TypeVar("D", bound=Domain)
Problems = Iterator[Problem]


@dataclass(frozen=True)
class Context:
    """A recipe and everything else that rules read. `unsound`: settings known to be wrong."""

    recipe: Recipe
    source: Node
    base: Path
    objects: Collection[str] = ()
    unsound: Collection[KeyPath] = ()

    def problem(self, path: KeyPath | str, message: str, fix: str = "") -> Problem:
        parts = tuple(path.split(".")) if isinstance(path, str) else path
        exact = self.source.find(parts)
        location = exact.location if exact else self.source.nearest(parts).key_location
        return Problem(location, dotted(parts), message, fix)

    def is_sound(self, *paths: KeyPath) -> bool:
        return not any(_overlap(path, bad) for path in paths for bad in self.unsound)

    def name_path(self, section: KeyPath) -> KeyPath:
        """Where a section is named: its key `name`, or the section itself in the short form."""
        return (*section, "name") if self.source.find((*section, "name")) else section

    def devices(self, role: str) -> tuple[Device, ...]:
        """The devices set for a role; empty if they are invalid, which another rule reports."""
        try:
            return parse_devices(self.recipe.devices.of(role) or "")
        except ConfigError:
            return ()

    @property
    def rl(self) -> RlRecipe | None:
        """The recipe if its pipeline is an RL pipeline, otherwise None."""
        return self.recipe if isinstance(self.recipe, RlRecipe) else None

    def domains(self) -> Iterator[tuple[KeyPath, Domain]]:
        """The sound domains of training and of validation."""
        data = self.recipe.data
        for kind, domains in (("domains", data.domains), ("validation", data.validation)):
            for name, domain in domains.items():
                path = ("data", kind, name)
                if self.is_sound(path):
                    yield path, domain

    def domains_of(self, kind: type[D]) -> Iterator[tuple[KeyPath, D]]:
        """The sound domains of one class."""
        return ((path, item) for path, item in self.domains() if isinstance(item, kind))

    def rewards(self) -> Iterator[tuple[KeyPath, RewardSpec]]:
        """The rewards of the sound domains."""
        for path, domain in self.domains():
            for index, reward in enumerate(rewards_of(domain)):
                yield (*path, "rewards", index), reward

    def environments(self) -> Iterator[tuple[KeyPath, EnvironmentSpec]]:
        """The environments of the sound domains."""
        for path, domain in self.domains():
            if (environment := environment_of(domain)) is not None:
                yield (*path, "environment"), environment

    def algorithms(self, *parts: str) -> Iterator[tuple[KeyPath, AlgorithmConfig]]:
        """The algorithms of an RL recipe in which these parts are sound: the recipe's, if a domain
        uses it, and those of domains."""
        if self.rl is None:
            return
        domains = self.rl.data.domains
        paths = {name: ("data", "domains", name, "algorithm") for name in domains}
        own = [(paths[name], item.algorithm) for name, item in domains.items() if item.algorithm]
        # A domain with an invalid algorithm does not use the recipe's.
        uses = [item.algorithm is None and self.is_sound(paths[n]) for n, item in domains.items()]
        common = [(("algorithm",), self.rl.algorithm)] if any(uses) or not domains else []
        for path, algorithm in [*common, *own]:
            if self.is_sound(*((*path, part) for part in parts)):
                yield path, algorithm


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    short = min(len(one), len(other))
    return one[:short] == other[:short]


Rule = Callable[[Context], Problems]
RULES: list[tuple[Rule, tuple[KeyPath, ...]]] = []


def rule(*reads: str) -> Callable[[Rule], Rule]:
    """Registers a rule with the settings it reads. Context skips unsound domains."""

    def register(function: Rule) -> Rule:
        RULES.append((function, tuple(tuple(path.split(".")) for path in reads)))
        return function

    return register
