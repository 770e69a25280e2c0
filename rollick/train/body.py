"""A module on one device and what every trainer does with it, whatever it is trained for.

Owns the parameters, the optimizer (none of a frozen model), their files, and their memory on a
GPU. Does not know of heads, losses and log-probs: local.py and critic.py build on it.

    Batch -> microbatches -> pack -> hidden states        (what is done with them: not here)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from rollick.config.schema import ModelConfig, Recipe
from rollick.data.batch import Batch
from rollick.errors import CheckpointError, ModelError
from rollick.models.attention import VARLEN, other_layers
from rollick.models.deterministic import deterministic_threads, tile_linears
from rollick.models.fixed import fix_arithmetic
from rollick.models.load import load_config, load_model
from rollick.models.plain_training import plain_hidden, prepare_plain
from rollick.train.memory import Parked
from rollick.train.microbatch import Pack, microbatches, pack
from rollick.train.optimizer import MasterAdamW
from rollick.train.strategy import LossReport


def load_packed_model(model: ModelConfig, *, device: str) -> nn.Module:
    """The model with attention over packs; refused if its layers cannot keep sequences apart."""
    refuse_unpackable(model)
    return load_model(model, device=device, attention=VARLEN)


def refuse_unpackable(model: ModelConfig) -> None:
    """An error if a layer of the model would mix the sequences of a pack."""
    if kinds := other_layers(load_config(model)):
        raise ModelError(
            f"{model.path!r} has layers of kind {kinds}, which cannot keep packed sequences apart",
            fix="use a decoder with attention layers only",
        )


class Body:
    """A module, its optimizer, its files and its sleep. `name` is that of its files.

    `decoder` is the part of the module that makes hidden states.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        *,
        decoder: Any,
        device: str,
        optimizer: MasterAdamW | None,
        name: str,
        fixed: bool = False,
    ) -> None:
        """`fixed` makes the forward that of an engine in zero-mismatch mode, on a GPU."""
        self.module = module
        self.recipe = recipe
        self.decoder = decoder
        self.device = device
        self.name = name
        self.deterministic = recipe.run.deterministic
        self.fixed = fixed and device.startswith("cuda")
        self._optimizer = optimizer
        self._parked = Parked()
        # Adapters are trained in a model that is not.
        module.requires_grad_(False)
        for parameter in () if optimizer is None else optimizer.parameters.values():
            parameter.requires_grad_(True)
        if self.deterministic:
            deterministic_threads(recipe.run.threads or 1)
            tile_linears(module)
        elif self.fixed:
            fix_arithmetic(module)
        else:
            prepare_plain(decoder)

    @property
    def optimizer(self) -> MasterAdamW:
        if self._optimizer is None:
            raise ModelError(
                "this model is frozen: it gives log-probs and cannot be trained or saved",
                fix="build it with trainable=True",
            )
        return self._optimizer

    def microbatches(self, batch: Batch) -> list[list[int]]:
        """The samples of each micro-batch."""
        train = self.recipe.train
        return microbatches(
            batch,
            tokens=train.tokens_per_microbatch,
            by_uid=self.deterministic,
            share_prefix=train.share_prefix,
            keep_groups=self.recipe.compares_pairs,
        )

    def pack(self, part: Batch) -> Pack:
        """A micro-batch as the model takes it."""
        return pack(
            part,
            device=self.device,
            deterministic=self.deterministic,
            share_prefix=self.recipe.train.share_prefix,
            fixed=self.fixed,
        )

    def hidden(self, packed: Pack) -> torch.Tensor:
        """The hidden state of every row of the pack, [N, D]."""
        plain_ND = self._plain_hidden(packed)
        if plain_ND is not None:
            return plain_ND
        return self.decoder(
            input_ids=packed.token_ids_N[None],
            position_ids=packed.layout.position_ids_N[None],
            use_cache=False,
            layout=packed.layout,
        ).last_hidden_state[0]

    def _plain_hidden(self, packed: Pack) -> torch.Tensor | None:
        """Without the decoder's modules, where that computes the same faster."""
        is_exact = next(self.decoder.parameters()).dtype is torch.float64
        # In float64 the modules' norms go through float32: whoever asks for it compares with them.
        if self.deterministic or self.fixed or is_exact:
            return None
        return plain_hidden(self.decoder, packed.token_ids_N, packed.layout)

    def save(self, path: Path, *, besides: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write masters, moments, counters and what is given besides into the folder `path`.

        Asleep or awake: what sleeps is written from where it is kept.
        """
        path.mkdir(parents=True, exist_ok=True)
        held = self.optimizer.tensors() | self._parked.copies
        tensors = {name: held[name].contiguous() for name in self.optimizer.tensors()}
        save_file(tensors | dict(besides or {}), path / f"{self.name}.safetensors")
        (path / f"{self.name}.json").write_text(json.dumps({"steps": self.optimizer.steps}))

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """Take what `save` wrote; parameters are written in place. Returns all that was saved."""
        try:
            saved = load_file(path / f"{self.name}.safetensors")
            steps = int(json.loads((path / f"{self.name}.json").read_text())["steps"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"the {self.name}'s state in {path} cannot be read: {error}",
                fix="resume from an earlier checkpoint",
            ) from error
        self.wake()
        self.optimizer.restore(saved, steps=steps)
        return saved

    def sleep(self, *, keep_parameters: bool = False) -> None:
        """Move optimizer state, gradients and parameters off the GPU; nothing to do on a CPU.

        `keep_parameters` leaves these where they are, so that an engine that shares them goes on,
        and so do graphs that were captured over their addresses.
        """
        if not self.on_gpu or self._parked:
            return
        parameters = {
            f"parameter.{name}": value.detach() for name, value in self.module.named_parameters()
        }
        state: dict[str, torch.Tensor] = {}
        if self._optimizer is not None:
            state = self._optimizer.tensors() | self._optimizer.gradients()
        moved = {name: value for name, value in state.items() if value.is_cuda}
        # State first: a parameter that is its own master is then kept by the master's name.
        self._parked.park(
            moved | parameters, staying=parameters.values() if keep_parameters else ()
        )
        torch.cuda.empty_cache()

    def wake(self) -> None:
        self._parked.bring_back()

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def token_places(batch: Batch, samples: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where the tokens of these samples are in the batch, in the order of the samples."""
    offsets = batch.offsets_B1
    return np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in samples])


class Tally:
    """Metrics over micro-batches. Stays on the device until `report`: one transfer a batch."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add(self, total: torch.Tensor, sums: Mapping[str, torch.Tensor], *, tokens: int) -> None:
        """The loss of a micro-batch, its metric sums and its trained tokens."""
        self.tokens += tokens
        for name, value in {"total": total, **sums}.items():
            self.add_sum(name, value)

    def add_sum(self, name: str, value: torch.Tensor) -> None:
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_balance(self, value: torch.Tensor, *, coefficient: float, tokens: int) -> None:
        """What a micro-batch adds to the loss of the experts' load, before its coefficient.

        It is a part of the loss, and its mean over all `tokens` of the batch is what is shown.
        """
        self.add_sum("total", coefficient * value)
        self.add_sum("expert_balance", value * tokens)

    def add_maximum(self, name: str, value: torch.Tensor) -> None:
        self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def report(self) -> LossReport:
        sums = {name: value.item() for name, value in self.sums.items()}
        return LossReport(
            loss=sums.pop("total", 0.0),
            tokens=self.tokens,
            sums=sums,
            maxima={name: value.item() for name, value in self.maxima.items()},
        )
