"""The worker of `rollick selftest` on one device."""

from __future__ import annotations

from itertools import count
from time import perf_counter

import torch
import torch.distributed as dist

from rollick.cluster.machine import machine_id, memory_bytes
from rollick.cluster.worker import HostContext
from rollick.models.loading.fingerprint import fingerprint
from rollick.roles.selftest import (
    AllReduceResult,
    DeviceFacts,
    OffloadResult,
    SelfTestRole,
)
from rollick.trainer.offload import OffloadedTensors
from rollick.trainer.parallel.mesh import Rendezvous, join_process_group, leave_process_group
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Channel, Route
from rollick.weights.receiver import PublishReceiver
from rollick.weights.sender import WeightSender
from rollick.workers.model_worker import MeteredWorker, builds_worker

ROUNDS = 3
MB = 1 << 20


class SelfTestWorker(MeteredWorker, SelfTestRole):
    def __init__(self, device: str, rank: int) -> None:
        super().__init__()
        self.device = device
        self.rank = rank
        self.sender = WeightSender()
        self.receiver = PublishReceiver(rank)
        self.versions = count(1)

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def describe(self) -> DeviceFacts:
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            name, size = str(properties.name), int(properties.total_memory)
        else:
            name, size = "cpu", memory_bytes() or 0
        return DeviceFacts(name, size / 1e9, machine_id(), torch.__version__)

    def all_reduce(self, megabytes: int) -> AllReduceResult:
        # Small integers, so that float32 sums are exact in any order.
        ranks, size = dist.get_world_size(), megabytes * MB // 4
        pattern = torch.arange(size, device=self.device).remainder_(1000).float()
        expected = pattern * ranks + sum(range(ranks))
        seconds: list[float] = []
        is_exact = True
        for _ in range(ROUNDS):
            tensor = pattern + self.rank
            self._synchronize()
            started = perf_counter()
            dist.all_reduce(tensor)
            self._synchronize()
            seconds.append(perf_counter() - started)
            is_exact = is_exact and torch.equal(tensor, expected)
        return AllReduceResult(is_exact, 4 * size / min(seconds) / 1e9)

    def offload(self, megabytes: int) -> OffloadResult:
        tensors = dict(self._random_tensors(megabytes, seed=0))
        before, used = fingerprint(list(tensors.items())), self._used_bytes()
        offloaded = OffloadedTensors()
        started = perf_counter()
        offloaded.move_to_host(tensors)
        torch.cuda.empty_cache()
        freed = used - self._used_bytes()
        offloaded.restore_from_host()
        seconds = perf_counter() - started
        is_intact = fingerprint(list(tensors.items())) == before
        speed = 2 * megabytes * MB / seconds / 1e9
        return OffloadResult(freed / MB, megabytes, is_intact, speed)

    def offer_weights(self, megabytes: int, channel: Channel) -> WeightManifest:
        self.sender.release(PublishOutcome(True))  # Of the transfer before.
        version = PolicyVersion(next(self.versions))
        weights = self._random_tensors(megabytes, seed=version)
        return self.sender.offer(weights, version, route=Route(channel, (1,)))

    def send_weights(self, channel: Channel) -> None:
        self.sender.send(channel)

    def receive_weights(self, manifest: WeightManifest) -> float:
        started = perf_counter()
        self.receiver.receive(manifest)
        self._synchronize()
        seconds = perf_counter() - started
        self.receiver.take(manifest.version)
        return seconds

    def _random_tensors(self, megabytes: int, *, seed: int) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator(self.device).manual_seed(seed)
        return [
            (f"tensor {n}", torch.randn(MB // 4, generator=generator, device=self.device))
            for n in range(megabytes)
        ]

    def _used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.sender.close()
        leave_process_group()


@builds_worker
def create(context: HostContext, rank: int, rendezvous: Rendezvous | None) -> SelfTestWorker:
    join_process_group(rendezvous, rank, device=context.device)
    return SelfTestWorker(context.device, rank)
