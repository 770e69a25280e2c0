"""Engines whose process kills itself halfway through a publish.

DYING_ENGINE names a file with POINT:VISIT. The first process that reaches the point for the
VISIT-th time (from 1) renames the file and kills itself there:

    receive    half of the weights are read, none is verified
    commit     half of the parameters have new weights, the others have the old ones

`install` adds these points to the native engines of worker processes.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from plugin_package import write_import_hook

from rollick.infer.native import weight_update
from rollick.types import Fingerprint
from rollick.weights import receiver

VARIABLE = "DYING_ENGINE"
_VISITS: Counter[str] = Counter()


def install(folder: Path) -> str:
    """Write the import hook. Returns the value for PYTHONPATH."""
    return write_import_hook(folder, "rollick.workers.generator", "dying_engine:add_points")


def is_due(point: str) -> bool:
    """Whether this process must die now: it is the first with so many visits to the point."""
    _VISITS[point] += 1
    plan = Path(os.environ.get(VARIABLE, "/nonexistent"))
    try:
        if plan.read_text() != f"{point}:{_VISITS[point]}":
            return False
        plan.rename(plan.with_suffix(".done"))
    except FileNotFoundError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def add_points(generator: Any) -> None:
    fingerprint, write = receiver.fingerprint, weight_update.write_weights

    def dying_fingerprint(pairs: Any) -> Fingerprint:
        if is_due("receive"):
            fingerprint(pairs[: len(pairs) // 2])
            die()
        return fingerprint(pairs)

    def dying_write(module: Any, weights: Any, *others: Any, **options: Any) -> Fingerprint:
        if is_due("commit"):
            targets = dict(module.named_parameters(remove_duplicate=False))
            for name, tensor in weights.pairs[: len(weights.pairs) // 2]:
                targets[name].data = tensor.clone()
            die()
        return write(module, weights, *others, **options)

    receiver.fingerprint = dying_fingerprint
    weight_update.write_weights = dying_write
