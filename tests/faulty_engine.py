"""An engine in whose memory a byte flips, or whose steps never return, or are slow.

FAULTY_ENGINE names a file with REQUESTS:KIND. The first process whose engine has got so many
requests takes the file away, leaves its pid in a file beside it (`taken_by`), and

    flip     flips a byte of its weights after the next step of its runner
    hang     blocks in the next step of its runner
    slow     needs three times as long for each step of its runner

`install` makes the engine known under the name `faulty`, also to worker processes.
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
    """Returns the value for PYTHONPATH."""
    return write_plugins(folder, "engines", {"faulty": "faulty_engine:FaultyEngine"})


def flip_byte(engine: NativeEngine) -> None:
    """Flip one bit of a weight, in the memory from which the engine decodes."""
    module: Any = engine.module
    layer: Any = module.model.layers[0].mlp.down_proj
    copy = layer.group.weights.packed if isinstance(layer, FusedLinear) else None
    memory = layer.weight.detach() if copy is None else packed_bytes(copy.weight)
    memory.view(torch.uint8).view(-1)[3] ^= 0x40


def flip_after_step(engine: NativeEngine) -> None:
    """When a step has run, the engine has the copies of weights from which it decodes."""
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
        begun = time.perf_counter()
        finished = step()
        time.sleep(2 * (time.perf_counter() - begun))
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
    """The kind of fault, if this process is the first with so many requests."""
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
