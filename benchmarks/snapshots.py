"""What snapshots cost, and how fast a killed learner is back.

    python benchmarks/snapshots.py [--json] [--parts cost recovery] [--out FILE]
    python benchmarks/snapshots.py --device cuda --json

cost, on the CPU    recipes/smollm2_sums.yaml on Ray, as it stands: seconds of a snapshot and of a
                    step. `share` is their ratio: the cost if nothing else went on meanwhile.
                    Engines generate meanwhile, so the real cost is less.
cost, on a GPU      Qwen2.5-1.5B with random weights, without Ray. A step trains on --tokens tokens
                    and then decodes for as long. `share` is a snapshot that nothing overlaps;
                    `share_overlapped` is by how much the snapshot slows the decoding down, in which
                    it is taken.
recovery            the learner is killed in the middle of a step. `recovery_s` is from its death to
                    its return; `start_s` is the part of it in which a process starts, imports and
                    loads the model, as at the start of any learner.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

RECIPE = Path(__file__).parent.parent / "recipes" / "smollm2_sums.yaml"
QUIET = ("observe.sinks=[]", "observe.live=off", "observe.report=false", "evaluate.at_start=false")
SEPARATE_CORES = ("devices.policy=cpu:0", "devices.generators=cpu:1")
SMALL_STEP = ("rollout.groups_per_step=2", "rollout.group_size=2", "rollout.drop_no_signal=false")


@asynccontextmanager
async def open_pipeline(loaded: Any):
    from rollick.pipelines.open_run import open_run
    from rollick.pipelines.rl import open_rl

    async with open_run(loaded) as run, open_rl(run) as pipeline:
        await run.recovery.take_snapshots()
        yield run, pipeline


async def make_step(run: Any, pipeline: Any) -> float:
    """Seconds of a step, as the run loop makes it."""
    begun = perf_counter()
    await pipeline.step()
    run.state.step += 1
    run.recovery.finish_step()
    return perf_counter() - begun


def load_smollm2(folder: Path, *overrides: str) -> Any:
    from rollick.config.load import load_recipe

    return load_recipe(RECIPE, (f"run.folder={folder}", *QUIET, *overrides))


def load_tiny(folder: Path, *overrides: str) -> Any:
    from rollick.config.load import recipe_from_dict
    from rollick.testing.tiny import save_tiny
    from rollick.testing.toys import toy_recipe

    recipe = toy_recipe(save_tiny(folder / "tiny"), folder, steps=99)
    return recipe_from_dict(recipe, overrides=("cluster.backend=ray", *overrides))


async def measure_cost_on_cpu(folder: Path, *, steps: int) -> dict[str, Any]:
    async with open_pipeline(load_smollm2(folder)) as (run, pipeline):
        snapshots = run.recovery.snapshots["policy"]
        step_s: list[float] = []
        snapshot_s: list[float] = []
        for number in range(steps + 1):
            seconds = await make_step(run, pipeline)
            if number:  # The first one warms up; its snapshot is taken in the second.
                step_s.append(seconds)
                snapshot_s.append(snapshots.seconds)
            print_progress(f"step {number}: {seconds:.1f} s, snapshot {snapshots.seconds:.2f} s")
        await run.recovery.take_snapshots()
        async with snapshots.hold() as held:
            assert held is not None, "the snapshot contains all training"
        return {
            "model": "SmolLM2-135M",
            "gb": round(sum(record.bytes for _, record in held) / 1e9, 3),
            "step_s": round(median(step_s), 3),
            "snapshot_s": round(median(snapshot_s), 3),
            "share": round(median(snapshot_s) / median(step_s), 4),
        }


async def measure_recovery(loaded: Any, *, kills: int) -> dict[str, Any]:
    async with open_pipeline(loaded) as (run, pipeline):
        await make_step(run, pipeline)
        for number in range(kills):
            await run.recovery.settle()
            step = asyncio.create_task(make_step(run, pipeline))
            while run.state.phase != "train":  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)
            os.kill(run.roles.policy.group.worker_processes()["policy 0"], signal.SIGKILL)
            await step
            print_progress(f"kill {number + 1}")
        faults = [f for f in run.telemetry.faults.faults if f.role == "policy"]
    recovery_s = [fault.rejoined_at - fault.failed_at for fault in faults]
    start_s = median(fault.restarted_at - fault.failed_at for fault in faults)
    assert len(recovery_s) == kills
    return {
        "recovery_s": round(median(recovery_s), 2),
        "slowest_s": round(max(recovery_s), 2),
        "start_s": round(start_s, 2),
        "ratio": round(median(recovery_s) / start_s, 2),
    }


def measure_cost_on_gpu(
    *, shape: str, device: str, tokens: int, length: int, steps: int
) -> dict[str, Any]:
    from training_parts import SHAPES, objective, random_batch, random_strategy, synchronize

    from rollick.trainer.snapshot import SnapshotMemory, SnapshotWriter, read_snapshot

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options = {"tokens_per_microbatch": min(tokens, 16384), "optimizer": {"lr": 1e-6}}
    strategy = random_strategy(shape, device=device, dtype=dtype, **options)
    vocabulary = SHAPES[shape].vocab_size
    batch = random_batch(tokens // length, 1, prompt=1, new=length - 1, vocabulary=vocabulary)
    writer, memories = SnapshotWriter(), [SnapshotMemory.create(name) for name in "ab"]

    def train() -> None:
        strategy.forward_backward(batch, objective())
        strategy.step()

    def snapshot() -> Any:
        memories.reverse()
        return writer.write(memories[0].path, strategy.state())

    def seconds(work: Callable[[], Any]) -> float:
        synchronize(device)
        begun = perf_counter()
        work()
        synchronize(device)
        return perf_counter() - begun

    train_s = [seconds(train) for _ in range(steps + 1)][1:]
    first_s = [seconds(snapshot) for _ in memories]  # Maps and pins each memory.
    snapshot_s = [seconds(snapshot) for _ in range(steps)]
    decode = _decoding(strategy.module, device)
    rounds = max(1, round(median(train_s) / median([seconds(decode) for _ in range(3)])))

    def generate() -> None:
        for _ in range(rounds):
            decode()

    def overlapped() -> None:
        thread = threading.Thread(target=snapshot)
        thread.start()
        generate()
        thread.join()

    pairs = [(seconds(generate), seconds(overlapped)) for _ in range(4 * steps)]
    record = snapshot()
    assert read_snapshot(record).steps == steps + 1
    step_s = median(train_s) + median(plain for plain, _ in pairs)
    slower_s = median(both - plain for plain, both in pairs)
    return {
        "model": f"Qwen2.5-{shape}",
        "tokens": tokens,
        "gb": round(record.bytes / 1e9, 3),
        "train_s": round(median(train_s), 3),
        "step_s": round(step_s, 3),
        "first_snapshot_s": [round(value, 3) for value in first_s],
        "snapshot_s": round(median(snapshot_s), 3),
        "gb_per_s": round(record.bytes / 1e9 / median(snapshot_s), 1),
        "share": round(median(snapshot_s) / step_s, 4),
        "share_overlapped": round(slower_s / step_s, 4),
        "decode_s": [round(plain, 3) for plain, _ in pairs],
        "decode_with_snapshot_s": [round(both, 3) for _, both in pairs],
    }


def _decoding(module: Any, device: str) -> Callable[[], None]:
    """Products of 64 rows with every matrix, which read all weights like a decode step; on a GPU as
    one graph, as engines replay it."""
    matrices = [each.detach() for each in module.parameters() if each.dim() == 2]
    rows = [torch.ones(64, each.shape[1], dtype=each.dtype, device=device) for each in matrices]

    def decode() -> None:
        for matrix, row in zip(matrices, rows, strict=True):
            torch.matmul(row, matrix.T)

    if not device.startswith("cuda"):
        return decode
    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    return graph.replay


def print_progress(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if options.device == "cuda" or options.shape == "tiny":
        sizes = {"tokens": options.tokens, "length": options.length, "steps": options.steps}
        figures["cost"] = measure_cost_on_gpu(shape=options.shape, device=options.device, **sizes)
        return figures
    if "cost" in options.parts:
        figures["cost"] = asyncio.run(measure_cost_on_cpu(folder / "cost", steps=options.steps))
    if "recovery" in options.parts:
        loaders = {"tiny": load_tiny, "SmolLM2-135M": load_smollm2}
        overrides = {"tiny": SEPARATE_CORES, "SmolLM2-135M": (*SEPARATE_CORES, *SMALL_STEP)}
        figures["recovery"] = {
            name: asyncio.run(
                measure_recovery(load(folder / name, *overrides[name]), kills=options.kills)
            )
            for name, load in loaders.items()
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", nargs="+", default=["cost", "recovery"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--shape", default="1.5B", help="on a GPU; tiny on the CPU is a rehearsal")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options)
    text = json.dumps(figures, indent=None if options.json else 1) + "\n"
    if options.out is not None:
        options.out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
