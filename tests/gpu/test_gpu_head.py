"""The head's kernels equal the dense formula in values and gradients."""

from __future__ import annotations

import pytest
import torch

from rollick.models.head.logprobs import OutputHead, token_logprobs

pytestmark = pytest.mark.gpu


def compute_dense(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy in one float64 computation, with temperatures of make_temperatures."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    all_logprobs = torch.log_softmax(
        logits / make_temperatures(len(hidden)).double()[:, None], dim=-1
    )
    return all_logprobs.gather(1, ids[:, None])[:, 0], -(all_logprobs.exp() * all_logprobs).sum(-1)


def make_temperatures(rows: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, rows, device="cuda")


def make_inputs(
    rows: int, vocabulary: int, *, dtype: torch.dtype, with_bias: bool
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(rows, 64), torch.randn(vocabulary, 64) / 4]
    tensors += [torch.randn(vocabulary)] if with_bias else []
    return [tensor.to("cuda", dtype).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 7), (9, 4096), (50, 50_000)])
@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_entropy_and_gradients_are_those_of_the_dense_formula(
    dtype: torch.dtype, chunk: int, rows: int, vocabulary: int, with_bias: bool
) -> None:
    inputs = make_inputs(rows, vocabulary, dtype=dtype, with_bias=with_bias)
    wide_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ids = torch.arange(rows, device="cuda") * 31 % vocabulary
    hidden, weight, *bias = inputs
    logprobs, entropy = token_logprobs(
        hidden,
        OutputHead(weight, bias[0] if bias else None),
        ids,
        make_temperatures(rows),
        chunk=chunk,
    )
    expected, expected_entropy = compute_dense(
        wide_inputs[0], wide_inputs[1], wide_inputs[2] if bias else None, ids
    )
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-5, rtol=1e-5)
    # Nonlinear in both outputs, so that each row has different gradients.
    actual = torch.autograd.grad((logprobs.exp() * entropy + logprobs).sum(), inputs)
    expected_gradients = torch.autograd.grad(
        (expected.exp() * expected_entropy + expected).sum(), wide_inputs
    )
    tolerance = 1e-5 if dtype is torch.float32 else 0.01
    for tensor, reference in zip(actual, expected_gradients, strict=True):
        assert ((tensor.double() - reference).norm() / reference.norm()).item() < tolerance


def test_an_unused_entropy_does_not_change_the_gradient() -> None:
    inputs = make_inputs(9, 4096, dtype=torch.float32, with_bias=False)
    wide_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ids = torch.arange(9, device="cuda")
    logprobs, _ = token_logprobs(
        inputs[0], OutputHead(inputs[1]), ids, make_temperatures(9), chunk=4
    )
    actual = torch.autograd.grad(logprobs.sum(), inputs)
    expected_gradients = torch.autograd.grad(
        compute_dense(wide_inputs[0], wide_inputs[1], None, ids)[0].sum(), wide_inputs
    )
    for tensor, reference in zip(actual, expected_gradients, strict=True):
        torch.testing.assert_close(tensor.double(), reference, atol=1e-4, rtol=1e-4)


def test_no_rows_are_no_log_probs() -> None:
    inputs = make_inputs(9, 50, dtype=torch.bfloat16, with_bias=True)
    hidden, weight, bias = inputs
    logprobs, entropy = token_logprobs(
        hidden[:0],
        OutputHead(weight, bias),
        torch.empty(0, dtype=torch.int64, device="cuda"),
        make_temperatures(0),
        chunk=4,
    )
    assert len(logprobs) == len(entropy) == 0
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), inputs)
    assert all(tensor.abs().sum() == 0 for tensor in gradients)
