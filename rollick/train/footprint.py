"""How much memory a trained or frozen model takes, before it is loaded. Pure: no torch.

    weights       numbers x bytes of the compute dtype
    state         AdamW's two float32 moments; float32 masters where the weights are narrower
    gradients     as the weights; besides, float32 sums where the weights are narrower
    activations   what a backward needs of each token of a micro-batch, layer by layer
    head          two chunks of logits in float32

Activations are those of a Llama-like layer in plain autograd. Of each token it keeps: for either
norm its input in float32, the normalised row and the result; queries, keys, values and what
attention gives; gate, up, the activated gate and their product. Attention's own work space and
what an allocator wastes are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollick.config.schema import LoraConfig, TrainConfig
from rollick.models.shape import PLAIN_KINDS, ModelShape

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one model, by what they are for. Those of work exist only while it is trained."""

    weights: int
    state: int = 0
    gradients: int = 0
    activations: int = 0
    head: int = 0

    @property
    def resting(self) -> int:
        """While nothing is computed with it."""
        return self.weights + self.state

    @property
    def scoring(self) -> int:
        """While it gives log-probs: one layer's activations are there at a time, and the head's."""
        return self.resting + self.head

    @property
    def training(self) -> int:
        return self.resting + self.gradients + self.activations + self.head


def frozen_footprint(shape: ModelShape, train: TrainConfig, *, itemsize: int) -> Footprint:
    """Of a model that only gives log-probs."""
    return Footprint(shape.parameters * itemsize, head=_head(shape, train, tokens=0))


def trained_footprint(
    shape: ModelShape,
    train: TrainConfig,
    *,
    itemsize: int,
    tokens: int,
    lora: LoraConfig | None = None,
    values: bool = False,
) -> Footprint:
    """Of a model that is trained on micro-batches of at most `tokens`; `values`: a critic."""
    narrow = itemsize < FLOAT32
    trained = shape.parameters
    adapters = 0
    if lora is not None:
        trained = adapters = shape.adapter_parameters(lora.rank, lora.targets)
    elif values:
        trained -= 0 if shape.tied else shape.vocabulary * shape.hidden
    weights = shape.parameters if lora is not None else trained
    return Footprint(
        weights=(weights + adapters) * itemsize,
        state=trained * (2 * FLOAT32 + (FLOAT32 if narrow else 0)),
        gradients=trained * (itemsize + (FLOAT32 if narrow else 0)),
        activations=tokens
        * activations_per_token(
            shape, itemsize=itemsize, modules=lora is not None or train.strategy != "local"
        ),
        head=0 if values else _head(shape, train, tokens=tokens),
    )


def activations_per_token(shape: ModelShape, *, itemsize: int, modules: bool) -> int:
    """Bytes that a backward needs of one token. `modules`: the model's own forward is run, even of
    a decoder that could do without (plain_training.py)."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.kind in PLAIN_KINDS and not modules:
        # Inputs of norms and of products; query, key and value, both turned, the output.
        numbers = 4 * shape.hidden + 3 * (wide + narrow) + 3 * shape.inner
        return shape.layers * (numbers * itemsize + (2 + shape.heads) * FLOAT32)
    norm = (FLOAT32 + 2 * itemsize) * shape.hidden
    attention = 2 * (wide + narrow) * itemsize
    experts = max(1, shape.experts_used)
    network = 4 * experts * shape.inner * itemsize
    return shape.layers * (2 * norm + attention + network)


def _head(shape: ModelShape, train: TrainConfig, *, tokens: int) -> int:
    """Log-probs of a chunk and what they are made from, or their gradient."""
    rows = min(train.logprob_chunk_tokens, tokens or train.logprob_chunk_tokens)
    return 2 * rows * shape.vocabulary * FLOAT32
