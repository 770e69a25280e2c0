"""Time of a publish on each channel, beside a plain copy of the same bytes in the same run.

    python benchmarks/weights.py [--json] [--threads 2] [--rounds 9]
    python benchmarks/weights.py --device cuda [--json]     two processes on one GPU, a 1.5B shape

CPU: the weights of a 135M model (float32) go from this process to a native engine in another one.
A publish is offer, receive, verify and commit, with the messages between the two processes. It is
compared with one numpy copy of as many bytes between two warm arrays, measured before each publish;
the figure is the median of the ratios. `adopt`: the engine uses the mapped memory as its
parameters. `delta`: 2 % of the elements of the model in bfloat16 changed, at random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig

from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import open_group
from rollick.cluster.worker import HostContext, RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig, InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.weight_update import EngineWeights, write_weights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.loading.fingerprint import fingerprint
from rollick.models.loading.load import empty_model
from rollick.roles.handles import Roles
from rollick.roles.publisher import Publisher
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Channel, ProcessLocation, Route, process_location
from rollick.weights.receiver import PublishReceiver
from rollick.weights.sender import WeightSender
from rollick.workers.generator import GeneratorWorker

SHAPES = {
    "tiny": (64, 192, 2, 4, 2, 96),
    "135m": (576, 1536, 30, 9, 3, 49152),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
}
"""Hidden, intermediate, layers, heads, key-value heads, vocabulary."""


def make_module(shape: str, *, dtype: torch.dtype, device: str) -> nn.Module:
    """A module whose parameters are allocated but not initialised."""
    hidden, inter, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    module: Any = empty_model(config, attention=CACHED).to(dtype).to_empty(device=device)
    module.tie_weights()
    return module


def make_weights(
    shape: str, *, dtype: torch.dtype, device: str = "cpu"
) -> list[tuple[str, torch.Tensor]]:
    module = make_module(shape, dtype=dtype, device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        return [(n, p.detach().normal_(std=0.02)) for n, p in module.named_parameters()]


def size_of(pairs: list[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in pairs)


def serve(connection: Connection, shape: str, device: str, adopt: bool, threads: int) -> None:
    """The other process: a generator that follows orders until the pipe closes."""
    torch.set_num_threads(threads)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    module = make_module(shape, dtype=dtype, device=device)
    try:
        if device == "cpu":
            asyncio.run(_serve_engine(connection, module, adopt))
        else:
            _serve_module(connection, module)
    except EOFError:
        os._exit(0)


async def _serve_engine(connection: Connection, module: nn.Module, adopt: bool) -> None:
    infer = InferConfig(slots=1, max_length=64)
    worker = GeneratorWorker(NativeEngine(EngineWeights(module), infer, stops=StopRules()))
    worker.receiver.adopts = adopt
    connection.send("ready")
    while True:
        order, argument = connection.recv()
        if order == "held":
            connection.send(fingerprint([(n, p.detach()) for n, p in module.named_parameters()]))
        else:
            connection.send(await getattr(worker, order)(argument))


def _serve_module(connection: Connection, module: nn.Module) -> None:
    receiver = PublishReceiver()
    connection.send("ready")
    while True:
        order, argument = connection.recv()
        if order == "held":
            connection.send(fingerprint([(n, p.detach()) for n, p in module.named_parameters()]))
        elif order == "receive":
            connection.send(receiver.receive(argument))
        else:
            weights = receiver.take(argument)
            write_weights(module, weights, argument, expected=None, adopt=False)
            connection.send(receiver.synchronize(weights))


@contextmanager
def generator(
    shape: str, *, device: str, adopt: bool, threads: int
) -> Iterator[Callable[[str, Any], Any]]:
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    child = spawning.Process(target=serve, args=(theirs, shape, device, adopt, threads))
    child.start()
    theirs.close()
    try:
        assert ours.recv() == "ready"

        def ask(order: str, argument: Any = None) -> Any:
            ours.send((order, argument))
            return ours.recv()

        yield ask
    finally:
        ours.close()
        child.join(10)
        child.kill()
        child.join()


def publish(
    sender: WeightSender,
    ask: Callable[[str, Any], Any],
    pairs: list[tuple[str, torch.Tensor]],
    *,
    version: int,
    channel: Channel,
) -> tuple[float, float, float]:
    """Seconds of one publish until it is offered, verified and committed."""
    begun = perf_counter()
    number = PolicyVersion(version)
    manifest: WeightManifest = sender.offer(pairs, number, route=Route(channel, (0,)))
    offered = perf_counter()
    ask("receive", manifest)
    verified = perf_counter()
    held = ask("commit", number)
    sender.release(PublishOutcome(True, adopted={0: bool(held)}))
    return offered - begun, verified - begun, perf_counter() - begun


def measure_host(shape: str, *, adopt: bool, threads: int, rounds: int) -> dict[str, float]:
    pairs = make_weights(shape, dtype=torch.float32)
    size = size_of(pairs)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    copies: list[float] = []
    publishes: list[float] = []
    sender = WeightSender()
    with generator(shape, device="cpu", adopt=adopt, threads=threads) as ask:
        for version in range(rounds + 3):
            begun = perf_counter()
            np.copyto(target, source)
            copies.append(perf_counter() - begun)
            pairs[0][1][0, 0] += 1
            publishes.append(publish(sender, ask, pairs, version=version, channel="host")[-1])
        assert ask("held", None) == fingerprint(pairs)
    sender.close()
    # The first ones make and map the memory.
    ratios = [copy / total for copy, total in zip(copies[3:], publishes[3:], strict=True)]
    return {
        "of_memcpy": median(ratios),
        "ms": 1e3 * median(publishes[3:]),
        "memcpy_ms": 1e3 * median(copies[3:]),
    }


class SharingLearner:
    """A learner whose engine shares its storage, as the publisher sees it."""

    def process_location(self) -> ProcessLocation:
        return process_location()


def make_learner(context: HostContext, rank: int) -> SharingLearner:
    return SharingLearner()


def make_sharing_generator(context: HostContext, rank: int) -> GeneratorWorker:
    module = make_module("tiny", dtype=torch.float32, device="cpu")
    infer = InferConfig(slots=4, max_length=64)
    engine = NativeEngine(EngineWeights(module, shared=True), infer, stops=StopRules())
    return GeneratorWorker(engine, shares=True)


async def measure_in_process(rounds: int) -> float:
    """Milliseconds of a publish to an engine that shares the learner's storage."""
    devices = DeviceMap({"policy": parse_devices("cpu"), "generators": parse_devices("cpu")})
    specs = [
        RoleSpec("policy", f"{__name__}:make_learner"),
        RoleSpec("generators", f"{__name__}:make_sharing_generator"),
    ]
    cluster = ClusterConfig(backend="inline")
    seconds: list[float] = []
    async with open_group(devices, specs, cluster=cluster, threads=1) as group:
        publisher = Publisher(Roles(group))
        for version in range(10 * rounds):
            begun = perf_counter()
            await publisher.publish(PolicyVersion(version))
            seconds.append(perf_counter() - begun)
    return 1e3 * median(seconds)


def measure_delta(shape: str) -> float:
    """The share of bytes transferred when 2 % of the elements changed."""
    pairs = make_weights(shape, dtype=torch.bfloat16)
    sender, route = WeightSender(), Route("host", (0,), send_delta=True)
    total = sender.offer(pairs, PolicyVersion(1), route=route).transferred_bytes
    sender.release(PublishOutcome(True))
    for _, tensor in pairs:
        changed = torch.rand(tensor.shape) < 0.02
        tensor.view(torch.int16)[changed] ^= 1
    share = sender.offer(pairs, PolicyVersion(2), route=route).transferred_bytes / total
    sender.close()
    return share


def measure_cuda(shape: str, *, rounds: int) -> dict[str, float]:
    pairs = make_weights(shape, dtype=torch.bfloat16, device="cuda:0")
    sender, seconds = WeightSender(), list[tuple[float, float, float]]()
    with generator(shape, device="cuda:0", adopt=False, threads=1) as ask:
        for version in range(rounds + 3):
            pairs[0][1][0, 0] += 1
            torch.cuda.synchronize()
            seconds.append(publish(sender, ask, pairs, version=version, channel="cuda_ipc"))
        assert ask("held", None) == fingerprint(pairs)
    host = [(name, tensor.cpu()) for name, tensor in pairs[:4]]
    assert fingerprint(host) == fingerprint(pairs[:4]), "CPU and GPU must agree"
    spent = list[float]()
    for _ in range(rounds):
        begun = perf_counter()
        fingerprint(pairs)
        spent.append(perf_counter() - begun)
    offered, verified, total = (1e3 * median(ends) for ends in zip(*seconds[3:], strict=True))
    return {
        "cuda_ipc_ms": total,
        "cuda_ipc_offered_ms": offered,
        "cuda_ipc_verified_ms": verified,
        "cuda_ipc_first_ms": 1e3 * seconds[0][-1],
        "cuda_fingerprint_ms": 1e3 * median(spent),
        "bytes": float(size_of(pairs)),
    }


def measure_cpu(shape: str, *, threads: int, rounds: int) -> dict[str, float | None]:
    host = measure_host(shape, adopt=False, threads=threads, rounds=rounds)
    adopt = measure_host(shape, adopt=True, threads=threads, rounds=rounds)
    pairs = make_weights(shape, dtype=torch.float32)
    begun = perf_counter()
    fingerprint(pairs)
    speed = size_of(pairs) / 1e9 / (perf_counter() - begun)
    return {
        "in_process_ms": asyncio.run(measure_in_process(rounds)),
        "host_of_memcpy": host["of_memcpy"],
        "adopt_of_memcpy": adopt["of_memcpy"],
        "cuda_ipc_ms": None,
        "delta_bytes_share": measure_delta(shape),
        "host_ms": host["ms"],
        "adopt_ms": adopt["ms"],
        "memcpy_ms": host["memcpy_ms"],
        "fingerprint_gb_s": speed,
        "bytes": float(size_of(pairs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        figures: dict[str, Any] = measure_cuda(args.shape or "1.5b", rounds=args.rounds)
    else:
        figures = measure_cpu(args.shape or "135m", threads=args.threads, rounds=args.rounds)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
