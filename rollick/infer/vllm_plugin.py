"""What vLLM loads into each of its processes: keeps it off instructions that crash on this CPU.

vLLM asks torch whether the CPU has matrix tile units (AMX) and takes its own kernels for them where
it has. Some machines announce them and do not run them (models/probe.py). The engine hands the
probe's finding to its children as an environment variable; the entry point `vllm.general_plugins`
brings this module into every one of them, before a model is built.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rollick.models.probe import LIMITED_ISA


def avoids_tiles(environment: Mapping[str, str]) -> bool:
    """Whether this process was told to stay below the tile units, by the engine or by the user."""
    limits = [environment.get(name, "").upper() for name in LIMITED_ISA]
    return all(limit not in ("", "ALL", "DEFAULT") and "AMX" not in limit for limit in limits)


def register() -> None:
    """Called by vLLM, perhaps more than once in a process. Elsewhere it changes nothing."""
    if not avoids_tiles(os.environ):
        return
    import torch

    # The one question that vLLM's choice of kernels depends on; oneDNN reads the variable itself.
    torch.cpu._is_amx_tile_supported = _no  # pyright: ignore[reportPrivateUsage]


def _no() -> bool:
    return False
