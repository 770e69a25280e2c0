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


def _model(config: Any = LLAMA) -> Any:
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


def _infer(**options: Any) -> InferConfig:
    return InferConfig(**{"slots": 8, "max_length": 128, **options})


def _paged(model: Any, *, stops: StopRules | None = None, **options: Any) -> PagedRunner:
    return PagedRunner(
        _module(model),
        _infer(**options),
        device="cpu",
        stops=stops or StopRules(),
        options=REFERENCE,
    )


def _slot_runner(model: Any, *, stops: StopRules | None = None, **options: Any) -> SlotRunner:
    return SlotRunner(
        _module(model),
        _infer(**options),
        device="cpu",
        deterministic=False,
        stops=stops or StopRules(),
    )


def _request(number: int, ids: Sequence[int], *, session: str | None = None, **sampling: Any):
    return Request(
        SampleId(0, number),
        frozen_array(ids, np.int32),
        Sampling(**{"max_tokens": 12, **sampling}),
        stream=number * 7919 + 13,
        session=session,
    )


def _mixed(count: int = 20) -> list[Request]:
    """Groups of four with prompts of 1 to 45 tokens, all lengths, greedy and sampled."""
    return [
        _request(
            n,
            [1, *((np.arange(11 * (n // 4)) * 7 + n // 4) % 30 + 2).tolist()],
            max_tokens=5 + (n * 13) % 50,
            temperature=(0.0, 1.0, 0.7, 1.3)[n % 4],
        )
        for n in range(count)
    ]


def _drive(runner: Any, requests: Sequence[Request]) -> dict[SampleId, Completion]:
    for request in requests:
        runner.queue.submit(EngineRequest(request))
    done: dict[SampleId, Completion] = {}
    for _ in range(2000):
        if not runner.has_work:
            return done
        done |= {job.request.uid: completion for job, completion in runner.step()}
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
    model, stops = _model(config), StopRules((2, 7))
    expected = _drive(_slot_runner(model, stops=stops), _mixed())
    assert {one.stop for one in expected.values()} == {StopReason.STOP, StopReason.LENGTH}
    _assert_equal(_drive(_paged(model, stops=stops), _mixed()), expected)


def test_prompts_longer_than_a_steps_budget_are_computed_in_chunks():
    model = _model()
    expected = _drive(_slot_runner(model), _mixed())
    _assert_equal(_drive(_paged(model, prefill_tokens=7), _mixed()), expected)


def test_fused_products_give_the_same_tokens():
    model = _model()
    expected = _drive(_paged(model), _mixed())
    fuse_storage(model)
    runner = _paged(model)
    _assert_equal(_drive(runner, _mixed()), expected)
    layers = runner.forward._module.modules()  # pyright: ignore[reportPrivateUsage]
    assert sum(type(layer) is FusedLinear for layer in layers) == 2 * 5


def test_a_group_computes_its_prompt_once():
    runner = _paged(_model())
    prompt = [1, *range(3, 30), *range(3, 20)]
    _drive(runner, [_request(n, prompt) for n in range(8)])
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
    model, stops = _model(), StopRules((2, 7))
    requests = [_request(n, [1, 5 + n], max_tokens=20, **sampling) for n in range(6)]
    expected = _drive(_slot_runner(model, stops=stops), requests)
    _assert_equal(_drive(_paged(model, stops=stops), requests), expected)


def test_a_stop_string_ends_a_sequence_with_its_last_token():
    model = _model()
    stops = StopRules((), lambda ids: "".join(chr(97 + token) for token in ids))
    request = _request(0, [1, 5], max_tokens=30, temperature=0.0)
    letters = "".join(chr(97 + t) for t in _drive(_paged(model), [request])[request.uid].token_ids)
    stop = letters[9:12]
    end = letters.index(stop) + 3
    stopping = _request(0, [1, 5], max_tokens=30, temperature=0.0, stop=(stop,))
    completion = _drive(_paged(model, stops=stops), [stopping])[request.uid]
    assert completion.stop is StopReason.STOP
    assert len(completion.token_ids) == end


def test_preempted_requests_still_generate_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    model = _model()
    expected = _drive(_slot_runner(model), _mixed())
    runner = _paged(model)
    reserve = PagedForward.reserve
    monkeypatch.setattr(PagedForward, "reserve", lambda self, _: reserve(self, 9))
    monkeypatch.setattr("rollick.infer.native.gpu.runner.PagePool", lambda _: _small_pool(pages=9))
    generated = _drive(runner, _mixed())
    _assert_equal(generated, expected)
    assert runner.stats.preempted > 0
    assert runner.kv_capacity == 8 * PAGE
    assert runner.kv_tokens == 0


def _small_pool(*, pages: int) -> Any:
    from rollick.infer.native.gpu.page_pool import PagePool

    return PagePool(pages)


def test_shared_pages_count_once():
    runner = _paged(_model())
    prompt = [1, *range(3, 30), *range(3, 20)]
    for number in range(4):
        runner.queue.submit(EngineRequest(_request(number, prompt, max_tokens=60)))
    runner.step()
    # One full page for all, and one more for each.
    assert runner.kv_tokens == (1 + 4) * PAGE
    assert runner.kv_capacity == 8 * 4 * PAGE
    runner.clear()
    assert runner.kv_tokens == runner.kv_capacity == 0


def test_an_aborted_request_keeps_its_tokens_and_can_be_continued():
    model = _model()
    complete = _drive(_paged(model), [_request(0, [1, 5], max_tokens=40)])[SampleId(0, 0)]
    runner = _paged(model)
    runner.queue.submit(EngineRequest(_request(0, [1, 5], max_tokens=40)))
    for _ in range(3):
        assert runner.step() == []
    ended = runner.abort(SampleId(0, 0))
    assert ended is not None
    part = ended[1]
    assert part.stop is StopReason.ABORTED
    assert 0 < len(part.token_ids) < 40
    request = Request(
        SampleId(0, 0),
        frozen_array([1, 5], np.int32),
        Sampling(max_tokens=40),
        stream=13,
        continue_from=part,
    )
    computed = runner.stats.prefilled_tokens
    rest = _drive(runner, [request])[SampleId(0, 0)]
    assert rest.token_ids.tolist() == complete.token_ids.tolist()
    assert runner.stats.prefilled_tokens == computed


def test_the_next_turn_of_a_session_reuses_the_pages_of_the_last():
    prompt = [1, *range(3, 22)]
    computed: dict[str | None, int] = {}
    for session in ("s", None):
        runner = _paged(_model())
        first = _request(0, prompt, session=session, max_tokens=30)
        generated = _drive(runner, [first])[first.uid]
        before = runner.stats.prefilled_tokens
        following = [*prompt, *generated.token_ids.tolist(), 9, 9, 9]
        _drive(runner, [_request(1, following, session=session)])
        computed[session] = runner.stats.prefilled_tokens - before
    # All but the last of 53 tokens are computed; only the full first page is reused.
    assert computed == {"s": 52 - PAGE, None: 52}


def test_only_tokens_after_a_change_of_weights_have_the_new_version():
    model = _model()
    runner = _paged(model)
    for number in range(3):
        runner.queue.submit(EngineRequest(_request(number, [1, 5 + number], max_tokens=30)))
    for _ in range(3):
        runner.step()
    runner.synchronize()
    lengths = runner.table.length[:3].copy() - 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    runner.commit(4, keep_cache=False)
    for completion in _drive(runner, []).values():
        generated = int(lengths[completion.uid.index])
        assert completion.versions.tolist() == [0] * generated + [4] * (30 - generated)


def test_tokens_on_a_kept_cache_are_flagged_and_no_other_sequence_reuses_it():
    model = _model()
    runner = _paged(model)
    prompt = [1, *range(5, 25)]
    runner.queue.submit(EngineRequest(_request(0, prompt, max_tokens=30, session="s")))
    for _ in range(3):
        runner.step()
    runner.synchronize()
    generated = int(runner.table.length[0]) - len(prompt)
    computed = runner.stats.prefilled_tokens
    runner.queue.submit(EngineRequest(_request(1, prompt, max_tokens=30)))
    runner.commit(4, keep_cache=True)
    done = _drive(runner, [])
    kept, later = done[SampleId(0, 0)], done[SampleId(0, 1)]
    assert kept.versions.tolist() == [0] * generated + [4] * (30 - generated)
    assert kept.kept_cache is not None
    assert kept.kept_cache.tolist() == (kept.versions == 4).tolist()
    assert later.kept_cache is None
    assert runner.stats.prefilled_tokens - computed == len(prompt) - 1, "the second one's own"
    again = len(prompt) + len(kept.token_ids)
    computed = runner.stats.prefilled_tokens
    turn = [*prompt, *kept.token_ids.tolist(), 7]
    _drive(runner, [_request(2, turn, max_tokens=2, session="s")])
    assert runner.stats.prefilled_tokens - computed > again - len(prompt), "not from the old cache"


def test_rows_are_compacted_when_a_smaller_graph_is_enough(monkeypatch: pytest.MonkeyPatch):
    buckets: list[int] = []
    decode = PagedForward.decode

    def noting(self: PagedForward, rows: Any, *, bucket: int, **options: Any) -> None:
        buckets.append(bucket)
        decode(self, rows, bucket=bucket, **options)

    monkeypatch.setattr(PagedForward, "decode", noting)
    model = _model()
    requests = [_request(n, [1, 5], max_tokens=4 if n % 4 else 40) for n in range(32)]
    expected = _drive(_slot_runner(model, slots=32), requests)
    _assert_equal(_drive(_paged(model, slots=32), requests), expected)
    assert buckets[0] == 32
    assert buckets[-1] == 8


def test_several_decodes_are_launched_at_once_while_no_request_waits():
    runner = _paged(_model())
    for number in range(3):
        runner.queue.submit(EngineRequest(_request(number, [1, 5], max_tokens=50)))
    runner.step()
    before = runner.stats.decode_steps
    runner.step()
    assert runner.stats.decode_steps - before == 4
    runner.queue.submit(EngineRequest(_request(3, [1, 5], max_tokens=50, stop_ids=(3,))))
    runner.step()
    before = runner.stats.decode_steps
    runner.step()
    assert runner.stats.decode_steps - before == 1, (
        "the host checks each token for the request's stop ids"
    )


def test_nothing_is_launched_when_all_rows_have_reached_their_limit():
    runner = _paged(_model())
    _drive(runner, [_request(n, [1, 5], max_tokens=10) for n in range(3)])
    assert runner.stats.decode_steps == 10


def test_logits_that_are_not_finite_name_the_request():
    model = _model()
    runner = _paged(model)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    from rollick.errors import EngineError

    with pytest.raises(EngineError, match="not finite"):
        _drive(runner, [_request(0, [1, 5])])


def test_a_module_that_cannot_be_compiled_or_captured_still_generates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refusing(self: PagedForward, *_: Any) -> Any:
        options = self.options
        lacking = "compiler" if options.compile_layers else "capture"
        if options.direct_decoder:
            lacking = "kernel"
        raise RuntimeError(f"no {lacking} for this")

    model = _model()
    requests = _mixed(8)
    expected = _drive(_slot_runner(model), requests)
    fuse_storage(model)
    runner = _paged(model)
    monkeypatch.setattr(runner.forward, "_on_gpu", True)
    monkeypatch.setattr(runner.forward, "options", ForwardOptions(triton_kernels=False))
    monkeypatch.setattr(PagedForward, "_capture", refusing)
    _assert_equal(_drive(runner, requests), expected)
    assert runner.forward.options == ForwardOptions(
        triton_kernels=False, compile_layers=False, cuda_graphs=False, direct_decoder=False
    )
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "no kernel for this",
        "no compiler for this",
        "no capture for this",
    ]


def test_freeing_the_cache_unfuses_the_weights():
    model = _model()
    fuse_storage(model)
    runner = _paged(model)
    _drive(runner, _mixed(4))
    runner.free()
    layers = runner.forward._module.modules()  # pyright: ignore[reportPrivateUsage]
    assert not any(isinstance(layer, FusedLinear) for layer in layers)
    _assert_equal(_drive(runner, _mixed(4)), _drive(_slot_runner(model), _mixed(4)))


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
