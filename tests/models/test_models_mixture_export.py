"""Exports of a mixture of experts load in transformers and vLLM, with the same log-probs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema import InferConfig, ModelConfig, VllmConfig
from rollick.config.schema.losses import PpoLoss
from rollick.models.loading.load import silence_transformers
from rollick.testing.batches import completions_to_batch, random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import tiny_tokenizer
from rollick.trainer.local import LocalStrategy
from rollick.types import Request, SampleId, Sampling

LENGTHS = [7, 12, 9]
SMALL = InferConfig(
    engine="vllm",
    slots=4,
    max_length=64,
    vllm=VllmConfig(enforce_eager=True, kv_cache_gb=0.05),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("mixture"), tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with silence_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def train_strategy(folder: Path, *, lora: bool) -> LocalStrategy:
    train = {"optimizer": {"lr": 1e-2}} | ({"lora": {"rank": 4}} if lora else {})
    strategy = LocalStrategy(recipe_of(folder, train=train))
    for seed in range(2):
        strategy.forward_backward(random_batch(LENGTHS, seed=seed), loss)
        assert not strategy.step().skipped
    return strategy


@pytest.mark.parametrize("lora", [False, True])
def test_transformers_loads_an_export_and_gives_the_learners_log_probs(
    folder: Path, tmp_path: Path, lora: bool
) -> None:
    torch.set_num_threads(1)
    strategy, batch = train_strategy(folder, lora=lora), random_batch(LENGTHS)
    strategy.export(tmp_path)
    with silence_transformers():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = np.zeros(batch.tokens, np.float32)
    for b, start in enumerate(batch.offsets_B1[:-1]):
        span = slice(start, start + batch.lengths_B[b])
        ids = torch.as_tensor(batch.token_ids_N[span]).long()
        with torch.no_grad():
            log_probs = (plain(ids[None]).logits[0] / float(batch.temperature_B[b])).log_softmax(-1)
        expected[span][1:] = log_probs[:-1].gather(1, ids[1:, None])[:, 0].numpy()
    mask = batch.loss_mask_N
    np.testing.assert_allclose(strategy.logprobs(batch)[mask], expected[mask], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_vllm_loads_an_export_and_draws_with_the_learners_log_probs(
    folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    from rollick.infer.engine import StopRules
    from rollick.infer.vllm.engine import VllmEngine

    strategy = train_strategy(folder, lora=False)
    strategy.export(tmp_path)
    engine = VllmEngine.create(SMALL, ModelConfig(path=str(tmp_path)), stops=StopRules())
    try:
        sampling = Sampling(temperature=1.0, max_tokens=8)
        request = Request(SampleId(0, 0), np.arange(4, 12, dtype=np.int32), sampling, stream=1)
        batch = completions_to_batch([request], [await engine.generate(request)])
    finally:
        await engine.close()
    mask = batch.loss_mask_N
    assert mask.sum() == 8
    learner_logprobs = strategy.logprobs(batch)[mask]
    np.testing.assert_allclose(batch.logprobs_N[mask], learner_logprobs, rtol=0, atol=1e-3)
