"""The reference strategy: the complete model in one process, on one device.

A TrainableModel with a language-model head: computes log-probs of tokens and the gradient of a loss
over them, for all parameters or for adapters (lora.py). Other strategies are tested against it.

    Batch -> microbatches -> PackedBatch -> hidden states -> log-probs -> loss -> backward

Legend: N tokens of a batch, T trained ones (in the loss mask, not first), K likeliest tokens of a
position.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollick.config.schema import ModelConfig, Recipe
from rollick.data.batch import Batch, TopTokens
from rollick.errors import ConfigError
from rollick.models.attention.varlen import VARLEN
from rollick.models.head.logprobs import chosen_logprobs, output_head, token_logprobs, top_logprobs
from rollick.models.loading.load import empty_model, fill_parameters, save_with_tokenizer
from rollick.trainer.lora import Adapters, add_adapters
from rollick.trainer.microbatch import PackedBatch, trained_tokens
from rollick.trainer.strategy import LossFn, LossReport, TrainState, WeightStream
from rollick.trainer.token_loss import ExpertBalance, ForwardOutput, RouterLog, add_token_loss
from rollick.trainer.trainable_model import (
    LossAccumulator,
    TrainableModel,
    load_packed_model,
    policy_optimizer,
    token_indices,
)
from rollick.types import FloatArray


class LocalStrategy(TrainableModel):
    """Trains a model that fits on one device; if not trainable, it only computes log-probs.

    `model` overrides the policy's (for a teacher); `vocabulary` restricts its output to the first
    `vocabulary` tokens.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        device: str = "cpu",
        trainable: bool = True,
        model: ModelConfig | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.model_config = model or recipe.model
        self.vocabulary = vocabulary
        module = load_packed_model(
            self.model_config, device=device, max_length=recipe.infer.max_length
        )
        self.adapters: Adapters | None = None
        if trainable and recipe.train.lora is not None:
            self.adapters = add_adapters(module, recipe.train.lora, seed=recipe.run.seed)
        trained = module.named_parameters() if self.adapters is None else self.adapters.parameters()
        super().__init__(
            module,
            recipe,
            device=device,
            optimizer=policy_optimizer(trained, recipe=recipe) if trainable else None,
            name="learner",
            batch_invariant=recipe.infer.zero_mismatch,
        )
        self.router_log = RouterLog(module) if trainable and recipe.train.expert_balance else None

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> FloatArray:
        logprobs_N = np.zeros(batch.tokens, dtype=np.float32)
        for samples, _, packed in self.packed_batches(batch):
            logprobs_T, _ = self._compute_logprobs(packed, self._trained_hidden(packed))
            indices_T = token_indices(batch, samples)[packed.indices_T]
            logprobs_N[indices_T] = logprobs_T.float().cpu().numpy()
        return logprobs_N

    def reference_logprobs(self, batch: Batch) -> FloatArray:
        """As `logprobs`, with the adapters disabled: those of the base model."""
        if self.adapters is None:
            raise ConfigError(
                "the policy has no adapters, so it cannot compute log-probs of its base model",
                fix="load the reference as a separate model, or set train.lora",
            )
        with self.adapters.wrapped.disable_adapter():
            return self.logprobs(batch)

    @torch.no_grad()
    def top_logprobs(self, batch: Batch, *, k: int) -> TopTokens:
        """The k likeliest tokens at each position in the loss mask; 0 elsewhere."""
        ids_NK = np.zeros((batch.tokens, k), dtype=np.int32)
        logprobs_NK = np.zeros((batch.tokens, k), dtype=np.float32)
        for samples, _, packed in self.packed_batches(batch):
            ids_TK, top_TK = top_logprobs(
                self._trained_hidden(packed),
                temperature_T=packed.temperature_T,
                k=k,
                **self._head_options(),
            )
            indices_T = token_indices(batch, samples)[packed.indices_T]
            ids_NK[indices_T] = ids_TK.cpu().numpy()
            logprobs_NK[indices_T] = top_TK.float().cpu().numpy()
        return TopTokens(ids_NK, logprobs_NK)

    def forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        self.check_gradient()
        optimizer = self.optimizer
        accumulator = LossAccumulator()
        with nullcontext() if self.adapters is None else self.adapters.dropout():
            balance = self._expert_balance(batch)
            for _, microbatch, packed in self.packed_batches(batch):
                output = self._forward(microbatch, packed)
                total = add_token_loss(
                    microbatch, packed, output, loss=loss, accumulator=accumulator
                )
                if balance is not None:
                    total = total + balance.add(output.routing, accumulator)
                total.backward()
                optimizer.accumulate()
        return accumulator.report()

    def weights(self) -> WeightStream:
        """The live parameters under their public names, tied ones once. Weights that are merged
        with an adapter are copies."""
        if self.adapters is not None:
            return self.adapters.merged()
        return ((name, value.detach()) for name, value in self.module.named_parameters())

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder with the tokenizer; adapters are merged."""
        module = self.module
        if self.adapters is not None:
            config: Any = module.config
            module = empty_model(config, attention=VARLEN)
            fill_parameters(module, dict(self.adapters.merged()))
        save_with_tokenizer(module, self.model_config, path)

    def export_adapter(self, path: Path) -> None:
        """Write the adapters alone, as PEFT loads them, with the tokenizer."""
        if self.adapters is None:
            raise ConfigError(
                "there is no adapter to write: all parameters were trained",
                fix="export the complete model, or train with train.lora",
            )
        self.adapters.export(path)
        save_with_tokenizer(None, self.model_config, path)

    def state(self) -> TrainState:
        """Masters, moments and random states."""
        rng_states = {"rng.cpu": torch.get_rng_state()}
        if self.on_gpu:
            rng_states["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        state = super().state()
        return TrainState({**state.tensors, **rng_states}, state.steps)

    def restore(self, state: TrainState) -> None:
        super().restore(state)
        torch.set_rng_state(state.tensors["rng.cpu"])
        if self.on_gpu and "rng.cuda" in state.tensors:
            torch.cuda.set_rng_state(state.tensors["rng.cuda"], self.device)

    def _expert_balance(self, batch: Batch) -> ExpertBalance | None:
        """The load-balancing loss, with the counts of the complete batch if it has several
        micro-batches."""
        if self.router_log is None:
            return None
        counts_LE: Tensor | None = None
        if len(self.microbatches(batch)) > 1:
            for _, _, packed in self.packed_batches(batch):
                with torch.no_grad(), self.router_log.recording():
                    self._trained_hidden(packed)
                counts = self.router_log.of_rows(packed.rows_T).counts_LE
                counts_LE = counts if counts_LE is None else counts_LE + counts
        rows = len(trained_tokens(batch)[0])
        return ExpertBalance(self.recipe.train.expert_balance, rows, counts_LE)

    def _forward(self, microbatch: Batch, packed: PackedBatch) -> ForwardOutput:
        with nullcontext() if self.router_log is None else self.router_log.recording():
            hidden_TD = self._trained_hidden(packed)
        routing = None if self.router_log is None else self.router_log.of_rows(packed.rows_T)
        logprobs_T, entropy_T = self._compute_logprobs(packed, hidden_TD)
        student_TK = None
        if microbatch.teacher_ids_NK is not None:
            ids_TK = torch.as_tensor(microbatch.teacher_ids_NK[packed.indices_T])
            student_TK = chosen_logprobs(
                hidden_TD,
                ids_TK=ids_TK.to(self.device, torch.int64),
                temperature_T=packed.temperature_T,
                **self._head_options(),
            )
        return ForwardOutput(logprobs_T, entropy_T, student_TK, routing)

    def _trained_hidden(self, packed: PackedBatch) -> Tensor:
        """The hidden states that predict the trained tokens."""
        return self.hidden(packed).index_select(0, packed.rows_T)

    def _compute_logprobs(self, packed: PackedBatch, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs, entropy) of the trained tokens."""
        targets_T, temperature_T = packed.targets_T, packed.temperature_T
        head = self._head_options()
        return token_logprobs(hidden_TD, targets_T=targets_T, temperature_T=temperature_T, **head)

    def _head_options(self) -> dict[str, Any]:
        """Arguments that all functions of models/head/logprobs.py take."""
        head = output_head(self.module)
        return {
            "head": head if self.vocabulary is None else head.first_tokens(self.vocabulary),
            "chunk": self.recipe.train.logprob_chunk_tokens,
            "batch_invariant": self.deterministic or self.batch_invariant,
        }
