"""The reference strategy: the whole model in one process, on one device.

Owns a model's module and its optimizer. Does not own the loss (given with each call), when to
step, or how a batch is cut (microbatch.py). Other strategies are tested against this one.

    Batch -> microbatches -> Pack -> hidden states -> log-probs of the counted tokens -> loss ->
    backward, per micro-batch; then step

Legend: N tokens of a batch, T those of them that count (in the loss mask, not first).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollick.algorithms.kl import k3
from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.config.schema import Recipe
from rollick.data.batch import Batch
from rollick.errors import CheckpointError, ModelError
from rollick.models.attention import VARLEN, other_layers
from rollick.models.deterministic import deterministic_threads, tile_linears
from rollick.models.head import output_head, token_logprobs
from rollick.models.load import load_config, load_model, load_tokenizer, quietly
from rollick.train.microbatch import Pack, loss_inputs, microbatches, pack
from rollick.train.optimizer import MasterAdamW
from rollick.train.strategy import LossFn, LossReport, OptimReport, WeightStream
from rollick.types import NOT_SAMPLED, BoolArray, FloatArray

TENSORS_FILE = "learner.safetensors"
COUNTERS_FILE = "learner.json"


class LocalStrategy:
    """Trains (or, not trainable, only scores) a model that fits on one device.

    `module` is public: an engine in this process shares its parameters.
    """

    def __init__(self, recipe: Recipe, *, device: str = "cpu", trainable: bool = True) -> None:
        self.recipe = recipe
        self.device = device
        self.deterministic = recipe.run.deterministic
        if self.deterministic:
            deterministic_threads(recipe.run.threads or 1)
        if kinds := other_layers(load_config(recipe.model)):
            raise ModelError(
                f"{recipe.model.path!r} has layers of kind {kinds}, which cannot keep packed "
                "sequences apart",
                fix="use a decoder with attention layers only",
            )
        self.module = load_model(recipe.model, device=device, attention=VARLEN)
        self.module.requires_grad_(trainable)
        if self.deterministic:
            tile_linears(self.module)
        self._optimizer = _optimizer_of(self.module, recipe) if trainable else None
        self._asleep: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def optimizer(self) -> MasterAdamW:
        if self._optimizer is None:
            raise ModelError(
                "this model is frozen: it gives log-probs and cannot be trained or saved",
                fix="build it with trainable=True",
            )
        return self._optimizer

    def logprobs(self, batch: Batch) -> FloatArray:
        """[N] float32: log-prob of each token in the loss mask; 0 for all others."""
        logprobs_N = np.zeros(batch.tokens, dtype=np.float32)
        offsets = batch.offsets_B1
        with torch.no_grad():
            for samples in self._microbatches(batch):
                packed = self._pack(batch.take(samples))
                logprobs_T, _ = self._forward(packed)
                tokens = np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in samples])
                logprobs_N[tokens[packed.places_T]] = logprobs_T.float().cpu().numpy()
        return logprobs_N

    def forward_backward(self, batch: Batch, loss: LossFn) -> LossReport:
        """Accumulates the gradient of sum(weights * loss) over the counted tokens."""
        optimizer = self.optimizer
        bypass = not self.recipe.objective.needs_old_logprobs
        tally = _Tally()
        for samples in self._microbatches(batch):
            part = batch.take(samples)
            packed = self._pack(part)
            logprobs_T, entropy_T = self._forward(packed)
            inputs = loss_inputs(part, packed, logprobs_T, old_is_behaviour=bypass)
            result = loss(inputs)
            total = (inputs.weights_T * result.loss_T).sum()
            total.backward()
            optimizer.accumulate()
            tally.add(result, total=total, entropy_T=entropy_T)
            tally.add_mismatch(inputs, drawn_T=part.versions_N[packed.places_T] != NOT_SAMPLED)
        return tally.report()

    def step(self) -> OptimReport:
        return self.optimizer.step()

    def weights(self) -> WeightStream:
        """The live parameters under their public names; tied ones once."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def export(self, path: Path) -> None:
        """Write a plain Hugging Face folder with the tokenizer."""
        module: Any = self.module
        tokenizer: Any = load_tokenizer(self.recipe.model)
        with quietly():
            module.save_pretrained(path)
            tokenizer.save_pretrained(path)

    def save(self, path: Path) -> None:
        """Write masters, moments, counters and the random state into the folder `path`."""
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.contiguous() for name, value in self.optimizer.tensors().items()}
        tensors |= {f"rng.{name}": state for name, state in self._random_states()}
        save_file(tensors, path / TENSORS_FILE)
        (path / COUNTERS_FILE).write_text(json.dumps({"steps": self.optimizer.steps}))

    def load(self, path: Path) -> None:
        """Take what `save` wrote; parameters are written in place."""
        try:
            saved = load_file(path / TENSORS_FILE)
            steps = int(json.loads((path / COUNTERS_FILE).read_text())["steps"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"the learner's state in {path} cannot be read: {error}",
                fix="resume from an earlier checkpoint",
            ) from error
        self.optimizer.restore(saved, steps=steps)
        torch.set_rng_state(saved["rng.cpu"])
        if self._on_gpu and "rng.cuda" in saved:
            torch.cuda.set_rng_state(saved["rng.cuda"], self.device)

    def sleep(self, *, keep_parameters: bool = False) -> None:
        """Move optimizer state and parameters off the GPU; nothing to do on a CPU.

        Only the memory goes: every tensor keeps its storage object, so what shares a parameter
        (an engine) finds it again after `wake`. `keep_parameters` lets such an engine go on.
        """
        if not self._on_gpu or self._asleep:
            return
        kept = {p.untyped_storage().data_ptr() for p in self.module.parameters()}
        for tensor in self._gpu_tensors():
            storage = tensor.untyped_storage()
            if storage.size() == 0 or (keep_parameters and storage.data_ptr() in kept):
                continue
            self._asleep.append((tensor, tensor.cpu()))
            storage.resize_(0)
        torch.cuda.empty_cache()

    def wake(self) -> None:
        for tensor, copied in self._asleep:
            tensor.untyped_storage().resize_(copied.numel() * copied.element_size())
            tensor.copy_(copied)
        self._asleep = []

    @property
    def _on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def _gpu_tensors(self) -> Iterable[torch.Tensor]:
        for parameter in self.module.parameters():
            yield parameter.detach()
        if self._optimizer is not None:
            yield from (value for value in self._optimizer.tensors().values() if value.is_cuda)

    def _random_states(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "cpu", torch.get_rng_state()
        if self._on_gpu:
            yield "cuda", torch.cuda.get_rng_state(self.device)

    def _microbatches(self, batch: Batch) -> list[list[int]]:
        tokens = self.recipe.train.tokens_per_microbatch
        return microbatches(batch, tokens=tokens, by_uid=self.deterministic)

    def _pack(self, part: Batch) -> Pack:
        return pack(part, device=self.device, deterministic=self.deterministic)

    def _forward(self, packed: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropy) of the counted tokens."""
        decoder: Any = self.module.base_model
        hidden_ND = decoder(
            input_ids=packed.token_ids_N[None],
            position_ids=packed.layout.position_ids_N[None],
            use_cache=False,
            layout=packed.layout,
        ).last_hidden_state[0]
        weight_VD, bias_V = output_head(self.module)
        return token_logprobs(
            hidden_ND.index_select(0, packed.rows_T),
            weight_VD,
            packed.targets_T,
            packed.temperature_T,
            chunk=self.recipe.train.logprob_chunk_tokens,
            tiled=self.deterministic,
            bias_V=bias_V,
        )


def _optimizer_of(module: torch.nn.Module, recipe: Recipe) -> MasterAdamW:
    train = recipe.train
    return MasterAdamW(
        module.named_parameters(),
        train.optimizer,
        schedule=train.schedule,
        total_steps=recipe.optimizer_steps,
    )


class _Tally:
    """Metrics over micro-batches. Stays on the device until `report`: one transfer a batch."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, result: TokenLoss, *, total: torch.Tensor, entropy_T: torch.Tensor) -> None:
        self.tokens += len(result.loss_T)
        self._sum("total", total)
        self._sum("loss", result.loss_T.sum())
        self._sum("entropy", entropy_T.sum())
        for name, value in result.sums.items():
            self._sum(name, value)

    @torch.no_grad()
    def add_mismatch(self, inputs: LossInputs, *, drawn_T: BoolArray) -> None:
        """How far pi is from the policy that drew the tokens; tokens that nobody drew have none."""
        if not drawn_T.any():
            return
        drawn = torch.as_tensor(drawn_T, device=inputs.logprobs_T.device)
        now_T, drawn_at_T = inputs.logprobs_T[drawn], inputs.behaviour_T[drawn]
        self._sum("mismatch_kl", k3(drawn_at_T, now_T).sum())
        moved = (now_T.exp() - drawn_at_T.exp()).abs().max()
        self.maxima["max_abs_dp"] = torch.maximum(self.maxima.get("max_abs_dp", moved), moved)

    def report(self) -> LossReport:
        sums = {name: value.item() for name, value in self.sums.items()}
        return LossReport(
            loss=sums.pop("total", 0.0),
            tokens=self.tokens,
            sums=sums,
            maxima={name: value.item() for name, value in self.maxima.items()},
        )

    def _sum(self, name: str, value: torch.Tensor) -> None:
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value
