"""Log-probs of the head: by hand, by gradient check, and within their memory."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

from rollick.errors import ModelError
from rollick.models.head import head_logits, output_head, token_logprobs
from rollick.testing.tiny import tiny_model


def inputs(rows: int = 5, size: int = 3, vocabulary: int = 7, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, size, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.arange(rows) * 3 % vocabulary
    temperature = torch.linspace(0.5, 1.5, rows, dtype=torch.float64)
    return hidden, weight, targets, temperature


def test_a_case_by_hand():
    """Logits (0, ln 3) at temperature 1: probabilities 1/4 and 3/4."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [log(3)]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([1]), torch.ones(1), chunk=8)
    assert logprobs.item() == pytest.approx(log(3 / 4))
    assert entropy.item() == pytest.approx(0.25 * log(4) + 0.75 * log(4 / 3))


def test_the_temperature_divides_the_logits():
    """Logits (0, 2 ln 3) at temperature 2 are (0, ln 3) at 1."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [2 * log(3)]])
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([0]), torch.tensor([2.0]), chunk=8)
    assert logprobs.item() == pytest.approx(log(1 / 4))


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("tiled", [False, True])
def test_gradients_are_those_of_finite_differences(chunk: int, tiled: bool):
    hidden, weight, targets, temperature = inputs()
    bias = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()

    def of(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor) -> torch.Tensor:
        return token_logprobs(
            hidden_TD, weight_VD, targets, temperature, chunk=chunk, tiled=tiled, bias_V=bias_V
        )[0]

    assert torch.autograd.gradcheck(of, (hidden, weight, bias))


def test_the_chunk_does_not_change_the_result():
    hidden, weight, targets, temperature = inputs(rows=11)
    results = [
        torch.stack(token_logprobs(hidden, weight, targets, temperature, chunk=chunk))
        for chunk in (1, 3, 11, 64)
    ]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-12)


def test_the_entropy_has_no_gradient():
    hidden, weight, targets, temperature = inputs()
    _, entropy = token_logprobs(hidden, weight, targets, temperature, chunk=2)
    assert not entropy.requires_grad


def test_low_precision_models_have_float32_log_probs():
    hidden, weight, targets, temperature = inputs(dtype=torch.float32)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, chunk=2)
    assert logprobs.dtype is entropy.dtype is torch.float32


class LargestTensor(TorchDispatchMode):
    """Sees every tensor that any operation makes, backward included."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("tiled", [False, True])
def test_no_tensor_is_larger_than_a_chunk_of_logits(tiled: bool):
    rows, vocabulary, chunk = 512, 300, 32
    hidden, weight, targets, temperature = inputs(rows=rows, size=4, vocabulary=vocabulary)
    with LargestTensor() as seen:
        logprobs, _ = token_logprobs(hidden, weight, targets, temperature, chunk=chunk, tiled=tiled)
        logprobs.sum().backward()
    assert seen.elements == chunk * vocabulary


def test_the_head_of_a_tied_model_is_its_embedding():
    model = tiny_model(11)
    weight, bias = output_head(model)
    assert weight is model.model.embed_tokens.weight
    assert bias is None


def test_a_model_that_caps_its_logits_is_refused():
    config = Gemma2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        final_logit_softcapping=30.0,
    )
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        output_head(Gemma2ForCausalLM(config))


def test_logits_of_half_precision_operands_are_not_rounded_to_half_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 64, generator=generator).bfloat16()
    weight = torch.randn(32, 64, generator=generator).bfloat16()
    bias = torch.randn(32, generator=generator).bfloat16()
    exact = hidden.double() @ weight.double().t() + bias.double()
    for tiled in (False, True):
        logits = head_logits(hidden, weight, bias, tiled=tiled)
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits.double(), exact, rtol=1e-6, atol=1e-5)
    rounded = torch.nn.functional.linear(hidden, weight, bias)
    assert (rounded.double() - exact).abs().max() > 1e-2
