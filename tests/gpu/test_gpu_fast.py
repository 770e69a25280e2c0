"""The fast path on a GPU: graphs, compiled layers and kernels draw what the plain runner draws."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollick.config.schema import InferConfig
from rollick.infer.native.endings import Stops
from rollick.infer.native.gpu.draw import DeviceRows, Field, Share, draw
from rollick.infer.native.gpu.forward import Ways
from rollick.infer.native.gpu.runner import PagedRunner
from rollick.infer.native.philox import uniforms
from rollick.infer.native.rows import Job
from rollick.infer.native.runner import Runner
from rollick.models.attention import VARLEN, PackedLayout
from rollick.models.cached_attention import CACHED
from rollick.models.fixed import fix_arithmetic
from rollick.models.fused import fuse_storage
from rollick.models.head import output_head, token_logprobs
from rollick.models.load import empty_model, share_parameters
from rollick.testing.tiny import tiny_model
from rollick.types import Completion, Request, SampleId, Sampling, StopReason, frozen_array

pytestmark = pytest.mark.gpu

VOCABULARY = 96
WAYS = {
    "as it is": Ways(graphs=False, compiled=False, fused=False, plain=False),
    "graph": Ways(compiled=False, fused=False, plain=False),
    "graph, fused": Ways(compiled=False, plain=False),
    "graph, fused, compiled": Ways(plain=False),
    "without modules": Ways(graphs=False),
    "graph, without modules": Ways(),
    "zero mismatch": Ways.zero_mismatch(),
}
STOPS = Stops((2, 7))


def _model(dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_model(VOCABULARY, hidden=64, layers=2).cuda().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    fuse_storage(model)
    return model


def _sharing(model: Any, attention: str) -> Any:
    module = empty_model(model.config, attention=attention)
    share_parameters(module, model)
    return module


def _infer(**options: Any) -> InferConfig:
    return InferConfig(**{"slots": 16, "max_length": 128, **options})


def _paged(model: Any, ways: Ways, *, stops: Stops = STOPS, **options: Any) -> PagedRunner:
    return PagedRunner(
        _sharing(model, CACHED),
        _infer(**options),
        device="cuda",
        stops=stops,
        version=0,
        ways=ways,
    )


def _plain(model: Any) -> Runner:
    return Runner(
        _sharing(model, CACHED),
        _infer(),
        device="cuda",
        deterministic=False,
        stops=STOPS,
        version=0,
    )


def _request(number: int, ids: Sequence[int], **sampling: Any) -> Request:
    return Request(
        SampleId(0, number),
        frozen_array(ids, np.int32),
        Sampling(**{"max_tokens": 12, **sampling}),
        stream=number * 7919 + 13,
    )


def _mixed(count: int = 32, **sampling: Any) -> list[Request]:
    """Groups of four with prompts of 1 to 78 tokens, all lengths, greedy and drawn."""
    return [
        _request(
            n,
            [1, *((np.arange(11 * (n // 4)) * 7 + n // 4) % 90 + 3).tolist()],
            max_tokens=5 + (n * 13) % 40,
            temperature=(0.0, 1.0, 0.7, 1.3)[n % 4],
            **sampling,
        )
        for n in range(count)
    ]


def _drive(runner: Any, requests: Sequence[Request]) -> dict[SampleId, Completion]:
    for request in requests:
        runner.submit(Job(request))
    done: dict[SampleId, Completion] = {}
    while runner.has_work:
        done |= {job.request.uid: completion for job, completion in runner.step()}
    return done


def _assert_alike(drawn: dict[SampleId, Completion], expected: dict[SampleId, Completion]) -> None:
    """One sequence may part where two tokens are almost equally likely."""
    assert drawn.keys() == expected.keys()
    same = [
        uid
        for uid, one in expected.items()
        if drawn[uid].token_ids.tolist() == one.token_ids.tolist() and drawn[uid].stop == one.stop
    ]
    assert len(same) >= len(expected) - 1
    for uid in same:
        np.testing.assert_allclose(drawn[uid].logprobs, expected[uid].logprobs, atol=1e-4)


@pytest.mark.parametrize("name", WAYS)
def test_every_way_draws_what_the_plain_runner_draws(name: str) -> None:
    torch._dynamo.reset()
    model = _model()
    expected = _drive(_plain(model), _mixed())
    assert {one.stop for one in expected.values()} == {StopReason.STOP, StopReason.LENGTH}
    runner = _paged(model, WAYS[name])
    _assert_alike(_drive(runner, _mixed()), expected)
    assert runner.cache.ways == WAYS[name], "nothing had to be given up"
    assert (runner.cache._plain is not None) == ("without modules" in name)
    runner.clear()


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.8}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": ((5, 2.0),)}],
    ids=str,
)
def test_cuts_and_biases_are_those_of_the_plain_runner(sampling: dict[str, Any]) -> None:
    model = _model()
    expected = _drive(_plain(model), _mixed(**sampling))
    runner = _paged(model, Ways(compiled=False))
    _assert_alike(_drive(runner, _mixed(**sampling)), expected)
    runner.clear()


def test_the_device_draws_with_the_random_numbers_of_the_host() -> None:
    rows = DeviceRows.empty(rows=512, pages=1, stops=[], device="cuda")
    rows.state[Field.LENGTH] = torch.arange(512, device="cuda") + 5
    rows.state[Field.LIMIT] = 10_000
    rows.state[Field.STREAM] = torch.randint(-(2**62), 2**62, (512,), device="cuda")
    rows.shares[Share.TEMPERATURE] = 1.0
    stream = rows.state[Field.STREAM].cpu().numpy().view(np.uint64)
    expected = uniforms(stream, np.arange(512) + 5)
    draw(torch.zeros(512, 4096, device="cuda"), rows, cuts=False, kernels=True)
    # Of 4,096 equally likely tokens, the one that is drawn is the uniform number's first 12 bits.
    assert rows.drawn[0].tolist() == np.floor(expected * 4096).astype(int).tolist()


@pytest.mark.parametrize(
    "ways", [Ways(), Ways(compiled=False, plain=False)], ids=["without modules", "modules"]
)
def test_an_optimizer_step_in_place_is_seen_by_a_captured_graph(ways: Ways) -> None:
    model = _model()
    runner = _paged(model, ways)
    before = _drive(runner, _mixed(8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    runner.commit(1)
    after = _drive(runner, _mixed(8))
    assert any(before[uid].token_ids.tolist() != after[uid].token_ids.tolist() for uid in before)
    _assert_alike(after, _drive(_plain(model), _mixed(8)))
    assert {version for one in after.values() for version in one.versions.tolist()} == {1}
    runner.clear()


def test_a_layer_that_reads_on_the_host_is_run_without_a_graph(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch._dynamo.reset()
    model = _model()
    expected = _drive(_plain(model), _mixed(8))
    runner = _paged(model, Ways())
    module: Any = runner.cache._module
    module.model.layers[0].mlp.register_forward_hook(_reads)
    with caplog.at_level(logging.WARNING):
        drawn = _drive(runner, _mixed(8))
    _assert_alike(drawn, expected)
    assert not runner.cache.ways.graphs
    assert "generates more slowly" in caplog.text
    runner.clear()


def _reads(_: Any, given: Any, output: torch.Tensor) -> None:
    assert float(output.flatten()[0]) == float(output.flatten()[0])


def _learner_logprobs(module: Any, requests: Sequence[Request], drawn: Any) -> Any:
    """Of each request's drawn tokens, from one packed forward."""
    ids = [np.concatenate([one.token_ids, drawn[one.uid].token_ids]) for one in requests]
    layout = PackedLayout.of([len(one) for one in ids], device="cuda", fixed=True)
    packed = torch.from_numpy(np.concatenate(ids).astype(np.int64)).cuda()
    with torch.no_grad():
        hidden = module.base_model(
            input_ids=packed[None],
            position_ids=layout.position_ids_N[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]
        weight, bias = output_head(module)
        ones = torch.ones(len(packed) - 1, device="cuda")
        scored, _ = token_logprobs(
            hidden[:-1], weight, packed[1:], ones, chunk=64, tiled=True, bias_V=bias
        )
    found: dict[SampleId, Any] = {}
    offset = 0
    for one, tokens in zip(requests, ids, strict=True):
        here = slice(offset + len(one.token_ids) - 1, offset + len(tokens) - 1)
        found[one.uid] = scored[here].cpu().numpy()
        offset += len(tokens)
    return found


def test_in_zero_mismatch_mode_a_learner_finds_the_engines_log_probs() -> None:
    model = _model(torch.bfloat16)
    runner = _paged(model, Ways.zero_mismatch(), stops=Stops(()))
    requests = [_request(n, [1, *range(3, 3 + 2 * n)], max_tokens=30) for n in range(24)]
    drawn = _drive(runner, requests)
    runner.clear()
    learner = _sharing(model, VARLEN)
    fix_arithmetic(learner)
    found = _learner_logprobs(learner, requests, drawn)
    for one in requests:
        # What is left is the last bits of a sum of exponentials in float32.
        np.testing.assert_allclose(found[one.uid], drawn[one.uid].logprobs, atol=1e-5)


def test_in_bfloat16_the_decoder_without_modules_is_as_exact_as_with_them() -> None:
    model = _model(torch.bfloat16)
    requests = [_request(n, [1, *range(3, 3 + 2 * n)], max_tokens=30) for n in range(24)]
    drawn: list[Any] = []
    for ways in (Ways(), Ways(compiled=False, plain=False)):
        runner = _paged(model, ways, stops=Stops(()))
        drawn.append(_drive(runner, requests))
        runner.clear()
    learner = _sharing(model.float(), VARLEN)
    gaps: list[float] = []
    for one in drawn:
        exact = _learner_logprobs(learner, requests, one)
        gaps.append(np.mean([np.abs(exact[uid] - one[uid].logprobs).mean() for uid in exact]))
    assert gaps[1] > 0
    assert gaps[0] < 1.5 * gaps[1]
