"""The learner: the optimizer steps of a batch, and the report of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollick.algorithms.objective import build_objective
from rollick.data.batch import Batch
from rollick.errors import ConfigError
from rollick.roles.reports import TrainReport
from rollick.testing.batches import random_batch, recipe_of
from rollick.trainer.local import LocalStrategy
from rollick.trainer.parallel.shares import BatchSplit
from rollick.trainer.strategy import LossReport, OptimReport
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.host import HostReceiver
from rollick.weights.plan import Route
from rollick.workers.learner import LearnerWorker

torch.set_num_threads(1)


class FakeStrategy:
    """Records its batches and returns the given reports."""

    def __init__(self, losses: Sequence[LossReport], steps: Sequence[OptimReport]) -> None:
        self.parts: list[Batch] = []
        self.order: list[str] = []
        self._losses = iter(losses)
        self._steps = iter(steps)

    def forward_backward(self, batch: Batch, loss: Any) -> LossReport:
        self.parts.append(batch)
        self.order.append("backward")
        return next(self._losses)

    def step(self) -> OptimReport:
        self.order.append("step")
        return next(self._steps)


def make_learner(
    strategy: Any, folder: Path, *, sections: dict[str, Any] | None = None, **train: Any
) -> LearnerWorker:
    recipe = recipe_of(folder, train=train, **(sections or {}))
    return LearnerWorker(strategy, build_objective(recipe.algorithms), recipe)


def train(worker: LearnerWorker, batch: Batch) -> TrainReport:
    [share] = BatchSplit.of(worker.recipe).shares(batch, ranks=1)
    return worker.train(share)


def make_strategy(count: int) -> FakeStrategy:
    loss, step = LossReport(loss=1.0, tokens=1), OptimReport(grad_norm=1.0, lr=0.1)
    return FakeStrategy([loss] * count, [step] * count)


def test_a_batch_is_one_step_unless_configured_otherwise(tiny_folder: Path) -> None:
    strategy, batch = make_strategy(1), random_batch([5, 6, 7])
    report = train(make_learner(strategy, tiny_folder), batch)
    assert strategy.parts == [batch]
    assert (report.optimizer_steps, report.skipped_steps) == (1, 0)


def test_minibatches_partition_the_samples_and_each_has_its_own_mean(tiny_folder: Path) -> None:
    strategy, batch = make_strategy(2), random_batch([5, 5, 5, 5])
    report = train(make_learner(strategy, tiny_folder, minibatches=2), batch)
    assert strategy.order == ["backward", "step"] * 2
    assert report.optimizer_steps == 2
    assert [part.uids for part in strategy.parts] == [batch.uids[0::2], batch.uids[1::2]]
    assert batch.weights_N.sum() == pytest.approx(1)
    assert [part.weights_N.sum() for part in strategy.parts] == pytest.approx([1, 1])


def test_every_sample_is_in_one_minibatch_where_they_do_not_divide(tiny_folder: Path) -> None:
    strategy, batch = make_strategy(3), random_batch([4, 5, 6, 7, 8])
    train(make_learner(strategy, tiny_folder, minibatches=3), batch)
    assert [part.rows for part in strategy.parts] == [2, 2, 1]
    assert sorted(uid for part in strategy.parts for uid in part.uids) == sorted(batch.uids)
    total = sum(part.weights_N.sum() for part in strategy.parts)
    assert total == pytest.approx(3 * batch.weights_N.sum())


def test_a_minibatch_is_scaled_in_every_part_of_its_loss(tiny_folder: Path) -> None:
    strategy, batch = make_strategy(2), random_batch([5, 5, 5, 5])
    batch = replace(batch, kl_weights_N=batch.weights_N / 2, entropy_weights_N=batch.weights_N / 4)
    train(make_learner(strategy, tiny_folder, minibatches=2), batch)
    for name, full in (("kl_weights_N", 0.5), ("entropy_weights_N", 0.25)):
        sums = [getattr(part, name).sum() for part in strategy.parts]
        assert sums == pytest.approx([full, full])


def test_a_loss_of_pairs_has_complete_pairs_in_its_minibatches(tiny_folder: Path) -> None:
    strategy, batch = make_strategy(2), random_batch([5, 6, 7, 8, 5, 6])
    pairs = {"pipeline": "dpo"}
    train(make_learner(strategy, tiny_folder, sections=pairs, minibatches=2), batch)
    assert [part.group_B.tolist() for part in strategy.parts] == [[0, 0, 2, 2], [1, 1]]


def test_a_batch_without_the_old_log_probs_that_the_recipe_needs_is_refused(
    tiny_folder: Path,
) -> None:
    """Otherwise mu would silently replace them, and the correction would have no effect."""
    strategy = make_strategy(1)
    sections = {"algorithm": {"loss": "ppo", "correction": "token_tis"}}
    with pytest.raises(ConfigError, match="needs log-probs of the old policy"):
        train(make_learner(strategy, tiny_folder, sections=sections), random_batch([5]))
    assert strategy.parts == []


def test_there_are_no_more_minibatches_than_samples(tiny_folder: Path) -> None:
    strategy = make_strategy(2)
    report = train(make_learner(strategy, tiny_folder, minibatches=8), random_batch([5, 6]))
    assert report.optimizer_steps == 2


def test_each_epoch_passes_over_the_full_batch(tiny_folder: Path) -> None:
    strategy, batch = make_strategy(6), random_batch([5, 6, 7, 8])
    report = train(make_learner(strategy, tiny_folder, minibatches=2, epochs=3), batch)
    assert report.optimizer_steps == 6
    assert [part.uids for part in strategy.parts] == [batch.uids[0::2], batch.uids[1::2]] * 3


def test_the_report_has_means_over_all_trained_tokens_and_the_largest_of_maxima(
    tiny_folder: Path,
) -> None:
    losses = [
        LossReport(loss=1.0, tokens=1, sums={"entropy": 2.0}, maxima={"ratio": 1.5}),
        LossReport(loss=3.0, tokens=3, sums={"entropy": 10.0, "kl": 2.0}, maxima={"ratio": 1.25}),
    ]
    steps = [OptimReport(grad_norm=2.0, lr=0.1), OptimReport(grad_norm=0.5, lr=0.2)]
    strategy = FakeStrategy(losses, steps)
    report = train(make_learner(strategy, tiny_folder, minibatches=2), random_batch([5, 6]))
    assert (report.loss, report.tokens, report.grad_norm, report.lr) == (2.0, 4, 2.0, 0.2)
    assert report.means == {"entropy": 3.0, "kl": 0.5}
    assert report.maxima == {"ratio": 1.5}
    logged = report.metrics()
    assert (logged["train/mean/entropy"], logged["train/max/ratio"]) == (3.0, 1.5)
    assert "seconds" not in " ".join(logged)


@pytest.mark.parametrize(
    ("skipped", "changed"), [((False, False), True), ((True, False), True), ((True, True), False)]
)
def test_weights_have_changed_unless_every_step_was_skipped(
    skipped: tuple[bool, bool], changed: bool, tiny_folder: Path
) -> None:
    steps = [OptimReport(grad_norm=1.0, lr=0.1, skipped=is_skipped) for is_skipped in skipped]
    strategy = FakeStrategy([LossReport(loss=1.0, tokens=1)] * 2, steps)
    report = train(make_learner(strategy, tiny_folder, epochs=2), random_batch([5]))
    assert report.changed is changed
    assert report.skipped_steps == sum(skipped)


def test_a_real_step_moves_the_weights_and_writes_what_it_holds(tiny_folder: Path) -> None:
    recipe = recipe_of(tiny_folder, train={"optimizer": {"lr": 1e-2}, "minibatches": 2})
    worker = LearnerWorker(LocalStrategy(recipe), build_objective(recipe.algorithms), recipe)
    before = worker.fingerprint()
    batch = random_batch([6, 7, 8, 9])
    report = train(worker, batch)
    assert (report.optimizer_steps, report.changed) == (2, True)
    assert report.tokens == np.count_nonzero(batch.loss_mask_N)
    assert worker.fingerprint() != before
    manifest = worker.offer_weights(PolicyVersion(1), Route("host", (0,)))
    expected = dict(worker.strategy.weights())
    assert manifest.fingerprint == worker.fingerprint()
    arrived = HostReceiver().open(manifest, 0)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in arrived)
    worker.release_weights(PublishOutcome(True))
    worker.close()
