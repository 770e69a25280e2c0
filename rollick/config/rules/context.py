"""The Context that rules read, and the registry of rules.

A rule is a function of a Context that yields Problems. It declares which settings it reads, and is
skipped if one of them is invalid: one mistake gives one problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollick.config.devices import Device, parse_devices
from rollick.config.problems import KeyPath, Problem, format_path
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
    """A recipe and everything else that rules read."""

    recipe: Recipe
    source: Node
    base_dir: Path
    object_names: Collection[str] = ()
    """Names that `object:NAME` may use."""
    invalid_paths: Collection[KeyPath] = ()

    def problem(self, path: KeyPath | str, message: str, fix: str = "") -> Problem:
        keys = tuple(path.split(".")) if isinstance(path, str) else path
        node = self.source.find(keys)
        location = node.location if node else self.source.find_nearest(keys).key_location
        return Problem(location, format_path(keys), message, fix)

    def is_valid(self, *paths: KeyPath) -> bool:
        """Whether no setting at, above or below these paths is invalid."""
        return not any(_overlap(path, invalid) for path in paths for invalid in self.invalid_paths)

    def name_path(self, section: KeyPath) -> KeyPath:
        """The path of a section's name: its key `name`, or the section itself in the short form."""
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
        """The valid domains of training and of validation."""
        data = self.recipe.data
        for section, domains in (("domains", data.domains), ("validation", data.validation)):
            for name, domain in domains.items():
                path = ("data", section, name)
                if self.is_valid(path):
                    yield path, domain

    def domains_of(self, domain_type: type[D]) -> Iterator[tuple[KeyPath, D]]:
        """The valid domains of one class."""
        return ((path, item) for path, item in self.domains() if isinstance(item, domain_type))

    def rewards(self) -> Iterator[tuple[KeyPath, RewardSpec]]:
        """The rewards of the valid domains."""
        for path, domain in self.domains():
            for index, reward in enumerate(rewards_of(domain)):
                yield (*path, "rewards", index), reward

    def environments(self) -> Iterator[tuple[KeyPath, EnvironmentSpec]]:
        """The environments of the valid domains."""
        for path, domain in self.domains():
            if (environment := environment_of(domain)) is not None:
                yield (*path, "environment"), environment

    def algorithms(self, *parts: str) -> Iterator[tuple[KeyPath, AlgorithmConfig]]:
        """The algorithms of an RL recipe in which these parts are valid: the recipe's, if a domain
        uses it, and those of domains."""
        if self.rl is None:
            return
        domains = self.rl.data.domains
        paths = {name: ("data", "domains", name, "algorithm") for name in domains}
        domain_algorithms = [(paths[n], d.algorithm) for n, d in domains.items() if d.algorithm]
        # A domain with an invalid algorithm does not inherit the recipe's.
        inherits = [d.algorithm is None and self.is_valid(paths[n]) for n, d in domains.items()]
        shared = [(("algorithm",), self.rl.algorithm)] if any(inherits) or not domains else []
        for path, algorithm in [*shared, *domain_algorithms]:
            if self.is_valid(*((*path, part) for part in parts)):
                yield path, algorithm


def _overlap(first: KeyPath, second: KeyPath) -> bool:
    length = min(len(first), len(second))
    return first[:length] == second[:length]


Rule = Callable[[Context], Problems]
RULES: list[tuple[Rule, tuple[KeyPath, ...]]] = []


def rule(*reads: str) -> Callable[[Rule], Rule]:
    """Registers a rule with the settings it reads. Rules that iterate over domains get only the
    valid ones."""

    def register(function: Rule) -> Rule:
        RULES.append((function, tuple(tuple(path.split(".")) for path in reads)))
        return function

    return register
