"""The paged decoder without modules: its kernels against references, its tokens against modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.gpu.forward import ForwardOptions
from rollick.infer.native.gpu.runner import PagedRunner
from rollick.infer.native.sequence_table import EngineRequest
from rollick.models.attention.paged import NO_WINDOW, PAGE, FusedQkv, PagedDecode, PagedPrefill
from rollick.models.attention.slot_cache import CACHED
from rollick.models.decoder.batch_invariant import reference_rms_norm
from rollick.models.decoder.fused_linear import fuse_storage
from rollick.models.loading.load import empty_model, share_parameters
from rollick.types import Completion, Request, SampleId, Sampling, frozen_array

# A warning of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = LlamaConfig(**SIZES)
DECODERS: dict[str, Any] = {
    "llama": LLAMA,
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=6),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2 with a window": Qwen2Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
REFERENCE = ForwardOptions(cuda_graphs=False, compile_layers=False, triton_kernels=False)
MODULES_ONLY = ForwardOptions(
    cuda_graphs=False, compile_layers=False, triton_kernels=False, direct_decoder=False
)
LENGTHS = [1, 2, 33, 64, 70]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _make_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
            elif "bias" in name:
                parameter.normal_()
            else:
                parameter.uniform_(0.5, 1.5)
    fuse_storage(model)
    return model


def _make_runner(model: Any, options: ForwardOptions) -> PagedRunner:
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    return PagedRunner(
        module,
        InferConfig(slots=8, max_length=128, prefill_tokens=20),
        device="cpu",
        stops=StopRules((2, 7)),
        options=options,
    )


def _make_requests(count: int = 12) -> list[Request]:
    """Groups of three with prompts of 1 to 34 tokens. The last exceed a step's prefill budget."""
    return [
        Request(
            SampleId(0, n),
            frozen_array([1, *((np.arange(11 * (n // 3)) * 7 + n // 3) % 30 + 2)], np.int32),
            Sampling(max_tokens=5 + (n * 13) % 40, temperature=(0.0, 1.0, 0.7)[n % 3]),
            stream=n * 7919 + 13,
        )
        for n in range(count)
    ]


def _run_requests(runner: PagedRunner, requests: Sequence[Request]) -> dict[SampleId, Completion]:
    for request in requests:
        runner.queue.submit(EngineRequest(request))
    completions: dict[SampleId, Completion] = {}
    while runner.has_work:
        completions |= {job.request.uid: completion for job, completion in runner.step()}
    return completions


def _is_direct(runner: PagedRunner) -> bool:
    return runner.forward._decoder is not None  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("name", DECODERS)
def test_the_paged_decoder_samples_the_tokens_of_the_modules(name: str):
    model = _make_model(DECODERS[name])
    direct, modules = _make_runner(model, REFERENCE), _make_runner(model, MODULES_ONLY)
    actual, expected = (
        _run_requests(direct, _make_requests()),
        _run_requests(modules, _make_requests()),
    )
    assert _is_direct(direct)
    assert not _is_direct(modules)
    assert actual.keys() == expected.keys()
    for uid, one in expected.items():
        assert actual[uid].token_ids.tolist() == one.token_ids.tolist()
        np.testing.assert_allclose(actual[uid].logprobs, one.logprobs, atol=2e-5)


def test_bfloat16_hidden_states_are_bit_equal_to_those_of_the_modules():
    model = _make_model(DECODERS["qwen3"]).to(torch.bfloat16)
    fuse_storage(model)
    requests = _make_requests(6)
    actual = _run_requests(_make_runner(model, REFERENCE), requests)
    modules = _make_runner(model, MODULES_ONLY)
    for uid, one in _run_requests(modules, requests).items():
        assert actual[uid].token_ids.tolist() == one.token_ids.tolist()
        assert actual[uid].logprobs.tolist() == one.logprobs.tolist()


def _add_hook(model: Any) -> Any:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    return model


class _CustomLinear(torch.nn.Linear):
    """A layer class that the decoder does not know."""


def _replace_layer(model: Any) -> Any:
    model.model.layers[0].self_attn.o_proj.__class__ = _CustomLinear
    return model


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (LLAMA, _add_hook),
        (LLAMA, _replace_layer),
        (
            LlamaConfig(
                **SIZES,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            None,
        ),
        (LlamaConfig(**{**SIZES, "hidden_act": "gelu"}), None),
        (
            Gemma3TextConfig(
                **SIZES,
                head_dim=16,
                sliding_window=6,
                layer_types=["sliding_attention", "full_attention"],
            ),
            None,
        ),
    ],
    ids=["hooked", "exchanged", "turned by length", "another activation", "another decoder"],
)
def test_unsupported_decoders_run_through_their_modules(config: Any, change: Any):
    model = _make_model(config)
    runner = _make_runner(model, REFERENCE)
    if change is not None:
        change(runner.forward._module)  # pyright: ignore[reportPrivateUsage]
    assert len(_run_requests(runner, _make_requests(3))) == 3
    assert not _is_direct(runner)


def test_weights_that_are_not_adjacent_in_memory_run_through_their_modules():
    torch.manual_seed(0)
    runner = _make_runner(AutoModelForCausalLM.from_config(LLAMA).eval(), REFERENCE)
    runner.queue.submit(EngineRequest(_make_requests(1)[0]))
    runner.step()
    assert not _is_direct(runner)


def _draw_normal(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(device=device, dtype=dtype)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Triton's interpreter truncates to bfloat16 where a GPU rounds."""
    tolerance = 1e-5 if actual.dtype is torch.float32 else 2**-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [24, 64])
def test_the_norm_kernel_embeds_adds_and_scales(kernel_device: str, width: int, dtype: torch.dtype):
    from rollick.models.decoder.layer_kernels import launch_add_norm, launch_embed_norm

    torch.manual_seed(0)
    table = _draw_normal(11, width, device=kernel_device, dtype=dtype)
    weight = _draw_normal(width, device=kernel_device, dtype=dtype)
    tokens = torch.tensor([3, 0, 10, 3], device=kernel_device)
    residual, normed = launch_embed_norm(tokens, table, weight, eps=1e-5)
    assert torch.equal(residual, table[tokens])
    _assert_close(normed, reference_rms_norm(table[tokens], weight, 1e-5))
    change = _draw_normal(4, width, device=kernel_device, dtype=dtype)
    expected = residual + change
    normed = launch_add_norm(residual, change, weight, eps=1e-5)
    _assert_close(residual, expected)
    _assert_close(normed, reference_rms_norm(expected, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gate_kernel_multiplies_up_by_the_activated_gate(
    kernel_device: str, dtype: torch.dtype
):
    from rollick.models.decoder.layer_kernels import launch_gate

    torch.manual_seed(0)
    gate_and_up = _draw_normal(3, 2 * 1030, device=kernel_device, dtype=dtype)
    gate, up = gate_and_up.chunk(2, dim=-1)
    _assert_close(launch_gate(gate_and_up), silu(gate) * up)


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("inputs", [32, 40])
def test_the_gated_product_equals_product_then_gate(kernel_device: str, rows: int, inputs: int):
    from rollick.models.decoder.layer_kernels import launch_gated_product

    torch.manual_seed(0)
    x = _draw_normal(rows, inputs, device=kernel_device)
    weight = _draw_normal(2 * 44, inputs, device=kernel_device)
    gate, up = (x @ weight.t()).chunk(2, dim=-1)
    expected = silu(gate) * up
    torch.testing.assert_close(launch_gated_product(x, weight), expected, rtol=1e-4, atol=1e-4)


def _make_qkv(tokens: int, *, normed: bool, window: int, device: str) -> FusedQkv:
    heads, kv_heads, dim = 3, 1, 24
    torch.manual_seed(1)
    angle = torch.rand(128, dim, device=device)
    return FusedQkv(
        _draw_normal(tokens, (heads + 2 * kv_heads) * dim, device=device),
        heads,
        kv_heads,
        angle.cos(),
        angle.sin(),
        scale=dim**-0.5,
        window=window,
        norms=(torch.rand(dim, device=device), torch.rand(dim, device=device)) if normed else None,
        eps=1e-5,
    )


def _make_cache(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    table = (torch.randperm(15) + 1).view(5, 3).int().to(device)
    return table, _draw_normal(2, 16, 1, PAGE, 24, device=device)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("window", [NO_WINDOW, 20])
def test_the_decode_kernel_rotates_queries_and_stored_keys_by_position(
    kernel_device: str, window: int, normed: bool, splits: int
):
    table, cache = _make_cache(kernel_device)
    qkv = _make_qkv(5, normed=normed, window=window, device=kernel_device)
    length, expected = torch.tensor(LENGTHS, device=kernel_device), cache.clone()
    step = PagedDecode(table, length, splits=splits)
    actual = step.attend_fused(qkv, (cache[0], cache[1]))
    reference = PagedDecode(table, length, kernels=False)
    expected_output = reference.attend_fused(qkv, (expected[0], expected[1]))
    torch.testing.assert_close(actual, expected_output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_unused_row_is_computed_and_stores_nothing(kernel_device: str):
    table, cache = _make_cache(kernel_device)
    qkv = _make_qkv(5, normed=False, window=NO_WINDOW, device=kernel_device)
    before = cache.clone()
    length = torch.zeros(5, dtype=torch.int64, device=kernel_device)
    PagedDecode(table, length).attend_fused(qkv, (cache[0], cache[1]))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("window", [NO_WINDOW, 20])
def test_the_prefill_rotates_and_stores_chunks_of_several_sequences(
    kernel_device: str, window: int, normed: bool
):
    from rollick.models.attention.paged_kernels import prefill_queries

    table, cache = _make_cache(kernel_device)
    spans = [(0, 5), (40, 64), (3, 69)]
    qkv = _make_qkv(5 + 24 + 66, normed=normed, window=window, device=kernel_device)
    actual: list[torch.Tensor] = []
    caches = cache, cache.clone()
    for kernels, one in zip((True, False), caches, strict=True):
        step = PagedPrefill.of(
            table[:3].tolist(),
            spans,
            queries=prefill_queries(3),
            device=kernel_device,
            kernels=kernels,
        )
        actual.append(step.attend_fused(qkv, (one[0], one[1])))
    torch.testing.assert_close(actual[0], actual[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[0], caches[1], rtol=1e-6, atol=1e-6)
