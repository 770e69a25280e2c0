"""Linear layers that are fused into one product: the same parameters and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollick.models.decoder.fused_linear import FusedLinear, fuse_linears, fuse_storage
from rollick.models.loading.load import empty_model, share_parameters
from rollick.testing.tiny import tiny_model

IDS = torch.tensor([[1, 5, 6, 7, 8]])


def _make_sharing_model(model: Any) -> Any:
    module = empty_model(model.config, attention="sdpa")
    share_parameters(module, model)
    return module


def test_fused_storage_changes_neither_values_nor_names():
    model = tiny_model(32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fuse_storage(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    attention: Any = model.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def test_siblings_with_adjacent_weights_compute_what_they_computed_alone():
    model = tiny_model(32).eval()
    fuse_storage(model)
    engine = _make_sharing_model(model)
    assert fuse_linears(engine) == 2 * len(model.model.layers)
    with torch.no_grad():
        torch.testing.assert_close(engine(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_writes_the_owners_parameters_writes_the_product():
    model = tiny_model(32)
    fuse_storage(model)
    engine = _make_sharing_model(model)
    fuse_linears(engine)
    with torch.no_grad():
        before = engine(IDS).logits
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS).logits.square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        after = engine(IDS).logits
        assert (after - before).abs().max() > 0.01
        torch.testing.assert_close(after, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_weights_that_are_not_adjacent_are_not_fused():
    model = tiny_model(32).eval()
    engine = _make_sharing_model(model)
    assert fuse_linears(engine) == 0
    assert type(engine.model.layers[0].self_attn.q_proj) is nn.Linear


def test_weights_that_were_separated_are_computed_alone_again():
    model = tiny_model(32).eval()
    fuse_storage(model)
    fuse_linears(model)
    attention: Any = model.model.layers[0].self_attn
    assert type(attention.q_proj) is FusedLinear
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()
    assert fuse_linears(model) == 2 * len(model.model.layers) - 1
    assert type(attention.q_proj) is nn.Linear


def test_layers_of_different_inputs_are_no_siblings():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(4, 8)
            self.up_proj = nn.Linear(6, 8)

    odd = Odd()
    fuse_storage(odd)
    assert fuse_linears(odd) == 0


def test_biases_are_fused_too():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(4, 8)
            self.up_proj = nn.Linear(4, 3)

    block, row = Block(), torch.randn(2, 4)
    expected = block.gate_proj(row), block.up_proj(row)
    fuse_storage(block)
    assert fuse_linears(block) == 1
    torch.testing.assert_close(block.gate_proj(row), expected[0])
    torch.testing.assert_close(block.up_proj(row), expected[1])
    # In the other order, and one layer twice.
    torch.testing.assert_close(block.up_proj(row), expected[1])
    torch.testing.assert_close(block.up_proj(row), expected[1])
    torch.testing.assert_close(block.gate_proj(row), expected[0])


def test_one_compilation_serves_all_layers_and_a_second_all_numbers_of_tokens():
    from torch._dynamo.testing import CompileCounter

    from rollick.models.attention.paged import PAGE, PagedDecode, attach_cache, use_step
    from rollick.models.attention.slot_cache import CACHED

    torch._dynamo.reset()
    model = tiny_model(32, layers=3).eval()
    fuse_storage(model)
    module: Any = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    fuse_linears(module)
    caches = torch.zeros(3, 2, 8, 2, PAGE, 16)
    attach_cache(module, [(cache[0], cache[1]) for cache in caches])
    counter = CompileCounter()
    for layer in module.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    compiled: list[int] = []
    for rows in (4, 6, 3, 9):
        table = torch.ones(rows, 2, dtype=torch.int32)
        step = PagedDecode(table, torch.full((rows,), 3), kernels=False)
        ids, positions = torch.ones(1, rows, dtype=torch.int64), torch.full((1, rows), 2)
        with torch.no_grad(), use_step(step):
            module.model(input_ids=ids, position_ids=positions, use_cache=False)
        compiled.append(counter.frame_count)
    torch._dynamo.reset()
    assert compiled == [1, 2, 2, 2]


def test_a_fused_model_is_saved_and_loaded_like_any_other(tmp_path: Path):
    model = tiny_model(32)
    fuse_storage(model)
    model.save_pretrained(tmp_path)
    loaded: Any = type(model).from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
