"""Tiny, randomly initialised models of many families, for tests of engine and learner.

Sizes are as small as each architecture allows. Weights are larger than a new model's, so that a
forward that omits an operation differs by far more than rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rollick.models.loading.load import silence_transformers

VOCABULARY = 96

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""Sizes under the config keys that most families use."""

_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_DYNAMIC_BY_ALPHA = {
    "rope_parameters": {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0, "rope_theta": 100.0},
    "max_position_embeddings": 4096,
}
_SMALL_STATE = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_GEMMA_PER_LAYER = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
}
_GEMMA_4 = {**_GEMMA_PER_LAYER, **_WINDOWED, "final_logit_softcapping": 4.0}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {**_EXPERTS, "num_dense_layers": 1, "global_attn_every_n_layers": 2}
    | {"sliding_window": 6, "layer_types": None},
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {"n_ctx": 128, "rotary_dim": 4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **_WINDOWED},
    "cwm": _WINDOWED,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "diffllama": {},
    "doge": {"keep_window_size": 8},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": _WINDOWED,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "falcon_h1": {**_SMALL_STATE, "mamba_d_ssm": 64},
    "gemma": {},
    "gemma2": {**_WINDOWED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0}
    | {"attn_logit_softcapping": 3.0},
    "gemma3": {"text_config": {**SIZES, **_WINDOWED}, "vision_config": _VISION},
    "gemma3_text": _WINDOWED,
    "gemma3n_text": {**_GEMMA_PER_LAYER, "layer_types": ["sliding_attention", "full_attention"]}
    | {"sliding_window": 6, "laurel_rank": 4, "intermediate_size": [48, 48]}
    | {"activation_sparsity_pattern": [0.0, 0.0], "final_logit_softcapping": 4.0},
    "gemma4": {"text_config": {**SIZES, **_GEMMA_4}, "vision_config": _VISION},
    "gemma4_text": _GEMMA_4,
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_LATENT, "head_dim": 8, "num_key_value_heads": 2},
    "gpt2": {"n_positions": 128},
    "gpt_bigcode": {"n_positions": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gpt_neox": {},
    "gpt_oss": {**_WINDOWED, **_EXPERTS},
    "gptj": {"n_positions": 128, "rotary_dim": 4},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "granitemoe": {**_EXPERTS, "logits_scaling": 4.0},
    "helium": {},
    "hunyuan_v1_dense": _DYNAMIC_BY_ALPHA,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, **_DYNAMIC_BY_ALPHA},
    "hyperclovax": {"logits_scaling": 0.5},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, **_EXPERTS},
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "llama4_text": {**_EXPERTS, "intermediate_size_mlp": 48},
    "mamba": {"state_size": 4},
    "minicpm3": {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    | {"qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4, "num_key_value_heads": 4},
    "minimax_m2": _EXPERTS,
    "ministral": _WINDOWED,
    "mistral": {"sliding_window": 6},
    "mixtral": _EXPERTS,
    "modernbert-decoder": {"layer_types": ["full_attention", "sliding_attention"]}
    | {"sliding_window": 6, "local_attention": 6, "global_attn_every_n_layers": 2},
    "mpt": {"max_seq_len": 128},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWED,
    "olmoe": _EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {"original_max_position_embeddings": 128},
    "phimoe": {**_EXPERTS, "sliding_window": 6},
    "qwen2": {},
    "qwen2_moe": _EXPERTS,
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_EXPERTS, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "recurrent_gemma": {"attention_window_size": 6, "lru_width": 32},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 6},
    "vaultgemma": {**_WINDOWED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0}
    | {"attn_logit_softcapping": 3.0},
    "xglm": {"ffn_dim": 48, "d_model": 32, "num_layers": 2, "attention_heads": 4},
}
"""The config options of each family beyond `SIZES`; None removes a key."""


def tiny_config(family: str) -> PretrainedConfig:
    options = {**SIZES, **FAMILIES[family]}
    return AutoConfig.for_model(family, **{k: v for k, v in options.items() if v is not None})


def tiny_family(family: str, *, attention: str = "eager", seed: int = 0) -> nn.Module:
    """A model of the family in float32, whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]), silence_transformers():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.2)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float().eval()
