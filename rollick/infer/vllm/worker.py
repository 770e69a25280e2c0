"""Code for vLLM's worker processes: reloads weights from a memory-mapped file.

vLLM adds WeightReloader to its worker class (the argument worker_extension_cls), so that the engine
can call its methods in every worker of a tensor-parallel group (collective_rpc). The weights have
their Hugging Face names; vLLM's own loaders shard and fuse them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from rollick.models.loading.fingerprint import fingerprint


def write_bundle(weights: Iterable[tuple[str, torch.Tensor]], path: str) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in weights}, path)


def read_bundle(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor); tensors are views of the memory-mapped file."""
    with safe_open(path, framework="pt") as bundle:
        for name in bundle.keys():  # noqa: SIM118 - not a mapping, and not iterable
            yield name, bundle.get_tensor(name)


def pack_tied_layers(model: nn.Module) -> None:
    """Repack layers that share a weight. vLLM on CPU multiplies by packed copies of weights, and
    its reload repacks only the layers named in the file; a tied head is not."""
    layers_by_storage: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
            layers_by_storage.setdefault(weight.data_ptr(), []).append(layer)
    for layers in layers_by_storage.values():
        for layer in layers if len(layers) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)


class WeightReloader:
    """Mixin for vLLM's worker. Method names have a prefix, so that they override nothing."""

    vllm_config: Any
    reload_weights: Any
    get_model: Any

    def rollick_file_fingerprint(self, path: str) -> str:
        """The fingerprint of the file as read by this worker. Does not change the model."""
        return fingerprint(read_bundle(path))

    def rollick_fingerprint(self) -> str:
        """The fingerprint of the model's parameters as vLLM keeps them."""
        return fingerprint([(n, p.detach()) for n, p in self.get_model().named_parameters()])

    def rollick_reload(self, path: str) -> None:
        """Load the file into the model in place, so that captured CUDA graphs stay valid."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.reload_weights(weights_iterator=read_bundle(path))
            pack_tied_layers(self.get_model())
