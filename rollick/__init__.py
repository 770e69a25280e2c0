"""rollick: reinforcement learning of language models, from a laptop to a cluster.

    import rollick

    result = rollick.train(model="my-model", prompts=["2+2=", "3+4="], reward=my_function)

The names below are the public interface, imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollick.config.load import LoadedRecipe, load_recipe
    from rollick.config.schema import Recipe
    from rollick.envs.base import TextEnv
    from rollick.errors import ConfigError, RollickError
    from rollick.pipelines.run import run_recipe, train
    from rollick.pipelines.state import RunInterrupted, RunResult
    from rollick.types import Group, Prompt, Sample, SampleId, Score, StopReason, Turn

__version__ = "0.1.0"

_MODULES = {
    "rollick.config.load": ("LoadedRecipe", "load_recipe"),
    "rollick.config.schema": ("Recipe",),
    "rollick.envs.base": ("TextEnv",),
    "rollick.errors": ("ConfigError", "RollickError"),
    "rollick.pipelines.run": ("run_recipe", "train"),
    "rollick.pipelines.state": ("RunInterrupted", "RunResult"),
    "rollick.types": ("Group", "Prompt", "Sample", "SampleId", "Score", "StopReason", "Turn"),
}

# A type checker reads literal lists only.
__all__ = ["ConfigError", "Group", "LoadedRecipe", "Prompt", "Recipe", "RollickError"]
__all__ += [
    "RunInterrupted",
    "RunResult",
    "Sample",
    "SampleId",
    "Score",
    "StopReason",
    "TextEnv",
    "Turn",
]
__all__ += ["load_recipe", "run_recipe", "train"]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"rollick has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
