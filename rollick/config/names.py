"""What a recipe can name: a static table kind -> name -> "module:attribute".

Reading it imports nothing, so `rollick check` and `rollick list` need neither torch nor ray.
Adding an implementation is one function and one line here. Other packages add names of their own
by entry points (plugins.py).

    name -- find --> "module:attribute" -- resolve --> what a recipe uses
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rollick.config.gym_tasks import GYM_TASKS
from rollick.config.plugins import plugin_target, plugins
from rollick.config.presets import PRESETS
from rollick.errors import ConfigError


def _in(module: str, *names: str) -> dict[str, str]:
    """Names of functions in one module that recipes know by the same name."""
    return {name: f"rollick.{module}:{name}" for name in names}


_OPEN: Mapping[str, Mapping[str, str]] = {
    "advantages": {
        **_in("algorithms.advantages", "dr_grpo", "grpo", "rloo"),
        "reinforce": "rollick.algorithms.returns:reinforce",
        "reinforce++": "rollick.algorithms.returns:reinforce_pp",
        "reinforce++_baseline": "rollick.algorithms.returns:reinforce_pp_baseline",
        **_in("algorithms.advantages", "lite_ppo", "max_rl", "gdpo"),
        "gae": "rollick.algorithms.returns:gae",
        "step_return": "rollick.algorithms.turns:step_return",
        "segment_return": "rollick.algorithms.turns:step_return",
        "gigpo": "rollick.algorithms.turns:gigpo",
        "opd": "rollick.algorithms.returns:opd",
    },
    "losses": {
        **_in("algorithms.losses", "dppo_tv", "dppo_kl", "ppo"),
        **_in("algorithms.sequence_losses", "gspo", "segment"),
        **_in("algorithms.losses", "reinforce", "truncated_is"),
        "topr": "rollick.algorithms.sequence_losses:topr",
        **_in("algorithms.losses", "cispo", "sapo"),
        "gmpo": "rollick.algorithms.sequence_losses:gmpo",
        **_in("algorithms.losses", "kimi", "raft"),
        "raft++": "rollick.algorithms.losses:raft_plus_plus",
        "sft": "rollick.algorithms.losses:sft",
        **_in("algorithms.preference", "dpo", "ipo"),
        "distillation": "rollick.algorithms.distillation:distillation",
    },
    "corrections": {
        **_in("algorithms.correction", "bypass", "none", "token_tis", "sequence_tis", "icepop"),
        **_in("algorithms.correction", "geometric", "k3", "decoupled", "opsm"),
    },
    "aggregations": {
        **_in("algorithms.aggregation", "token_mean", "sequence_mean_token_mean"),
        **_in("algorithms.aggregation", "sequence_mean_token_sum", "fixed_length", "prompt_mean"),
    },
    "rewards": {
        **_in("rewards.text", "exact_match", "last_number", "contains", "multiple_choice", "f1"),
        "math": "rollick.rewards.math:math_answer",
        "instructions": "rollick.rewards.instructions:instructions",
        **_in("rewards.text", "json_schema", "regex", "length", "tags", "repetition", "language"),
        "judge": "rollick.rewards.judge:judge",
        "model": "rollick.rewards.base:model",
        "code": "rollick.rewards.code:code",
        "knights_knaves": "rollick.rewards.knights_knaves:knights_knaves",
        "reasoning_gym": "rollick.rewards.reasoning_gym_scores:reasoning_gym",
    },
    "environments": {
        "frozen_lake": "rollick.envs.frozen_lake:FrozenLake",
        "sokoban": "rollick.envs.sokoban:Sokoban",
        "webshop": "rollick.envs.webshop:WebShop",
        "tools": "rollick.envs.tools.env:ToolEnv",
        "gymnasium": "rollick.envs.adapters.gymnasium_env:GymEnv",
        "minigrid": "rollick.envs.adapters.minigrid_env:minigrid_env",
        "reasoning_gym": "rollick.envs.adapters.reasoning_gym_env:ReasoningGymEnv",
        "textarena": "rollick.envs.adapters.textarena_env:TextArenaEnv",
        "openenv": "rollick.envs.adapters.openenv_env:RemoteEnv",
        "verifiers": "rollick.envs.adapters.verifiers_env:VerifiersEnv",
    },
    "engines": {
        "native": "rollick.infer.native.engine:NativeEngine",
        "vllm": "rollick.infer.vllm.engine:VllmEngine",
    },
    "train_strategies": {
        "local": "rollick.trainer.local:LocalStrategy",
        "fsdp": "rollick.trainer.fsdp:FsdpStrategy",
    },
    "pipelines": {
        **dict.fromkeys(("rlvr", "agentic"), "rollick.pipelines.rl:run_rl"),
        **dict.fromkeys(("sft", "dpo", "distill"), "rollick.pipelines.supervised:run_supervised"),
    },
    "sinks": {
        "tensorboard": "rollick.observe.sinks:TensorBoardSink",
        "wandb": "rollick.observe.sinks:open_wandb",
        "mlflow": "rollick.observe.sinks:MlflowSink",
        "trackio": "rollick.observe.sinks:open_trackio",
    },
}

CLOSED: Mapping[str, Mapping[str, str]] = {
    "value_losses": _in("algorithms.value", "value"),
    "selections": {
        "zero_variance": "rollick.algorithms.selection:group_drop_reason",
        "retirement": "rollick.data.curriculum:is_retired",
        "near_half": "rollick.data.curriculum:nearest_half",
    },
    "kl_forms": _in("algorithms.kl", "k1", "k2", "k3"),
    "bonuses": _in("algorithms.losses", "entropy"),
    "kl_controllers": {
        "fixed": "rollick.algorithms.kl:fixed_coefficient",
        "adaptive": "rollick.algorithms.kl:adaptive_coefficient",
    },
    "divergences": {
        "forward": "rollick.algorithms.distillation:forward_kl",
        "reverse": "rollick.algorithms.distillation:reverse_kl",
        "js": "rollick.algorithms.distillation:js",
        "skewed": "rollick.algorithms.distillation:skewed_kl",
        "skewed_reverse": "rollick.algorithms.distillation:skewed_reverse_kl",
        "adaptive": "rollick.algorithms.distillation:adaptive_kl",
    },
    "shapings": {
        "length_penalty": "rollick.algorithms.shaping:soft_length_penalty",
        "normalise": "rollick.algorithms.shaping:normalise_scores",
        "truncated_mask": "rollick.algorithms.shaping:trained_members",
        "difficulty_mask": "rollick.algorithms.shaping:trained_members",
    },
    "gym_tasks": dict.fromkeys(GYM_TASKS, "rollick.data.reasoning_gym_source:gym_rows"),
    "presets": dict.fromkeys(PRESETS, "rollick.config.presets:PRESETS"),
}
"""Kinds that are settings of a part and not names to import: other packages cannot add to them."""

NAMES = {**_OPEN, **CLOSED}

REFERENCE = re.compile(r"^(?P<where>[^:]+):(?P<attribute>[A-Za-z_]\w*)$")
"""`file.py:name` or `package.module:name`: something of the user's own."""


def is_reference(name: str) -> bool:
    return REFERENCE.match(name) is not None


def nearest(name: str, known: list[str], *, count: int = 3) -> list[str]:
    """The known names that look most like `name`, best first."""
    return get_close_matches(name, known, n=count, cutoff=0.6)


def names_of(kind: str) -> list[str]:
    """All names of a kind: those of the table, then those of installed packages."""
    return list(dict.fromkeys([*NAMES[kind], *(() if kind in CLOSED else plugins(kind))]))


def find(kind: str, name: str) -> str | None:
    """Where `name` is, as module:attribute (or file.py:name); None if it is unknown.

    ConfigError if more than one registered it. Nothing is imported.
    """
    if is_reference(name):
        return name
    own = NAMES[kind].get(name)
    if kind in CLOSED:
        return own
    target = plugin_target(kind, name, own=own)
    if target is not None and not is_reference(target):
        message = f"{name!r} of the {kind.replace('_', ' ')} is registered as {target!r}"
        raise ConfigError(message, fix="its package must register it as module:attribute")
    return target


def resolve(kind: str, name: str, *, base: Path | None = None) -> Any:
    """Import the object of a name. Files are relative to `base`, the recipe's folder."""
    target = find(kind, name)
    if target is None:
        known = names_of(kind)
        close = ", ".join(nearest(name, known))
        message = f"{name!r} is not one of the {kind} ({', '.join(known) or 'none'})"
        fix = f"did you mean {close}?" if close else "or name your own as file.py:name"
        raise ConfigError(message, fix=fix)
    return load_reference(target, base=base)


def load_reference(name: str, *, base: Path | None = None) -> Any:
    """Import `file.py:name` or `package.module:name`."""
    where, _, attribute = name.partition(":")
    module = _load_file(where, base) if where.endswith(".py") else importlib.import_module(where)
    if not hasattr(module, attribute):
        known = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ConfigError(f"{where} has no {attribute!r}", fix=f"it defines: {known}")
    return getattr(module, attribute)


def _load_file(where: str, base: Path | None) -> ModuleType:
    path = ((base or Path.cwd()) / where).resolve()
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", fix="give a path relative to the recipe")
    name = f"rollick_user_{path.stem}_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        # Last in sys.path, so that modules next to the file can be imported but hide no others.
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module
