"""Weights on a GPU: the fingerprint is that of the CPU, and another process maps the memory."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from rollick.errors import WeightError
from rollick.models.loading import fingerprint as fingerprint_module
from rollick.models.loading.fingerprint import PIECE_BYTES, ROW_BYTES, SMALL_BYTES, fingerprint
from rollick.types import Fingerprint, PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.plan import Route
from rollick.weights.sender import WeightSender

pytestmark = pytest.mark.gpu

SIZES = (0, 3, SMALL_BYTES, SMALL_BYTES + 1, 3 * ROW_BYTES, 2 * PIECE_BYTES + ROW_BYTES + 5)

CHILD = """
import pickle, sys
from rollick.errors import WeightError
from rollick.models.loading.fingerprint import fingerprint
from rollick.weights.receiver import PublishReceiver

receiver = PublishReceiver()
while True:
    try:
        manifest = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        receiver.receive(manifest)
        weights = receiver.take(manifest.version)
        copies = [(name, tensor.clone()) for name, tensor in weights]
        receiver.synchronize(weights)
        answer = fingerprint([(name, tensor.cpu()) for name, tensor in copies])
    except WeightError as error:
        answer = error
    sys.stdout.buffer.write(pickle.dumps(answer))
    sys.stdout.buffer.flush()
"""


@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_gives_the_fingerprint_of_the_cpu(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert fingerprint([("a", data.cuda())]) == fingerprint([("a", data)])


def test_the_kernel_and_plain_torch_give_the_fingerprint_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]
    tensors += [torch.randn(3001, 1537).bfloat16(), torch.ones(4 << 20), tensors[-1][1:]]
    pairs = [(str(number), tensor) for number, tensor in enumerate(tensors)]
    on_gpu = [(name, tensor.cuda()) for name, tensor in pairs]
    # A view at an odd address.
    on_gpu[-1] = (on_gpu[-1][0], on_gpu[len(SIZES) - 1][1][1:])
    actual = set[Fingerprint]()
    for threshold in (1, 1 << 60):
        monkeypatch.setattr(fingerprint_module, "KERNEL_BYTES", threshold)
        actual.add(fingerprint(on_gpu))
    assert actual == {fingerprint(pairs)}


@pytest.mark.parametrize("place", [0, 100_000_000, 2 * (64 << 20) - 1])
def test_one_flipped_bit_of_large_weights_changes_the_fingerprint(place: int) -> None:
    data = torch.randint(0, 256, (2 * (64 << 20),), dtype=torch.uint8, device="cuda")
    assert data.numel() >= fingerprint_module.KERNEL_BYTES
    before = fingerprint([("a", data)])
    data[place] ^= 4
    assert fingerprint([("a", data)]) != before
    data[place] ^= 4
    assert fingerprint([("a", data)]) == before


def test_another_process_maps_the_parameters_and_sees_each_version() -> None:
    pairs = [
        ("large", torch.randn(1500, 1111, device="cuda").bfloat16()),
        ("small", torch.randn(7, device="cuda")),
    ]
    sender, route = WeightSender(), Route("cuda_ipc", (0,))
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        for version in range(3):
            pairs[0][1].add_(1)
            manifest = sender.offer(pairs, PolicyVersion(version), route=route)
            pickle.dump(manifest, child.stdin)
            child.stdin.flush()
            assert pickle.load(child.stdout) == fingerprint(pairs)
            sender.release(PublishOutcome(True))
        wrong_manifest = replace(manifest, fingerprint=Fingerprint("0" * 32))
        pickle.dump(wrong_manifest, child.stdin)
        child.stdin.flush()
        assert isinstance(pickle.load(child.stdout), WeightError)
    finally:
        child.kill()
        child.communicate()
