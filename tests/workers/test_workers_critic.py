"""The workers of critic and teacher: the tokens of a batch that they use, and their reports."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollick.algorithms.losses import ValueInputs
from rollick.algorithms.value_targets import explained_variance, select_value_tokens
from rollick.cluster.devices import DeviceMap, HostSpec
from rollick.cluster.worker import HostContext
from rollick.config.devices import parse_devices
from rollick.config.schema import Recipe
from rollick.data.batch import Batch, TokenValues
from rollick.errors import ConfigError, ModelError
from rollick.observe.metric_table import is_documented
from rollick.roles.handles import Critic
from rollick.roles.reports import CriticReport
from rollick.testing.batches import random_batch, recipe_of
from rollick.testing.tiny import save_tiny, tiny_model
from rollick.trainer.critic import LocalCritic
from rollick.trainer.parallel.shares import BatchSplit
from rollick.trainer.strategy import LossReport, OptimReport, ValueLossFn
from rollick.workers import critic as critic_module
from rollick.workers import scorer as scorer_module
from rollick.workers.critic import CriticWorker

torch.set_num_threads(1)

HERE = HostContext(HostSpec(0, parse_devices("cpu")[0], {}), {}, "cpu", 1)
TWO_ALGORITHMS = {
    "domains": {
        "judged": {"source": "none.jsonl", "algorithm": "ppo"},
        "compared": {"source": "none.jsonl", "algorithm": "grpo"},
    }
}


class FakeCritic:
    """Records its batches, computes the loss on values of 1, and reports step 1 as skipped."""

    def __init__(self) -> None:
        self.parts: list[Batch] = []
        self.totals: list[float] = []
        self.steps = 0

    def values(self, batch: Batch) -> TokenValues:
        return TokenValues(np.ones(batch.tokens), np.ones(batch.rows))

    def forward_backward(self, batch: Batch, loss: ValueLossFn) -> LossReport:
        self.parts.append(batch)
        mask_N = batch.loss_mask_N
        assert batch.values_N is not None
        assert batch.returns_N is not None
        streams = (batch.values_N, batch.returns_N, batch.weights_N)
        old_T, returns_T, weights_T = (torch.as_tensor(stream[mask_N]) for stream in streams)
        actual = loss(ValueInputs(torch.ones_like(old_T), old_T, returns_T, weights_T))
        self.totals.append(actual.total.item())
        return LossReport(loss=actual.total.item(), tokens=int(mask_N.sum()), sums={"value": 3.0})

    def step(self) -> OptimReport:
        self.steps += 1
        return OptimReport(grad_norm=float(self.steps), lr=0.1, skipped=self.steps == 1)

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


def add_value_targets(batch: Batch, *, returns: float = 0.0) -> Batch:
    """Add old values of 1 and constant returns."""
    ones_N = np.where(batch.loss_mask_N, 1.0, 0.0)
    return replace(batch, values_N=ones_N, returns_N=returns * ones_N)


class OneWorkerGroup:
    """A group whose only worker is in this process."""

    def __init__(self, worker: CriticWorker) -> None:
        self.worker = worker
        self.device_map = DeviceMap({"critic": parse_devices("cpu")})

    def collective(self, role: str) -> asyncio.Lock:
        return asyncio.Lock()

    async def scatter(self, role: str, method: str, parts: list[Any], *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(part, *args) for part in parts]


def train_critic(worker: CriticWorker, batch: Batch) -> CriticReport:
    """Train the worker through the role's handle."""
    group: Any = OneWorkerGroup(worker)
    handle = Critic(group, "critic", batch_split=BatchSplit.of(worker.recipe, role="critic"))
    handle.value_components = worker.recipe.value_components
    return asyncio.run(handle.train(batch))


def make_ppo_recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    return recipe_of(folder, algorithm={"preset": "ppo"}, **sections)


def test_every_trained_token_counts_the_same_over_the_full_batch(tiny_folder: Path):
    strategy, batch = FakeCritic(), add_value_targets(random_batch([5, 6, 7]))
    report = train_critic(CriticWorker(strategy, make_ppo_recipe(tiny_folder)), batch)
    (part,) = strategy.parts
    assert set(part.weights_N[part.loss_mask_N]) == {1 / 12}
    assert not part.weights_N[~part.loss_mask_N].any()
    # Every value is 1 and every return 0: the loss is half of the squared difference.
    assert strategy.totals == pytest.approx([0.5])
    assert report.train is not None
    assert (report.train.tokens, report.train.means) == (12, {"value": 3 / 12})


def test_mini_batches_and_epochs_are_those_of_the_policy(tiny_folder: Path):
    strategy, batch = FakeCritic(), add_value_targets(random_batch([5, 5, 5, 5]))
    recipe = make_ppo_recipe(tiny_folder, train={"minibatches": 2, "epochs": 2})
    report = train_critic(CriticWorker(strategy, recipe), batch)
    assert [part.uids for part in strategy.parts] == [batch.uids[0::2], batch.uids[1::2]] * 2
    assert [part.weights_N.sum() for part in strategy.parts] == pytest.approx([1] * 4)
    assert report.train is not None
    assert (report.train.optimizer_steps, report.train.skipped_steps) == (4, 1)
    assert report.changed


def test_a_batch_whose_only_step_was_skipped_changed_nothing(tiny_folder: Path):
    worker = CriticWorker(FakeCritic(), make_ppo_recipe(tiny_folder))
    report = train_critic(worker, add_value_targets(random_batch([5])))
    assert not report.changed


def test_only_tokens_of_algorithms_with_values_are_learned_from(tiny_folder: Path):
    recipe = recipe_of(tiny_folder, data=TWO_ALGORITHMS)
    assert [algorithm.advantage.name for algorithm in recipe.algorithms] == ["gae", "grpo"]
    batch = add_value_targets(random_batch([5, 6, 7]))
    component_N = np.repeat(np.array([0, 1, 0], np.int8), batch.lengths_B)
    strategy = FakeCritic()
    train_critic(CriticWorker(strategy, recipe), replace(batch, component_N=component_N))
    (part,) = strategy.parts
    assert part.uids == (batch.uids[0], batch.uids[2])
    assert part.weights_N.sum() == pytest.approx(1)
    assert set(part.weights_N[part.loss_mask_N]) == {1 / 8}


def test_a_batch_without_such_tokens_trains_nothing_and_is_no_skip(tiny_folder: Path):
    batch = add_value_targets(random_batch([5, 6]))
    strategy = FakeCritic()
    worker = CriticWorker(strategy, recipe_of(tiny_folder, data=TWO_ALGORITHMS))
    report = train_critic(worker, replace(batch, component_N=np.ones(batch.tokens, np.int8)))
    assert strategy.parts == []
    assert (report.train, report.changed, report.metrics()) == (None, True, {})


def test_a_batch_without_returns_is_refused(tiny_folder: Path):
    worker = CriticWorker(FakeCritic(), make_ppo_recipe(tiny_folder))
    with pytest.raises(ConfigError, match="old values and returns"):
        train_critic(worker, random_batch([5]))


def test_samples_without_a_token_of_theirs_are_left_out():
    batch = random_batch([4, 5])
    own_mask_N = batch.loss_mask_N & (np.arange(9) < 4)
    assert select_value_tokens(batch, own_mask_N).uids == batch.uids[:1]


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([0.0, 1.0], [0.0, 1.0], 1.0),
        ([5.0, 6.0], [0.0, 1.0], 1.0),
        ([0.5, 0.5], [0.0, 1.0], 0.0),
        ([1.0, 0.0], [0.0, 1.0], -3.0),
        ([1.0, 3.0], [2.0, 2.0], 0.0),
        ([1.0], [2.0], 0.0),
        ([], [], 0.0),
    ],
    ids=["exact", "exact but shifted", "constant", "opposite", "returns alike", "one", "none"],
)
def test_explained_variance_is_one_less_the_share_that_is_left(
    values: list[float], returns: list[float], expected: float
):
    assert explained_variance(np.array(values), np.array(returns)) == pytest.approx(expected)


def test_a_real_critic_learns_its_returns_and_every_metric_is_documented(tiny_folder: Path):
    recipe = make_ppo_recipe(
        tiny_folder, critic={"optimizer": {"lr": 1e-2}}, train={"minibatches": 2}
    )
    worker = critic_module.create(HERE, 0, recipe)
    batch = random_batch([6, 7, 8, 9])
    returns_N = np.where(batch.loss_mask_N, np.repeat([1.0, -1.0, 0.5, 0.0], batch.lengths_B), 0.0)
    explained: list[float] = []
    for _ in range(12):
        values_N = worker.values(batch).values_N
        targets = replace(batch, values_N=values_N, returns_N=returns_N)
        report = train_critic(worker, targets)
        explained.append(report.explained_variance)
    assert abs(explained[0]) < 0.1
    assert explained[-1] > 0.8
    metrics = report.metrics()
    assert all(is_documented(name) for name in metrics)
    assert metrics["critic/explained_variance"] == explained[-1]
    assert metrics["critic/tokens"] == 22
    assert metrics["critic/mean/return"] == pytest.approx(returns_N.sum() / 22)


def make_teacher(policy: Path, teacher: Path, *, top_k: int = 4) -> scorer_module.ScorerWorker:
    recipe = recipe_of(policy, teacher={"path": str(teacher), "top_k": top_k})
    return scorer_module.create_teacher(HERE, 0, recipe)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("teacher"), seed=3, hidden=32)


def compute_dense_logprobs(folder: Path, batch: Batch, b: int, *, tokens: int) -> torch.Tensor:
    """Log-softmax over the first `tokens` of the vocabulary, for each position but the first."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = batch.token_ids_N[batch.offsets_B1[b] : batch.offsets_B1[b + 1]]
    with torch.no_grad():
        logits = model(torch.as_tensor(ids).long()[None]).logits[0, :-1, :tokens]
    return (logits / float(batch.temperature_B[b])).log_softmax(-1)


def test_a_teacher_gives_log_probs_of_the_tokens_and_of_its_most_likely_ones(
    tiny_folder: Path, teacher_folder: Path
):
    batch = random_batch([6, 5])
    worker = make_teacher(tiny_folder, teacher_folder)
    logprobs_N, top = worker.logprobs(batch), worker.top_logprobs(batch)
    assert top.ids_NK.shape == top.logprobs_NK.shape == (11, 4)
    assert not top.logprobs_NK[~batch.loss_mask_N].any()
    for b in range(2):
        cut = slice(batch.offsets_B1[b] + 2, batch.offsets_B1[b + 1])
        dense = compute_dense_logprobs(teacher_folder, batch, b, tokens=10_000)[1:]
        sampled = dense.gather(1, torch.as_tensor(batch.token_ids_N[cut]).long()[:, None])[:, 0]
        np.testing.assert_allclose(logprobs_N[cut], sampled.numpy(), atol=1e-5)
        likeliest = dense.topk(4)
        assert np.array_equal(top.ids_NK[cut], likeliest.indices.numpy())
        np.testing.assert_allclose(top.logprobs_NK[cut], likeliest.values.numpy(), atol=1e-5)


def test_a_teacher_with_other_tokens_is_refused(tiny_folder: Path, tmp_path: Path):
    other = save_tiny(tmp_path, alphabet="ba" + "cdefgh0123456789 ")
    with pytest.raises(ConfigError, match=r"has other tokens than the policy .* differ, such as"):
        make_teacher(tiny_folder, other)


def copy_with_rows(folder: Path, target: Path, rows: int) -> Path:
    """Copy the tokenizer, with a new model whose vocabulary has this number of rows."""
    shutil.copytree(folder, target)
    tiny_model(rows, hidden=32).save_pretrained(target)
    return target


def count_rows(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def test_a_teacher_with_more_rows_scores_only_the_policys_tokens(
    tiny_folder: Path, teacher_folder: Path, tmp_path: Path
):
    rows = count_rows(tiny_folder)
    padded = copy_with_rows(teacher_folder, tmp_path / "padded", rows + 7)
    batch = random_batch([6])
    worker = make_teacher(tiny_folder, padded, top_k=rows)
    dense = compute_dense_logprobs(padded, batch, 0, tokens=rows)[1:]
    top = worker.top_logprobs(batch)
    assert top.ids_NK.max() == rows - 1
    np.testing.assert_allclose(np.exp(top.logprobs_NK[2:]).sum(-1), 1, atol=1e-5)
    sampled = dense.gather(1, torch.as_tensor(batch.token_ids_N[2:]).long()[:, None])[:, 0]
    np.testing.assert_allclose(worker.logprobs(batch)[2:], sampled.numpy(), atol=1e-5)
    with pytest.raises(ModelError, match=f"the {rows + 1} likeliest tokens of a vocabulary"):
        make_teacher(tiny_folder, padded, top_k=rows + 1).top_logprobs(batch)


def test_a_teacher_with_fewer_rows_is_refused(
    tiny_folder: Path, teacher_folder: Path, tmp_path: Path
):
    rows = count_rows(tiny_folder)
    cut = copy_with_rows(teacher_folder, tmp_path / "cut", rows - 1)
    with pytest.raises(ConfigError, match=rf"has {rows} tokens, but the .* has only {rows - 1}"):
        make_teacher(tiny_folder, cut)


def test_a_recipe_without_a_teacher_cannot_have_one_built(tiny_folder: Path):
    with pytest.raises(ConfigError, match="the recipe has none"):
        scorer_module.create_teacher(HERE, 0, recipe_of(tiny_folder))


def test_a_critic_on_a_host_is_the_local_one(tiny_folder: Path):
    worker = critic_module.create(HERE, 0, make_ppo_recipe(tiny_folder))
    assert isinstance(worker.strategy, LocalCritic)
