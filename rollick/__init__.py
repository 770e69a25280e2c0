"""rollick: reinforcement learning of language models, from a laptop to a cluster.

    import rollick

    result = rollick.train(model="my-model", prompts=["2+2=", "3+4="], reward=my_function)

The names below are the public interface. What is heavy is imported when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollick.config.load import LoadedRecipe, load_recipe
    from rollick.config.schema import Recipe
    from rollick.envs.base import TextEnv
    from rollick.errors import ConfigError, RollickError
    from rollick.pipelines.base import RunResult
    from rollick.pipelines.run import run_recipe, train
    from rollick.types import Group, Prompt, Sample, SampleId, Score, StopReason, Turn

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "rollick.errors",
    "Group": "rollick.types",
    "LoadedRecipe": "rollick.config.load",
    "Prompt": "rollick.types",
    "Recipe": "rollick.config.schema",
    "RollickError": "rollick.errors",
    "RunResult": "rollick.pipelines.base",
    "Sample": "rollick.types",
    "SampleId": "rollick.types",
    "Score": "rollick.types",
    "StopReason": "rollick.types",
    "TextEnv": "rollick.envs.base",
    "Turn": "rollick.types",
    "load_recipe": "rollick.config.load",
    "run_recipe": "rollick.pipelines.run",
    "train": "rollick.pipelines.run",
}

__all__ = [
    "ConfigError",
    "Group",
    "LoadedRecipe",
    "Prompt",
    "Recipe",
    "RollickError",
    "RunResult",
    "Sample",
    "SampleId",
    "Score",
    "StopReason",
    "TextEnv",
    "Turn",
    "load_recipe",
    "run_recipe",
    "train",
]


class _Package(ModuleType):
    """Keeps `rollick.train` the function.

    Importing anything from the room rollick/train would bind that module to the same name here,
    and a second call of `rollick.train(...)` would find a module. Imports from the room do not
    need the binding.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"rollick has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
