"""The reference critic: a decoder with a value head, in one process, on one device.

The value head is one float32 row, for any dtype of the decoder. The value of token t is that of the
state before t is sampled, so it comes from the row that predicts t.

Legend: N tokens of a batch, T trained ones (in the loss mask, not first), B samples, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollick.algorithms.losses import ValueInputs
from rollick.algorithms.objective import Loss
from rollick.config.schema import RlRecipe
from rollick.data.batch import Batch, TokenValues
from rollick.errors import ConfigError
from rollick.trainer.microbatch import PackedBatch
from rollick.trainer.optimizer import MasterAdamW, TotalNorm
from rollick.trainer.strategy import LossReport, ValueLossFn
from rollick.trainer.trainable_model import TrainableModel, load_packed_model, token_indices
from rollick.types import FloatArray, stable_hash

INITIAL_STD = 0.01
"""Standard deviation of the initial values, for hidden states with a root mean square of 1."""


class ValueModel(nn.Module):
    """A decoder and the head that computes values from its hidden states. It has the attributes of
    a transformers model that sharding reads."""

    base_model_prefix = "decoder"

    def __init__(self, decoder: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.decoder: Any = decoder
        self.head = head

    @classmethod
    def of(cls, language_model: Any, *, seed: int) -> ValueModel:
        """A critic on top of a language model, whose output head is dropped. Its head is on the
        device of the decoder."""
        hidden_size = int(language_model.config.get_text_config().hidden_size)
        decoder = language_model.base_model
        device = next(decoder.parameters()).device
        return cls(decoder, _create_value_head(hidden_size, seed=seed).to(device))

    @property
    def base_model(self) -> nn.Module:
        return self.decoder

    @property
    def config(self) -> Any:
        return self.decoder.config

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.get_input_embeddings()

    def set_experts_implementation(self, name: str) -> None:
        self.decoder.set_experts_implementation(name)

    def compute_values(self, rows_TD: Tensor) -> Tensor:
        """The value of each hidden state."""
        return self.head(rows_TD.to(self.head.weight.dtype))[:, 0]


class LocalCritic(TrainableModel):
    """Computes values and trains on one device. Its state includes no random state: a critic does
    not sample, and may share the learner's process."""

    def __init__(self, recipe: RlRecipe, *, device: str = "cpu") -> None:
        language_model = load_packed_model(
            recipe.critic.model or recipe.model, device=device, max_length=recipe.infer.max_length
        )
        self.value_model = ValueModel.of(language_model, seed=recipe.run.seed)
        optimizer = critic_optimizer(self.value_model.named_parameters(), recipe=recipe)
        super().__init__(
            self.value_model, recipe, device=device, optimizer=optimizer, name="critic"
        )

    @torch.no_grad()
    def values(self, batch: Batch) -> TokenValues:
        """Float32 values: before each token in the loss mask, and after each sample's last token. 0
        for all other tokens, and for samples without a token in the mask."""
        values_N = np.zeros(batch.tokens, dtype=np.float32)
        last_B = np.zeros(batch.rows, dtype=np.float32)
        for samples, _, packed in self.packed_batches(batch):
            hidden_ND = self.hidden(packed)
            indices_T = token_indices(batch, samples)[packed.indices_T]
            values_N[indices_T] = self._compute_values(hidden_ND, packed.rows_T).float().cpu()
            last_B[samples] = self._compute_values(hidden_ND, packed.last_rows_B).float().cpu()
        return TokenValues(values_N, last_B)

    def forward_backward(self, batch: Batch, loss: ValueLossFn) -> LossReport:
        def evaluate(microbatch: Batch, packed: PackedBatch) -> tuple[Loss, int]:
            values_T = self._compute_values(self.hidden(packed), packed.rows_T)
            return loss(value_inputs(microbatch, packed, values_T)), len(values_T)

        return self.accumulate_gradients(batch, evaluate)

    def _compute_values(self, hidden_ND: Tensor, rows: Tensor) -> Tensor:
        return self.value_model.compute_values(hidden_ND.index_select(0, rows))


def critic_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    total_norm: TotalNorm | None = None,
    *,
    recipe: RlRecipe,
) -> MasterAdamW:
    return MasterAdamW(
        parameters,
        recipe.critic.optimizer,
        peak_lr=recipe.critic.peak_lr,
        schedule=recipe.train.schedule,
        total_steps=recipe.run.steps * recipe.train.steps_per_batch,
        total_norm=total_norm,
    )


def _create_value_head(hidden_size: int, *, seed: int) -> nn.Linear:
    """Its weights depend only on the seed. Does not change the random state of the process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_hash(seed, "critic"))
        head = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.normal_(head.weight, std=INITIAL_STD / hidden_size**0.5)
        nn.init.zeros_(head.bias)
    return head


def value_inputs(microbatch: Batch, packed: PackedBatch, values_T: Tensor) -> ValueInputs:
    if microbatch.values_N is None or microbatch.returns_N is None:
        raise ConfigError(
            "the batch has no values and returns, which the critic's loss needs",
            fix="annotate the batch with values, and assign credit, before the update",
        )

    def select_trained(values_N: FloatArray) -> Tensor:
        return torch.as_tensor(values_N[packed.indices_T]).to(values_T)

    return ValueInputs(
        values_T=values_T,
        old_T=select_trained(microbatch.values_N),
        returns_T=select_trained(microbatch.returns_N),
        weights_T=select_trained(microbatch.weights_N),
    )
