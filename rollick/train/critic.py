"""The reference critic: a decoder with a value head, in one process, on one device.

Its body is that of a language model without the head over the vocabulary; the value head is one
float32 row, whatever the dtype of the body. The value of token t is that before t is drawn, so it
comes from the row that predicts t: the critic never sees the token whose state it judges.

    Batch -> microbatches -> Pack -> hidden states -> values of the counted tokens -> loss ->
    backward, per micro-batch; then step

Legend: N tokens of a batch, T those of them that count (in the loss mask, not first), B samples,
D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rollick.algorithms.value import ValueInputs
from rollick.config.schema import Recipe
from rollick.data.batch import Batch, TokenValues
from rollick.errors import ConfigError
from rollick.train.body import Body, Tally, load_packed_model, token_places
from rollick.train.microbatch import Pack
from rollick.train.optimizer import MasterAdamW
from rollick.train.strategy import LossReport, OptimReport, ValueLossFn
from rollick.types import FloatArray, stable_hash

START_SPREAD = 0.01
"""Standard deviation of the values at the start, for hidden states of a root mean square of 1."""


class ValueModel(nn.Module):
    """A decoder and the head that makes values of its hidden states."""

    def __init__(self, decoder: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head


class LocalCritic:
    """Judges and learns on one device."""

    def __init__(self, recipe: Recipe, *, device: str = "cpu") -> None:
        self.recipe = recipe
        # Only the decoder is kept: the head over the vocabulary is freed with the rest.
        language_model: Any = load_packed_model(recipe.critic.model or recipe.model, device=device)
        decoder: nn.Module = language_model.base_model
        size = int(language_model.config.get_text_config().hidden_size)
        head = _value_head(size, seed=recipe.run.seed).to(device)
        self.module = ValueModel(decoder, head)
        self.body = Body(
            self.module,
            recipe,
            decoder=decoder,
            device=device,
            optimizer=MasterAdamW(
                self.module.named_parameters(),
                recipe.critic.optimizer,
                schedule=recipe.train.schedule,
                total_steps=recipe.critic_steps,
            ),
            name="critic",
        )

    def values(self, batch: Batch) -> TokenValues:
        """Of each token in the loss mask before it is drawn, and after each sample's last token.

        0 for all other tokens, and for samples that have none in the mask.
        """
        values_N = np.zeros(batch.tokens, dtype=np.float32)
        last_B = np.zeros(batch.samples, dtype=np.float32)
        with torch.no_grad():
            for samples in self.body.microbatches(batch):
                packed = self.body.pack(batch.take(samples))
                hidden_ND = self.body.hidden(packed)
                places_T = token_places(batch, samples)[packed.places_T]
                values_N[places_T] = _numbers(self._values(hidden_ND, packed.rows_T))
                last_B[samples] = _numbers(self._values(hidden_ND, packed.last_rows_B))
        return TokenValues(values_N, last_B)

    def forward_backward(self, batch: Batch, loss: ValueLossFn) -> LossReport:
        """Accumulates the gradient of the loss over the counted tokens."""
        tally = Tally()
        for samples in self.body.microbatches(batch):
            part = batch.take(samples)
            packed = self.body.pack(part)
            values_T = self._values(self.body.hidden(packed), packed.rows_T)
            result = loss(_value_inputs(part, packed, values_T))
            result.total.backward()
            self.body.optimizer.accumulate()
            tally.add(result.total, result.sums, tokens=len(values_T))
        return tally.report()

    def step(self) -> OptimReport:
        return self.body.optimizer.step()

    def save(self, path: Path) -> None:
        """Without a random state: a critic draws nothing, and its process may be the learner's."""
        self.body.save(path)

    def load(self, path: Path) -> None:
        self.body.load(path)

    def sleep(self) -> None:
        self.body.sleep()

    def wake(self) -> None:
        self.body.wake()

    def _values(self, hidden_ND: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        head = self.module.head
        return head(hidden_ND.index_select(0, rows).to(head.weight.dtype))[:, 0]


def _value_head(size: int, *, seed: int) -> nn.Linear:
    """Follows from the seed alone, and leaves the random state of the process as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_hash(seed, "critic"))
        head = nn.Linear(size, 1, dtype=torch.float32)
        nn.init.normal_(head.weight, std=START_SPREAD / size**0.5)
        nn.init.zeros_(head.bias)
    return head


def _value_inputs(part: Batch, packed: Pack, values_T: torch.Tensor) -> ValueInputs:
    if part.values_N is None or part.returns_N is None:
        raise ConfigError(
            "a critic is trained on old values and returns, and the batch has none",
            fix="annotate the batch and assign its credit before it is trained on",
        )

    def counted(values_N: FloatArray) -> torch.Tensor:
        return torch.as_tensor(values_N[packed.places_T]).to(values_T)

    return ValueInputs(
        values_T=values_T,
        old_T=counted(part.values_N),
        returns_T=counted(part.returns_N),
        weights_T=counted(part.weights_N),
    )


def _numbers(values: torch.Tensor) -> FloatArray:
    return values.float().cpu().numpy()
