"""What a recipe can name: a static table kind -> name -> "module:attribute".

Reading it imports nothing, so `rollick check` and `rollick list` need neither torch nor ray.
Adding an implementation is one function and one line here. `resolve` does the import.
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
    },
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
    "rewards": {
        "exact_match": "rollick.rewards.text:exact_match",
        "last_number": "rollick.rewards.text:last_number",
        "contains": "rollick.rewards.text:contains",
    },
    "environments": {},
    "engines": {"native": "rollick.infer.native.engine:NativeEngine"},
    "train_strategies": {"local": "rollick.train.local:LocalStrategy"},
    "pipelines": {
        "rlvr": "rollick.pipelines.rlvr:run_rlvr",
        "sft": "rollick.pipelines.sft:run_sft",
    },
    "sinks": {
        "tensorboard": "rollick.observe.sinks:TensorBoardSink",
        "wandb": "rollick.observe.sinks:WandbSink",
        "mlflow": "rollick.observe.sinks:MlflowSink",
        "trackio": "rollick.observe.sinks:TrackioSink",
    },
}

REFERENCE = re.compile(r"^(?P<where>[^:]+):(?P<attribute>[A-Za-z_]\w*)$")
"""`file.py:name` or `package.module:name`: something of the user's own."""


def is_reference(name: str) -> bool:
    return REFERENCE.match(name) is not None


def nearest(name: str, known: list[str], *, count: int = 3) -> list[str]:
    """The known names that look most like `name`, best first."""
    return get_close_matches(name, known, n=count, cutoff=0.6)


def resolve(kind: str, name: str, *, base: Path | None = None) -> Any:
    """Import what `name` stands for. Files are taken relative to `base`, the recipe's folder."""
    target = NAMES[kind].get(name, name)
    match = REFERENCE.match(target)
    if match is None:
        close = nearest(name, list(NAMES[kind]))
        raise ConfigError(
            f"{name!r} is not one of the {kind} ({', '.join(NAMES[kind]) or 'none'})",
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
