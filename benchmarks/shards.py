"""Weights from the ranks of a sharded learner to receivers, beside a plain broadcast.

    python benchmarks/shards.py [--json] [--hidden 1024] [--layers 8] [--rounds 3]

A randomly initialised model on four learner ranks (FSDP, and FSDP x tensor parallel), and one or
two receivers, each a process of this machine; gloo over the loopback network, one thread each. The
receivers write in place, into tensors that exist before.

    speed       bytes of the model / seconds of the transfer (the second and later ones: the first
                forms the groups)
    share       speed / the speed of a plain gloo broadcast of the same bytes, in buckets of the
                same size, from one process to the same receivers, measured in the same rounds
    extra_mb    growth of resident memory of a receiver and of a learner rank during a transfer;
                `buckets`: the same in buckets
The fingerprints at both ends are compared (asserted).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

BUCKET_BYTES = 16 << 20
LEARNERS = 4
LAYOUTS = {"4 FSDP": {"data": 4}, "2x2 FSDP x TP": {"data": 2, "tensor": 2}}


class Process:
    """A process that calls functions of this module."""

    def __init__(self, name: str, rank: int, rendezvous: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, rank, rendezvous), name=name, daemon=True
        )
        self.process.start()

    def start(self, work: Callable[..., Any], *arguments: Any) -> None:
        self.connection.send((work, arguments))

    def result(self) -> Any:
        return self.connection.recv()


def _serve(connection: Connection, rank: int, rendezvous: Any) -> None:
    import torch

    torch.set_num_threads(1)
    if rendezvous is not None:
        from rollick.trainer.parallel.mesh import join_process_group

        join_process_group(rendezvous, rank, device="cpu")
    state: dict[str, Any] = {"rank": rank}
    while True:
        work, arguments = connection.recv()
        connection.send(work(state, *arguments))


def build(state: dict[str, Any], folder: str, parallel: dict[str, int]) -> int:
    """Build the learner of a rank. Returns the bytes of the model."""
    from rollick.testing.batches import recipe_of
    from rollick.trainer.fsdp import FsdpStrategy
    from rollick.weights.channels.shards import ShardSender

    recipe = recipe_of(Path(folder), train={"strategy": "fsdp", "parallel": parallel})
    state["strategy"] = FsdpStrategy(recipe)
    state["sender"] = ShardSender(bucket_bytes=BUCKET_BYTES)
    return sum(4 * shape.numel() for _, shape in state["strategy"].weights().shapes)


def offer(state: dict[str, Any], version: int, receivers: int) -> Any:
    ranks = tuple(range(receivers))
    return state["sender"].offer(state["strategy"].weights(), version, ranks)


def send(state: dict[str, Any], source: Any) -> float:
    """Returns the growth of resident memory."""
    from rollick.weights.channels.base import PublishOutcome

    before = reset_peak()
    state["sender"].send(source)
    state["sender"].release(PublishOutcome(True))
    return peak_bytes() - before


def fingerprint_full(state: dict[str, Any]) -> str:
    from rollick.models.loading.fingerprint import fingerprint

    return fingerprint(state["strategy"].weights())


def receive(state: dict[str, Any], manifest: Any) -> tuple[float, float]:
    """(seconds, growth of resident memory); the targets exist before."""
    from rollick.weights.channels.shards import ShardReceiver

    receiver = state.setdefault("receiver", ShardReceiver())
    if "targets" not in state:
        state["targets"] = make_targets(manifest)
    before, started = reset_peak(), perf_counter()
    receiver.receive(manifest, state["rank"], state["targets"])
    return perf_counter() - started, peak_bytes() - before


def make_targets(manifest: Any) -> list[Any]:
    import torch

    shapes = [(tensor.shape, getattr(torch, tensor.dtype)) for tensor in manifest.layout]
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]


def fingerprint_targets(state: dict[str, Any], manifest: Any) -> str:
    from rollick.models.loading.fingerprint import fingerprint

    names = [tensor.name for tensor in manifest.layout]
    return fingerprint(list(zip(names, state["targets"], strict=True)))


def join_broadcast(state: dict[str, Any], host: str, port: int, member: int, members: int) -> None:
    import torch.distributed as dist

    from rollick.weights.channels.broadcast import join_group

    store = dist.TCPStore(host, port, is_master=False)
    state["plain"] = join_group(store, f"plain {members}", member, members, timeout_s=60)


def broadcast_plain(state: dict[str, Any], size: int) -> float:
    """Seconds of a broadcast of this many bytes, in buckets."""
    import torch

    from rollick.weights.channels.broadcast import broadcast

    memory = state.setdefault("memory", torch.zeros(size, dtype=torch.uint8))
    started = perf_counter()
    for start in range(0, size, BUCKET_BYTES):
        broadcast(state["plain"], memory[start : start + BUCKET_BYTES])
    return perf_counter() - started


def reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return read_status("VmRSS:")


def peak_bytes() -> float:
    return read_status("VmHWM:")


def read_status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def measure(folder: Path, layout: str, receivers: int, *, rounds: int) -> dict[str, Any]:
    import torch.distributed as dist

    from rollick.trainer.parallel.mesh import open_rendezvous

    store, rendezvous = open_rendezvous("127.0.0.1", ranks=LEARNERS, timeout_s=600)
    learners = [Process(f"learner {rank}", rank, rendezvous) for rank in range(LEARNERS)]
    ends = [Process(f"receiver {rank}", rank, None) for rank in range(receivers)]
    plain_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def on(processes: list[Process], work: Callable[..., Any], *arguments: Any) -> list[Any]:
        for process in processes:
            process.start(work, *arguments)
        return [process.result() for process in processes]

    size = on(learners, build, str(folder), LAYOUTS[layout])[0]
    members = [learners[0], *ends]
    for number, process in enumerate(members):
        process.start(join_broadcast, "127.0.0.1", plain_store.port, number, len(members))
    for process in members:
        process.result()
    seconds: list[float] = []
    plain: list[float] = []
    grown: list[tuple[float, float]] = []
    for version in range(rounds + 1):
        manifest = on(learners, offer, version, receivers)[0]
        for process in ends:
            process.start(receive, manifest)
        sent = on(learners, send, manifest.source)
        received = [process.result() for process in ends]
        took = max(on(members, broadcast_plain, size))
        if version:  # The first one forms the groups.
            seconds.append(max(each for each, _ in received))
            plain.append(took)
            grown.append((max(each for _, each in received), max(sent)))
    prints = {*on(learners, fingerprint_full), *on(ends, fingerprint_targets, manifest)}
    assert len(prints) == 1, "both ends have the same weights"
    for process in (*learners, *ends):
        process.process.kill()
    del store
    speeds = size / median(seconds) / 1e9, size / median(plain) / 1e9
    receiver_bytes, sender_bytes = (max(column) for column in zip(*grown, strict=True))
    return {
        "layout": layout,
        "receivers": receivers,
        "mb": round(size / 1e6),
        "gb_per_s": round(speeds[0], 3),
        "plain_gb_per_s": round(speeds[1], 3),
        "share": round(speeds[0] / speeds[1], 3),
        "receiver_extra_mb": round(receiver_bytes / 1e6, 1),
        "learner_extra_mb": round(sender_bytes / 1e6, 1),
        "receiver_buckets": round(receiver_bytes / BUCKET_BYTES, 2),
        "learner_buckets": round(sender_bytes / BUCKET_BYTES, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from rollick.testing.tiny import save_tiny

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_tiny(
            Path(temporary), hidden=options.hidden, layers=options.layers, heads=16, kv_heads=8
        )
        for layout in LAYOUTS:
            for receivers in (1, 2):
                results.append(measure(folder, layout, receivers, rounds=options.rounds))
                sys.stderr.write(f"{results[-1]}\n")
    figures = {
        "least_share": min(result["share"] for result in results),
        "most_receiver_buckets": max(result["receiver_buckets"] for result in results),
        "results": results,
    }
    sys.stdout.write(json.dumps(figures, indent=None if options.json else 1) + "\n")


if __name__ == "__main__":
    main()
