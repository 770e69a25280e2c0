"""An engine in whose memory a byte flips.

FLIPPING_ENGINE names a file with a number of requests. The first process whose engine has got so
many takes the file away and flips a byte of its weights. `install` makes the engine known under the
name `flipping`, also to worker processes.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rollick.infer.native.engine import NativeEngine
from rollick.types import Completion, Request

VARIABLE = "FLIPPING_ENGINE"
ENTRY_POINTS = "[rollick.engines]\nflipping = flipping_engine:FlippingEngine\n"


def install(folder: Path) -> str:
    """Writes a package with the engine as a plugin; returns the value for PYTHONPATH."""
    metadata = folder / "flipping_engine-1.0.dist-info"
    metadata.mkdir(parents=True)
    name = "Metadata-Version: 2.1\nName: flipping-engine\nVersion: 1.0\n"
    (metadata / "METADATA").write_text(name)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return os.pathsep.join([str(folder), str(Path(__file__).parent)])


def flip_byte(engine: NativeEngine) -> None:
    """Flip one bit of a weight, in the memory from which the engine computes."""
    weights = dict(engine.module.named_parameters())
    weight = next(weights[name] for name in weights if name.endswith("down_proj.weight"))
    weight.detach().view(torch.uint8).view(-1)[3] ^= 0x40


class FlippingEngine(NativeEngine):
    requests = 0

    async def generate(self, request: Request) -> Completion:
        self.requests += 1
        if _takes_plan(self.requests):
            flip_byte(self)
        return await super().generate(request)


def _takes_plan(requests: int) -> bool:
    """Whether this process is the first with so many requests."""
    plan = Path(os.environ.get(VARIABLE, "/nonexistent"))
    try:
        if requests < int(plan.read_text()):
            return False
        plan.rename(plan.with_suffix(".done"))
    except FileNotFoundError:
        return False
    return True
