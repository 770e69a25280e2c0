"""What a recipe can name: a static table kind -> name -> "module:attribute".

Reading it imports nothing, so `rollick check` and `rollick list` need neither torch nor ray.
Adding an implementation is one function and one line here. Other packages register names as entry
points in the group `rollick.KIND`; only the metadata of packages is read, on first use.

    name -- find_target --> "module:attribute" -- resolve --> the object

    [project.entry-points."rollick.losses"]        in the pyproject.toml of another package
    my_loss = "my_package.losses:my_loss"
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

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
        **_in("algorithms.losses", "dppo_tv", "dppo_kl", "ppo", "gspo", "segment", "reinforce"),
        **_in("algorithms.losses", "truncated_is", "topr", "cispo", "sapo", "gmpo", "kimi", "raft"),
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
"""Kinds to which other packages can add names."""

_GYM_TASKS = """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf
    binary_alternation binary_matrix bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic
    chain_sum circuit_logic codeio coin_flip color_cube_rotation complex_arithmetic count_bits
    count_primes countdown course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice
    emoji_mystery family_relationships figlet_font fraction_simplification futoshiki game_of_life
    game_of_life_halting gcd graph_color group_anagrams gsm_symbolic intermediate_integration
    isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm leg_counting
    letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku
    modulo_grid n_queens needle_haystack number_filtering number_format number_sequence
    number_sorting palindrome_generation palindrome_partitioning path_star polynomial_equations
    polynomial_multiplication pool_matrix power_function prime_factorization products
    propositional_logic puzzle24 quantum_lock ransom_note rearc rectangle_count rotate_matrix
    rotten_oranges rubiks_cube rush_hour self_reference sentence_reordering shortest_path
    simple_equations simple_geometry simple_integration sokoban spell_backward spiral_matrix
    string_insertion string_manipulation string_splitting string_synthesis sudoku survo syllogism
    time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting
    zebra_puzzles
"""
"""The tasks of the tested version of reasoning-gym; a test compares the list with the package.
`composite` is left out: in a recipe, several tasks are several domains."""

CLOSED: Mapping[str, Mapping[str, str]] = {
    "value_losses": _in("algorithms.losses", "value"),
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
    "gym_tasks": dict.fromkeys(_GYM_TASKS.split(), "rollick.data.reasoning_gym_source:gym_rows"),
    "presets": dict.fromkeys(PRESETS, "rollick.config.presets:PRESETS"),
}
"""Kinds that are settings of a part, not names to import: other packages cannot add to them."""

NAMES = {**_OPEN, **CLOSED}

REFERENCE = re.compile(r"^(?P<module>[^:]+):(?P<attribute>[A-Za-z_]\w*)$")
"""`file.py:name` or `package.module:name`: a user's object."""


def is_reference(name: str) -> bool:
    return REFERENCE.match(name) is not None


def find_similar(name: str, known: list[str], *, count: int = 3) -> list[str]:
    """The known names that are most similar to `name`, best first."""
    return get_close_matches(name, known, n=count, cutoff=0.6)


def names_of(kind: str) -> list[str]:
    """All names of a kind: those of the table, then those of installed packages."""
    return list(dict.fromkeys([*NAMES[kind], *(() if kind in CLOSED else find_plugins(kind))]))


class Plugin(NamedTuple):
    """One registered name: the package, and its target as module:attribute."""

    package: str
    target: str


def find_plugins(kind: str) -> Mapping[str, list[Plugin]]:
    """The plugins of one kind, such as `losses`: name -> registrations, sorted by name."""
    # Cached by sys.path, so that packages added to it later are found.
    return _read_plugins(kind, tuple(sys.path))


@cache
def _read_plugins(kind: str, path: tuple[str, ...]) -> dict[str, list[Plugin]]:
    plugins: dict[str, set[Plugin]] = {}
    for entry in _entry_points(path).select(group=f"rollick.{kind}"):
        package = entry.dist.name if entry.dist else "an unknown package"
        plugins.setdefault(entry.name, set()).add(Plugin(package, entry.value.strip()))
    return {name: sorted(plugins[name]) for name in sorted(plugins)}


@cache
def _entry_points(path: tuple[str, ...]) -> Any:
    # Any: its class depends on the version of Python. Imported on first use: most importers of this
    # module never look up a plugin.
    from importlib.metadata import entry_points

    return entry_points()


def find_target(kind: str, name: str) -> str | None:
    """The target of `name` as module:attribute (or file.py:name); None if it is unknown.

    Raises ConfigError if several packages registered it: the meaning of a recipe must not depend on
    what else is installed. Imports nothing.
    """
    if is_reference(name):
        return name
    builtin = NAMES[kind].get(name)
    registered = () if kind in CLOSED else find_plugins(kind).get(name, ())
    if not registered:
        return builtin
    subject = f"{name!r} of the {kind.replace('_', ' ')}"
    packages = [plugin.package for plugin in registered]
    if builtin or len(packages) > 1:
        owners = ["rollick itself", *packages] if builtin else packages
        remove = (" and " if builtin else " or ").join(packages)
        fix = f"uninstall {remove}, or name its function as package.module:function"
        raise ConfigError(f"{subject} is registered by {' and by '.join(owners)}", fix=fix)
    target = registered[0].target
    if not is_reference(target):
        message = f"{subject} is registered as {target!r}"
        raise ConfigError(message, fix="its package must register it as module:attribute")
    return target


def resolve(kind: str, name: str, *, base_dir: Path | None = None) -> Any:
    """Import the object of a name. Files are relative to `base_dir`, the recipe's folder."""
    target = find_target(kind, name)
    if target is None:
        known, kinds = names_of(kind), kind.replace("_", " ")
        similar = ", ".join(find_similar(name, known))
        message = f"{name!r} is not one of the {kinds} ({', '.join(known) or 'none'})"
        fix = f"did you mean {similar}?" if similar else "name your own as file.py:name"
        raise ConfigError(message, fix=fix)
    return load_reference(target, base_dir=base_dir)


def load_reference(name: str, *, base_dir: Path | None = None) -> Any:
    path, _, attribute = name.partition(":")
    module = _load_file(path, base_dir) if path.endswith(".py") else importlib.import_module(path)
    if not hasattr(module, attribute):
        public_names = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ConfigError(f"{path} has no {attribute!r}", fix=f"it defines: {public_names}")
    return getattr(module, attribute)


def _load_file(file: str, base_dir: Path | None) -> ModuleType:
    path = ((base_dir or Path.cwd()) / file).resolve()
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", fix="write a path relative to the recipe")
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
