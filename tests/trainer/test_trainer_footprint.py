"""The predicted memory of activations, compared with the tensors that a forward keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollick.models.loading.shape import ModelShape
from rollick.testing.batches import random_batch, recipe_of
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.trainer.memory_estimate import activations_per_token


def measure_bytes_per_token(strategy: LocalStrategy) -> float:
    """Bytes per token that a forward keeps for its backward, without parameters."""
    batch, kept = random_batch([64] * 4), dict[int, torch.Tensor]()
    parameters = {p.untyped_storage().data_ptr() for p in strategy.module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = strategy.hidden(strategy.pack(batch))
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / batch.tokens


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_a_forward_keeps_about_the_predicted_memory(
    tmp_path: Path, dtype: str, itemsize: int, lora: dict[str, int] | None
) -> None:
    folder = save_tiny(tmp_path, hidden=128, heads=8, kv_heads=2)
    shape = ModelShape.read(str(folder))
    assert shape is not None
    model, train = {"path": str(folder), "dtype": dtype}, {"lora": lora, "share_prefix": False}
    measured = measure_bytes_per_token(LocalStrategy(recipe_of(folder, model=model, train=train)))
    predicted = activations_per_token(shape, itemsize=itemsize, uses_model_forward=lora is not None)
    assert 0.9 < measured / predicted < 1.1
