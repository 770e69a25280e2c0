"""Tiled linear layers: the bits of a row do not depend on its neighbours."""

from __future__ import annotations

import torch
from torch import nn

from rollick.models.attention.varlen import VARLEN, PackedLayout
from rollick.models.decoder.batch_invariant import (
    TiledLinear,
    round_up_to_tile,
    tile_linears,
    tiled_linear,
)
from rollick.models.head.logprobs import OutputHead, token_logprobs
from rollick.testing.tiny import tiny_model


def test_a_row_has_the_same_bits_alone_and_among_others():
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(97, 72), torch.randn(129, 72), torch.randn(129)
    full = tiled_linear(rows, weight, bias)
    for start, stop in [(0, 1), (5, 6), (30, 35), (64, 97), (96, 97)]:
        assert torch.equal(tiled_linear(rows[start:stop], weight, bias), full[start:stop])


def test_a_tiled_layer_gives_the_product_and_its_gradients():
    torch.manual_seed(0)
    plain = nn.Linear(5, 3).double()
    tiled = nn.Linear(5, 3).double()
    tiled.load_state_dict(plain.state_dict())
    tile_linears(tiled)
    assert type(tiled) is TiledLinear
    x = torch.randn(2, 20, 5, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    torch.testing.assert_close(tiled(x), plain(y))
    tiled(x).pow(2).sum().backward()
    plain(y).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(tiled.weight.grad, plain.weight.grad)
    torch.testing.assert_close(tiled.bias.grad, plain.bias.grad)


def test_rows_are_filled_up_to_whole_tiles():
    assert [round_up_to_tile(count) for count in (1, 32, 33)] == [32, 32, 64]


def test_the_log_probs_of_a_sample_do_not_depend_on_the_others_in_the_pack():
    # A hidden size of 72 makes arrays whose ends fall inside a vector register.
    model = tiny_model(53, hidden=72, heads=6, kv_heads=3).eval()
    model.set_attn_implementation(VARLEN)
    # Weights of a trained size: tiny logits would round the differences away.
    for parameter in model.parameters():
        parameter.data.mul_(8 if parameter.ndim == 2 else 1)
    tile_linears(model)
    generator = torch.Generator().manual_seed(1)
    samples = [
        torch.randint(4, 53, (n,), generator=generator)
        for n in (9, 17, 9, 3, 40, 2, 5, 7, 3, 11, 13, 15)
    ]

    def compute_logprobs(order: list[int]) -> list[torch.Tensor]:
        picked = [samples[b] for b in order]
        lengths = [len(sample) for sample in picked]
        padding = round_up_to_tile(sum(lengths)) - sum(lengths)
        layout = PackedLayout.of([*lengths, *([padding] if padding else [])], per_sequence=True)
        ids = torch.cat([*picked, torch.zeros(padding, dtype=torch.int64)])
        with torch.no_grad():
            hidden = model.model(
                input_ids=ids[None],
                position_ids=layout.position_ids_N[None],
                use_cache=False,
                layout=layout,
            ).last_hidden_state[0]
            result, _ = token_logprobs(
                hidden[: sum(lengths) - 1],
                OutputHead(model.lm_head.weight),
                ids[1 : sum(lengths)],
                torch.ones(sum(lengths) - 1),
                chunk=20,
                batch_invariant=True,
            )
        return [part[:-1] for part in torch.cat([result, torch.zeros(1)]).split(lengths)]

    all_samples = list(range(len(samples)))
    together = compute_logprobs(all_samples)
    for order in ([3, 1], [4, 2, 0], [2, 0, 1], *([b] for b in all_samples)):
        for b, result in zip(order, compute_logprobs(order), strict=True):
            assert torch.equal(result, together[b]), (order, b)
