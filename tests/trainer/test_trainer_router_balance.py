"""RouterLog: the routing of a mixture of experts, for the load-balancing loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from rollick.errors import ModelError
from rollick.models.loading.load import silence_transformers
from rollick.trainer.token_loss import RouterLog

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}


def make_multimodal_mixture(**text: Any) -> Any:
    with silence_transformers():
        config = Qwen3VLMoeConfig(text_config={**TEXT, **text}, vision_config=VISION)
        return Qwen3VLMoeForConditionalGeneration(config)


def test_the_routers_of_a_multimodal_mixture_are_recorded():
    model = make_multimodal_mixture()
    assert getattr(model.config, "num_experts_per_tok", None) is None  # only its text config has it
    log = RouterLog(model)
    with log.recording():
        model.base_model(input_ids=torch.arange(6)[None])
    routing = log.of_rows(torch.arange(6))
    assert routing.counts_LE.shape == (2, 4)
    assert routing.counts_LE.sum(-1).tolist() == [12.0, 12.0]  # two experts for each of six rows


def test_a_model_without_experts_is_refused():
    with pytest.raises(ModelError, match="has no experts"):
        RouterLog(make_multimodal_mixture(num_experts_per_tok=0))
