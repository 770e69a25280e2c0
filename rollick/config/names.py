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

NAMES: Mapping[str, Mapping[str, str]] = {
    "advantages": {
        "dr_grpo": "rollick.algorithms.advantages:dr_grpo",
        "grpo": "rollick.algorithms.advantages:grpo",
        "rloo": "rollick.algorithms.advantages:rloo",
        "reinforce": "rollick.algorithms.returns:reinforce",
        "reinforce++": "rollick.algorithms.returns:reinforce_pp",
        "reinforce++_baseline": "rollick.algorithms.advantages:reinforce_pp_baseline",
        "lite_ppo": "rollick.algorithms.advantages:lite_ppo",
        "max_rl": "rollick.algorithms.advantages:max_rl",
        "gdpo": "rollick.algorithms.advantages:gdpo",
        "gae": "rollick.algorithms.returns:gae",
        "step_return": "rollick.algorithms.turns:step_return",
        "segment_return": "rollick.algorithms.turns:step_return",
        "gigpo": "rollick.algorithms.turns:gigpo",
        "opd": "rollick.algorithms.returns:opd",
    },
    "losses": {
        "dppo_tv": "rollick.algorithms.losses:dppo_tv",
        "dppo_kl": "rollick.algorithms.losses:dppo_kl",
        "ppo": "rollick.algorithms.losses:ppo",
        "gspo": "rollick.algorithms.sequence_losses:gspo",
        "segment": "rollick.algorithms.sequence_losses:segment",
        "reinforce": "rollick.algorithms.losses:reinforce",
        "truncated_is": "rollick.algorithms.losses:truncated_is",
        "topr": "rollick.algorithms.sequence_losses:topr",
        "cispo": "rollick.algorithms.losses:cispo",
        "sapo": "rollick.algorithms.losses:sapo",
        "gmpo": "rollick.algorithms.sequence_losses:gmpo",
        "kimi": "rollick.algorithms.losses:kimi",
        "raft": "rollick.algorithms.losses:raft",
        "raft++": "rollick.algorithms.losses:raft_plus_plus",
        "sft": "rollick.algorithms.losses:sft",
        "dpo": "rollick.algorithms.preference:dpo",
        "ipo": "rollick.algorithms.preference:ipo",
        "distillation": "rollick.algorithms.distillation:distillation",
    },
    "value_losses": {"value": "rollick.algorithms.value:value"},
    "corrections": {
        "bypass": "rollick.algorithms.correction:bypass",
        "none": "rollick.algorithms.correction:none",
        "token_tis": "rollick.algorithms.correction:token_tis",
        "sequence_tis": "rollick.algorithms.correction:sequence_tis",
        "icepop": "rollick.algorithms.correction:icepop",
        "geometric": "rollick.algorithms.correction:geometric",
        "k3": "rollick.algorithms.correction:k3",
        "decoupled": "rollick.algorithms.correction:decoupled",
        "opsm": "rollick.algorithms.correction:opsm",
    },
    "aggregations": {
        "token_mean": "rollick.algorithms.aggregation:token_mean",
        "sequence_mean_token_mean": "rollick.algorithms.aggregation:sequence_mean_token_mean",
        "sequence_mean_token_sum": "rollick.algorithms.aggregation:sequence_mean_token_sum",
        "fixed_length": "rollick.algorithms.aggregation:fixed_length",
        "prompt_mean": "rollick.algorithms.aggregation:prompt_mean",
    },
    "selections": {
        "zero_variance": "rollick.algorithms.selection:judge_group",
        "retirement": "rollick.data.curriculum:is_retired",
        "near_half": "rollick.data.curriculum:nearest_half",
    },
    "rewards": {
        "exact_match": "rollick.rewards.text:exact_match",
        "last_number": "rollick.rewards.text:last_number",
        "contains": "rollick.rewards.text:contains",
        "multiple_choice": "rollick.rewards.text:multiple_choice",
        "f1": "rollick.rewards.text:f1",
        "math": "rollick.rewards.math:math_answer",
        "instructions": "rollick.rewards.instructions:instructions",
        "json_schema": "rollick.rewards.structure:json_schema",
        "regex": "rollick.rewards.structure:regex",
        "length": "rollick.rewards.structure:length",
        "tags": "rollick.rewards.structure:tags",
        "repetition": "rollick.rewards.structure:repetition",
        "language": "rollick.rewards.language:language",
        "judge": "rollick.rewards.judge:judge",
        "model": "rollick.rewards.model:model",
        "code": "rollick.rewards.code:code",
        "reasoning_gym": "rollick.rewards.gym:reasoning_gym",
    },
    "environments": {
        "frozen_lake": "rollick.envs.frozen_lake:FrozenLake",
        "sokoban": "rollick.envs.sokoban:Sokoban",
        "webshop": "rollick.envs.webshop:WebShop",
        "tools": "rollick.envs.tools.env:ToolEnv",
        "gymnasium": "rollick.envs.adapters.gym:GymEnv",
        "minigrid": "rollick.envs.adapters.minigrid:minigrid_env",
        "reasoning_gym": "rollick.envs.adapters.reasoning:ReasoningGymEnv",
        "textarena": "rollick.envs.adapters.arena:TextArenaEnv",
        "openenv": "rollick.envs.adapters.remote:RemoteEnv",
        "verifiers": "rollick.envs.adapters.verifier:VerifiersEnv",
    },
    "engines": {
        "native": "rollick.infer.native.engine:NativeEngine",
        "vllm": "rollick.infer.vllm:VllmEngine",
    },
    "train_strategies": {
        "local": "rollick.train.local:LocalStrategy",
        "fsdp": "rollick.train.fsdp:FsdpStrategy",
    },
    "pipelines": {
        "rlvr": "rollick.pipelines.rlvr:run_rlvr",
        "agentic": "rollick.pipelines.agentic:run_agentic",
        "sft": "rollick.pipelines.sft:run_sft",
        "dpo": "rollick.pipelines.dpo:run_dpo",
        "distill": "rollick.pipelines.distill:run_distill",
    },
    "sinks": {
        "tensorboard": "rollick.observe.sinks:TensorBoardSink",
        "wandb": "rollick.observe.sinks:WandbSink",
        "mlflow": "rollick.observe.sinks:MlflowSink",
        "trackio": "rollick.observe.sinks:TrackioSink",
    },
    "kl_forms": {
        "k1": "rollick.algorithms.kl:k1",
        "k2": "rollick.algorithms.kl:k2",
        "k3": "rollick.algorithms.kl:k3",
    },
    "bonuses": {"entropy": "rollick.algorithms.losses:entropy"},
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
    "gym_tasks": dict.fromkeys(GYM_TASKS, "rollick.data.gym:gym_rows"),
    "presets": dict.fromkeys(PRESETS, "rollick.config.presets:PRESETS"),
}

CLOSED = frozenset(
    {
        "value_losses",
        "bonuses",
        "selections",
        "kl_forms",
        "kl_controllers",
        "divergences",
        "shapings",
        "gym_tasks",
        "presets",
    }
)
"""Kinds that are settings of a part and not names to import: other packages cannot add to them."""

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
    """Where `name` is, as module:attribute (or file.py:name); None if nobody knows it.

    ConfigError if more than one registered it. Nothing is imported.
    """
    if is_reference(name):
        return name
    own = NAMES[kind].get(name)
    if kind in CLOSED:
        return own
    target = plugin_target(kind, name, own=own)
    if target is not None and not is_reference(target):
        raise ConfigError(
            f"{name!r} of the {kind.replace('_', ' ')} is registered as {target!r}",
            fix="its package must register it as module:attribute",
        )
    return target


def resolve(kind: str, name: str, *, base: Path | None = None) -> Any:
    """Import what `name` stands for. Files are taken relative to `base`, the recipe's folder."""
    target = find(kind, name)
    if target is None:
        known = names_of(kind)
        close = nearest(name, known)
        raise ConfigError(
            f"{name!r} is not one of the {kind} ({', '.join(known) or 'none'})",
            fix=f"did you mean {', '.join(close)}?"
            if close
            else "or name your own as file.py:name",
        )
    return load_reference(target, base=base)


def load_reference(name: str, *, base: Path | None = None) -> Any:
    """Import `file.py:name` or `package.module:name`."""
    where, _, attribute = name.partition(":")
    module = _load_file(where, base) if where.endswith(".py") else importlib.import_module(where)
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{where} has no {attribute!r}",
            fix=f"it defines: {', '.join(n for n in vars(module) if not n.startswith('_'))}",
        )
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
    spec.loader.exec_module(module)
    return module
