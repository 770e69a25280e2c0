"""Linear layers with packed weights equal nn.Linear and follow changes of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rollick.errors import EngineCorrupt
from rollick.infer.native.packed_linear import (
    PackedHead,
    can_pack,
    check_copies,
    drop_packed,
    pack_linears,
    packed_bytes,
)
from rollick.models.decoder.fused_linear import FusedLinear
from rollick.models.head.logprobs import OutputHead
from rollick.testing.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    not can_pack(nn.Linear(2, 2)), reason="torch is built without oneDNN"
)


def _make_block(*, bias: bool) -> Any:
    torch.manual_seed(0)
    block: Any = nn.Module()
    block.q_proj, block.k_proj, block.v_proj, block.o_proj = (
        nn.Linear(24, width, bias=bias) for width in (32, 16, 16, 8)
    )
    block.get_output_embeddings = lambda: None
    return block


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_packed_layers_compute_the_outputs_of_unpacked_ones(bias):
    block = _make_block(bias=bias)
    layers = [block.q_proj, block.k_proj, block.v_proj, block.o_proj]
    input = torch.randn(5, 3, 24)
    expected = [layer(input) for layer in layers]
    pack_linears(block)
    assert all(type(layer) is FusedLinear for layer in layers)
    for layer, output in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer(input), output)


@torch.inference_mode()
def test_fused_siblings_may_be_called_in_any_order_and_with_different_inputs():
    block = _make_block(bias=True)
    first, second = torch.randn(4, 24), torch.randn(4, 24)
    expected = {id(x): block.k_proj(x) for x in (first, second)}
    pack_linears(block)
    block.q_proj(first)
    torch.testing.assert_close(block.k_proj(second), expected[id(second)])
    torch.testing.assert_close(block.k_proj(first), expected[id(first)])
    torch.testing.assert_close(block.k_proj(first), expected[id(first)])


@torch.inference_mode()
def test_weights_are_packed_again_only_after_a_drop():
    block = _make_block(bias=False)
    packed = pack_linears(block)
    input = torch.randn(2, 24)
    before = block.o_proj(input)
    assert [weights.packed is not None for _, weights in packed].count(True) == 1
    block.o_proj.weight.mul_(2)
    torch.testing.assert_close(block.o_proj(input), before)
    drop_packed(packed)
    assert all(weights.packed is None for _, weights in packed)
    torch.testing.assert_close(block.o_proj(input), 2 * before)


@pytest.mark.parametrize("part", ["weight", "bias"])
@torch.inference_mode()
def test_a_flipped_bit_in_a_packed_copy_is_found_until_the_copy_is_made_again(part):
    block = _make_block(bias=True)
    packed = pack_linears(block)
    copies = [weights for _, weights in packed]
    input = torch.randn(2, 24)
    before = block.q_proj(input)
    check_copies(copies)
    copy = block.q_proj.group.weights.packed
    memory = packed_bytes(copy.weight) if part == "weight" else copy.bias.view(torch.uint8)
    memory[3] ^= 0x40
    assert not torch.equal(block.q_proj(input.clone()), before)
    with pytest.raises(EngineCorrupt, match=r"1 of 1 packed copies .* its memory was damaged"):
        check_copies(copies)
    drop_packed(packed)
    assert torch.equal(block.q_proj(input), before)
    check_copies(copies)


@torch.inference_mode()
def test_a_flipped_bit_in_a_packed_head_is_found():
    head = PackedHead()
    head.logits(torch.randn(3, 24), OutputHead(torch.randn(40, 24)))
    check_copies([head])
    assert head.packed is not None
    packed_bytes(head.packed.weight)[-1] ^= 1
    with pytest.raises(EngineCorrupt):
        check_copies([head])


@torch.inference_mode()
def test_a_head_in_half_precision_gives_float32_logits():
    weight = torch.randn(40, 24).bfloat16()
    hidden = torch.randn(3, 24).bfloat16()
    logits = PackedHead().logits(hidden, OutputHead(weight))
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, hidden.float() @ weight.float().t())


def test_names_and_storage_of_parameters_stay():
    model = tiny_model(16)
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    pack_linears(model)
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == before


def test_a_module_in_float64_is_not_packed():
    assert not can_pack(nn.Linear(2, 2).double())
