"""What runs inside vLLM's worker processes: new weights, from a file that all of them map.

vLLM makes this class a base of its worker (its setting worker_extension_cls), so that the engine
can call the methods in every worker of a tensor-parallel group (collective_rpc). The weights come
under their public names; vLLM's own loaders cut and fuse them.

    VllmEngine: write_bundle --file--> verify, in each worker --> take, in each worker
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from rollick.models.fingerprint import fingerprint


def write_bundle(weights: Iterable[tuple[str, torch.Tensor]], path: str) -> None:
    """One safetensors file of all weights."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in weights}, path)


def read_bundle(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as views of the mapped file."""
    with safe_open(path, framework="pt") as bundle:
        for name in bundle.keys():  # noqa: SIM118 - it is no mapping, and has no iterator
            yield name, bundle.get_tensor(name)


def pack_tied_layers(model: nn.Module) -> None:
    """Bring the packed copies of tied weights up to date.

    On the CPU vLLM multiplies by a packed copy of each weight. Its reload packs the layers that the
    weights name; a head that is tied to the embedding is named by none, and would stay as it was.
    """
    users: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
            users.setdefault(weight.data_ptr(), []).append(layer)
    for layers in users.values():
        for layer in layers if len(layers) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)


class WeightReceiver:
    """Methods that vLLM's worker gains. Their names must not be taken there."""

    vllm_config: Any
    reload_weights: Any
    get_model: Any

    def rollick_verify(self, path: str) -> str:
        """The fingerprint of the bytes that this worker sees. Changes nothing."""
        return fingerprint(read_bundle(path))

    def rollick_take(self, path: str) -> None:
        """Write the weights over the model's, in place: captured graphs stay valid."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.reload_weights(weights_iterator=read_bundle(path))
            pack_tied_layers(self.get_model())
