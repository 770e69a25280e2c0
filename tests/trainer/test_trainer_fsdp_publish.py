"""Publishing from a sharded learner: no rank of it holds full weights."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch.distributed import get_rank

from rollick.config.schema import InferConfig, ModelConfig, Recipe
from rollick.errors import WeightError
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.models.loading.fingerprint import fingerprint
from rollick.testing.batches import recipe_of
from rollick.testing.tiny import save_tiny
from rollick.trainer.fsdp import FsdpStrategy
from rollick.trainer.strategy import ShardedWeights
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.host import HostReceiver
from rollick.weights.channels.shards import ShardSender
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Route
from rollick.weights.receiver import PublishReceiver
from rollick.weights.sender import WeightSender
from rollick.workers.generator import GeneratorWorker
from rollick.workers.learner import LearnerWorker


def test_one_parameter_at_a_time_is_written_where_engines_read_it():
    shapes = [(name, torch.empty(3, 5, device="meta")) for name in "abcd"]
    references: list[weakref.ref[torch.Tensor]] = []
    max_alive = 0

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal max_alive
        for index, (name, _) in enumerate(shapes):
            tensor = torch.full((3, 5), float(index))
            references.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            max_alive = max(max_alive, sum(ref() is not None for ref in references))

    sender, receiver = WeightSender(), HostReceiver()
    route = Route("host", (0,))
    manifest = sender.offer(ShardedWeights(shapes, parameters()), PolicyVersion(3), route=route)
    received = list(receiver.open(manifest, 0))
    assert [(name, value[0, 0].item()) for name, value in received] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
        ("d", 3),
    ]
    assert fingerprint(received) == manifest.fingerprint
    assert max_alive <= 1  # the tensor that was just written
    sender.release(PublishOutcome(True))
    sender.close()


RanksFactory = Callable[[int], Ranks]
BUCKET_BYTES = 20_000
LEARNERS: dict[str, LearnerWorker] = {}
"""The learner of each layout, in the process of a rank."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("dense"), hidden=64, heads=8, kv_heads=4)


def make_recipe(folder: Path, parallel: dict[str, int], dtype: str = "float32") -> Recipe:
    return recipe_of(
        folder,
        model={"path": str(folder), "dtype": dtype},
        train={"strategy": "fsdp", "parallel": parallel},
    )


def offer_shards(recipe: Recipe, version: int, route: Route) -> WeightManifest | None:
    """Offer the weights of this rank's learner, which are different in each version."""
    key = str(recipe.train.parallel) + recipe.model.dtype
    if key not in LEARNERS:
        LEARNERS[key] = LearnerWorker(FsdpStrategy(recipe), unused_loss, recipe, rank=get_rank())
    worker = LEARNERS[key]
    with torch.no_grad():
        for parameter in worker.strategy.optimizer.masters.values():
            parameter.mul_(1 + version / 8)
    if worker.sender.shard_sender is None:
        worker.sender.shard_sender = ShardSender(bucket_bytes=BUCKET_BYTES, timeout_s=30)
    return worker.offer_weights(PolicyVersion(version), route)


def unused_loss(inputs: Any) -> Any:
    raise AssertionError


def send_shards(recipe: Recipe, source: Any) -> str:
    """Send the offer and release it. Returns the fingerprint of the full weights."""
    worker = LEARNERS[str(recipe.train.parallel) + recipe.model.dtype]
    worker.send_weights("broadcast", source)
    worker.release_weights(PublishOutcome(True))
    return worker.fingerprint()


def receive_in_threads(
    receivers: list[PublishReceiver], manifest: WeightManifest
) -> list[Future[str]]:
    pool = ThreadPoolExecutor(len(receivers))
    return [pool.submit(receiver.receive, manifest) for receiver in receivers]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parallel", [{"data": 4}, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("receivers", [1, 2])
def test_shards_reach_every_receiver_bit_for_bit(
    ranks: RanksFactory, dense: Path, parallel: dict[str, int], receivers: int, dtype: str
) -> None:
    recipe, route = make_recipe(dense, parallel, dtype), Route("broadcast", tuple(range(receivers)))
    ends = [PublishReceiver(rank) for rank in range(receivers)]
    for version in (1, 2):
        manifest, *others = ranks(4).run(offer_shards, recipe, version, route)
        assert others == [None] * 3
        received = receive_in_threads(ends, manifest)
        sent = ranks(4).run(send_shards, recipe, manifest.source)
        assert {future.result(30) for future in received} == set(sent)
        for end in ends:
            weights = end.take(PolicyVersion(version))
            assert fingerprint(weights.pairs) == sent[0]


async def test_shards_are_written_into_the_parameters_of_an_engine_in_place(
    ranks: RanksFactory, dense: Path
) -> None:
    recipe = make_recipe(dense, {"data": 2, "tensor": 2})
    route = Route("broadcast", (0,), in_place=True)
    engine = NativeEngine.create(
        InferConfig(slots=2, max_length=32), ModelConfig(path=str(dense)), stops=StopRules()
    )
    worker = GeneratorWorker(engine)
    addresses = [parameter.data_ptr() for parameter in engine.module.parameters()]
    for version in (1, 2):
        manifest, *_ = ranks(4).run(offer_shards, recipe, version, route)
        receiving = asyncio.create_task(worker.receive(manifest))
        sent = await asyncio.to_thread(ranks(4).run, send_shards, recipe, manifest.source)
        assert await receiving == sent[0]
        assert engine.load().version < version
        await worker.commit(PolicyVersion(version))
        assert engine.load().version == version
        assert engine.fingerprint() == sent[0]
        await worker.check_weights()
    assert [parameter.data_ptr() for parameter in engine.module.parameters()] == addresses
    await worker.close()


def send_wrong_shards(recipe: Recipe, source: Any) -> None:
    """Rank 1 sends other bytes than those of its fingerprint."""
    worker = LEARNERS[str(recipe.train.parallel) + recipe.model.dtype]
    sender = worker.sender.shard_sender
    assert sender is not None
    if get_rank() == 1:
        write = sender._fill

        def fill(*arguments: Any) -> torch.Tensor:
            filled = write(*arguments)
            filled[:1] += 1
            return filled

        sender._fill = fill
    worker.send_weights("broadcast", source)
    worker.release_weights(PublishOutcome(False))
    sender._fill = ShardSender._fill.__get__(sender)


def test_a_wrong_byte_of_a_shard_is_found_and_the_next_transfer_succeeds(
    ranks: RanksFactory, dense: Path
) -> None:
    recipe, route = make_recipe(dense, {"data": 4}), Route("broadcast", (0,))
    receiver = PublishReceiver()
    manifest, *_ = ranks(4).run(offer_shards, recipe, 1, route)
    [received] = receive_in_threads([receiver], manifest)
    ranks(4).run(send_wrong_shards, recipe, manifest.source)
    with pytest.raises(WeightError, match="arrived from learner rank 1 with fingerprint"):
        received.result(30)
    manifest, *_ = ranks(4).run(offer_shards, recipe, 2, route)
    [received] = receive_in_threads([receiver], manifest)
    sent = ranks(4).run(send_shards, recipe, manifest.source)
    assert received.result(30) == sent[0]


def send_without_receiver(recipe: Recipe, source: Any) -> str:
    """Returns the error of a transfer that no receiver joins."""
    worker = LEARNERS[str(recipe.train.parallel) + recipe.model.dtype]
    sender = worker.sender.shard_sender
    assert sender is not None
    sender.timeout_s, usual = 2.0, sender.timeout_s
    try:
        worker.send_weights("broadcast", source)
    except WeightError as error:
        return error.message
    finally:
        sender.timeout_s = usual
        worker.release_weights(PublishOutcome(False))
    return ""


def test_a_transfer_without_its_receiver_fails_in_time_and_the_next_one_succeeds(
    ranks: RanksFactory, dense: Path
) -> None:
    recipe, route = make_recipe(dense, {"data": 4}), Route("broadcast", (0,))
    manifest, *_ = ranks(4).run(offer_shards, recipe, 1, route)
    for message in ranks(4).run(send_without_receiver, recipe, manifest.source):
        assert "the transfer to generators (0,) failed" in message
    manifest, *_ = ranks(4).run(offer_shards, recipe, 2, route)
    [received] = receive_in_threads([PublishReceiver()], manifest)
    sent = ranks(4).run(send_shards, recipe, manifest.source)
    assert received.result(30) == sent[0]
