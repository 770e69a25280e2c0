"""What a rule about a recipe is, and what it may look at. The rules: check.py and *_rules.py.

A rule is a function of a Context that yields Problems. It says which settings it reads, and is
left out where one of those is already known to be wrong: one mistake gives one problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollick.config.algorithm import AlgorithmConfig
from rollick.config.problems import KeyPath, Problem, dotted
from rollick.config.schema import DomainConfig, Recipe
from rollick.config.source import Node

Findings = Iterator[Problem]


@dataclass(frozen=True)
class Context:
    """A recipe with all that the rules may look at. `unsound`: settings known to be wrong."""

    recipe: Recipe
    source: Node
    base: Path
    objects: Collection[str] = ()
    unsound: Collection[KeyPath] = ()

    def problem(self, path: KeyPath | str, message: str, fix: str = "") -> Problem:
        parts = tuple(path.split(".")) if isinstance(path, str) else path
        exact = self.source.find(parts)
        place = exact.place if exact else self.source.nearest(parts).key_place
        return Problem(place, dotted(parts), message, fix)

    def is_sound(self, *paths: KeyPath) -> bool:
        return not any(_overlap(path, bad) for path in paths for bad in self.unsound)

    def domains(self, *, validation: bool | None = None) -> Iterator[tuple[KeyPath, DomainConfig]]:
        """The sound domains, of training (False), of validation (True), or of both (None)."""
        data = self.recipe.data
        for kind, domains in (("domains", data.domains), ("validation", data.validation)):
            if validation is not None and validation != (kind == "validation"):
                continue
            for name, domain in domains.items():
                path = ("data", kind, name)
                if self.is_sound(path):
                    yield path, domain

    def algorithms(self, *parts: str) -> Iterator[tuple[KeyPath, AlgorithmConfig]]:
        """The algorithms that are trained with, those whose parts of these names are sound: the
        recipe's, if some domain has none of its own, and those of domains."""
        domains = self.recipe.data.domains
        found: list[tuple[KeyPath, AlgorithmConfig]] = []
        if not domains or any(self._takes_the_recipes(name) for name in domains):
            found.append((("algorithm",), self.recipe.algorithm))
        for name, domain in domains.items():
            if domain.algorithm is not None:
                found.append((("data", "domains", name, "algorithm"), domain.algorithm))
        for path, algorithm in found:
            if self.is_sound(*((*path, part) for part in parts)):
                yield path, algorithm

    def _takes_the_recipes(self, domain: str) -> bool:
        """An algorithm of the domain's that is wrong is not in the recipe, but was meant."""
        is_sound = self.is_sound(("data", "domains", domain, "algorithm"))
        return is_sound and self.recipe.data.domains[domain].algorithm is None


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    short = min(len(one), len(other))
    return one[:short] == other[:short]


Rule = Callable[[Context], Findings]
RULES: list[tuple[Rule, tuple[KeyPath, ...]]] = []


def rule(*reads: str) -> Callable[[Rule], Rule]:
    """Registers a rule with the settings it reads (domains are looked after by Context)."""

    def register(function: Rule) -> Rule:
        RULES.append((function, tuple(tuple(path.split(".")) for path in reads)))
        return function

    return register
