"""Weights through host memory: exact, verified, and without leaked files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollick.errors import WeightError
from rollick.types import PolicyVersion
from rollick.weights.channels import host
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.host import HostReceiver, HostSender, remove_stale_files
from rollick.weights.manifest import ALIGN, WeightManifest
from rollick.weights.receiver import PublishReceiver

ONE, TWO, THREE = PolicyVersion(1), PolicyVersion(2), PolicyVersion(3)
TENSORS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "scalar": torch.tensor(3.25),
    "odd": torch.tensor([1.5, -2.25, 1e30], dtype=torch.bfloat16),
    "half": torch.tensor([[0.1], [65504.0]], dtype=torch.float16),
    "empty": torch.empty(0, 4),
    "one": torch.tensor([float("-inf")]),
    "numbers": torch.tensor([2**40 + 1], dtype=torch.int64),
}


@pytest.fixture
def sender() -> Iterator[HostSender]:
    host_sender = HostSender()
    yield host_sender
    host_sender.close()


def offer(sender: HostSender, version: PolicyVersion = ONE, **changed: float) -> WeightManifest:
    tensors = TENSORS | {name: torch.tensor(value) for name, value in changed.items()}
    return sender.offer(list(tensors.items()), version, (0,))


def scalar(receiver: HostReceiver, manifest: WeightManifest) -> float:
    return dict(receiver.open(manifest, 0))["scalar"].item()


def test_every_tensor_arrives_with_its_bytes_dtype_and_shape(sender: HostSender) -> None:
    receiver = PublishReceiver()
    receiver.receive(offer(sender))
    arrived = dict(receiver.take(ONE))
    assert list(arrived) == list(TENSORS)
    for name, sent in TENSORS.items():
        assert arrived[name].dtype == sent.dtype
        assert arrived[name].shape == sent.shape
        assert torch.equal(arrived[name], sent)


def test_a_tensor_that_is_a_transposed_view_arrives_in_its_order(sender: HostSender) -> None:
    view = torch.arange(6.0).reshape(2, 3).T
    manifest = sender.offer([("view", view)], ONE, (0,))
    ((_, arrived),) = HostReceiver().open(manifest, 0)
    assert torch.equal(arrived, view)


def test_a_model_without_weights_makes_a_round_trip(sender: HostSender) -> None:
    receiver = PublishReceiver()
    receiver.receive(sender.offer([], ONE, (0,)))
    assert list(receiver.take(ONE)) == []


def test_places_are_aligned_and_do_not_overlap(sender: HostSender) -> None:
    ends = [0]
    for place in offer(sender).layout:
        assert place.offset % ALIGN == 0
        assert place.offset >= ends[-1]
        ends.append(place.offset + place.size)


def test_what_a_receiver_writes_reaches_no_other_process(sender: HostSender) -> None:
    manifest = offer(sender)
    for _, tensor in HostReceiver().open(manifest, 0):
        tensor.zero_()
    PublishReceiver().receive(manifest)


@pytest.mark.parametrize("place", [n for n, t in enumerate(TENSORS.values()) if t.numel()])
def test_one_wrong_byte_is_detected_and_a_second_offer_is_accepted(
    sender: HostSender, place: int
) -> None:
    manifest = offer(sender)
    entry = manifest.layout[place]
    assert sender.offered is not None
    sender.offered.memory[entry.offset + entry.size - 1] ^= 1
    receiver = PublishReceiver()
    with pytest.raises(WeightError, match=r"version 1 arrived with fingerprint .*; sent was"):
        receiver.receive(manifest)
    with pytest.raises(WeightError, match="was not received"):
        receiver.take(ONE)
    sender.release(PublishOutcome(False))
    receiver.receive(offer(sender))
    assert receiver.take(ONE).fingerprint == manifest.fingerprint


def test_swapped_names_are_detected(sender: HostSender) -> None:
    sent = sender.offer([("a", torch.zeros(2)), ("b", torch.ones(2))], ONE, (0,))
    a, b = sent.layout
    swapped = replace(sent, layout=(replace(a, offset=b.offset), replace(b, offset=a.offset)))
    with pytest.raises(WeightError):
        PublishReceiver().receive(swapped)


@pytest.mark.parametrize("advice", [host.MADV_COLLAPSE, 999], ids=["large pages", "refused"])
def test_weights_of_several_pages_arrive_and_a_wrong_byte_at_either_end_is_noticed(
    sender: HostSender, advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MADV_COLLAPSE", advice)
    sent = torch.arange(2 * host.LARGE_PAGE + 12_345, dtype=torch.int32).byte()
    manifest = sender.offer([("a", sent)], ONE, (0,))
    receiver = PublishReceiver()
    receiver.receive(manifest)
    ((_, arrived),) = receiver.take(ONE)
    assert torch.equal(arrived, sent)
    assert sender.offered is not None
    for place in (0, sent.numel() - 1):
        sender.offered.memory[place] ^= 1
        with pytest.raises(WeightError, match="arrived with fingerprint"):
            receiver.receive(manifest)
        sender.offered.memory[place] ^= 1
    receiver.receive(manifest)


def test_unreachable_memory_is_an_error_with_the_reason(sender: HostSender) -> None:
    manifest = offer(sender)
    sender.close()
    with pytest.raises(WeightError, match="check that the learner runs; on another machine"):
        PublishReceiver().receive(manifest)


def test_another_file_at_the_path_of_the_memory_is_refused(
    sender: HostSender, tmp_path: Path
) -> None:
    manifest = offer(sender)
    other = tmp_path / "other"
    other.write_bytes(bytes(4096))
    moved = replace(manifest, source=replace(manifest.source, path=str(other)))
    with pytest.raises(WeightError, match="not available"):
        PublishReceiver().receive(moved)


def test_memory_is_written_again_at_each_publish_and_mapped_once(sender: HostSender) -> None:
    receiver = HostReceiver()
    seen: set[int] = set()
    for version, value in ((ONE, 1.0), (TWO, 2.0), (THREE, 3.0)):
        manifest = offer(sender, version, scalar=value)
        assert scalar(receiver, manifest) == value
        seen.add(receiver.mapped[manifest.source.identity][0].data_ptr())
        sender.release(PublishOutcome(True))
    assert len(seen) == 1
    assert len(sender.buffers) == 1


def test_an_engine_that_uses_a_memory_keeps_it_while_the_next_version_is_written(
    sender: HostSender,
) -> None:
    receiver = HostReceiver()
    used: list[tuple[int, int]] = []
    held = torch.tensor(0.0)
    for version, value in ((ONE, 1.0), (TWO, 2.0), (THREE, 3.0)):
        manifest = offer(sender, version, scalar=value)
        assert held.item() == value - 1
        held = dict(receiver.open(manifest, 0))["scalar"]
        used.append(manifest.source.identity)
        sender.release(PublishOutcome(True, adopted={0: True}))
    assert used[0] == used[2] != used[1]
    assert len(sender.buffers) == 2


def test_after_a_publish_that_failed_no_memory_of_an_engine_is_written(sender: HostSender) -> None:
    receiver = HostReceiver()
    first = offer(sender, ONE, scalar=1.0)
    held = dict(receiver.open(first, 0))["scalar"]
    sender.release(PublishOutcome(True, adopted={0: True}))
    second = offer(sender, TWO, scalar=2.0)
    other = dict(receiver.open(second, 0))["scalar"]
    # One of two engines may have committed the second version, the other has the first.
    sender.release(PublishOutcome(None))
    third = offer(sender, TWO, scalar=3.0)
    assert (held.item(), other.item()) == (1.0, 2.0)
    sender.release(PublishOutcome(False))
    assert offer(sender, TWO).source.identity == third.source.identity
    sender.release(PublishOutcome(True, adopted={0: True}))
    assert len(sender.buffers) == 2


def test_memory_of_an_engine_that_is_left_out_is_not_written_by_later_publishes(
    sender: HostSender,
) -> None:
    receivers = HostReceiver(), HostReceiver()
    first = offer(sender, ONE, scalar=1.0)
    held = dict(receivers[0].open(first, 0))["scalar"]
    sender.release(PublishOutcome(True, adopted={0: True, 1: True}))
    for version, value in ((TWO, 2.0), (THREE, 3.0), (PolicyVersion(4), 4.0)):
        manifest = offer(sender, version, scalar=value)
        assert (held.item(), scalar(receivers[1], manifest)) == (1.0, value)
        sender.release(PublishOutcome(True, adopted={1: True}))
    assert len(sender.buffers) == 3
    # Engine 0 is lost: its memory is no longer read.
    offer(sender, PolicyVersion(5))
    sender.release(PublishOutcome(True, adopted={0: False, 1: True}))
    assert len(sender.buffers) == 2


def test_a_larger_model_gets_larger_memory(sender: HostSender) -> None:
    small = sender.offer([("a", torch.ones(4))], ONE, (0,))
    sender.release(PublishOutcome(True))
    large = sender.offer([("a", torch.ones(4000))], TWO, (0,))
    receiver = HostReceiver()
    receiver.open(large, 0)
    assert large.source.identity != small.source.identity
    assert len(sender.buffers) == 1


def test_a_copy_that_breaks_in_the_middle_can_be_tried_again(sender: HostSender) -> None:
    # A tensor on the meta device has a size but no bytes, so that copying it fails.
    tensors = [("a", torch.zeros(2)), ("b", torch.zeros(2, device="meta"))]
    with pytest.raises(TypeError, match="meta"):
        sender.offer(tensors, ONE, (0,))
    sender.release(PublishOutcome(False))
    PublishReceiver().receive(offer(sender))
    assert len(sender.buffers) == 1


def test_without_memfd_a_file_is_used_and_removed_when_its_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(host.tempfile, "tempdir", str(tmp_path))
    stale_file = tmp_path / f"{host.PREFIX}{2**22 + 1}-left"
    stale_file.touch()
    sender = HostSender()
    manifest = offer(sender)
    assert [file.name.split("-")[2] for file in tmp_path.iterdir()] == [str(os.getpid())]
    remove_stale_files()
    PublishReceiver().receive(manifest)
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_without_memory_for_the_weights_a_file_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host.tempfile, "tempdir", str(tmp_path))
    reserve = os.posix_fallocate

    def fail_in_memory(descriptor: int, offset: int, size: int) -> None:
        if "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fail_in_memory)
    sender = HostSender()
    PublishReceiver().receive(offer(sender))
    assert "No space left on device); using a file" in caplog.text
    assert len(list(tmp_path.iterdir())) == 1
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_without_room_in_memory_and_on_disk_the_publish_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.tempfile, "tempdir", str(tmp_path))

    def fail(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(WeightError, match="cannot allocate"):
        offer(HostSender())
    assert list(tmp_path.iterdir()) == []


SEND_AND_WAIT = """
import pickle, sys, torch
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.host import HostSender
sender = HostSender()
first = sender.offer([("a", torch.full((70_000,), 1.0))], 1, (0,))
sys.stdout.buffer.write(pickle.dumps(first)); sys.stdout.buffer.flush()
sys.stdin.read(1)
sender.release(PublishOutcome(True, adopted={0: True}))
sender.offer([("a", torch.full((70_000,), 2.0))], 2, (0,))
sys.stdout.buffer.write(b"writing"); sys.stdout.buffer.flush()
sys.stdin.read(1)
"""


def test_a_sender_that_is_killed_leaves_no_file_and_engines_as_they_were() -> None:
    import pickle

    before = set(Path("/dev/shm").iterdir())
    child = subprocess.Popen(
        [sys.executable, "-c", SEND_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        manifest: WeightManifest = pickle.load(child.stdout)
        receiver = PublishReceiver(adopts=True)
        receiver.receive(manifest)
        weights = receiver.take(ONE)
        assert weights.persistent
        child.stdin.write(b".")
        child.stdin.flush()
        assert child.stdout.read(7) == b"writing"
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert torch.equal(dict(weights)["a"], torch.full((70_000,), 1.0))
    new = {file.name for file in set(Path("/dev/shm").iterdir()) - before}
    # Tests that run at the same time create folders for vLLM.
    assert {name for name in new if "rollick" in name and "rollick-vllm-" not in name} == set()
    with pytest.raises(WeightError, match="check that the learner runs"):
        PublishReceiver().receive(manifest)
