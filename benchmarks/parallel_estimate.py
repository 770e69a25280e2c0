"""What pipeline parallelism would save for two large shapes: docs/decisions/0017 reads this.

    python benchmarks/parallel_estimate.py [--json] [--link-gb-s 50] [--flops 989e12]

Arithmetic, nothing is run. Nodes have 8 GPUs, joined by NVLink; a link between nodes belongs to one
GPU. Compared for one optimizer step over the same tokens on the same GPUs:

    sharded    FSDP2 over nodes, with tensor (dense) or expert parallelism (mixture) inside a node.
               Each micro-batch gathers all weights twice and reduces their gradients once.
    pipeline   one stage per `stages` nodes, FSDP2 over the rest, the same inside a node. Idle time
               of a 1F1B schedule: (stages - 1) / (micro-batches + stages - 1).

Communication overlaps with computation: a step takes the longer of the two, per micro-batch.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

NODE = 8
BYTES_TRAINED = 16
"""Per parameter: bfloat16 weight and gradient, float32 master and two moments."""
GATHERED_BYTES = 6
"""Per parameter and micro-batch: bfloat16 weights twice, bfloat16 gradients once."""


@dataclass(frozen=True)
class Shape:
    name: str
    parameters: float
    active: float
    """Parameters that a token uses."""
    layers: int
    hidden: int
    utilisation: float
    """Share of the peak that the products reach when nothing waits."""
    microbatches: tuple[int, ...]
    """Tokens per GPU to compare."""
    same_rows: int = 1
    """GPUs that compute the same rows (tensor parallelism): each keeps the inputs of all."""


@dataclass(frozen=True)
class Row:
    shape: str
    gpus: int
    tokens_per_gpu: int
    """Of a step."""
    microbatch: int
    """Tokens per GPU of a micro-batch."""
    state_gb: float
    """Weights, gradients and optimizer state per GPU."""
    activations_gb: float
    """Inputs of the layers of one micro-batch, with recomputation."""
    sharded_s: float
    pipeline_s: float
    stages: int

    @property
    def gain(self) -> float:
        return self.sharded_s / self.pipeline_s


SHAPES = (
    Shape("70B dense", 70.6e9, 70.6e9, 80, 8192, 0.45, (1024, 2048, 4096), 8),
    Shape("235B-A22B mixture", 235e9, 22e9, 94, 4096, 0.35, (4096, 8192, 16384)),
)


def step_s(
    shape: Shape, *, tokens: int, microbatch: int, stages: int, flops: float, link: float
) -> float:
    """Seconds of a step. `tokens` and `microbatch`: per GPU, as if there were one stage."""
    count = max(1, tokens // microbatch)
    computed = 6 * shape.active * microbatch / (flops * shape.utilisation)
    moved = GATHERED_BYTES * shape.parameters / stages / NODE / link
    if stages == 1:
        return count * max(computed, moved)
    # A stage keeps its gathered weights for all micro-batches of the step.
    busy = count * computed + max(0.0, moved - count * computed)
    return busy * (count + stages - 1) / count


def estimate(shape: Shape, gpus: int, tokens: int, flops: float, link: float) -> list[Row]:
    rows: list[Row] = []
    for microbatch in shape.microbatches:
        common = {"tokens": tokens, "microbatch": microbatch, "flops": flops, "link": link}
        sharded = step_s(shape, stages=1, **common)
        options = [n for n in (2, 4, 8) if gpus // NODE % n == 0]
        best = min(options, key=lambda n: step_s(shape, stages=n, **common))
        rows.append(
            Row(
                shape=shape.name,
                gpus=gpus,
                tokens_per_gpu=tokens,
                microbatch=microbatch,
                state_gb=BYTES_TRAINED * shape.parameters / gpus / 1e9,
                activations_gb=2 * microbatch * shape.same_rows * shape.layers * shape.hidden / 1e9,
                sharded_s=sharded,
                pipeline_s=step_s(shape, stages=best, **common),
                stages=best,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--link-gb-s", type=float, default=50.0)
    parser.add_argument("--flops", type=float, default=989e12)
    parser.add_argument("--tokens", type=int, default=65_536, help="per GPU and step")
    arguments = parser.parse_args()
    rows = [
        row
        for shape in SHAPES
        for gpus in (64, 256)
        for row in estimate(
            shape, gpus, arguments.tokens, arguments.flops, arguments.link_gb_s * 1e9
        )
    ]
    for row in rows:
        print(
            f"{row.shape:>18}  {row.gpus:>4} GPUs  micro-batch {row.microbatch:>6}  "
            f"state {row.state_gb:5.1f} GB  activations {row.activations_gb:5.1f} GB  "
            f"sharded {row.sharded_s:6.1f} s  pipeline ({row.stages}) {row.pipeline_s:6.1f} s  "
            f"gain {row.gain:.2f}"
        )
    if arguments.json:
        print(json.dumps([asdict(row) | {"gain": row.gain} for row in rows]))


if __name__ == "__main__":
    main()
