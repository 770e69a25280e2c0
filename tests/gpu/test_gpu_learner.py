"""The local strategy on a GPU: steps equal to the CPU's; sleep and checkpoints keep every bit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema.losses import PpoLoss
from rollick.models.loading.fingerprint import fingerprint
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy

pytestmark = pytest.mark.gpu

LENGTHS = [7, 12, 7, 3, 9, 12]


def _make_learner(folder: Path, device: str, **sections: dict[str, Any]) -> LocalStrategy:
    sections.setdefault("model", {"path": str(folder), "dtype": "float32"})
    # eps is large, so that a gradient's last bits are not amplified to full steps by Adam.
    sections.setdefault("train", {"optimizer": {"lr": 1e-3, "eps": 1e-3}})
    return LocalStrategy(recipe_of(folder, **sections), device=device)


def _compute_loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def _train(learner: LocalStrategy, seed: int) -> float:
    learner.forward_backward(random_batch(LENGTHS, seed=seed), _compute_loss)
    return learner.step().grad_norm


def _measure_allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_three_steps_on_a_gpu_give_the_weights_of_the_cpu(tiny_folder: Path) -> None:
    on_cpu, on_gpu = _make_learner(tiny_folder, "cpu"), _make_learner(tiny_folder, "cuda")
    start = {name: weight.clone() for name, weight in on_cpu.weights()}
    for seed in range(3):
        assert _train(on_gpu, seed) == pytest.approx(_train(on_cpu, seed), rel=1e-4)
    gpu = dict(on_gpu.weights())
    for name, expected in on_cpu.weights():
        torch.testing.assert_close(gpu[name].cpu(), expected, rtol=0, atol=1e-4)
    moved = max((weight - start[name]).abs().max().item() for name, weight in on_cpu.weights())
    assert moved > 5e-4, "the weights hardly moved, so their likeness says nothing"


def test_log_probs_on_a_gpu_are_those_of_the_cpu(tiny_folder: Path) -> None:
    batch = random_batch(LENGTHS)
    on_cpu, on_gpu = _make_learner(tiny_folder, "cpu"), _make_learner(tiny_folder, "cuda")
    np.testing.assert_allclose(on_gpu.logprobs(batch), on_cpu.logprobs(batch), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_frees_the_learner_and_wake_restores_every_bit(tmp_path: Path, dtype: str) -> None:
    folder = save_tiny(tmp_path, hidden=256)
    learner = _make_learner(folder, "cuda", model={"path": str(folder), "dtype": dtype})
    _train(learner, 0)
    weights, state = (
        fingerprint(learner.weights()),
        fingerprint(learner.optimizer.tensors().items()),
    )
    awake = _measure_allocated()
    held_bytes = sum(parameter.nbytes for parameter in learner.module.parameters())
    held_bytes += sum(
        exp.nbytes for n, exp in learner.optimizer.tensors().items() if "exp_avg" in n
    )
    learner.sleep()
    asleep = _measure_allocated()
    learner.wake()
    assert awake - asleep >= held_bytes
    assert fingerprint(learner.weights()) == weights
    assert fingerprint(learner.optimizer.tensors().items()) == state


def test_a_learner_that_slept_trains_like_one_that_did_not(tiny_folder: Path) -> None:
    slept, other = _make_learner(tiny_folder, "cuda"), _make_learner(tiny_folder, "cuda")
    for learner in (slept, other):
        _train(learner, 0)
    slept.sleep()
    slept.wake()
    for learner in (slept, other):
        _train(learner, 1)
    other_tensors = dict(other.weights())
    for name, weight in slept.weights():
        torch.testing.assert_close(weight, other_tensors[name], rtol=0, atol=1e-6)


def test_a_saved_learner_is_loaded_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    model = {"path": str(tiny_folder), "dtype": "bfloat16"}
    learner, fresh = (_make_learner(tiny_folder, "cuda", model=model) for _ in range(2))
    _train(learner, 0)
    learner.save(tmp_path)
    assert fingerprint(fresh.weights()) != fingerprint(learner.weights())
    fresh.load(tmp_path)
    assert fingerprint(fresh.weights()) == fingerprint(learner.weights())
    saved_tensors, other_tensors = learner.optimizer.tensors(), fresh.optimizer.tensors()
    assert fingerprint(saved_tensors.items()) == fingerprint(other_tensors.items())
