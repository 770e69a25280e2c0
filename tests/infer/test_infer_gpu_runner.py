"""The GPU's runner, with the references of its kernels: tokens and laws of the plain one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from rollick.config.schema import InferConfig
from rollick.infer.native.endings import Stops
from rollick.infer.native.gpu.forward import PagedForward, Ways, buckets_of
from rollick.infer.native.gpu.runner import PagedRunner
from rollick.infer.native.rows import Job
from rollick.infer.native.runner import Runner
from rollick.models.cached_attention import CACHED
from rollick.models.fused import FusedLinear, fuse_storage
from rollick.models.load import empty_model, share_parameters
from rollick.models.paged_attention import PAGE
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
REFERENCE = Ways(graphs=False, compiled=False, kernels=False)


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


def _paged(model: Any, *, stops: Stops | None = None, **options: Any) -> PagedRunner:
    return PagedRunner(
        _module(model),
        _infer(**options),
        device="cpu",
        stops=stops or Stops(()),
        version=0,
        ways=REFERENCE,
    )


def _plain(model: Any, *, stops: Stops | None = None, **options: Any) -> Runner:
    return Runner(
        _module(model),
        _infer(**options),
        device="cpu",
        deterministic=False,
        stops=stops or Stops(()),
        version=0,
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
    """Groups of four with prompts of 1 to 45 tokens, all lengths, greedy and drawn."""
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
        runner.submit(Job(request))
    done: dict[SampleId, Completion] = {}
    for _ in range(2000):
        if not runner.has_work:
            return done
        done |= {job.request.uid: completion for job, completion in runner.step()}
    raise AssertionError("the runner does not come to an end")


def _assert_alike(drawn: dict[SampleId, Completion], expected: dict[SampleId, Completion]) -> None:
    assert drawn.keys() == expected.keys()
    for uid, one in expected.items():
        assert drawn[uid].token_ids.tolist() == one.token_ids.tolist(), uid
        assert drawn[uid].stop == one.stop
        assert drawn[uid].versions.tolist() == one.versions.tolist()
        np.testing.assert_allclose(drawn[uid].logprobs, one.logprobs, atol=2e-5)


@pytest.mark.parametrize("config", [LLAMA, GEMMA3], ids=["llama", "gemma3, window of 6"])
def test_tokens_are_those_of_the_plain_runner(config: Any):
    model, stops = _model(config), Stops((2, 7))
    expected = _drive(_plain(model, stops=stops), _mixed())
    assert {one.stop for one in expected.values()} == {StopReason.STOP, StopReason.LENGTH}
    _assert_alike(_drive(_paged(model, stops=stops), _mixed()), expected)


def test_prompts_longer_than_a_steps_budget_are_computed_in_parts():
    model = _model()
    expected = _drive(_plain(model), _mixed())
    _assert_alike(_drive(_paged(model, prefill_tokens=7), _mixed()), expected)


def test_fused_products_give_the_same_tokens():
    model = _model()
    expected = _drive(_paged(model), _mixed())
    fuse_storage(model)
    runner = _paged(model)
    _assert_alike(_drive(runner, _mixed()), expected)
    layers = runner.cache._module.modules()  # pyright: ignore[reportPrivateUsage]
    assert sum(type(layer) is FusedLinear for layer in layers) == 2 * 5


def test_a_group_computes_its_prompt_once():
    runner = _paged(_model())
    prompt = [1, *range(3, 30), *range(3, 20)]
    _drive(runner, [_request(n, prompt) for n in range(8)])
    assert runner.prefilled_tokens == len(prompt) - 1


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
def test_what_a_request_asks_for_is_done_as_in_the_plain_runner(sampling: dict[str, Any]):
    model, stops = _model(), Stops((2, 7))
    requests = [_request(n, [1, 5 + n], max_tokens=20, **sampling) for n in range(6)]
    expected = _drive(_plain(model, stops=stops), requests)
    _assert_alike(_drive(_paged(model, stops=stops), requests), expected)


def test_a_stop_string_ends_a_sequence_with_its_last_token():
    model = _model()
    stops = Stops((), lambda ids: "".join(chr(97 + token) for token in ids))
    request = _request(0, [1, 5], max_tokens=30, temperature=0.0)
    letters = "".join(chr(97 + t) for t in _drive(_paged(model), [request])[request.uid].token_ids)
    wanted = letters[9:12]
    end = letters.index(wanted) + 3
    stopping = _request(0, [1, 5], max_tokens=30, temperature=0.0, stop=(wanted,))
    completion = _drive(_paged(model, stops=stops), [stopping])[request.uid]
    assert completion.stop is StopReason.STOP
    assert len(completion.token_ids) == end


def test_few_pages_throw_requests_out_and_still_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    model = _model()
    expected = _drive(_plain(model), _mixed())
    runner = _paged(model)
    reserve = PagedForward.reserve
    monkeypatch.setattr(PagedForward, "reserve", lambda self, _: reserve(self, 9))
    monkeypatch.setattr("rollick.infer.native.gpu.runner.PagePool", lambda _: _small_pool(pages=9))
    drawn = _drive(runner, _mixed())
    _assert_alike(drawn, expected)
    assert runner.preempted > 0
    assert runner.kv_capacity == 8 * PAGE
    assert runner.kv_tokens == 0


def _small_pool(*, pages: int) -> Any:
    from rollick.infer.native.gpu.pages import PagePool

    return PagePool(pages)


def test_pages_in_use_are_counted_once_however_many_share_them():
    runner = _paged(_model())
    prompt = [1, *range(3, 30), *range(3, 20)]
    for number in range(4):
        runner.submit(Job(_request(number, prompt, max_tokens=60)))
    runner.step()
    # One full page for all, and for each one that it goes on from.
    assert runner.kv_tokens == (1 + 4) * PAGE
    assert runner.kv_capacity == 8 * 4 * PAGE
    runner.clear()
    assert runner.kv_tokens == runner.kv_capacity == 0


def test_an_aborted_request_keeps_its_tokens_and_goes_on_where_it_was():
    model = _model()
    whole = _drive(_paged(model), [_request(0, [1, 5], max_tokens=40)])[SampleId(0, 0)]
    runner = _paged(model)
    runner.submit(Job(_request(0, [1, 5], max_tokens=40)))
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
    computed = runner.prefilled_tokens
    rest = _drive(runner, [request])[SampleId(0, 0)]
    assert rest.token_ids.tolist() == whole.token_ids.tolist()
    assert runner.prefilled_tokens == computed


def test_the_next_turn_of_a_session_begins_with_the_pages_of_the_last():
    prompt = [1, *range(3, 22)]
    computed: dict[str | None, int] = {}
    for session in ("s", None):
        runner = _paged(_model())
        first = _request(0, prompt, session=session, max_tokens=30)
        drawn = _drive(runner, [first])[first.uid]
        before = runner.prefilled_tokens
        following = [*prompt, *drawn.token_ids.tolist(), 9, 9, 9]
        _drive(runner, [_request(1, following, session=session)])
        computed[session] = runner.prefilled_tokens - before
    # Of 53 tokens all but the last are computed; the first page of the last turn is full.
    assert computed == {"s": 52 - PAGE, None: 52}


def test_a_change_of_weights_is_seen_by_tokens_after_it_and_by_no_other():
    model = _model()
    runner = _paged(model)
    for number in range(3):
        runner.submit(Job(_request(number, [1, 5 + number], max_tokens=30)))
    for _ in range(3):
        runner.step()
    runner.settle()
    lengths = runner.rows.length[:3].copy() - 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    runner.commit(4)
    for completion in _drive(runner, []).values():
        drawn = int(lengths[completion.uid.index])
        assert completion.versions.tolist() == [0] * drawn + [4] * (30 - drawn)


def test_a_kept_cache_goes_on_flagged_and_nobody_else_begins_with_it():
    model = _model()
    runner = _paged(model)
    prompt = [1, *range(5, 25)]
    runner.submit(Job(_request(0, prompt, max_tokens=30, session="s")))
    for _ in range(3):
        runner.step()
    runner.settle()
    drawn = int(runner.rows.length[0]) - len(prompt)
    computed = runner.prefilled_tokens
    runner.submit(Job(_request(1, prompt, max_tokens=30)))
    runner.commit(4, keep_cache=True)
    done = _drive(runner, [])
    kept, later = done[SampleId(0, 0)], done[SampleId(0, 1)]
    assert kept.versions.tolist() == [0] * drawn + [4] * (30 - drawn)
    assert kept.kept_cache is not None
    assert kept.kept_cache.tolist() == (kept.versions == 4).tolist()
    assert later.kept_cache is None
    assert runner.prefilled_tokens - computed == len(prompt) - 1, "the second one's own"
    again = len(prompt) + len(kept.token_ids)
    computed = runner.prefilled_tokens
    turn = [*prompt, *kept.token_ids.tolist(), 7]
    _drive(runner, [_request(2, turn, max_tokens=2, session="s")])
    assert runner.prefilled_tokens - computed > again - len(prompt), "not from the old cache"


def test_rows_that_ended_make_room_for_a_smaller_graph(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    decode = PagedForward.decode

    def noting(self: PagedForward, rows: Any, *, bucket: int, **options: Any) -> None:
        asked.append(bucket)
        decode(self, rows, bucket=bucket, **options)

    monkeypatch.setattr(PagedForward, "decode", noting)
    model = _model()
    requests = [_request(n, [1, 5], max_tokens=4 if n % 4 else 40) for n in range(32)]
    expected = _drive(_plain(model, slots=32), requests)
    _assert_alike(_drive(_paged(model, slots=32), requests), expected)
    assert asked[0] == 32
    assert asked[-1] == 8


def test_several_steps_are_launched_at_once_while_nobody_waits():
    runner = _paged(_model())
    for number in range(3):
        runner.submit(Job(_request(number, [1, 5], max_tokens=50)))
    runner.step()
    before = runner.decode_steps
    runner.step()
    assert runner.decode_steps - before == 4
    runner.submit(Job(_request(3, [1, 5], max_tokens=50, stop_ids=(3,))))
    runner.step()
    before = runner.decode_steps
    runner.step()
    assert runner.decode_steps - before == 1, "the host must look at each token for its stop ids"


def test_nothing_is_launched_beyond_the_limit_of_all_rows():
    runner = _paged(_model())
    _drive(runner, [_request(n, [1, 5], max_tokens=10) for n in range(3)])
    assert runner.decode_steps == 10


def test_logits_that_are_not_finite_name_the_request():
    model = _model()
    runner = _paged(model)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    from rollick.errors import EngineError

    with pytest.raises(EngineError, match="not finite"):
        _drive(runner, [_request(0, [1, 5])])


def test_a_module_that_refuses_to_be_compiled_and_captured_still_generates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refusing(self: PagedForward, *_: Any) -> Any:
        ways = self.ways
        lacking = "kernel" if ways.plain else "compiler" if ways.compiled else "capture"
        raise RuntimeError(f"no {lacking} for this")

    model = _model()
    requests = _mixed(8)
    expected = _drive(_plain(model), requests)
    fuse_storage(model)
    runner = _paged(model)
    monkeypatch.setattr(runner.cache, "_on_gpu", True)
    monkeypatch.setattr(runner.cache, "_ways", Ways(kernels=False))
    monkeypatch.setattr(PagedForward, "_capture", refusing)
    _assert_alike(_drive(runner, requests), expected)
    assert runner.cache.ways == Ways(kernels=False, compiled=False, graphs=False, plain=False)
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "no kernel for this",
        "no compiler for this",
        "no capture for this",
    ]


def test_freeing_the_cache_lets_go_of_the_weights():
    model = _model()
    fuse_storage(model)
    runner = _paged(model)
    _drive(runner, _mixed(4))
    runner.free()
    layers = runner.cache._module.modules()  # pyright: ignore[reportPrivateUsage]
    assert not any(isinstance(layer, FusedLinear) for layer in layers)
    _assert_alike(_drive(runner, _mixed(4)), _drive(_plain(model), _mixed(4)))


def test_buckets_grow_in_steps_of_an_eighth_to_a_half():
    assert buckets_of(4) == [8]
    assert buckets_of(64) == [8, 16, 32, 40, 48, 56, 64]
    sizes = buckets_of(1024)
    assert sizes[-1] == 1024
    assert all(a < b <= 2 * a for a, b in pairwise(sizes))
