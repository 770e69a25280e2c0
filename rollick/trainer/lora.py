"""LoRA adapters by PEFT: only the adapters are trained.

    module -> add_adapters -> the same module, whose linear layers compute W x + scale * B (A x)

Adapters have the dtype of the model; the optimizer holds their float32 masters. B starts at zero,
so the first policy equals the base model. Without its adapters, the module is the reference.
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
from rollick.models.loading.adapter import Adapter, base_parameters, is_adapter
from rollick.models.loading.load import silence_transformers
from rollick.types import stable_hash

ADAPTER_NAME = "default"
"""The name that PEFT gives to the only adapter."""


class Adapters:
    """The adapters of a module. Create them with `add_adapters`."""

    def __init__(self, wrapped: Any, layers: dict[str, Any], *, scale: float) -> None:
        """`wrapped` is PEFT's model around the module; `layers` are the layers with an adapter, by
        name."""
        self.wrapped = wrapped
        self.module: nn.Module = wrapped.get_base_model()
        self.layers = layers
        self.scale = scale

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.module.named_parameters():
            if is_adapter(name):
                yield name.replace(f".{ADAPTER_NAME}.", "."), parameter

    def live_adapters(self) -> Iterator[Adapter]:
        """The adapters of all layers, as live tensors."""
        for name, layer in self.layers.items():
            a_RI, b_OR = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
            yield Adapter(f"{name}.weight", a_RI.detach(), b_OR.detach())

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights. One with an adapter is merged when the iterator reaches it; the
        others are the live parameters."""
        adapters = {adapter.name: adapter for adapter in self.live_adapters()}
        for name, weight in self.base():
            adapter = adapters.get(name)
            yield name, weight if adapter is None else adapter.merged(weight, scale=self.scale)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the base model under public names, tied ones once."""
        seen: set[int] = set()
        for name, parameter in base_parameters(self.module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter.detach()

    @contextmanager
    def dropout(self) -> Generator[None]:
        """Enables dropout inside the context; only the training forward uses it."""
        dropouts = [layer.lora_dropout for layer in self.layers.values()]
        for dropout in dropouts:
            dropout.train()
        try:
            yield
        finally:
            for dropout in dropouts:
                dropout.eval()

    def export(self, path: Path) -> None:
        """Write a folder that PEFT can load over the model."""
        with silence_transformers():
            # With an explicit setting, PEFT does not query the hub for the vocabulary.
            self.wrapped.save_pretrained(path, save_embedding_layers=False)
        (path / "README.md").unlink(missing_ok=True)


def add_adapters(module: nn.Module, config: LoraConfig, *, seed: int) -> Adapters:
    """Add adapters to the module's layers in place; the seed determines their weights."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtra.of("peft", "lora")
    import peft

    names = _target_layers(module, config.targets)
    peft_config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        target_modules=list(config.targets) or names,
    )
    with silence_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_hash(seed, "lora"))
        model: Any = module
        # Adapters in the model's dtype: the optimizer holds the masters.
        wrapped: Any = peft.get_peft_model(model, peft_config, autocast_adapter_dtype=False)
    wrapped.eval()
    layers = {name: module.get_submodule(name) for name in names}
    return Adapters(wrapped, layers, scale=config.alpha / config.rank)


def _target_layers(module: nn.Module, targets: Sequence[str]) -> list[str]:
    """The names of the linear layers that get adapters. Excludes the head: its weight is read
    directly, so an adapter would have no effect."""
    head: Any = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    modules = module.named_modules()
    linear = {name for name, child in modules if isinstance(child, nn.Linear) and child is not head}
    matches = {t: {n for n in linear if f".{n}".endswith(f".{t}")} for t in targets}
    unmatched = [target for target, names in matches.items() if not names]
    if unmatched:
        available = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"train.lora.targets: {type(module).__name__} has no linear layer {unmatched[0]!r}",
            fix=f"use one of: {', '.join(available)}",
        )
    return sorted(set[str]().union(*matches.values()) if targets else linear)
