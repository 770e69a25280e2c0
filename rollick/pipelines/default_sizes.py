"""Settings of `rollick.train` that depend on the device, for keys that its caller does not give.

On a CPU a run then takes at most about five minutes. On a GPU the defaults of the schema fit.
RUN/recipe.yaml shows what a run used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHORT_RUN: Mapping[str, Any] = {"steps": 20, "max_minutes": 5}

ON_CPU: Mapping[str, Any] = {
    "sampling": {"max_tokens": 32},
    # Refilling dropped groups would take an unpredictable time.
    "rollout": {"groups_per_step": 4, "group_size": 8, "drop_no_signal": False},
    "train": {"tokens_per_microbatch": 4096},
    "infer": {"slots": 32},
}

FEW_STEPS_LR = 1e-5
"""With so few steps, the schema's learning rate for long runs would change nothing."""

ON_GPU: Mapping[str, Any] = {"devices": {"policy": "0", "generators": "0"}}


def add_default_sizes(recipe: Mapping[str, Any], *, has_gpu: bool) -> dict[str, Any]:
    """The recipe with sizes for its device; uses the first GPU if there is one and the recipe names
    no device."""
    if "devices" not in recipe and has_gpu:
        return _fill(recipe, ON_GPU)
    if "cpu" not in str(_section(recipe, "devices").get("policy", "cpu")):
        return dict(recipe)
    filled = _fill(recipe, ON_CPU)
    if "steps" in _section(recipe, "run"):
        return filled
    if _section(recipe, "train").get("lora") is None:
        filled = _fill(filled, {"train": {"optimizer": {"lr": FEW_STEPS_LR}}})
    return _fill(filled, {"run": SHORT_RUN})


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section that is not one, which the checks of the recipe report, counts as empty."""
    section = recipe.get(name)
    return section if isinstance(section, Mapping) else {}


def _fill(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the keys of `defaults` that it lacks, section by section."""
    filled = dict(given)
    for key, value in defaults.items():
        inner = filled.get(key)
        if key not in filled:
            filled[key] = value
        elif isinstance(inner, Mapping) and isinstance(value, Mapping):
            filled[key] = _fill(inner, value)
    return filled
