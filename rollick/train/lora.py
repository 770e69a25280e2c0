"""Adapters on a model, by PEFT: what is trained where all other parameters stay as they are.

Owns putting adapters into a module, switching them off (the model without them is the reference),
their dropout, and their files. Does not own how one is added to a weight (models/adapter.py).

    module -> add_adapters -> the same module, whose linear layers compute W x + scale * B (A x)

Adapters have the dtype of the model; their float32 masters are the optimizer's. B starts at zero,
so that the first policy is the model itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollick.config.schema import LoraConfig
from rollick.errors import ConfigError, MissingExtra
from rollick.models.adapter import Adapter, base_parameters, is_adapter
from rollick.models.load import quietly
from rollick.types import stable_hash

NAME = "default"
"""What PEFT calls the one adapter that a module has here."""


class Adapters:
    """The adapters of a module. Make them with `add_adapters`."""

    def __init__(self, wrapped: Any, layers: dict[str, Any], *, scale: float) -> None:
        """`wrapped` is PEFT's model around the module; `layers` those with an adapter, by name."""
        self.wrapped = wrapped
        self.layers = layers
        self.scale = scale

    @property
    def module(self) -> nn.Module:
        """The model itself, with adapters in its layers."""
        return self.wrapped.get_base_model()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained."""
        for name, parameter in self.module.named_parameters():
            if is_adapter(name):
                yield name.replace(f".{NAME}.", "."), parameter

    def each(self) -> Iterator[Adapter]:
        """Over live tensors."""
        for name, layer in self.layers.items():
            a_RI, b_OR = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            yield Adapter(f"{name}.weight", a_RI.detach(), b_OR.detach())

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the policy under public names, tied ones once: those with an adapter are
        sums, made as the stream is read; the others are the live parameters."""
        adapters = {adapter.name: adapter for adapter in self.each()}
        for name, weight in self.base():
            adapter = adapters.get(name)
            yield name, weight if adapter is None else adapter.merged(weight, scale=self.scale)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the model without adapters: those it was loaded with."""
        seen: set[int] = set()
        for name, parameter in base_parameters(self.module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter.detach()

    @contextmanager
    def disabled(self) -> Generator[None]:
        """The model without adapters, while the block runs."""
        with self.wrapped.disable_adapter():
            yield

    @contextmanager
    def dropping(self) -> Generator[None]:
        """Dropout is on while the block runs: only a gradient is to see it."""
        parts = [layer.lora_dropout for layer in self.layers.values()]
        for part in parts:
            part.train()
        try:
            yield
        finally:
            for part in parts:
                part.eval()

    def export(self, path: Path) -> None:
        """A folder that PEFT loads over the model."""
        with quietly():
            # Told that the vocabulary is the model's, PEFT does not ask the hub.
            self.wrapped.save_pretrained(path, save_embedding_layers=False)
        (path / "README.md").unlink(missing_ok=True)


def add_adapters(module: nn.Module, config: LoraConfig, *, seed: int) -> Adapters:
    """Put adapters into the module's layers, in place; they follow from the seed alone."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtra.of("peft", "lora")
    import peft

    names = _chosen_layers(module, config.targets)
    wanted = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        target_modules=list(config.targets) or names,
    )
    with quietly(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_hash(seed, "lora"))
        model: Any = module
        # Adapters in the model's dtype: their masters are the optimizer's, as all others are.
        wrapped: Any = peft.get_peft_model(model, wanted, autocast_adapter_dtype=False)
    wrapped.eval()
    layers = {name: module.get_submodule(name) for name in names}
    return Adapters(wrapped, layers, scale=config.alpha / config.rank)


def _chosen_layers(module: nn.Module, targets: Sequence[str]) -> list[str]:
    """The layers that get adapters: linear ones, and not the head, because log-probs read the
    head's weight and not its output."""
    head: Any = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    able = {
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    }
    named = {target: {name for name in able if _ends(name, target)} for target in targets}
    strangers = [target for target, names in named.items() if not names]
    if strangers:
        ends = sorted({name.rpartition(".")[2] for name in able})
        raise ConfigError(
            f"train.lora.targets: {strangers[0]!r} is no layer of {type(module).__name__} that can "
            "have an adapter",
            fix=f"these can: {', '.join(ends)}",
        )
    return sorted(set[str]().union(*named.values()) if targets else able)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
