"""An engine with a fault: a flipped byte in its weights, a step that hangs, or slow steps.

FAULTY_ENGINE names a file with REQUESTS:KIND. The first process whose engine has received so
many requests renames the file, writes its pid into it (`taken_by`), and

    flip     flips a byte of its weights after the next step of its runner
    hang     blocks in the next step of its runner
    slow     needs three times as long for each step of its runner

`install` registers the engine as `faulty`, also in worker processes.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from plugin_package import write_plugins

from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.packed_linear import packed_bytes
from rollick.models.decoder.fused_linear import FusedLinear
from rollick.types import Completion, Request

VARIABLE = "FAULTY_ENGINE"


def install(folder: Path) -> str:
    """Write the plugin package. Returns the value for PYTHONPATH."""
    return write_plugins(folder, "engines", {"faulty": "faulty_engine:FaultyEngine"})


def flip_byte(engine: NativeEngine) -> None:
    """Flip one bit of a weight, in the memory from which the engine decodes."""
    module: Any = engine.module
    layer: Any = module.model.layers[0].mlp.down_proj
    packed_weights = layer.group.weights.packed if isinstance(layer, FusedLinear) else None
    memory = (
        layer.weight.detach() if packed_weights is None else packed_bytes(packed_weights.weight)
    )
    memory.view(torch.uint8).view(-1)[3] ^= 0x40


def flip_after_step(engine: NativeEngine) -> None:
    """Flip a byte after the next step: by then the engine has the weight copies that it uses."""
    runner: Any = engine.runner
    step = runner.step

    def step_and_flip() -> Any:
        finished = step()
        flip_byte(engine)
        runner.step = step
        return finished

    runner.step = step_and_flip


def hang(engine: NativeEngine) -> None:
    runner: Any = engine.runner
    runner.step = threading.Event().wait


def slow_down(engine: NativeEngine) -> None:
    runner: Any = engine.runner
    step = runner.step

    def slow_step() -> Any:
        started_at = time.perf_counter()
        finished = step()
        time.sleep(2 * (time.perf_counter() - started_at))
        return finished

    runner.step = slow_step


FAULTS = {"flip": flip_after_step, "hang": hang, "slow": slow_down}


class FaultyEngine(NativeEngine):
    requests = 0

    async def generate(self, request: Request) -> Completion:
        self.requests += 1
        if (kind := _take_fault(self.requests)) is not None:
            FAULTS[kind](self)
        return await super().generate(request)


def _take_fault(requests: int) -> str | None:
    """The planned kind of fault, if this process is the first with so many requests."""
    plan = Path(os.environ.get(VARIABLE, "/nonexistent"))
    try:
        count, _, kind = plan.read_text().partition(":")
        if requests < int(count):
            return None
        plan.rename(_taken(plan))
    except FileNotFoundError:
        return None
    _taken(plan).write_text(str(os.getpid()))
    return kind


def plan_fault(plan: Path, kind: str, *, requests: int = 1) -> None:
    plan.write_text(f"{requests}:{kind}")


def taken_by(plan: Path) -> int:
    """The pid of the process with the fault."""
    return int(_taken(plan).read_text())


def _taken(plan: Path) -> Path:
    return plan.with_suffix(".taken")
