"""The base class of trainers on one device; local.py, critic.py and reward_model.py add heads and
losses.

It owns the parameters and the optimizer (none if the model is frozen), and saves and offloads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from rollick.algorithms.objective import Loss
from rollick.config.schema import ModelConfig, Recipe
from rollick.data.batch import Batch
from rollick.errors import CheckpointError, ModelError, open_files_exhausted
from rollick.models.attention.varlen import VARLEN, unsupported_layer_types
from rollick.models.decoder.batch_invariant import tile_linears, use_batch_invariant_kernels
from rollick.models.decoder.training import hidden_states, prepare_decoder, run_decoder
from rollick.models.loading.load import inherit_permissions, load_config, load_model
from rollick.models.loading.probe import check_learner
from rollick.models.loading.rope import check_lengths, fix_rope
from rollick.trainer.microbatch import PackedBatch, microbatches, pack
from rollick.trainer.offload import OffloadedTensors
from rollick.trainer.optimizer import MasterAdamW, TotalNorm, check_gradient_dtype
from rollick.trainer.snapshot import SnapshotMemory, load_tensors
from rollick.trainer.strategy import LossReport, OptimReport, TrainState


def load_packed_model(model: ModelConfig, *, device: str, max_length: int) -> nn.Module:
    """Load a model with attention over packed sequences of up to `max_length` tokens. Raises if its
    results would differ from the model's own forward."""
    check_packable(model)
    module = load_model(model, device=device, attention=VARLEN)
    fix_rope(module, max_length)
    check_learner(module, max_length=max_length)
    return module


def check_packable(model: ModelConfig) -> None:
    """Raises if a layer would mix the sequences of a pack."""
    if types := unsupported_layer_types(load_config(model)):
        raise ModelError(
            f"{model.path!r} has layers of type {types}, which would mix packed sequences",
            fix="use a decoder with attention layers only",
        )


def policy_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    total_norm: TotalNorm | None = None,
    *,
    recipe: Recipe,
) -> MasterAdamW:
    train = recipe.train
    return MasterAdamW(
        parameters,
        train.optimizer,
        peak_lr=train.peak_lr,
        schedule=train.schedule,
        total_steps=recipe.optimizer_steps,
        total_norm=total_norm,
    )


class TrainableModel:
    """A module with its optimizer, its files and its offloading. The base class of all trainers
    except fsdp.py.

    `name` is the name of its files. `module.base_model` computes the hidden states.
    `batch_invariant`: on a GPU, use the engine's kernels of zero-mismatch mode. `keep_groups`:
    never divide a group between micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        *,
        device: str,
        optimizer: MasterAdamW | None,
        name: str,
        batch_invariant: bool = False,
        keep_groups: bool = False,
    ) -> None:
        self.module = module
        self.recipe = recipe
        self.decoder: Any = module.base_model
        self.device = device
        self.name = name
        self.deterministic = recipe.run.deterministic
        self.batch_invariant = batch_invariant and self.on_gpu
        self._keep_groups = keep_groups or recipe.compares_pairs
        self._optimizer = optimizer
        self._offloaded = OffloadedTensors()
        # With adapters, the optimizer has only their parameters.
        module.requires_grad_(False)
        for parameter in () if optimizer is None else optimizer.parameters.values():
            parameter.requires_grad_(True)
        if self.deterministic:
            # With several threads, a row's bits depend on the batch: element-wise kernels divide
            # the work by its size.
            torch.set_num_threads(recipe.run.threads or 1)
            tile_linears(module)
        elif self.batch_invariant:
            use_batch_invariant_kernels(module)
        else:
            prepare_decoder(self.decoder)

    @property
    def optimizer(self) -> MasterAdamW:
        if self._optimizer is None:
            raise ModelError(
                "this model is frozen: it has no optimizer and cannot be trained or saved",
                fix="build it with trainable=True",
            )
        return self._optimizer

    def check_gradient(self) -> None:
        check_gradient_dtype(next(self.decoder.parameters()).dtype)

    def microbatches(self, batch: Batch) -> list[list[int]]:
        train = self.recipe.train
        return microbatches(
            batch,
            tokens=train.tokens_per_microbatch,
            by_uid=self.deterministic,
            share_prefix=train.share_prefix,
            keep_groups=self._keep_groups,
        )

    def pack(self, microbatch: Batch) -> PackedBatch:
        check_lengths(self.module, microbatch.lengths_B.tolist())
        return pack(
            microbatch,
            device=self.device,
            deterministic=self.deterministic,
            share_prefix=self.recipe.train.share_prefix,
            batch_invariant=self.batch_invariant,
        )

    def packed_batches(self, batch: Batch) -> Iterator[tuple[list[int], Batch, PackedBatch]]:
        """(indices of the samples, samples, packed inputs) of each micro-batch."""
        for samples in self.microbatches(batch):
            microbatch = batch.take(samples)
            yield samples, microbatch, self.pack(microbatch)

    def accumulate_gradients(
        self, batch: Batch, loss: Callable[[Batch, PackedBatch], tuple[Loss, int]]
    ) -> LossReport:
        """Forward and backward of each micro-batch; `loss` returns its loss and the number of
        tokens that the report counts."""
        self.check_gradient()
        accumulator = LossAccumulator()
        for _, microbatch, packed in self.packed_batches(batch):
            result, tokens = loss(microbatch, packed)
            result.total.backward()
            self.optimizer.accumulate()
            accumulator.add(result.total, result.sums, tokens=tokens)
        return accumulator.report()

    def hidden(self, packed: PackedBatch) -> Tensor:
        """The hidden state of every row of the pack, [N, D]."""
        # In float64, the norms of the modules round to float32; tests compare with the modules.
        is_float64 = next(self.decoder.parameters()).dtype is torch.float64
        if not (self.deterministic or self.batch_invariant or is_float64):
            # A faster forward, for supported decoders (models/decoder/training.py).
            hidden_ND = hidden_states(self.decoder, packed.token_ids_N, packed.layout)
            if hidden_ND is not None:
                return hidden_ND
        return run_decoder(self.decoder, packed.token_ids_N, packed.layout)

    def step(self) -> OptimReport:
        return self.optimizer.step()

    def state(self) -> TrainState:
        """Masters and moments. Can be called while asleep."""
        current = self.optimizer.tensors() | self._offloaded.copies
        tensors = {name: current[name] for name in self.optimizer.tensors()}
        return TrainState(tensors, self.optimizer.steps)

    def restore(self, state: TrainState) -> None:
        """Load a state; parameters are updated in place."""
        self.wake()
        self.optimizer.restore(state.tensors, steps=state.steps)

    def save(self, path: Path) -> None:
        """Write `state` into the folder."""
        path.mkdir(parents=True, exist_ok=True)
        state = self.state()
        tensors = {name: tensor.contiguous() for name, tensor in state.tensors.items()}
        save_file(tensors, path / tensors_file(self.name))
        inherit_permissions(path)
        write_counters(path, self.name, steps=state.steps)

    def load(self, path: Path) -> None:
        try:
            saved = load_tensors(path / tensors_file(self.name))
            steps = int(json.loads((path / f"{self.name}.json").read_text())["steps"])
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise open_files_exhausted(error) or CheckpointError(
                f"the {self.name}'s state in {path} cannot be read: {error}",
                fix="resume from an earlier checkpoint",
            ) from error
        self.restore(TrainState(saved, steps))

    def sleep(self, *, keep_parameters: bool = False) -> None:
        """Move optimizer state, gradients and parameters off the GPU.

        `keep_parameters` leaves the parameters in place, for an engine that shares them and graphs
        captured over their addresses.
        """
        if not self.on_gpu or self._offloaded:
            return
        named = self.module.named_parameters()
        parameters = {f"parameter.{name}": value.detach() for name, value in named}
        state: dict[str, Tensor] = {}
        if self._optimizer is not None:
            state = self._optimizer.tensors() | self._optimizer.gradients()
        moved = {name: value for name, value in state.items() if value.is_cuda}
        kept = parameters.values() if keep_parameters else ()
        # State first: a parameter that is its own master is stored under the master's name.
        self._offloaded.move_to_host(moved | parameters, keep=kept)
        torch.cuda.empty_cache()

    def wake(self) -> None:
        self._offloaded.restore_from_host()

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def tensors_file(name: str) -> str:
    """The file of a trained model's tensors in the folder of its checkpoint."""
    return f"{name}.safetensors"


def write_counters(path: Path, name: str, *, steps: int) -> None:
    (path / f"{name}.json").write_text(json.dumps({"steps": steps}))


def save_snapshot(path: Path, name: str, memory: SnapshotMemory, *, steps: int) -> None:
    """Write a snapshot as `TrainableModel.save` writes the state itself."""
    path.mkdir(parents=True, exist_ok=True)
    memory.copy_to(path / tensors_file(name))
    inherit_permissions(path)
    write_counters(path, name, steps=steps)


def token_indices(batch: Batch, samples: Sequence[int]) -> npt.NDArray[np.int64]:
    """Indices in the batch of the tokens of these samples, in the order of the samples."""
    offsets = batch.offsets_B1
    return np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in samples])


class LossAccumulator:
    """Sums metrics over micro-batches, on the device: `report` makes one transfer."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, total: Tensor, sums: Mapping[str, Tensor], *, tokens: int) -> None:
        self.tokens += tokens
        for name, value in {"total": total, **sums}.items():
            self.add_sum(name, value)

    def add_sum(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_maximum(self, name: str, value: Tensor) -> None:
        self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def report(self) -> LossReport:
        sums = {name: value.item() for name, value in self.sums.items()}
        return LossReport(
            loss=sums.pop("total", 0.0),
            tokens=self.tokens,
            sums=sums,
            maxima={name: value.item() for name, value in self.maxima.items()},
        )
