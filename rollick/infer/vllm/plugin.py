"""A vLLM plugin that avoids CPU instructions which crash on some machines.

vLLM uses its own AMX kernels if torch reports matrix tile units, which some machines cannot run
(models/bf16_probe.py). The engine passes the probe's result to its children as an environment
variable; the entry point `vllm.general_plugins` loads this module in each before a model is built.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rollick.models.bf16_probe import LIMITED_ISA


def amx_is_disabled(environment: Mapping[str, str]) -> bool:
    """Whether the engine or the user has limited this process to instructions without AMX."""
    limits = [environment.get(name, "").upper() for name in LIMITED_ISA]
    return all(limit not in ("", "ALL", "DEFAULT") and "AMX" not in limit for limit in limits)


def register() -> None:
    """Called by vLLM, possibly several times in a process."""
    if not amx_is_disabled(os.environ):
        return
    import torch

    # vLLM's choice of kernels depends on this alone; oneDNN reads the variable itself.
    torch.cpu._is_amx_tile_supported = lambda: False  # pyright: ignore[reportPrivateUsage]
