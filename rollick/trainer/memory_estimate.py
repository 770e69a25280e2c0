"""Estimates the memory of a trained or frozen model before it is loaded. Does not import torch.

    weights       parameters x bytes of the compute dtype
    state         AdamW's two float32 moments; float32 masters where the weights are narrower
    gradients     as the weights, plus float32 sums where the weights are narrower
    activations   saved for the backward of each token of a micro-batch, layer by layer
    logits        two float32 arrays of a chunk of logits
    gathered      of a sharded model (fsdp): the embeddings and two layers, in full

Ranks of strategy fsdp divide weights, state and gradients; those of `context` divide the tokens.

A Llama-like layer in plain autograd saves for each token: the float32 input, normalised row and
output of both norms; queries, keys, values and the attention output; gate, up, the activated gate
and their product. Attention workspaces and allocator fragmentation are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollick.config.schema import LoraConfig, TrainConfig
from rollick.models.loading.shape import LLAMA_STYLE_MODELS, ModelShape

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one model by purpose. Gradients and activations exist only during training."""

    weights: int
    state: int = 0
    gradients: int = 0
    activations: int = 0
    logits: int = 0
    gathered: int = 0

    @property
    def idle(self) -> int:
        """Bytes while the model is idle."""
        return self.weights + self.state

    @property
    def scoring(self) -> int:
        """Bytes while it computes log-probs. Does not count the activations, which exist for one
        layer at a time."""
        return self.idle + self.gathered + self.logits

    @property
    def training(self) -> int:
        return self.training_without_tokens + self.activations + self.logits

    @property
    def training_without_tokens(self) -> int:
        """Bytes that training takes however short the samples are."""
        return self.idle + self.gathered + self.gradients


def frozen_footprint(
    shape: ModelShape, train: TrainConfig, *, itemsize: int, ranks: int = 1
) -> Footprint:
    """Footprint of a model that only computes log-probs, on one of its ranks."""
    return Footprint(
        shape.parameters * itemsize // ranks,
        logits=_logits(shape, train, tokens=0),
        gathered=_gathered(shape, shape.parameters, itemsize=itemsize) if ranks > 1 else 0,
    )


def trained_footprint(
    shape: ModelShape,
    train: TrainConfig,
    *,
    itemsize: int,
    tokens: int,
    lora: LoraConfig | None = None,
    is_critic: bool = False,
    ranks: int = 1,
) -> Footprint:
    """Footprint of a model trained on micro-batches of up to `tokens`. `ranks`: number of fsdp
    ranks; returns the footprint of one rank."""
    trained = shape.parameters
    adapters = 0
    if lora is not None:
        trained = adapters = shape.adapter_parameters(lora.rank, lora.targets)
    elif is_critic:
        trained -= 0 if shape.tied else shape.vocabulary * shape.hidden
    weights = shape.parameters if lora is not None else trained
    uses_model_forward = lora is not None or train.strategy != "local"
    float32_copy = FLOAT32 if itemsize < FLOAT32 else 0
    tokens = -(-tokens // train.parallel.context) if ranks > 1 else tokens
    return Footprint(
        weights=(weights + adapters) * itemsize // ranks,
        state=trained * (2 * FLOAT32 + float32_copy) // ranks,
        gradients=trained * (itemsize + float32_copy) // ranks,
        activations=_activations(
            shape, train, tokens, itemsize=itemsize, uses_model_forward=uses_model_forward
        ),
        logits=0 if is_critic else _logits(shape, train, tokens=tokens),
        gathered=_gathered(shape, weights, itemsize=itemsize) if ranks > 1 else 0,
    )


def _gathered(shape: ModelShape, parameters: int, *, itemsize: int) -> int:
    """Bytes that a rank gathers in full: the embeddings and two layers."""
    layer = (parameters - shape.embedding_parameters) // shape.layers
    return (shape.embedding_parameters + 2 * layer) * itemsize


def _activations(
    shape: ModelShape, train: TrainConfig, tokens: int, *, itemsize: int, uses_model_forward: bool
) -> int:
    """Bytes saved for the backward of a micro-batch; with `recompute` the inputs of all layers, and
    one layer at a time."""
    per_token = activations_per_token(
        shape, itemsize=itemsize, uses_model_forward=uses_model_forward
    )
    if train.strategy != "local" and train.parallel.recompute:
        per_token = per_token // shape.layers + shape.layers * shape.hidden * itemsize
    return tokens * per_token


def activations_per_token(shape: ModelShape, *, itemsize: int, uses_model_forward: bool) -> int:
    """Bytes saved for the backward of one token. `uses_model_forward`: the model's own forward,
    even where models/decoder/training.py supports the decoder."""
    query_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.kind in LLAMA_STYLE_MODELS and not uses_model_forward:
        # Inputs of norms and matmuls; query, key and value, query and key after RoPE, the output.
        values_per_token = 4 * shape.hidden + 3 * (query_size + kv_size) + 3 * shape.inner
        return shape.layers * (values_per_token * itemsize + (2 + shape.heads) * FLOAT32)
    norm = (FLOAT32 + 2 * itemsize) * shape.hidden
    attention = 2 * (query_size + kv_size) * itemsize
    mlp = 4 * max(1, shape.experts_used) * shape.inner * itemsize
    return shape.layers * (2 * norm + attention + mlp)


def _logits(shape: ModelShape, train: TrainConfig, *, tokens: int) -> int:
    """Two float32 arrays of a chunk's size: the logits, and their log-probs or gradient."""
    rows = min(train.logprob_chunk_tokens, tokens or train.logprob_chunk_tokens)
    return 2 * rows * shape.vocabulary * FLOAT32
