"""The paged runner on a GPU, with graphs, compiled layers and kernels, against the slot runner."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.gpu.device_sampler import (
    DeviceState,
    SamplingField,
    StateField,
    sample_on_device,
)
from rollick.infer.native.gpu.forward import ForwardOptions
from rollick.infer.native.gpu.runner import PagedRunner
from rollick.infer.native.philox import uniforms
from rollick.infer.native.sequence_table import EngineRequest
from rollick.infer.native.slot_runner import SlotRunner
from rollick.models.attention.slot_cache import CACHED
from rollick.models.attention.varlen import VARLEN, PackedLayout
from rollick.models.decoder.batch_invariant import use_batch_invariant_kernels
from rollick.models.decoder.fused_linear import fuse_storage
from rollick.models.head.logprobs import output_head, token_logprobs
from rollick.models.loading.load import empty_model, share_parameters
from rollick.testing.tiny import tiny_model
from rollick.types import Completion, Request, SampleId, Sampling, StopReason, frozen_array

pytestmark = pytest.mark.gpu

VOCABULARY = 96
OPTIONS = {
    "eager": ForwardOptions(
        cuda_graphs=False, compile_layers=False, fused_linears=False, direct_decoder=False
    ),
    "graph": ForwardOptions(compile_layers=False, fused_linears=False, direct_decoder=False),
    "graph, fused": ForwardOptions(compile_layers=False, direct_decoder=False),
    "graph, fused, compiled": ForwardOptions(direct_decoder=False),
    "direct decoder": ForwardOptions(cuda_graphs=False),
    "graph, direct decoder": ForwardOptions(),
    "zero mismatch": ForwardOptions.zero_mismatch(),
}
MODULES_ONLY = ForwardOptions(compile_layers=False, direct_decoder=False)
STOPS = StopRules((2, 7))


def _make_model(dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_model(VOCABULARY, hidden=64, layers=2).cuda().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    fuse_storage(model)
    return model


def _make_sharing_module(model: Any, attention: str) -> Any:
    module = empty_model(model.config, attention=attention)
    share_parameters(module, model)
    return module


def _make_config(**options: Any) -> InferConfig:
    return InferConfig(**{"slots": 16, "max_length": 128, **options})


def _make_paged_runner(
    model: Any, forward: ForwardOptions, *, stops: StopRules = STOPS, **options: Any
) -> PagedRunner:
    return PagedRunner(
        _make_sharing_module(model, CACHED),
        _make_config(**options),
        device="cuda",
        stops=stops,
        options=forward,
    )


def _make_slot_runner(model: Any) -> SlotRunner:
    return SlotRunner(
        _make_sharing_module(model, CACHED),
        _make_config(),
        device="cuda",
        deterministic=False,
        stops=STOPS,
    )


def _make_request(number: int, ids: Sequence[int], **sampling: Any) -> Request:
    return Request(
        SampleId(0, number),
        frozen_array(ids, np.int32),
        Sampling(**{"max_tokens": 12, **sampling}),
        stream=number * 7919 + 13,
    )


def _make_mixed_requests(count: int = 32, **sampling: Any) -> list[Request]:
    """Groups of four with prompts of 1 to 78 tokens and all output lengths, greedy and sampled."""
    return [
        _make_request(
            n,
            [1, *((np.arange(11 * (n // 4)) * 7 + n // 4) % 90 + 3).tolist()],
            max_tokens=5 + (n * 13) % 40,
            temperature=(0.0, 1.0, 0.7, 1.3)[n % 4],
            **sampling,
        )
        for n in range(count)
    ]


def _run_requests(runner: Any, requests: Sequence[Request]) -> dict[SampleId, Completion]:
    for request in requests:
        runner.queue.submit(EngineRequest(request))
    completions: dict[SampleId, Completion] = {}
    while runner.has_work:
        completions |= {job.request.uid: completion for job, completion in runner.step()}
    return completions


def _assert_equal(
    generated: dict[SampleId, Completion], expected: dict[SampleId, Completion]
) -> None:
    """Assert equality. One sequence may differ, because two tokens may be almost equally likely."""
    assert generated.keys() == expected.keys()
    same = [
        uid
        for uid, one in expected.items()
        if generated[uid].token_ids.tolist() == one.token_ids.tolist()
        and generated[uid].stop == one.stop
    ]
    assert len(same) >= len(expected) - 1
    for uid in same:
        np.testing.assert_allclose(generated[uid].logprobs, expected[uid].logprobs, atol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_all_forward_options_generate_the_tokens_of_the_slot_runner(name: str) -> None:
    torch._dynamo.reset()
    model = _make_model()
    expected = _run_requests(_make_slot_runner(model), _make_mixed_requests())
    assert {one.stop for one in expected.values()} == {StopReason.STOP, StopReason.LENGTH}
    runner = _make_paged_runner(model, OPTIONS[name])
    _assert_equal(_run_requests(runner, _make_mixed_requests()), expected)
    assert runner.forward.options == OPTIONS[name], "no option was disabled"
    assert (runner.forward._decoder is not None) == ("direct decoder" in name)
    runner.clear()


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.8}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": ((5, 2.0),)}],
    ids=str,
)
def test_truncation_and_biases_act_as_in_the_slot_runner(sampling: dict[str, Any]) -> None:
    model = _make_model()
    expected = _run_requests(_make_slot_runner(model), _make_mixed_requests(**sampling))
    runner = _make_paged_runner(model, ForwardOptions(compile_layers=False))
    _assert_equal(_run_requests(runner, _make_mixed_requests(**sampling)), expected)
    runner.clear()


def test_the_device_uses_the_random_numbers_of_the_host() -> None:
    rows = DeviceState.empty(rows=512, pages=1, stop_ids=[], device="cuda")
    rows.state[StateField.LENGTH] = torch.arange(512, device="cuda") + 5
    rows.state[StateField.LIMIT] = 10_000
    rows.state[StateField.STREAM] = torch.randint(-(2**62), 2**62, (512,), device="cuda")
    rows.sampling[SamplingField.TEMPERATURE] = 1.0
    stream = rows.state[StateField.STREAM].cpu().numpy().view(np.uint64)
    expected = uniforms(stream, np.arange(512) + 5)
    sample_on_device(torch.zeros(512, 4096, device="cuda"), rows, truncate=False, kernels=True)
    # Of 4,096 equally likely tokens, the sampled one is the uniform number's first 12 bits.
    assert rows.sampled[0].tolist() == np.floor(expected * 4096).astype(int).tolist()


@pytest.mark.parametrize(
    "forward",
    [ForwardOptions(), ForwardOptions(compile_layers=False, direct_decoder=False)],
    ids=["direct decoder", "modules"],
)
def test_a_captured_graph_uses_parameters_written_in_place(
    forward: ForwardOptions,
) -> None:
    model = _make_model()
    runner = _make_paged_runner(model, forward)
    before = _run_requests(runner, _make_mixed_requests(8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    runner.commit(1, keep_cache=False)
    after = _run_requests(runner, _make_mixed_requests(8))
    assert any(before[uid].token_ids.tolist() != after[uid].token_ids.tolist() for uid in before)
    _assert_equal(after, _run_requests(_make_slot_runner(model), _make_mixed_requests(8)))
    assert {version for one in after.values() for version in one.versions.tolist()} == {1}
    runner.clear()


def test_a_layer_that_synchronises_with_the_host_runs_without_a_graph(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch._dynamo.reset()
    model = _make_model()
    expected = _run_requests(_make_slot_runner(model), _make_mixed_requests(8))
    runner = _make_paged_runner(model, ForwardOptions())
    module: Any = runner.forward._module
    module.model.layers[0].mlp.register_forward_hook(_read_output)
    with caplog.at_level(logging.WARNING):
        generated = _run_requests(runner, _make_mixed_requests(8))
    _assert_equal(generated, expected)
    assert not runner.forward.options.cuda_graphs
    assert "generates more slowly" in caplog.text
    runner.clear()


def _read_output(_: Any, inputs: Any, output: torch.Tensor) -> None:
    assert float(output.flatten()[0]) == float(output.flatten()[0])


def _compute_learner_logprobs(module: Any, requests: Sequence[Request], generated: Any) -> Any:
    """The learner's log-probs of each request's tokens, from one packed forward."""
    ids = [np.concatenate([one.token_ids, generated[one.uid].token_ids]) for one in requests]
    layout = PackedLayout.of([len(one) for one in ids], device="cuda", batch_invariant=True)
    packed = torch.from_numpy(np.concatenate(ids).astype(np.int64)).cuda()
    with torch.no_grad():
        hidden = module.base_model(
            input_ids=packed[None],
            position_ids=layout.position_ids_N[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]
        ones = torch.ones(len(packed) - 1, device="cuda")
        packed_logprobs, _ = token_logprobs(
            hidden[:-1], output_head(module), packed[1:], ones, chunk=64, batch_invariant=True
        )
    actual: dict[SampleId, Any] = {}
    offset = 0
    for one, tokens in zip(requests, ids, strict=True):
        span = slice(offset + len(one.token_ids) - 1, offset + len(tokens) - 1)
        actual[one.uid] = packed_logprobs[span].cpu().numpy()
        offset += len(tokens)
    return actual


def test_in_zero_mismatch_mode_the_learner_computes_the_engines_log_probs() -> None:
    model = _make_model(torch.bfloat16)
    runner = _make_paged_runner(model, ForwardOptions.zero_mismatch(), stops=StopRules())
    requests = [_make_request(n, [1, *range(3, 3 + 2 * n)], max_tokens=30) for n in range(24)]
    generated = _run_requests(runner, requests)
    runner.clear()
    learner = _make_sharing_module(model, VARLEN)
    use_batch_invariant_kernels(learner)
    actual = _compute_learner_logprobs(learner, requests, generated)
    for one in requests:
        # The tolerance covers the rounding of a float32 sum of exponentials.
        np.testing.assert_allclose(actual[one.uid], generated[one.uid].logprobs, atol=1e-5)


def test_in_bfloat16_the_direct_decoder_is_as_exact_as_the_modules() -> None:
    model = _make_model(torch.bfloat16)
    requests = [_make_request(n, [1, *range(3, 3 + 2 * n)], max_tokens=30) for n in range(24)]
    generated: list[Any] = []
    for forward in (
        ForwardOptions(),
        ForwardOptions(compile_layers=False, direct_decoder=False),
    ):
        runner = _make_paged_runner(model, forward, stops=StopRules())
        generated.append(_run_requests(runner, requests))
        runner.clear()
    learner = _make_sharing_module(model.float(), VARLEN)
    gaps: list[float] = []
    for one in generated:
        exact = _compute_learner_logprobs(learner, requests, one)
        gaps.append(np.mean([np.abs(exact[uid] - one[uid].logprobs).mean() for uid in exact]))
    assert gaps[1] > 0
    assert gaps[0] < 1.5 * gaps[1]
