"""The reference strategy: the whole model in one process, on one device.

Owns the language-model head of a body (body.py): log-probs of tokens, and the gradient of a loss
over them, for all parameters or for adapters (lora.py). Does not own the loss (given with each
call), when to step, or how a batch is cut (microbatch.py). Other strategies are tested against
this one.

    Batch -> microbatches -> Pack -> hidden states -> log-probs of the counted tokens -> loss ->
    backward, per micro-batch; then step

Legend: N tokens of a batch, T those of them that count (in the loss mask, not first), K likeliest
tokens of a position.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rollick.algorithms.kl import k3
from rollick.algorithms.losses import LossInputs
from rollick.config.schema import ModelConfig, Recipe
from rollick.data.batch import Batch, TopTokens
from rollick.errors import ConfigError
from rollick.models.attention import VARLEN
from rollick.models.head import chosen_logprobs, output_head, token_logprobs, top_logprobs
from rollick.models.load import empty_model, fill_parameters, load_tokenizer, quietly
from rollick.train.body import Body, Tally, load_packed_model, token_places
from rollick.train.lora import Adapters, add_adapters
from rollick.train.microbatch import Pack, counted_tokens, loss_inputs
from rollick.train.optimizer import MasterAdamW
from rollick.train.routing import RouterLog, Routing, balance_loss
from rollick.train.strategy import LossFn, LossReport, OptimReport, WeightStream
from rollick.types import NOT_SAMPLED, BoolArray, FloatArray


class LocalStrategy:
    """Trains (or, not trainable, only scores) a model that fits on one device.

    `model` is another one than the policy's (a teacher); `vocabulary` takes only that many of its
    first tokens for possible ones.
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
        self.recipe = recipe
        self.model = model or recipe.model
        self.vocabulary = vocabulary
        module: Any = load_packed_model(self.model, device=device)
        self.adapters: Adapters | None = None
        if trainable and recipe.train.lora is not None:
            self.adapters = add_adapters(module, recipe.train.lora, seed=recipe.run.seed)
        trained = module.named_parameters() if self.adapters is None else self.adapters.parameters()
        self.body = Body(
            module,
            recipe,
            decoder=module.base_model,
            device=device,
            optimizer=_optimizer_of(trained, recipe) if trainable else None,
            name="learner",
            fixed=recipe.infer.zero_mismatch,
        )
        balances = trainable and recipe.train.expert_balance > 0
        self.log = RouterLog(module) if balances else None

    @property
    def module(self) -> nn.Module:
        """Public: an engine in this process shares its parameters, but for those that an adapter
        is added to."""
        return self.body.module

    @property
    def optimizer(self) -> MasterAdamW:
        return self.body.optimizer

    def logprobs(self, batch: Batch) -> FloatArray:
        """[N] float32: log-prob of each token in the loss mask; 0 for all others."""
        logprobs_N = np.zeros(batch.tokens, dtype=np.float32)
        with torch.no_grad():
            for samples in self._microbatches(batch):
                packed = self._pack(batch.take(samples))
                logprobs_T, _ = self._logprobs(packed, self._hidden(packed))
                places_T = token_places(batch, samples)[packed.places_T]
                logprobs_N[places_T] = logprobs_T.float().cpu().numpy()
        return logprobs_N

    def reference_logprobs(self, batch: Batch) -> FloatArray:
        """The same of the model without its adapters, which is the one that the run began with."""
        if self.adapters is None:
            raise ConfigError(
                "a policy without adapters does not know the model that it began with",
                fix="give the reference a model of its own, or set train.lora",
            )
        with self.adapters.disabled():
            return self.logprobs(batch)

    def top_logprobs(self, batch: Batch, *, k: int) -> TopTokens:
        """The k likeliest tokens at each position in the loss mask; 0 elsewhere."""
        ids_NK = np.zeros((batch.tokens, k), dtype=np.int32)
        logprobs_NK = np.zeros((batch.tokens, k), dtype=np.float32)
        with torch.no_grad():
            for samples in self._microbatches(batch):
                packed = self._pack(batch.take(samples))
                ids_TK, top_TK = top_logprobs(
                    self._hidden(packed),
                    temperature_T=packed.temperature_T,
                    k=k,
                    **self._head(),
                )
                places_T = token_places(batch, samples)[packed.places_T]
                ids_NK[places_T] = ids_TK.cpu().numpy()
                logprobs_NK[places_T] = top_TK.float().cpu().numpy()
        return TopTokens(ids_NK, logprobs_NK)

    def forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        """Accumulates the gradient of the loss over the counted tokens."""
        with nullcontext() if self.adapters is None else self.adapters.dropping():
            return self._forward_backward(batch, loss)

    def _forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        optimizer = self.optimizer
        tally = Tally()
        parts = self._microbatches(batch)
        counts_LE = self._expert_counts(batch, parts)
        for samples in parts:
            part = batch.take(samples)
            packed = self._pack(part)
            hidden_TD, routing = self._routed(packed)
            logprobs_T, entropy_T = self._logprobs(packed, hidden_TD)
            inputs = loss_inputs(
                part,
                packed,
                logprobs_T,
                entropy_T=None if part.entropy_weights_N is None else entropy_T,
                student_TK=self._student(part, packed, hidden_TD),
            )
            result = loss(inputs)
            total = result.total
            if routing is not None:
                counts = routing.counts_LE if counts_LE is None else counts_LE
                total = total + self._balance(routing, counts, batch, tally)
            total.backward()
            optimizer.accumulate()
            sums = {**result.sums, "entropy": entropy_T.detach().sum()}
            tally.add(result.total, sums, tokens=len(logprobs_T))
            add_mismatch(tally, inputs, part.versions_N[packed.places_T] != NOT_SAMPLED)
        return tally.report()

    def step(self) -> OptimReport:
        return self.optimizer.step()

    def weights(self) -> WeightStream:
        """The live parameters under their public names; tied ones once. A weight that has an
        adapter comes as the sum of both, which is not live."""
        if self.adapters is not None:
            yield from self.adapters.merged()
            return
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def export(self, path: Path) -> None:
        """Write a plain Hugging Face folder with the tokenizer; adapters are added to their
        weights."""
        module: Any = self.module
        if self.adapters is not None:
            module = empty_model(module.config, attention=VARLEN)
            fill_parameters(module, dict(self.adapters.merged()))
        tokenizer: Any = load_tokenizer(self.model)
        with quietly():
            module.save_pretrained(path)
            tokenizer.save_pretrained(path)

    def export_adapter(self, path: Path) -> None:
        """Write the adapters alone, as PEFT loads them over the model, with the tokenizer."""
        if self.adapters is None:
            raise ConfigError(
                "there is no adapter to write: the run trained all parameters",
                fix="export the whole model, or train with train.lora",
            )
        self.adapters.export(path)
        load_tokenizer(self.model).save_pretrained(path)

    def save(self, path: Path) -> None:
        """Write the body's state and the random state of the process into the folder `path`."""
        random = {"rng.cpu": torch.get_rng_state()}
        if self.body.on_gpu:
            random["rng.cuda"] = torch.cuda.get_rng_state(self.body.device)
        self.body.save(path, besides=random)

    def load(self, path: Path) -> None:
        """Take what `save` wrote; parameters are written in place."""
        saved = self.body.load(path)
        torch.set_rng_state(saved["rng.cpu"])
        if self.body.on_gpu and "rng.cuda" in saved:
            torch.cuda.set_rng_state(saved["rng.cuda"], self.body.device)

    def sleep(self, *, keep_parameters: bool = False) -> None:
        self.body.sleep(keep_parameters=keep_parameters)

    def wake(self) -> None:
        self.body.wake()

    def _expert_counts(self, batch: Batch, parts: list[list[int]]) -> torch.Tensor | None:
        """How often each expert is chosen in the whole batch; None if the one micro-batch of it
        will tell, or nobody asks."""
        if self.log is None or len(parts) < 2:
            return None
        counts: list[torch.Tensor] = []
        with torch.no_grad():
            for samples in parts:
                _, routing = self._routed(self._pack(batch.take(samples)))
                counts += [routing.counts_LE] if routing else []
        return torch.stack(counts).sum(0)

    def _balance(
        self, routing: Routing, counts_LE: torch.Tensor, batch: Batch, tally: Tally
    ) -> torch.Tensor:
        """What a micro-batch adds to the loss of the experts' load."""
        coefficient, rows = self.recipe.train.expert_balance, len(counted_tokens(batch)[0])
        balance = balance_loss(routing, counts_LE=counts_LE, rows=rows)
        tally.add_balance(balance, coefficient=coefficient, tokens=rows)
        return coefficient * balance

    def _routed(self, packed: Pack) -> tuple[torch.Tensor, Routing | None]:
        """The hidden states that predict the counted tokens, and what the routers said of them
        where the recipe balances experts."""
        if self.log is None:
            return self._hidden(packed), None
        with self.log.recording():
            hidden_TD = self._hidden(packed)
        return hidden_TD, self.log.of_rows(packed.rows_T)

    def _microbatches(self, batch: Batch) -> list[list[int]]:
        return self.body.microbatches(batch)

    def _pack(self, part: Batch) -> Pack:
        return self.body.pack(part)

    def _hidden(self, packed: Pack) -> torch.Tensor:
        """The hidden states that predict the counted tokens."""
        return self.body.hidden(packed).index_select(0, packed.rows_T)

    def _logprobs(self, packed: Pack, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropy) of the counted tokens."""
        return token_logprobs(
            hidden_TD,
            targets_T=packed.targets_T,
            temperature_T=packed.temperature_T,
            **self._head(),
        )

    def _student(self, part: Batch, packed: Pack, hidden_TD: torch.Tensor) -> torch.Tensor | None:
        """Log-probs of the teacher's likeliest tokens, where the batch names them."""
        if part.teacher_ids_NK is None:
            return None
        ids_TK = torch.as_tensor(part.teacher_ids_NK[packed.places_T])
        return chosen_logprobs(
            hidden_TD,
            ids_TK=ids_TK.to(self.body.device, torch.int64),
            temperature_T=packed.temperature_T,
            **self._head(),
        )

    def _head(self) -> dict[str, Any]:
        """What every function of models/head.py takes besides the rows."""
        weight_VD, bias_V = output_head(self.module)
        if self.vocabulary is not None:
            weight_VD = weight_VD[: self.vocabulary]
            bias_V = None if bias_V is None else bias_V[: self.vocabulary]
        return {
            "weight_VD": weight_VD,
            "bias_V": bias_V,
            "chunk": self.recipe.train.logprob_chunk_tokens,
            "tiled": self.body.deterministic or self.body.fixed,
        }


def _optimizer_of(trained: Iterable[tuple[str, nn.Parameter]], recipe: Recipe) -> MasterAdamW:
    train = recipe.train
    return MasterAdamW(
        trained,
        train.optimizer,
        schedule=train.schedule,
        total_steps=recipe.optimizer_steps,
    )


@torch.no_grad()
def add_mismatch(tally: Tally, inputs: LossInputs, drawn_T: BoolArray) -> None:
    """How far pi is from the policy that drew the tokens; tokens that nobody drew have none."""
    if not drawn_T.any():
        return
    drawn = torch.as_tensor(drawn_T, device=inputs.logprobs_T.device)
    now_T, drawn_at_T = inputs.logprobs_T[drawn], inputs.behaviour_T[drawn]
    tally.add_sum("mismatch_kl", k3(drawn_at_T, now_T).sum())
    tally.add_maximum("max_abs_dp", (now_T.exp() - drawn_at_T.exp()).abs().max())
