"""Snapshots of a learner on a GPU equal its state bit for bit, awake and asleep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema.losses import PpoLoss
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.trainer.local import LocalStrategy
from rollick.trainer.snapshot import SnapshotMemory, SnapshotRecord, SnapshotWriter, read_snapshot

pytestmark = pytest.mark.gpu

LENGTHS = [7, 12, 7, 3, 9, 12]


@pytest.fixture
def memories() -> Iterator[list[SnapshotMemory]]:
    memories = [SnapshotMemory.create(name) for name in "ab"]
    yield memories
    for memory in memories:
        memory.close()


@pytest.fixture
def learner(tiny_folder: Path) -> LocalStrategy:
    model = {"path": str(tiny_folder), "dtype": "bfloat16"}
    return LocalStrategy(recipe_of(tiny_folder, model=model), device="cuda")


def train(learner: LocalStrategy, seed: int) -> None:
    learner.forward_backward(random_batch(LENGTHS, seed=seed), compute_loss)
    learner.step()


def compute_loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def copy_state(learner: LocalStrategy) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in learner.state().tensors.items()}


def assert_equal(record: SnapshotRecord, expected: dict[str, Tensor]) -> None:
    tensors = read_snapshot(record).tensors
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


def test_two_memories_hold_the_states_of_two_steps(
    learner: LocalStrategy, memories: list[SnapshotMemory]
) -> None:
    writer = SnapshotWriter()
    written: list[tuple[SnapshotRecord, dict[str, Tensor]]] = []
    for step in range(5):
        train(learner, step)
        record = writer.write(memories[step % 2].path, learner.state())
        written.append((record, copy_state(learner)))
    train(learner, 5)
    for record, expected in written[-2:]:
        assert_equal(record, expected)
    writer.close()


def test_a_sleeping_learner_has_the_snapshot_that_it_has_awake(
    learner: LocalStrategy, memories: list[SnapshotMemory]
) -> None:
    writer = SnapshotWriter()
    train(learner, 0)
    awake = writer.write(memories[0].path, learner.state())
    learner.sleep()
    asleep = [writer.write(memory.path, learner.state()) for memory in memories]
    learner.wake()
    assert {record.fingerprint for record in asleep} == {awake.fingerprint}
    assert_equal(asleep[0], copy_state(learner))
    writer.close()


def test_a_restored_learner_continues_with_the_same_bits(
    learner: LocalStrategy, memories: list[SnapshotMemory]
) -> None:
    writer = SnapshotWriter()
    train(learner, 0)
    record = writer.write(memories[0].path, learner.state())
    train(learner, 1)
    other = LocalStrategy(learner.recipe, device="cuda")
    other.restore(read_snapshot(record))
    train(other, 1)
    expected = copy_state(learner)
    assert all(torch.equal(value, expected[name]) for name, value in copy_state(other).items())
    writer.close()
