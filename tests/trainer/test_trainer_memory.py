"""Offloaded tensors free their memory and are restored bit for bit; kept tensors do not move."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema.losses import PpoLoss
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.trainer.offload import OffloadedTensors
from rollick.workers.model_worker import Meter


def loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def test_offloaded_memory_is_free_and_is_restored() -> None:
    offloaded, first, second = OffloadedTensors(), torch.arange(6.0), torch.arange(4)
    offloaded.move_to_host({"first": first, "second": second})
    assert first.untyped_storage().size() == second.untyped_storage().size() == 0
    assert torch.equal(offloaded.copies["first"], torch.arange(6.0))
    offloaded.restore_from_host()
    assert torch.equal(first, torch.arange(6.0))
    assert torch.equal(second, torch.arange(4))
    assert not offloaded


def test_kept_tensors_keep_their_address() -> None:
    offloaded, shared, own = OffloadedTensors(), torch.ones(8), torch.ones(8)
    address = shared.data_ptr()
    offloaded.move_to_host({"shared": shared[:4], "own": own}, keep=[shared])
    assert own.untyped_storage().size() == 0
    assert shared.data_ptr() == address
    assert torch.equal(shared, torch.ones(8))


def test_host_memory_is_kept_from_one_sleep_to_the_next() -> None:
    offloaded, tensor = OffloadedTensors(), torch.ones(8)
    addresses = []
    for value in (1.0, 2.0):
        tensor.fill_(value)
        offloaded.move_to_host({"one": tensor})
        addresses.append(offloaded.copies["one"].data_ptr())
        offloaded.restore_from_host()
        assert torch.equal(tensor, torch.full((8,), value))
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_sleep_with_the_rest_and_the_step_is_the_same(tmp_path: Path, dtype: str) -> None:
    """`sleep` offloads on a GPU only, so the test offloads the tensors itself."""
    folder = save_tiny(tmp_path, hidden=16, layers=1)
    batch, actual = random_batch([5, 9]), []
    for sleeps in (False, True):
        strategy = LocalStrategy(recipe_of(folder, model={"path": str(folder), "dtype": dtype}))
        strategy.forward_backward(batch, loss)
        optimizer = strategy.optimizer
        gradients = optimizer.gradients()
        assert len({value.data_ptr() for value in gradients.values()}) == len(optimizer.masters)
        if sleeps:
            offloaded = OffloadedTensors()
            offloaded.move_to_host(optimizer.tensors() | gradients)
            assert all(value.untyped_storage().size() == 0 for value in gradients.values())
            offloaded.restore_from_host()
        strategy.step()
        actual.append(strategy.logprobs(batch))
    assert np.array_equal(actual[0], actual[1])


def test_a_meter_counts_what_was_held_since_it_began() -> None:
    gc.collect()  # Memory freed during the measurement would hide the allocation.
    meter = Meter()
    allocation = np.ones(256 << 20, np.uint8)
    assert meter.peak() >= 0.9 * allocation.nbytes
    del allocation
    assert Meter().peak() < 32 << 20
