"""Every channel sends the learner's weights to an engine bit for bit; a wrong byte is detected.

Some tests publish to a native engine in this process; others send to child processes.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollick.config.schema import InferConfig
from rollick.errors import WeightError
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.weight_update import EngineWeights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.loading.fingerprint import fingerprint
from rollick.models.loading.load import empty_model, share_parameters
from rollick.testing.tiny import tiny_model
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.broadcast import BroadcastReceiver, BroadcastSender
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Route
from rollick.weights.sender import WeightSender
from rollick.workers.generator import GeneratorWorker

ONE, TWO = PolicyVersion(1), PolicyVersion(2)
Pairs = list[tuple[str, torch.Tensor]]


def make_weights(seed: int, dtype: torch.dtype) -> Pairs:
    model = tiny_model(11, seed=seed).to(dtype)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def make_engine(seed: int, dtype: torch.dtype) -> NativeEngine:
    source = tiny_model(11, seed=seed).to(dtype)
    module = empty_model(source.config, attention=CACHED)
    share_parameters(module, source)
    return NativeEngine(
        EngineWeights(module), InferConfig(slots=2, max_length=16), stops=StopRules()
    )


def fingerprint_engine(engine: NativeEngine) -> str:
    return fingerprint([(n, p.detach()) for n, p in engine.module.named_parameters()])


async def publish(
    sender: WeightSender, worker: GeneratorWorker, pairs: Pairs, route: Route
) -> bool:
    """Publish to one generator of this process. Returns whether it adopted the memory."""
    version = PolicyVersion(worker.engine.load().version + 1)
    manifest = sender.offer(pairs, version, route=route)
    sending = threading.Thread(target=sender.send, args=(route.channel,))
    sending.start()
    await worker.receive(manifest)
    sending.join()
    is_adopted = await worker.commit(version)
    sender.release(PublishOutcome(True, adopted={route.ranks[0]: is_adopted}))
    return is_adopted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "route",
    [
        Route("direct", (0,)),
        Route("host", (0,)),
        Route("host", (0,), send_delta=True),
        Route("broadcast", (0,)),
        Route("broadcast", (0,), send_delta=True),
    ],
    ids=lambda route: f"{route.channel}{'-delta' * route.send_delta}",
)
async def test_every_channel_transfers_three_versions_bit_for_bit(
    route: Route, dtype: torch.dtype
) -> None:
    engine, sender = make_engine(0, dtype), WeightSender()
    worker = GeneratorWorker(engine)
    pairs = make_weights(1, dtype)
    for step in range(3):
        pairs[2 + step][1].view(-1)[::50] += 1
        await publish(sender, worker, pairs, route)
        assert fingerprint_engine(engine) == fingerprint(pairs)
        assert engine.load().version == 1 + step
    sender.close()
    await engine.close()


async def test_a_native_engine_uses_the_hosts_memory_and_moves_at_each_commit() -> None:
    engine, sender = make_engine(0, torch.float32), WeightSender()
    worker = GeneratorWorker(engine)
    addresses: list[int] = []
    for seed in (1, 2, 3):
        assert await publish(sender, worker, make_weights(seed, torch.float32), Route("host", (0,)))
        addresses.append(next(engine.module.parameters()).data_ptr())
        assert fingerprint_engine(engine) == fingerprint(make_weights(seed, torch.float32))
    assert addresses[0] == addresses[2] != addresses[1]
    embedding, head = (engine.module.get_submodule(n) for n in ("model.embed_tokens", "lm_head"))
    assert embedding.weight is head.weight
    sender.close()
    await engine.close()


async def test_weights_of_another_dtype_are_copied_and_not_adopted() -> None:
    engine, sender = make_engine(0, torch.float32), WeightSender()
    await publish(
        sender, GeneratorWorker(engine), make_weights(1, torch.bfloat16), Route("host", (0,))
    )
    assert next(engine.module.parameters()).dtype == torch.float32
    sender.close()
    await engine.close()


async def test_some_weights_are_sent_to_engines_that_have_the_others() -> None:
    engine, sender = make_engine(0, torch.float32), WeightSender()
    worker, pairs = GeneratorWorker(engine), make_weights(1, torch.float32)
    route = Route("host", (0,))
    part = [(name, tensor + 1) for name, tensor in pairs if "q_proj" in name]
    base = fingerprint(pairs)
    with pytest.raises(WeightError, match="publish the full weights first"):
        await worker.receive(sender.offer(part, ONE, route=route, partial_of=base))
    sender.release(PublishOutcome(False))
    await publish(sender, worker, pairs, route)
    manifest = sender.offer(part, TWO, route=route, partial_of=base)
    await worker.receive(manifest)
    await worker.commit(TWO)
    assert manifest.transferred_bytes == sum(4 * tensor.numel() for _, tensor in part)
    assert fingerprint_engine(engine) == fingerprint(list((dict(pairs) | dict(part)).items()))
    sender.close()
    await engine.close()


CHILD = """
import pickle, sys, torch
from rollick.errors import WeightError
from rollick.models.loading.fingerprint import fingerprint
from rollick.weights.channels.broadcast import BroadcastReceiver, BroadcastSource
from rollick.weights.receiver import PublishReceiver

torch.set_num_threads(1)
orders, answers = sys.stdin.buffer, sys.stdout.buffer
receiver, held = PublishReceiver(adopts=True), None
receiver.receivers[BroadcastSource] = BroadcastReceiver(timeout_s=15)
while True:
    try:
        order, argument = pickle.load(orders)
    except EOFError:
        break
    answer = None
    try:
        if order == "receive":
            receiver.receive(argument)
        elif order == "commit":
            held = receiver.take(argument)
            # As an engine does: lasting memory is its own from now on, any other is copied.
            pairs = [(n, t if held.persistent else t.clone()) for n, t in held]
            held = pairs
        else:
            answer = held and fingerprint(held)
    except WeightError as error:
        answer = error
    answers.write(pickle.dumps(answer))
    answers.flush()
"""


class Child:
    """A process that receives weights and executes commands."""

    def __init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", CHILD], **pipes)

    def send_order(self, order: str, argument: Any = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(pickle.dumps((order, argument)))
        self.process.stdin.flush()

    def read_reply(self) -> Any:
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)

    def execute(self, order: str, argument: Any = None) -> Any:
        self.send_order(order, argument)
        return self.read_reply()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def pair_of_children() -> Iterator[tuple[Child, Child]]:
    started = Child(), Child()
    yield started
    for child in started:
        child.kill()


def start_in_thread(work: Callable[[], None]) -> Callable[[], BaseException | None]:
    """Start the work in a thread. The result waits for its end and returns the error it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> BaseException | None:
        thread.join(60)
        assert not thread.is_alive()
        return raised[0] if raised else None

    return wait


def test_a_receiver_that_is_killed_before_it_commits_affects_no_other(
    pair_of_children: tuple[Child, Child],
) -> None:
    stays, dies = pair_of_children
    sender, pairs = WeightSender(), make_weights(1, torch.float32)
    manifest = sender.offer(pairs, ONE, route=Route("host", (0, 1)))
    assert [child.execute("receive", manifest) for child in (stays, dies)] == [None, None]
    dies.kill()
    sender.release(PublishOutcome(False))
    # The publish is retried without the lost receiver.
    again = sender.offer(pairs, ONE, route=Route("host", (0,)))
    assert stays.execute("receive", again) is None
    stays.execute("commit", ONE)
    assert stays.execute("held") == fingerprint(pairs)
    sender.close()


def test_a_broadcast_to_two_processes_survives_the_loss_of_one(
    pair_of_children: tuple[Child, Child],
) -> None:
    children, pairs = pair_of_children, make_weights(1, torch.float32)
    sender = BroadcastSender(bucket_bytes=100_000, timeout_s=15)

    def transfer(version: int, ranks: tuple[int, ...]) -> BaseException | None:
        manifest = sender.offer(pairs, PolicyVersion(version), ranks)
        for rank in ranks:
            # Every child runs as rank 0, so its list of ranks has 0 at its position.
            order = tuple(0 if other == rank else -1 - other for other in ranks)
            source = replace(manifest.source, ranks=order)
            children[rank].send_order("receive", replace(manifest, source=source))
        return start_in_thread(sender.send)()

    assert transfer(1, (0, 1)) is None
    for child in children:
        assert child.read_reply() is None
        child.execute("commit", ONE)
        assert child.execute("held") == fingerprint(pairs)
    children[1].kill()
    first = fingerprint(pairs)
    pairs[0][1].add_(1)
    # Receiver 1 is lost: the sender fails, and receiver 0 commits nothing.
    manifest = sender.offer(pairs, TWO, (0, 1))
    children[0].send_order("receive", manifest)
    error = start_in_thread(sender.send)()
    sender.release(PublishOutcome(False))
    assert isinstance(error, WeightError)
    children[0].read_reply()
    assert children[0].execute("held") == first
    assert transfer(2, (0,)) is None
    assert children[0].read_reply() is None
    children[0].execute("commit", TWO)
    assert children[0].execute("held") == fingerprint(pairs)
    sender.close()


def test_a_broadcast_whose_sender_dies_ends_in_time_and_commits_nothing() -> None:
    pairs = make_weights(1, torch.float32)
    sender, receiver = BroadcastSender(timeout_s=20), BroadcastReceiver(timeout_s=2)
    manifest = sender.offer(pairs, ONE, (0,))
    wait_for_send = start_in_thread(sender.send)
    receiver.open(manifest, 0)
    assert wait_for_send() is None
    again = sender.offer(pairs, TWO, (0,))
    sender.close()
    with pytest.raises(WeightError, match="failed"):
        receiver.open(again, 0)


def test_a_wrong_byte_of_a_broadcast_is_found() -> None:
    from rollick.weights.receiver import PublishReceiver

    pairs = make_weights(1, torch.float32)
    sender = WeightSender()
    manifest: WeightManifest = sender.offer(pairs, ONE, route=Route("broadcast", (0,)))
    # The sent weights differ from the offered ones.
    pairs[3][1].view(-1)[5] += 1
    sending = start_in_thread(lambda: sender.send("broadcast"))
    receiver = PublishReceiver()
    with pytest.raises(WeightError, match="arrived with fingerprint"):
        receiver.receive(manifest)
    assert sending() is None
    with pytest.raises(WeightError, match="was not received"):
        receiver.take(ONE)
    sender.close()
