"""The snapshots of all ranks: restored on another number of ranks, and written to files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks, own_part
from tiny_mixture import save_tiny_mixture
from torch.distributed.checkpoint import FileSystemReader

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema import Recipe
from rollick.config.schema.losses import PpoLoss
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.fsdp import FsdpStrategy
from rollick.trainer.local import LocalStrategy
from rollick.trainer.parallel.checkpoint import COUNTERS, FOLDER, save_states
from rollick.trainer.snapshot import SnapshotMemory, SnapshotRecord, SnapshotWriter, read_snapshot
from rollick.trainer.strategy import TrainState

LENGTHS = [7, 12, 7, 3, 9, 12, 5]

RanksFactory = Callable[[int], Ranks]


def policy_loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def make_recipe(folder: Path, **parallel: int) -> Recipe:
    options = {"strategy": "fsdp", "parallel": parallel}
    return recipe_of(folder, train={"optimizer": {"lr": 1e-2}, **options})


def train(recipe: Recipe, states: Sequence[TrainState], seed: int) -> tuple[TrainState, float]:
    """Restore the states and take one step. Returns the new state and the loss of another batch."""
    strategy = FsdpStrategy(recipe)
    if states:
        strategy.restore_all(states)
    strategy.forward_backward(own_part(strategy, random_batch(LENGTHS, seed=seed))[0], policy_loss)
    assert not strategy.step().skipped
    other, _ = own_part(strategy, random_batch(LENGTHS, seed=99))
    loss = strategy.forward_backward(other, policy_loss).loss
    strategy.sharded_optimizer.drop_gradients()
    return copy_through_snapshot(strategy.state()), loss


def copy_through_snapshot(state: TrainState) -> TrainState:
    """The state as a new process reads it from a snapshot."""
    memory = SnapshotMemory.create("test")
    record: SnapshotRecord = SnapshotWriter().write(memory.path, state)
    restored = read_snapshot(record)
    copied = {name: tensor.clone() for name, tensor in restored.tensors.items()}
    memory.close()
    return TrainState(copied, restored.steps, restored.shards)


@pytest.mark.parametrize(
    "parallel",
    [{"data": 2}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_one_rank_continues_from_the_snapshots_of_two(
    ranks: RanksFactory, tmp_path: Path, parallel: Any
) -> None:
    folder = save_tiny(tmp_path / "tiny", hidden=64, heads=8, kv_heads=4)
    local, expected = LocalStrategy(make_recipe(folder)), list[float]()
    for seed in range(2):
        local.forward_backward(random_batch(LENGTHS, seed=seed), policy_loss)
        local.step()
        expected.append(local.forward_backward(random_batch(LENGTHS, seed=99), policy_loss).loss)
        local.optimizer.drop_gradients()
    first = ranks(2).run(train, make_recipe(folder, **parallel), [], 0)
    [(state, loss)] = ranks(1).run(train, make_recipe(folder), [each[0] for each in first], 1)
    assert state.steps == 2
    assert [first[0][1], loss] == pytest.approx(expected, abs=2e-5)


def train_and_save(recipe: Recipe, path: Path) -> TrainState:
    """Take one step and save. Returns the state."""
    strategy = FsdpStrategy(recipe)
    strategy.forward_backward(own_part(strategy, random_batch(LENGTHS, seed=0))[0], policy_loss)
    strategy.step()
    strategy.save(path)
    return copy_through_snapshot(strategy.state())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    reader = FileSystemReader(path / FOLDER)
    saved: Any = reader.read_metadata().state_dict_metadata
    tensors = {n: torch.empty(each.size, dtype=each.properties.dtype) for n, each in saved.items()}
    with warnings.catch_warnings():  # Warns about reading in a single process.
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize("parallel", [{"data": 2}, {"tensor": 2}, {"expert": 2}], ids=str)
def test_files_written_from_the_snapshots_of_all_ranks_are_those_that_the_ranks_write(
    ranks: RanksFactory, tmp_path: Path, parallel: Any
) -> None:
    save = save_tiny_mixture if "expert" in parallel else save_tiny
    folder = save(tmp_path / "tiny", hidden=64, heads=8, kv_heads=4)
    by_ranks, by_controller = tmp_path / "ranks", tmp_path / "controller"
    save_states(
        by_controller, ranks(2).run(train_and_save, make_recipe(folder, **parallel), by_ranks)
    )
    expected, written = read_tensors(by_ranks), read_tensors(by_controller)
    assert written.keys() == expected.keys()
    assert {"rng.0", "rng.1"} < written.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    assert (by_controller / COUNTERS).read_text() == (by_ranks / COUNTERS).read_text()


def sleep_and_write(recipe: Recipe) -> tuple[TrainState, TrainState, bool]:
    """Returns the states before and during a sleep, and whether the strategy still sleeps."""
    strategy = FsdpStrategy(recipe)
    strategy.forward_backward(own_part(strategy, random_batch(LENGTHS, seed=0))[0], policy_loss)
    strategy.step()
    awake = strategy.state()
    copied = {name: tensor.clone() for name, tensor in awake.tensors.items()}
    # As `sleep` does on a GPU.
    strategy._offloaded.move_to_host(strategy.optimizer.tensors())
    asleep = copy_through_snapshot(strategy.state())
    return TrainState(copied, awake.steps, awake.shards), asleep, bool(strategy._offloaded)


def test_a_snapshot_does_not_wake_a_sleeping_learner(ranks: RanksFactory, tmp_path: Path) -> None:
    recipe = make_recipe(save_tiny(tmp_path / "tiny"))
    [(awake, asleep, still_sleeps)] = ranks(1).run(sleep_and_write, recipe)
    assert still_sleeps
    assert (asleep.steps, asleep.shards) == (awake.steps, awake.shards)
    assert asleep.tensors.keys() == awake.tensors.keys()
    assert all(torch.equal(asleep.tensors[name], value) for name, value in awake.tensors.items())
