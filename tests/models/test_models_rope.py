"""Rotary embeddings that depend on the length: no sample depends on its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from rollick.config.schema import InferConfig, ModelConfig
from rollick.data.batch import Batch
from rollick.errors import ModelError
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.models.loading.load import load_model, silence_transformers
from rollick.models.loading.rope import fix_rope
from rollick.testing.batches import random_batch, recipe_of
from rollick.trainer.local import LocalStrategy
from rollick.types import Completion, Request, SampleId, Sampling, frozen_array

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 3.0, 8.0, 20.0],
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
MODELS = {
    "longrope": Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=16),
    "dynamic": LlamaConfig(**{**SIZES, "max_position_embeddings": 16}, rope_parameters=DYNAMIC),
}
MAX_LENGTH = 40


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    with silence_transformers():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(MODELS[request.param])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.3)
        model.save_pretrained(path)
    return path


def _make_learner(folder: Path, max_length: int = MAX_LENGTH) -> LocalStrategy:
    return LocalStrategy(recipe_of(folder, infer={"max_length": max_length}))


def _compute_logprobs(folder: Path, batch: Batch, *, at_length: int | None = None) -> torch.Tensor:
    """Log-probs of all sampled tokens by transformers, with the frequencies for `at_length`."""
    model = load_model(ModelConfig(path=str(folder)), device="cpu", attention="eager")
    if at_length is not None:
        fix_rope(model, at_length)
    rows: list[torch.Tensor] = []
    for b in range(batch.rows):
        span = slice(*batch.offsets_B1[b : b + 2].tolist())
        ids = torch.from_numpy(batch.token_ids_N[span].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logprobs = (logits / batch.temperature_B[b].item()).log_softmax(-1)
        chosen = logprobs.gather(1, ids[1:, None])[:, 0]
        rows.append(chosen[torch.from_numpy(batch.loss_mask_N[span][1:])])
    return torch.cat(rows)


def test_log_probs_of_the_learner_do_not_depend_on_the_neighbours(folder: Path):
    learner, batch = _make_learner(folder), random_batch([10, 38, 12])
    together = learner.logprobs(batch)[batch.loss_mask_N]
    alone = [
        learner.logprobs(sample)[sample.loss_mask_N] for sample in map(batch.take, ([0], [1], [2]))
    ]
    np.testing.assert_allclose(np.concatenate(alone), together, atol=1e-4)


def test_the_frequencies_are_those_of_the_longest_sequence_of_the_run(folder: Path):
    batch = random_batch([10, 38, 12])
    actual = _make_learner(folder).logprobs(batch)[batch.loss_mask_N]
    expected = _compute_logprobs(folder, batch, at_length=MAX_LENGTH)
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-4)


def test_in_a_run_of_short_sequences_the_frequencies_are_the_models_short_ones(folder: Path):
    batch = random_batch([10, 16, 12])
    actual = _make_learner(folder, max_length=16).logprobs(batch)[batch.loss_mask_N]
    np.testing.assert_allclose(actual, _compute_logprobs(folder, batch).numpy(), atol=1e-4)


def test_a_sample_that_is_longer_than_the_frequencies_allow_is_refused(folder: Path):
    with pytest.raises(ModelError, match=r"41 tokens.*at most 40.*infer.max_length=41"):
        _make_learner(folder).logprobs(random_batch([12, 41]))


class _Unknown(torch.nn.Module):
    rope_type = "dynamic"

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return positions


def test_an_embedding_that_cannot_be_set_to_a_length_is_refused():
    with pytest.raises(ModelError, match=r"_Unknown depends on the length and cannot be set.* 40"):
        fix_rope(torch.nn.Sequential(_Unknown()), 40)


async def _generate(engine: NativeEngine, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    requests = [
        Request(
            SampleId(number, 0),
            frozen_array(prompt, np.int32),
            Sampling(temperature=1.0, max_tokens=10),
            stream=number,
        )
        for number, prompt in enumerate(prompts)
    ]
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


async def test_a_long_neighbour_does_not_change_what_the_engine_samples(folder: Path):
    model, infer = ModelConfig(path=str(folder)), InferConfig(slots=4, max_length=MAX_LENGTH)
    engine = NativeEngine.create(infer, model, stops=StopRules())
    short, long = [1, 5, 9], [1, *range(4, 32)]
    (alone,) = await _generate(engine, [short])
    with_neighbour, _ = await _generate(engine, [short, long])
    await engine.close()
    assert with_neighbour.token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(with_neighbour.logprobs, alone.logprobs, atol=1e-4)
