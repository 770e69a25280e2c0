"""Log-probs of the output head: values, gradients and memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import log
from typing import Any

import pytest
import torch
from tiny_families import tiny_family
from torch.utils._python_dispatch import TorchDispatchMode

from rollick.errors import ModelError
from rollick.models.head.logprobs import (
    ChunkOptions,
    OutputHead,
    chosen_logprobs,
    head_logits,
    output_head,
    token_logprobs,
    top_logprobs,
)
from rollick.testing.tiny import tiny_model


def make_inputs(
    rows: int = 5, size: int = 3, vocabulary: int = 7, dtype: torch.dtype = torch.float64
):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, size, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.arange(rows) * 3 % vocabulary
    temperature = torch.linspace(0.5, 1.5, rows, dtype=torch.float64)
    return hidden, weight, targets, temperature


def make_bias(vocabulary: int) -> torch.Tensor:
    return torch.linspace(-1, 1, vocabulary, dtype=torch.float64).requires_grad_()


def dense_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """All log-probs [T, V] at once, differentiated by autograd."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return torch.log_softmax(logits / temperature[:, None], dim=-1)


def dense_entropy(logprobs: torch.Tensor) -> torch.Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


def test_a_case_by_hand():
    """Logits (0, ln 3) at temperature 1: probabilities 1/4 and 3/4."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [log(3)]])
    logprobs, entropy = token_logprobs(
        hidden, OutputHead(weight), torch.tensor([1]), torch.ones(1), chunk=8
    )
    assert logprobs.item() == pytest.approx(log(3 / 4))
    assert entropy.item() == pytest.approx(0.25 * log(4) + 0.75 * log(4 / 3))


def test_the_temperature_divides_the_logits():
    """Logits (0, 2 ln 3) at temperature 2 are (0, ln 3) at 1."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [2 * log(3)]])
    logprobs, _ = token_logprobs(
        hidden, OutputHead(weight), torch.tensor([0]), torch.tensor([2.0]), chunk=8
    )
    assert logprobs.item() == pytest.approx(log(1 / 4))


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_gradients_of_log_probs_and_entropy_are_those_of_finite_differences(
    chunk: int, batch_invariant: bool
):
    hidden, weight, targets, temperature = make_inputs()

    def differentiable(
        hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(
            hidden_TD,
            OutputHead(weight_VD, bias_V),
            targets,
            temperature,
            chunk=chunk,
            batch_invariant=batch_invariant,
        )

    assert torch.autograd.gradcheck(differentiable, (hidden, weight, make_bias(7)))


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_gradients_of_chosen_log_probs_are_those_of_finite_differences(
    chunk: int, batch_invariant: bool
):
    hidden, weight, _, temperature = make_inputs()
    ids = torch.tensor([[0, 3, 6], [1, 1, 2], [5, 4, 5], [6, 6, 6], [2, 0, 1]])

    def differentiable(
        hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor
    ) -> torch.Tensor:
        return chosen_logprobs(
            hidden_TD,
            OutputHead(weight_VD, bias_V),
            ids,
            temperature,
            chunk=chunk,
            batch_invariant=batch_invariant,
        )

    assert torch.autograd.gradcheck(differentiable, (hidden, weight, make_bias(7)))


def test_the_gradient_of_the_entropy_by_hand():
    """At p = (1/4, 3/4), dH/dlogit = -p (log p + H) = (3/16) ln 3 (1, -1); over temperature 2."""
    hidden = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor([[0.0], [2 * log(3)]], dtype=torch.float64, requires_grad=True)
    _, entropy = token_logprobs(
        hidden, OutputHead(weight), torch.tensor([0]), torch.tensor([2.0]), chunk=8
    )
    entropy.sum().backward()
    expected = 3 / 16 * log(3) / 2
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([expected, -expected])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_log_probs_entropy_and_their_gradients_are_those_of_the_dense_formula(
    rows: int, with_bias: bool
):
    hidden, weight, targets, temperature = make_inputs(rows=rows)
    bias = make_bias(7) if with_bias else None
    differentiable = [part for part in (hidden, weight, bias) if part is not None]
    logprobs, entropy = token_logprobs(
        hidden, OutputHead(weight, bias), targets, temperature, chunk=4
    )
    all_logprobs = dense_logprobs(hidden, weight, temperature, bias)
    expected = all_logprobs.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, dense_entropy(all_logprobs))
    # Nonlinear in both, so that the gradients differ between rows.
    grads = torch.autograd.grad((logprobs.exp() * entropy).sum(), differentiable)
    torch.testing.assert_close(
        grads,
        torch.autograd.grad((expected.exp() * dense_entropy(all_logprobs)).sum(), differentiable),
    )


CHOICES: dict[str, Callable[[int], torch.Tensor]] = {
    "one": lambda rows: torch.arange(rows)[:, None] % 7,
    "some": lambda rows: torch.tensor([4, 0, 6]).expand(rows, 3),
    "repeated": lambda rows: torch.tensor([2, 5, 2, 2]).expand(rows, 4),
    "all": lambda rows: torch.arange(7).flip(0).expand(rows, 7),
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("choice", CHOICES)
def test_chosen_log_probs_and_their_gradients_are_those_of_the_dense_formula(
    choice: str, rows: int, with_bias: bool
):
    hidden, weight, _, temperature = make_inputs(rows=rows)
    ids = CHOICES[choice](rows)
    bias = make_bias(7) if with_bias else None
    differentiable = [part for part in (hidden, weight, bias) if part is not None]
    chosen = chosen_logprobs(hidden, OutputHead(weight, bias), ids, temperature, chunk=4)
    expected = dense_logprobs(hidden, weight, temperature, bias).gather(1, ids)
    torch.testing.assert_close(chosen, expected)
    uneven = torch.linspace(-1, 2, ids.numel(), dtype=torch.float64).view(ids.shape)
    grads = torch.autograd.grad((chosen * uneven).sum(), differentiable)
    torch.testing.assert_close(
        grads, torch.autograd.grad((expected * uneven).sum(), differentiable)
    )


def test_one_chosen_token_a_row_is_its_target_bit_for_bit():
    hidden, weight, targets, temperature = make_inputs(rows=40, dtype=torch.float32)
    logprobs, _ = token_logprobs(hidden, OutputHead(weight), targets, temperature, chunk=16)
    chosen = chosen_logprobs(hidden, OutputHead(weight), targets[:, None], temperature, chunk=16)
    assert torch.equal(chosen[:, 0], logprobs)
    for one, other in zip(
        torch.autograd.grad(chosen.sum(), (hidden, weight)),
        torch.autograd.grad(logprobs.sum(), (hidden, weight)),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_the_most_likely_tokens_by_hand():
    """Logits (0, ln 5, ln 2) at temperature 1: probabilities 1/8, 5/8 and 2/8."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [log(5)], [log(2)]])
    ids, logprobs = top_logprobs(hidden, OutputHead(weight), torch.ones(1), k=2, chunk=8)
    assert ids.tolist() == [[1, 2]]
    assert logprobs[0].tolist() == pytest.approx([log(5 / 8), log(2 / 8)])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_most_likely_tokens_are_those_of_the_dense_formula(
    k: int, rows: int, batch_invariant: bool, with_bias: bool
):
    hidden, weight, _, temperature = make_inputs(rows=rows)
    bias = make_bias(7) if with_bias else None
    expected, expected_ids = dense_logprobs(hidden, weight, temperature, bias).detach().topk(k)
    for chunk in (1, 4, 100):
        ids, logprobs = top_logprobs(
            hidden,
            OutputHead(weight, bias),
            temperature,
            k=k,
            chunk=chunk,
            batch_invariant=batch_invariant,
        )
        assert ids.dtype is torch.int64
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(logprobs, expected)
        assert not logprobs.requires_grad


def test_a_student_at_its_own_most_likely_tokens_has_their_log_probs():
    hidden, weight, _, temperature = make_inputs(rows=9)
    ids, logprobs = top_logprobs(hidden, OutputHead(weight), temperature, k=4, chunk=4)
    assert torch.equal(
        chosen_logprobs(hidden, OutputHead(weight), ids, temperature, chunk=4), logprobs
    )


@pytest.mark.parametrize("k", [0, 8])
def test_more_tokens_than_the_vocabulary_has_and_none_are_refused(k: int):
    hidden, weight, _, temperature = make_inputs()
    with pytest.raises(ModelError, match=f"{k} likeliest tokens of a vocabulary of 7"):
        top_logprobs(hidden, OutputHead(weight), temperature, k=k, chunk=4)


def test_the_chunk_does_not_change_results_and_gradients():
    hidden, weight, targets, temperature = make_inputs(rows=11)
    ids = torch.stack([targets, targets.flip(0)], dim=1)

    def compute_results(chunk: int) -> list[torch.Tensor]:
        logprobs, entropy = token_logprobs(
            hidden, OutputHead(weight), targets, temperature, chunk=chunk
        )
        chosen = chosen_logprobs(hidden, OutputHead(weight), ids, temperature, chunk=chunk)
        total = (logprobs.exp() * entropy).sum() + chosen.exp().sum()
        return [logprobs, entropy, chosen, *torch.autograd.grad(total, (hidden, weight))]

    for chunk in (1, 3, 64):
        torch.testing.assert_close(compute_results(chunk), compute_results(11), rtol=0, atol=1e-12)


def test_an_entropy_with_weight_zero_keeps_the_bits_of_the_gradient():
    hidden, weight, targets, temperature = make_inputs(rows=40, dtype=torch.float32)
    logprobs, entropy = token_logprobs(hidden, OutputHead(weight), targets, temperature, chunk=16)
    unused = torch.autograd.grad(logprobs.exp().sum(), (hidden, weight), retain_graph=True)
    zero = torch.autograd.grad(logprobs.exp().sum() + 0 * entropy.sum(), (hidden, weight))
    for one, other in zip(unused, zero, strict=True):
        assert torch.equal(one, other)


def test_an_unused_entropy_adds_no_work_on_logits_to_the_backward():
    rows, vocabulary = 5, 7

    def list_logits_operations(what: str) -> list[str]:
        loss = make_losses(rows, vocabulary, chunk=100)[what]()
        with TensorRecorder() as recorder:
            loss.backward()
        return [name for name, elements in recorder.tensors if elements == rows * vocabulary]

    # chosen_logprobs has no entropy at all.
    assert list_logits_operations("logprobs") == list_logits_operations("chosen") != []
    assert len(list_logits_operations("both")) > len(list_logits_operations("logprobs"))


def test_half_precision_models_have_float32_log_probs_and_gradients_of_their_own_dtype():
    hidden, weight, targets, temperature = make_inputs(rows=40, size=8)
    exact = dense_logprobs(hidden.bfloat16().double(), weight.bfloat16().double(), temperature)
    half, half_weight = (part.detach().bfloat16().requires_grad_() for part in (hidden, weight))
    logprobs, entropy = token_logprobs(
        half, OutputHead(half_weight), targets, temperature, chunk=16
    )
    chosen = chosen_logprobs(half, OutputHead(half_weight), targets[:, None], temperature, chunk=16)
    ids, top = top_logprobs(half, OutputHead(half_weight), temperature, k=2, chunk=16)
    for result, expected in [
        (logprobs, exact.gather(1, targets[:, None])[:, 0]),
        (entropy, dense_entropy(exact)),
        (chosen, exact.gather(1, targets[:, None])),
        (top, exact.gather(1, ids)),
    ]:
        assert result.dtype is torch.float32
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    total = logprobs.sum() + entropy.sum() + chosen.sum()
    wide_total = 2 * exact.gather(1, targets[:, None]).sum() + dense_entropy(exact).sum()
    for grad, expected in zip(
        torch.autograd.grad(total, (half, half_weight)),
        torch.autograd.grad(wide_total, (hidden, weight)),
        strict=True,
    ):
        assert grad.dtype is torch.bfloat16
        torch.testing.assert_close(grad.double(), expected, rtol=0.02, atol=0.1)


class TensorRecorder(TorchDispatchMode):
    """Records (operation, elements) of every tensor that an operation creates, also in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        created = func(*args, **(kwargs or {}))
        for tensor in created if isinstance(created, (tuple, list)) else [created]:
            if isinstance(tensor, torch.Tensor):
                self.tensors.append((str(func), tensor.numel()))
        return created

    @property
    def largest(self) -> int:
        return max(elements for _, elements in self.tensors)


def make_losses(
    rows: int, vocabulary: int, **settings: Any
) -> dict[str, Callable[[], torch.Tensor]]:
    hidden, weight, targets, temperature = make_inputs(rows=rows, size=4, vocabulary=vocabulary)
    ids = torch.stack([targets, targets.flip(0)], dim=1)
    return {
        "logprobs": lambda: token_logprobs(
            hidden, OutputHead(weight), targets, temperature, **settings
        )[0].sum(),
        "entropy": lambda: token_logprobs(
            hidden, OutputHead(weight), targets, temperature, **settings
        )[1].sum(),
        "both": lambda: torch.stack(
            token_logprobs(hidden, OutputHead(weight), targets, temperature, **settings)
        ).sum(),
        "chosen": lambda: chosen_logprobs(
            hidden, OutputHead(weight), ids, temperature, **settings
        ).sum(),
    }


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("what", ["logprobs", "entropy", "both", "chosen"])
def test_no_tensor_is_larger_than_a_chunk_of_logits(what: str, batch_invariant: bool):
    rows, vocabulary, chunk = 512, 300, 32
    loss = make_losses(rows, vocabulary, chunk=chunk, batch_invariant=batch_invariant)[what]
    with TensorRecorder() as recorder:
        loss().backward()
    assert recorder.largest == chunk * vocabulary


class PeakMemory(TorchDispatchMode):
    """Records the peak bytes of the tensors that are created inside it, also in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.created: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        created = func(*args, **(kwargs or {}))
        tensors = created if isinstance(created, (tuple, list)) else [created]
        self.created += [
            weakref.ref(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)
        ]
        self.peak = max(self.peak, self.live_bytes)
        return created

    @property
    def live_bytes(self) -> int:
        alive = [tensor for reference in self.created if (tensor := reference()) is not None]
        self.created = [weakref.ref(tensor) for tensor in alive]
        storages = [tensor.untyped_storage() for tensor in alive]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure_peak_bytes(tokens: int, vocabulary: int, *, chunk: int) -> int:
    hidden, weight, targets, temperature = make_inputs(rows=tokens, size=2, vocabulary=vocabulary)
    with PeakMemory() as recorder:
        logprobs, entropy = token_logprobs(
            hidden, OutputHead(weight), targets, temperature, chunk=chunk
        )
        (logprobs.sum() + entropy.sum()).backward()
    return recorder.peak


@pytest.mark.parametrize("vocabulary", [8_000, 50_000, 150_000])
def test_memory_does_not_grow_with_tokens_times_vocabulary(vocabulary: int):
    chunk = 4
    few, many = (measure_peak_bytes(tokens, vocabulary, chunk=chunk) for tokens in (8, 32))
    logits = 8 * chunk * vocabulary
    assert 2 * logits < few < 5 * logits
    # 24 more tokens add 24 rows of everything except logits.
    assert many - few < 24 * 200


@pytest.mark.parametrize("what", ["logprobs", "entropy", "both", "chosen"])
def test_no_more_than_a_chunk_of_logits_is_kept_for_the_backward(what: str):
    rows, vocabulary, chunk = 512, 300, 32
    loss = make_losses(rows, vocabulary, chunk=chunk)[what]
    with PeakMemory() as recorder:
        kept = loss()
        assert recorder.live_bytes < 8 * (chunk * vocabulary + 20 * rows)
        kept.backward()


@pytest.mark.parametrize("what", ["logprobs", "entropy", "both", "chosen"])
def test_rows_of_one_chunk_have_their_logits_computed_once(what: str):
    loss = make_losses(16, 40, chunk=16)[what]
    with TensorRecorder() as recorder:
        loss().backward()
    products = [name for name, elements in recorder.tensors if "mm" in name and elements == 16 * 40]
    assert len(products) == 1


def test_a_second_backward_through_the_same_log_probs_is_the_first():
    hidden, weight, targets, temperature = make_inputs(rows=5, size=3, vocabulary=7)
    logprobs, _ = token_logprobs(hidden, OutputHead(weight), targets, temperature, chunk=2)
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_most_likely_tokens_need_no_tensor_larger_than_a_chunk_of_logits(batch_invariant: bool):
    rows, vocabulary, chunk = 512, 300, 32
    hidden, weight, _, temperature = make_inputs(rows=rows, size=4, vocabulary=vocabulary)
    with TensorRecorder() as recorder:
        top_logprobs(
            hidden,
            OutputHead(weight),
            temperature,
            k=2,
            chunk=chunk,
            batch_invariant=batch_invariant,
        )
    assert recorder.largest == chunk * vocabulary


def test_the_head_of_a_tied_model_is_its_embedding():
    model = tiny_model(11)
    weight, bias, scale, softcap = output_head(model)
    assert (scale, softcap) == (1.0, None)
    assert weight is model.model.embed_tokens.weight
    assert bias is None


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_scaled_and_capped_logits_have_the_gradient_of_their_definition(batch_invariant: bool):
    hidden, weight, targets, temperature = make_inputs(rows=5, size=3, vocabulary=7)
    head, bias = {"scale": 0.5, "softcap": 1.5}, make_bias(7)

    def differentiable(
        hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor
    ) -> Any:
        return token_logprobs(
            hidden_TD,
            OutputHead(weight_VD, bias_V, **head),
            targets,
            temperature,
            chunk=2,
            batch_invariant=batch_invariant,
        )

    product = 0.5 * (hidden @ weight.t() + bias)
    capped = 1.5 * torch.tanh(product / 1.5) / temperature[:, None]
    expected = capped.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(differentiable(hidden, weight, bias)[0], expected)
    assert torch.autograd.gradcheck(differentiable, (hidden, weight, bias))


@pytest.mark.filterwarnings(  # of Triton's interpreter, in masked lanes
    "ignore:Conversion of an array:DeprecationWarning",
    "ignore:overflow:RuntimeWarning",
    "ignore:invalid value:RuntimeWarning",
)
def test_the_fused_kernels_scale_and_cap_logits_as_the_reference_does(kernel_device: str):
    from rollick.models.head.fused import FusedLogprobs

    hidden, weight, targets, temperature = make_inputs(
        rows=5, size=3, vocabulary=7, dtype=torch.float32
    )
    bias = torch.linspace(-1, 1, 7).requires_grad_()
    differentiable, options = (hidden, weight, bias), ChunkOptions(2, scale=0.5, softcap=1.5)
    expected, expected_entropy = token_logprobs(
        hidden, OutputHead(weight, bias, 0.5, 1.5), targets, temperature, chunk=2
    )
    leaves = [one.detach().to(kernel_device).requires_grad_() for one in differentiable]
    rows = targets.to(kernel_device), temperature.float().to(kernel_device)
    actual: Any = FusedLogprobs.apply(*leaves, *rows, options)
    torch.testing.assert_close(actual[0].cpu(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual[1].cpu(), expected_entropy, atol=1e-5, rtol=1e-5)
    kernel_grads = torch.autograd.grad((actual[0].exp() * actual[1]).sum(), leaves)
    for one, other in zip(
        kernel_grads,
        torch.autograd.grad((expected.exp() * expected_entropy).sum(), differentiable),
        strict=True,
    ):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma4", "granite", "cohere"])
def test_a_model_that_changes_its_logits_has_a_head_that_does_the_same(family: str):
    """gemma4 has its soft cap in its text config."""
    model: Any = tiny_family(family)
    ids = torch.tensor([[1, 20, 30, 40]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        own = model(input_ids=ids, use_cache=False).logits[0]
    head = output_head(model)
    torch.testing.assert_close(head_logits(hidden, head), own)
    assert (head_logits(hidden, OutputHead(*head[:2])) - own).abs().max() > 0.1


def test_logits_of_half_precision_operands_are_not_rounded_to_half_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 64, generator=generator).bfloat16()
    weight = torch.randn(32, 64, generator=generator).bfloat16()
    bias = torch.randn(32, generator=generator).bfloat16()
    exact = hidden.double() @ weight.double().t() + bias.double()
    for batch_invariant in (False, True):
        logits = head_logits(hidden, OutputHead(weight, bias), batch_invariant=batch_invariant)
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits.double(), exact, rtol=1e-6, atol=1e-5)
    rounded = torch.nn.functional.linear(hidden, weight, bias)
    assert (rounded.double() - exact).abs().max() > 1e-2


def test_over_a_large_vocabulary_log_probs_are_those_of_float64_to_a_millionth() -> None:
    rng = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(8, 96, generator=rng)
    weight_VD = 0.3 * torch.randn(50_000, 96, generator=rng)
    targets_T = torch.randint(50_000, (8,), generator=rng)
    temperature_T = torch.tensor([0.7, 1.0, 1.3, 2.0] * 2)
    actual_T, _ = token_logprobs(
        hidden_TD, OutputHead(weight_VD), targets_T, temperature_T, chunk=4
    )
    logits_TV = hidden_TD.double() @ weight_VD.double().t() / temperature_T[:, None].double()
    expected_T = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
    assert (actual_T - expected_T).abs().mean() < 1e-6
