"""The paged runner on the CPU, without kernels, against the slot runner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import tiny_family
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.gpu.forward import (
    ForwardOptions,
    PagedForward,
    decoder_layers,
    graph_buckets,
)
from rollick.infer.native.gpu.runner import PagedRunner
from rollick.infer.native.sequence_table import EngineRequest
from rollick.infer.native.slot_runner import SlotRunner
from rollick.models.attention.paged import PAGE
from rollick.models.attention.slot_cache import CACHED
from rollick.models.decoder.fused_linear import FusedLinear, fuse_storage
from rollick.models.loading.load import empty_model, share_parameters
from rollick.types import Completion, Request, SampleId, Sampling, StopReason, frozen_array

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
GEMMA3 = Gemma3TextConfig(
    **SIZES, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
)
REFERENCE = ForwardOptions(cuda_graphs=False, compile_layers=False, triton_kernels=False)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _make_model(config: Any = LLAMA) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def _module(model: Any) -> Any:
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    return module


def _make_config(**options: Any) -> InferConfig:
    return InferConfig(**{"slots": 8, "max_length": 128, **options})


def _make_paged_runner(
    model: Any, *, stops: StopRules | None = None, **options: Any
) -> PagedRunner:
    return PagedRunner(
        _module(model),
        _make_config(**options),
        device="cpu",
        stops=stops or StopRules(),
        options=REFERENCE,
    )


def _make_slot_runner(model: Any, *, stops: StopRules | None = None, **options: Any) -> SlotRunner:
    return SlotRunner(
        _module(model),
        _make_config(**options),
        device="cpu",
        deterministic=False,
        stops=stops or StopRules(),
    )


def _make_request(number: int, ids: Sequence[int], *, session: str | None = None, **sampling: Any):
    return Request(
        SampleId(0, number),
        frozen_array(ids, np.int32),
        Sampling(**{"max_tokens": 12, **sampling}),
        stream=number * 7919 + 13,
        session=session,
    )


def _make_mixed_requests(count: int = 20) -> list[Request]:
    """Groups of four with prompts of 1 to 45 tokens and all output lengths, greedy and sampled."""
    return [
        _make_request(
            n,
            [1, *((np.arange(11 * (n // 4)) * 7 + n // 4) % 30 + 2).tolist()],
            max_tokens=5 + (n * 13) % 50,
            temperature=(0.0, 1.0, 0.7, 1.3)[n % 4],
        )
        for n in range(count)
    ]


def _run_requests(runner: Any, requests: Sequence[Request]) -> dict[SampleId, Completion]:
    for request in requests:
        runner.queue.submit(EngineRequest(request))
    completions: dict[SampleId, Completion] = {}
    for _ in range(2000):
        if not runner.has_work:
            return completions
        completions |= {job.request.uid: completion for job, completion in runner.step()}
    raise AssertionError("the runner does not finish")


def _assert_equal(
    generated: dict[SampleId, Completion], expected: dict[SampleId, Completion]
) -> None:
    assert generated.keys() == expected.keys()
    for uid, one in expected.items():
        assert generated[uid].token_ids.tolist() == one.token_ids.tolist(), uid
        assert generated[uid].stop == one.stop
        assert generated[uid].versions.tolist() == one.versions.tolist()
        np.testing.assert_allclose(generated[uid].logprobs, one.logprobs, atol=2e-5)


@pytest.mark.parametrize("config", [LLAMA, GEMMA3], ids=["llama", "gemma3, window of 6"])
def test_tokens_are_those_of_the_slot_runner(config: Any):
    model, stops = _make_model(config), StopRules((2, 7))
    expected = _run_requests(_make_slot_runner(model, stops=stops), _make_mixed_requests())
    assert {one.stop for one in expected.values()} == {StopReason.STOP, StopReason.LENGTH}
    _assert_equal(
        _run_requests(_make_paged_runner(model, stops=stops), _make_mixed_requests()), expected
    )


def test_prompts_longer_than_a_steps_budget_are_computed_in_chunks():
    model = _make_model()
    expected = _run_requests(_make_slot_runner(model), _make_mixed_requests())
    _assert_equal(
        _run_requests(_make_paged_runner(model, prefill_tokens=7), _make_mixed_requests()), expected
    )


def test_fused_products_give_the_same_tokens():
    model = _make_model()
    expected = _run_requests(_make_paged_runner(model), _make_mixed_requests())
    fuse_storage(model)
    runner = _make_paged_runner(model)
    _assert_equal(_run_requests(runner, _make_mixed_requests()), expected)
    layers = runner.forward._module.modules()  # pyright: ignore[reportPrivateUsage]
    assert sum(type(layer) is FusedLinear for layer in layers) == 2 * 5


def test_a_group_computes_its_prompt_once():
    runner = _make_paged_runner(_make_model())
    prompt = [1, *range(3, 30), *range(3, 20)]
    _run_requests(runner, [_make_request(n, prompt) for n in range(8)])
    assert runner.stats.prefilled_tokens == len(prompt) - 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.8, "temperature": 1.3},
        {"logit_bias": ((5, 3.0), (6, float("-inf")))},
        {"min_tokens": 9, "stop_ids": (4, 5, 6, 7, 8)},
    ],
    ids=str,
)
def test_sampling_parameters_act_as_in_the_slot_runner(sampling: dict[str, Any]):
    model, stops = _make_model(), StopRules((2, 7))
    requests = [_make_request(n, [1, 5 + n], max_tokens=20, **sampling) for n in range(6)]
    expected = _run_requests(_make_slot_runner(model, stops=stops), requests)
    _assert_equal(_run_requests(_make_paged_runner(model, stops=stops), requests), expected)


def test_a_stop_string_ends_a_sequence_with_its_last_token():
    model = _make_model()
    stops = StopRules((), lambda ids: "".join(chr(97 + token) for token in ids))
    request = _make_request(0, [1, 5], max_tokens=30, temperature=0.0)
    text = "".join(
        chr(97 + t)
        for t in _run_requests(_make_paged_runner(model), [request])[request.uid].token_ids
    )
    stop = text[9:12]
    end = text.index(stop) + 3
    stopping = _make_request(0, [1, 5], max_tokens=30, temperature=0.0, stop=(stop,))
    completion = _run_requests(_make_paged_runner(model, stops=stops), [stopping])[request.uid]
    assert completion.stop is StopReason.STOP
    assert len(completion.token_ids) == end


def test_preempted_requests_still_generate_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    model = _make_model()
    expected = _run_requests(_make_slot_runner(model), _make_mixed_requests())
    runner = _make_paged_runner(model)
    reserve = PagedForward.reserve
    monkeypatch.setattr(PagedForward, "reserve", lambda self, _: reserve(self, 9))
    monkeypatch.setattr(
        "rollick.infer.native.gpu.runner.PagePool", lambda _: _make_small_pool(pages=9)
    )
    generated = _run_requests(runner, _make_mixed_requests())
    _assert_equal(generated, expected)
    assert runner.stats.preempted > 0
    assert runner.kv_capacity == 8 * PAGE
    assert runner.kv_tokens == 0


def _make_small_pool(*, pages: int) -> Any:
    from rollick.infer.native.gpu.page_pool import PagePool

    return PagePool(pages)


def test_shared_pages_count_once():
    runner = _make_paged_runner(_make_model())
    prompt = [1, *range(3, 30), *range(3, 20)]
    for number in range(4):
        runner.queue.submit(EngineRequest(_make_request(number, prompt, max_tokens=60)))
    runner.step()
    # All share one full page, and each has one more.
    assert runner.kv_tokens == (1 + 4) * PAGE
    assert runner.kv_capacity == 8 * 4 * PAGE
    runner.clear()
    assert runner.kv_tokens == runner.kv_capacity == 0


def test_an_aborted_request_keeps_its_tokens_and_can_be_continued():
    model = _make_model()
    uninterrupted = _run_requests(
        _make_paged_runner(model), [_make_request(0, [1, 5], max_tokens=40)]
    )[SampleId(0, 0)]
    runner = _make_paged_runner(model)
    runner.queue.submit(EngineRequest(_make_request(0, [1, 5], max_tokens=40)))
    for _ in range(3):
        assert runner.step() == []
    ended = runner.abort(SampleId(0, 0))
    assert ended is not None
    partial = ended[1]
    assert partial.stop is StopReason.ABORTED
    assert 0 < len(partial.token_ids) < 40
    request = Request(
        SampleId(0, 0),
        frozen_array([1, 5], np.int32),
        Sampling(max_tokens=40),
        stream=13,
        continue_from=partial,
    )
    prefilled = runner.stats.prefilled_tokens
    continued = _run_requests(runner, [request])[SampleId(0, 0)]
    assert continued.token_ids.tolist() == uninterrupted.token_ids.tolist()
    assert runner.stats.prefilled_tokens == prefilled


def test_the_next_turn_of_a_session_reuses_the_pages_of_the_last():
    prompt = [1, *range(3, 22)]
    prefilled: dict[str | None, int] = {}
    for session in ("s", None):
        runner = _make_paged_runner(_make_model())
        first = _make_request(0, prompt, session=session, max_tokens=30)
        generated = _run_requests(runner, [first])[first.uid]
        before = runner.stats.prefilled_tokens
        next_prompt = [*prompt, *generated.token_ids.tolist(), 9, 9, 9]
        _run_requests(runner, [_make_request(1, next_prompt, session=session)])
        prefilled[session] = runner.stats.prefilled_tokens - before
    # Without reuse, 52 of 53 tokens are prefilled. Of the cached pages, only the first is full.
    assert prefilled == {"s": 52 - PAGE, None: 52}


def test_only_tokens_after_a_change_of_weights_have_the_new_version():
    model = _make_model()
    runner = _make_paged_runner(model)
    for number in range(3):
        runner.queue.submit(EngineRequest(_make_request(number, [1, 5 + number], max_tokens=30)))
    for _ in range(3):
        runner.step()
    runner.synchronize()
    lengths = runner.table.length[:3].copy() - 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    runner.commit(4, keep_cache=False)
    for completion in _run_requests(runner, []).values():
        generated = int(lengths[completion.uid.index])
        assert completion.versions.tolist() == [0] * generated + [4] * (30 - generated)


def test_tokens_on_a_kept_cache_are_flagged_and_no_other_sequence_reuses_it():
    model = _make_model()
    runner = _make_paged_runner(model)
    prompt = [1, *range(5, 25)]
    runner.queue.submit(EngineRequest(_make_request(0, prompt, max_tokens=30, session="s")))
    for _ in range(3):
        runner.step()
    runner.synchronize()
    generated = int(runner.table.length[0]) - len(prompt)
    prefilled = runner.stats.prefilled_tokens
    runner.queue.submit(EngineRequest(_make_request(1, prompt, max_tokens=30)))
    runner.commit(4, keep_cache=True)
    completions = _run_requests(runner, [])
    kept, later = completions[SampleId(0, 0)], completions[SampleId(0, 1)]
    assert kept.versions.tolist() == [0] * generated + [4] * (30 - generated)
    assert kept.kept_cache is not None
    assert kept.kept_cache.tolist() == (kept.versions == 4).tolist()
    assert later.kept_cache is None
    assert runner.stats.prefilled_tokens - prefilled == len(prompt) - 1, "the second one's own"
    history_tokens = len(prompt) + len(kept.token_ids)
    prefilled = runner.stats.prefilled_tokens
    next_turn = [*prompt, *kept.token_ids.tolist(), 7]
    _run_requests(runner, [_make_request(2, next_turn, max_tokens=2, session="s")])
    assert runner.stats.prefilled_tokens - prefilled > history_tokens - len(prompt), (
        "not from the old cache"
    )


def test_rows_are_compacted_when_a_smaller_graph_is_enough(monkeypatch: pytest.MonkeyPatch):
    buckets: list[int] = []
    decode = PagedForward.decode

    def record_bucket(self: PagedForward, rows: Any, *, bucket: int, **options: Any) -> None:
        buckets.append(bucket)
        decode(self, rows, bucket=bucket, **options)

    monkeypatch.setattr(PagedForward, "decode", record_bucket)
    model = _make_model()
    requests = [_make_request(n, [1, 5], max_tokens=4 if n % 4 else 40) for n in range(32)]
    expected = _run_requests(_make_slot_runner(model, slots=32), requests)
    _assert_equal(_run_requests(_make_paged_runner(model, slots=32), requests), expected)
    assert buckets[0] == 32
    assert buckets[-1] == 8


def test_several_decodes_are_launched_at_once_while_no_request_waits():
    runner = _make_paged_runner(_make_model())
    for number in range(3):
        runner.queue.submit(EngineRequest(_make_request(number, [1, 5], max_tokens=50)))
    runner.step()
    before = runner.stats.decode_steps
    runner.step()
    assert runner.stats.decode_steps - before == 4
    runner.queue.submit(EngineRequest(_make_request(3, [1, 5], max_tokens=50, stop_ids=(3,))))
    runner.step()
    before = runner.stats.decode_steps
    runner.step()
    assert runner.stats.decode_steps - before == 1, (
        "the host checks each token for the request's stop ids"
    )


def test_nothing_is_launched_when_all_rows_have_reached_their_limit():
    runner = _make_paged_runner(_make_model())
    _run_requests(runner, [_make_request(n, [1, 5], max_tokens=10) for n in range(3)])
    assert runner.stats.decode_steps == 10


def test_logits_that_are_not_finite_name_the_request():
    model = _make_model()
    runner = _make_paged_runner(model)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    from rollick.errors import EngineError

    with pytest.raises(EngineError, match="not finite"):
        _run_requests(runner, [_make_request(0, [1, 5])])


def test_a_module_that_cannot_be_compiled_or_captured_still_generates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def raise_unsupported(self: PagedForward, *_: Any) -> Any:
        options = self.options
        missing = "compiler" if options.compile_layers else "capture"
        if options.direct_decoder:
            missing = "kernel"
        raise RuntimeError(f"no {missing} for this")

    model = _make_model()
    requests = _make_mixed_requests(8)
    expected = _run_requests(_make_slot_runner(model), requests)
    fuse_storage(model)
    runner = _make_paged_runner(model)
    monkeypatch.setattr(runner.forward, "_on_gpu", True)
    monkeypatch.setattr(runner.forward, "options", ForwardOptions(triton_kernels=False))
    monkeypatch.setattr(PagedForward, "_capture", raise_unsupported)
    _assert_equal(_run_requests(runner, requests), expected)
    assert runner.forward.options == ForwardOptions(
        triton_kernels=False, compile_layers=False, cuda_graphs=False, direct_decoder=False
    )
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "no kernel for this",
        "no compiler for this",
        "no capture for this",
    ]


def test_freeing_the_cache_unfuses_the_weights():
    model = _make_model()
    fuse_storage(model)
    runner = _make_paged_runner(model)
    _run_requests(runner, _make_mixed_requests(4))
    runner.free()
    layers = runner.forward._module.modules()  # pyright: ignore[reportPrivateUsage]
    assert not any(isinstance(layer, FusedLinear) for layer in layers)
    _assert_equal(
        _run_requests(runner, _make_mixed_requests(4)),
        _run_requests(_make_slot_runner(model), _make_mixed_requests(4)),
    )


def test_buckets_grow_in_steps_of_an_eighth_to_a_half():
    assert graph_buckets(4) == [8]
    assert graph_buckets(64) == [8, 16, 32, 40, 48, 56, 64]
    sizes = graph_buckets(1024)
    assert sizes[-1] == 1024
    assert all(a < b <= 2 * a for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("family", "layer"),
    [("llama", "LlamaDecoderLayer"), ("gemma3", "Gemma3DecoderLayer"), ("gpt2", "GPT2Block")],
)
def test_the_layers_to_compile_are_found_by_any_name_and_in_multimodal_models(
    family: str, layer: str
):
    actual = decoder_layers(tiny_family(family, attention=CACHED), 2)
    assert [type(one).__name__ for one in actual] == [layer, layer]
