"""LoRA adapters: only they are trained, the base model stays unchanged, exports load in peft and
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from tiny_mixture import widen_norms
from transformers import AutoModelForCausalLM

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema.losses import PpoLoss
from rollick.errors import CheckpointError, ConfigError
from rollick.models.loading.fingerprint import fingerprint
from rollick.models.loading.load import silence_transformers
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy

LENGTHS = [7, 12, 7, 3, 9, 12]
IDS = torch.arange(4, 16)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)


@pytest.mark.parametrize(
    ("train", "peak"),
    [({}, 1e-6), ({"lora": {}}, 1e-5), ({"lora": {}, "optimizer": {"lr": 3e-4}}, 3e-4)],
    ids=str,
)
def test_adapters_have_a_larger_default_learning_rate_than_full_training(
    tmp_path: Path, train: dict[str, Any], peak: float
) -> None:
    strategy = LocalStrategy(recipe_of(save_tiny(tmp_path), train=train))
    strategy.forward_backward(random_batch([4, 5]), loss)
    assert strategy.step().lr == peak


def make_learner(
    folder: Path, *, steps: int = 0, dtype: str = "auto", **lora: Any
) -> LocalStrategy:
    train = {"lora": {"rank": 4, "alpha": 8} | lora, "optimizer": {"lr": 1e-2}}
    strategy = LocalStrategy(
        recipe_of(folder, model={"path": str(folder), "dtype": dtype}, train=train)
    )
    for seed in range(steps):
        step(strategy, seed)
    return strategy


def step(strategy: LocalStrategy, seed: int = 0) -> None:
    strategy.forward_backward(random_batch(LENGTHS, seed=seed), loss)
    assert not strategy.step().skipped


def loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def make_frozen(folder: Path) -> LocalStrategy:
    return LocalStrategy(recipe_of(folder), trainable=False)


def logits(path: Path, auto_class: Any = AutoModelForCausalLM) -> torch.Tensor:
    with silence_transformers(), torch.no_grad():
        return auto_class.from_pretrained(path)(IDS).logits


def test_the_first_policy_is_the_model_itself(folder: Path) -> None:
    batch = random_batch(LENGTHS)
    assert np.array_equal(make_learner(folder).logprobs(batch), make_frozen(folder).logprobs(batch))


def test_adapters_follow_from_the_seed_alone(folder: Path) -> None:
    torch.manual_seed(1)
    first = fingerprint(make_learner(folder).optimizer.tensors().items())
    torch.manual_seed(2)
    expected_random = torch.rand(())
    torch.manual_seed(2)
    assert fingerprint(make_learner(folder).optimizer.tensors().items()) == first
    assert torch.equal(torch.rand(()), expected_random)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_move_and_the_model_is_the_reference(folder: Path, dtype: str) -> None:
    strategy, batch = make_learner(folder, dtype=dtype), random_batch(LENGTHS)
    assert strategy.adapters is not None
    base, initial_logprobs = fingerprint(strategy.adapters.base()), strategy.logprobs(batch)
    for seed in range(2):
        step(strategy, seed)
    assert fingerprint(strategy.adapters.base()) == base
    assert all(".lora_" in name for name in strategy.optimizer.parameters)
    assert np.array_equal(strategy.reference_logprobs(batch), initial_logprobs)
    assert np.abs(strategy.logprobs(batch) - initial_logprobs).max() > 1e-3


def test_the_gradient_of_an_adapter_is_that_of_the_sum(folder: Path) -> None:
    """The merged weight is W + s B A, so dA = s B' dW and dB = s dW A'. In float64."""
    strategy = make_learner(folder, steps=2)
    strategy.export(folder.parent / "sum")
    full = LocalStrategy(recipe_of(folder.parent / "sum"))
    for learner in (strategy, full):
        learner.module.double()
        widen_norms(learner.module)
    assert strategy.adapters is not None
    merged = dict(strategy.adapters.merged())
    for name, parameter in full.module.named_parameters():
        parameter.data.copy_(merged[name])
    batch, gradients = random_batch(LENGTHS), {}
    for learner in (strategy, full):
        learner.forward_backward(batch, loss)
        gradients |= {name: p.grad for name, p in learner.optimizer.parameters.items()}
    scale = strategy.adapters.scale
    assert scale == 2
    for adapter in strategy.adapters.live_adapters():
        sum_OI, layer = gradients[adapter.name], adapter.name.removesuffix(".weight")
        for part, expected in (
            ("lora_A", scale * adapter.b_OR.T @ sum_OI),
            ("lora_B", scale * sum_OI @ adapter.a_RI.T),
        ):
            actual = gradients[f"{layer}.{part}.weight"]
            assert (actual - expected).norm() < 1e-10 * expected.norm()


def test_a_merged_export_is_a_plain_folder_with_the_same_logits(
    folder: Path, tmp_path: Path
) -> None:
    strategy = make_learner(folder, steps=2)
    strategy.export(tmp_path)
    with silence_transformers():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert fingerprint(plain.named_parameters()) == fingerprint(strategy.weights())
    assert (logits(tmp_path) - logits(folder)).abs().max() > 1e-2


def test_peft_loads_an_adapter_export_and_gives_the_logits_of_the_merged_one(
    folder: Path, tmp_path: Path
) -> None:
    strategy = make_learner(folder, steps=2, targets=["q_proj", "v_proj", "down_proj"])
    strategy.export(tmp_path / "merged")
    strategy.export_adapter(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    adapted = logits(tmp_path / "adapter", AutoPeftModelForCausalLM)
    torch.testing.assert_close(adapted, logits(tmp_path / "merged"), rtol=0, atol=1e-5)
    assert (adapted - logits(folder)).abs().max() > 1e-2


def test_the_learner_computes_what_its_export_does(folder: Path, tmp_path: Path) -> None:
    strategy, batch = make_learner(folder, steps=2), random_batch(LENGTHS)
    strategy.export(tmp_path)
    np.testing.assert_allclose(
        make_frozen(tmp_path).logprobs(batch), strategy.logprobs(batch), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_learner_continues_bit_for_bit(folder: Path, tmp_path: Path, dtype: str) -> None:
    first = make_learner(folder, steps=2, dtype=dtype, dropout=0.1)
    first.save(tmp_path)
    step(first, 2)
    second = make_learner(folder, steps=1, dtype=dtype, dropout=0.1)
    second.load(tmp_path)
    step(second, 2)
    assert fingerprint(second.weights()) == fingerprint(first.weights())
    saved = load_file(tmp_path / "learner.safetensors")
    assert all(".lora_" in name or name.startswith("rng.") for name in saved)


def test_adapters_of_another_rank_are_not_taken_over(folder: Path, tmp_path: Path) -> None:
    make_learner(folder, steps=1).save(tmp_path)
    with pytest.raises(CheckpointError, match="lora_A"):
        make_learner(folder, rank=8).load(tmp_path)


def test_a_gradient_sees_dropout_and_a_score_does_not(folder: Path) -> None:
    strategy, batch = make_learner(folder, steps=2, dropout=0.5), random_batch(LENGTHS)
    assert np.array_equal(strategy.logprobs(batch), strategy.logprobs(batch))
    actual = [strategy.forward_backward(batch, loss).sums["entropy"] for _ in range(2)]
    assert actual[0] != actual[1]


@pytest.mark.parametrize("targets", [["quary_proj"], ["lm_head"], ["embed_tokens"]])
def test_layers_that_cannot_have_an_adapter_are_refused(folder: Path, targets: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"train\.lora\.targets"):
        make_learner(folder, targets=targets)


def test_without_adapters_there_is_neither_a_reference_nor_an_adapter_to_write(
    folder: Path, tmp_path: Path
) -> None:
    strategy = LocalStrategy(recipe_of(folder))
    with pytest.raises(ConfigError, match="has no adapters"):
        strategy.reference_logprobs(random_batch(LENGTHS))
    with pytest.raises(ConfigError, match="no adapter to write"):
        strategy.export_adapter(tmp_path)
