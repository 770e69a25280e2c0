"""The head's kernels give what the dense formula gives, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from rollick.models.head.logprobs import OutputHead, token_logprobs

pytestmark = pytest.mark.gpu


def dense(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All at once, in float64; temperatures are those of `temperatures`."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    every = torch.log_softmax(logits / temperatures(len(hidden)).double()[:, None], dim=-1)
    return every.gather(1, ids[:, None])[:, 0], -(every.exp() * every).sum(-1)


def temperatures(rows: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, rows, device="cuda")


def parts(rows: int, vocabulary: int, *, dtype: torch.dtype, with_bias: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    drawn = [torch.randn(rows, 64), torch.randn(vocabulary, 64) / 4]
    drawn += [torch.randn(vocabulary)] if with_bias else []
    return [one.to("cuda", dtype).requires_grad_() for one in drawn]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 7), (9, 4096), (50, 50_000)])
@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_entropy_and_gradients_are_those_of_the_dense_formula(
    dtype: torch.dtype, chunk: int, rows: int, vocabulary: int, with_bias: bool
) -> None:
    given = parts(rows, vocabulary, dtype=dtype, with_bias=with_bias)
    wide = [one.detach().double().requires_grad_() for one in given]
    ids = torch.arange(rows, device="cuda") * 31 % vocabulary
    hidden, weight, *bias = given
    logprobs, entropy = token_logprobs(
        hidden,
        OutputHead(weight, bias[0] if bias else None),
        ids,
        temperatures(rows),
        chunk=chunk,
    )
    expected, uncertainty = dense(wide[0], wide[1], wide[2] if bias else None, ids)
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), uncertainty, atol=2e-5, rtol=1e-5)
    # Not linear in either, so that every row has gradients of its own for both.
    actual = torch.autograd.grad((logprobs.exp() * entropy + logprobs).sum(), given)
    wanted = torch.autograd.grad((expected.exp() * uncertainty + expected).sum(), wide)
    near = 1e-5 if dtype is torch.float32 else 0.01
    for one, other in zip(actual, wanted, strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < near


def test_an_unused_entropy_does_not_change_the_gradient() -> None:
    given = parts(9, 4096, dtype=torch.float32, with_bias=False)
    wide = [one.detach().double().requires_grad_() for one in given]
    ids = torch.arange(9, device="cuda")
    logprobs, _ = token_logprobs(given[0], OutputHead(given[1]), ids, temperatures(9), chunk=4)
    actual = torch.autograd.grad(logprobs.sum(), given)
    wanted = torch.autograd.grad(dense(wide[0], wide[1], None, ids)[0].sum(), wide)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def test_no_rows_are_no_log_probs() -> None:
    given = parts(9, 50, dtype=torch.bfloat16, with_bias=True)
    hidden, weight, bias = given
    logprobs, entropy = token_logprobs(
        hidden[:0],
        OutputHead(weight, bias),
        torch.empty(0, dtype=torch.int64, device="cuda"),
        temperatures(0),
        chunk=4,
    )
    assert len(logprobs) == len(entropy) == 0
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), given)
    assert all(one.abs().sum() == 0 for one in gradients)
