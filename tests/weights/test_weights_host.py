"""Weights through host memory: exact, verified, and nothing left behind."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollick.cluster.devices import DeviceMap
from rollick.config.devices import parse_devices
from rollick.errors import WeightError
from rollick.types import PolicyVersion
from rollick.weights.channels import host
from rollick.weights.channels.host import (
    ALIGN,
    WeightManifest,
    read_weights,
    remove_weights,
    verify_weights,
    write_weights,
)
from rollick.weights.plan import PublishPlan, plan_publish

ONE = PolicyVersion(1)
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the weights go in these tests."""
    monkeypatch.setattr(host, "_shared_folder", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def manifest(folder: Path) -> WeightManifest:
    return write_weights(TENSORS.items(), ONE)


def test_every_tensor_arrives_with_its_bytes_dtype_and_shape(manifest: WeightManifest) -> None:
    verify_weights(manifest)
    arrived = dict(read_weights(manifest))
    assert list(arrived) == list(TENSORS)
    for name, sent in TENSORS.items():
        assert arrived[name].dtype == sent.dtype
        assert arrived[name].shape == sent.shape
        assert torch.equal(arrived[name], sent)


def test_a_tensor_that_is_a_transposed_view_arrives_in_its_order(folder: Path) -> None:
    view = torch.arange(6.0).reshape(2, 3).T
    (_, arrived), *_ = read_weights(write_weights([("view", view)], ONE))
    assert torch.equal(arrived, view)


def test_a_model_without_weights_makes_a_round_trip(folder: Path) -> None:
    manifest = write_weights([], ONE)
    verify_weights(manifest)
    assert list(read_weights(manifest)) == []


def test_places_are_aligned_and_do_not_overlap(manifest: WeightManifest) -> None:
    ends = [0]
    for place in manifest.places:
        assert place.offset % ALIGN == 0
        assert place.offset >= ends[-1]
        ends.append(place.offset + place.size)


def test_what_a_receiver_writes_reaches_nobody_else(manifest: WeightManifest) -> None:
    for _, tensor in read_weights(manifest):
        tensor.zero_()
    verify_weights(manifest)


@pytest.mark.parametrize("place", range(len(TENSORS)), ids=list(TENSORS))
def test_one_wrong_byte_is_noticed(manifest: WeightManifest, place: int) -> None:
    where = manifest.places[place]
    if where.size == 0:
        return
    data = bytearray(Path(manifest.path).read_bytes())
    data[where.offset + where.size - 1] ^= 1
    Path(manifest.path).write_bytes(data)
    with pytest.raises(WeightError, match=r"version 1 arrived with fingerprint .*, sent was"):
        verify_weights(manifest)


def test_swapped_names_are_noticed(folder: Path) -> None:
    sent = write_weights([("a", torch.zeros(2)), ("b", torch.ones(2))], ONE)
    a, b = sent.places
    swapped = replace(sent, places=(replace(a, offset=b.offset), replace(b, offset=a.offset)))
    with pytest.raises(WeightError):
        verify_weights(swapped)


def test_a_file_that_is_not_on_this_machine_is_an_error_that_says_so(
    manifest: WeightManifest,
) -> None:
    remove_weights(manifest)
    with pytest.raises(WeightError, match="put learner and generators on the same one"):
        verify_weights(manifest)


def test_removing_frees_the_memory_and_can_be_done_twice(
    manifest: WeightManifest, folder: Path
) -> None:
    assert len(list(folder.iterdir())) == 1
    remove_weights(manifest)
    remove_weights(manifest)
    assert list(folder.iterdir()) == []


def test_a_stream_that_breaks_leaves_nothing_behind(folder: Path) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        write_weights(stream(), ONE)
    assert list(folder.iterdir()) == []


def test_a_copy_that_breaks_in_the_middle_leaves_nothing_behind(folder: Path) -> None:
    # A tensor on the meta device has a size but no bytes, so that copying it fails.
    tensors = [("a", torch.zeros(2)), ("b", torch.zeros(2, device="meta"))]
    with pytest.raises(NotImplementedError):
        write_weights(tensors, ONE)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("policy", "generators", "plan"),
    [
        ("cpu:0", "cpu:0", PublishPlan(shared=(0,), copied=())),
        ("cpu:0", "cpu:1", PublishPlan(shared=(), copied=(0,))),
        ("cpu:0", "cpu:0-2", PublishPlan(shared=(0,), copied=(1, 2))),
        ("cpu:1", "cpu:0-2", PublishPlan(shared=(1,), copied=(0, 2))),
        ("0", "0-1", PublishPlan(shared=(0,), copied=(1,))),
    ],
)
def test_a_generator_beside_the_learner_shares_and_every_other_one_gets_a_copy(
    policy: str, generators: str, plan: PublishPlan
) -> None:
    roles = {"policy": parse_devices(policy), "generators": parse_devices(generators)}
    assert plan_publish(DeviceMap(roles)) == plan


def test_a_run_without_generators_publishes_to_nobody() -> None:
    assert plan_publish(DeviceMap({"policy": parse_devices("cpu")})) == PublishPlan((), ())
