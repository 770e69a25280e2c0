"""The native engine against transformers, and its own guarantees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import tiny_family
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollick.config.schema import InferConfig
from rollick.errors import EngineError, ModelError
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.weight_update import EngineWeights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.loading.load import empty_model, share_parameters
from rollick.testing.tiny import tiny_model
from rollick.types import (
    Completion,
    PolicyVersion,
    Request,
    SampleId,
    Sampling,
    StopReason,
    frozen_array,
    stable_hash,
)

VOCABULARY = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
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
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, one head each": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3, wide heads": Qwen3Config(**SIZES, head_dim=16),
    "mistral, window of 6": MistralConfig(**SIZES, sliding_window=6),
}
PROMPTS = ([1, 5, 6, 7], [1, 9], [3], [1, 5, 6, 7], [4] * 11)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _make_model(config: Any, *, seed: int = 0) -> Any:
    """A random model with large weights, so that tokens are far from equally likely."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def _make_engine(model: Any, *, slots: int = 8, deterministic: bool = False, **options: Any) -> Any:
    """An engine that shares the model's parameters."""
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    decode: Callable[[Sequence[int]], str] | None = options.pop("decode", None)
    stop_ids: tuple[int, ...] = options.pop("stop_ids", ())
    return NativeEngine(
        EngineWeights(module, shared=True),
        InferConfig(slots=slots, max_length=128, **options),
        deterministic=deterministic,
        stops=StopRules(stop_ids, decode),
    )


def _make_request(
    index: int, ids: Sequence[int], *, continue_from: Completion | None = None, **sampling: Any
) -> Request:
    return Request(
        SampleId(0, index),
        frozen_array(ids, np.int32),
        Sampling(**{"max_tokens": 20, **sampling}),
        stream=stable_hash("test", index),
        continue_from=continue_from,
    )


async def _generate_all(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


async def _wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def _get_bits(completion: Completion) -> tuple[list[int], bytes]:
    return completion.token_ids.tolist(), completion.logprobs.tobytes()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
async def test_greedy_tokens_and_log_probs_equal_those_of_transformers(name, deterministic):
    model = _make_model(CONFIGS[name])
    engine = _make_engine(model, deterministic=deterministic, slots=3, stop_ids=(2,))
    requests = [_make_request(index, ids, temperature=0.0) for index, ids in enumerate(PROMPTS)]
    for ids, completion in zip(PROMPTS, await _generate_all(engine, requests), strict=True):
        expected = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
        )[0, len(ids) :]
        assert completion.token_ids.tolist() == expected.tolist()
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor(ids), expected])[None]).logits[0]
        logprobs = logits[len(ids) - 1 : -1].log_softmax(-1).gather(-1, expected[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, logprobs.numpy(), atol=1e-4)
    await engine.close()


async def test_sampled_log_probs_are_those_of_a_full_forward_at_the_temperature():
    model = _make_model(CONFIGS["llama"])
    engine = _make_engine(model)
    completions = await _generate_all(
        engine, [_make_request(i, ids, temperature=0.7) for i, ids in enumerate(PROMPTS)]
    )
    for ids, completion in zip(PROMPTS, completions, strict=True):
        generated = torch.from_numpy(completion.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor(ids), generated])[None]).logits[0]
        expected = (logits[len(ids) - 1 : -1] / 0.7).log_softmax(-1).gather(-1, generated[:, None])
        np.testing.assert_allclose(completion.logprobs, expected[:, 0].numpy(), atol=1e-4)
    await engine.close()


async def test_more_requests_than_slots_are_refilled_at_once_and_all_finish():
    engine = _make_engine(_make_model(CONFIGS["llama"]), slots=3)
    lengths = [2, 9, 4, 7, 1, 5, 3]
    requests = [_make_request(i, [1, 3 + i], max_tokens=n) for i, n in enumerate(lengths)]
    completions = await _generate_all(engine, requests)
    assert [len(completion.token_ids) for completion in completions] == lengths
    assert engine.load().generated_tokens == sum(lengths)
    # Steps by slot: 2+7+3, 9, 4+1+5. A slot that stays empty would add steps.
    assert engine.runner.stats.decode_steps == 12
    await engine.close()


async def test_a_sample_does_not_depend_on_the_batch_or_on_the_number_of_slots():
    model = _make_model(CONFIGS["llama"])
    requests = [_make_request(i, PROMPTS[i % 5]) for i in range(12)]
    wide, narrow = _make_engine(model, slots=12), _make_engine(model, slots=2)
    in_order = await _generate_all(wide, requests)
    reversed_order = await _generate_all(narrow, requests[::-1])
    for one, other in zip(in_order, reversed_order[::-1], strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    await wide.close()
    await narrow.close()


async def test_in_deterministic_mode_the_batch_does_not_change_a_single_bit():
    model = _make_model(CONFIGS["qwen3, wide heads"])
    requests = [_make_request(i, PROMPTS[i % 5]) for i in range(34)]
    wide, narrow = (_make_engine(model, slots=slots, deterministic=True) for slots in (34, 3))
    in_order = await _generate_all(wide, requests)
    reversed_order = await _generate_all(narrow, requests[::-1])
    assert [_get_bits(one) for one in in_order] == [
        _get_bits(other) for other in reversed_order[::-1]
    ]
    alone = await narrow.generate(requests[7])
    assert _get_bits(alone) == _get_bits(in_order[7])
    await wide.close()
    await narrow.close()


async def test_in_deterministic_mode_a_recomputed_cache_has_the_same_bits():
    model = _make_model(CONFIGS["llama"])
    requests = [_make_request(i, PROMPTS[i % 5], max_tokens=60) for i in range(6)]
    undisturbed, disturbed = (_make_engine(model, slots=4, deterministic=True) for _ in range(2))
    expected = await _generate_all(undisturbed, requests)
    tasks = [asyncio.create_task(disturbed.generate(request)) for request in requests]
    for tokens in (40, 120, 200):
        await _wait_until(lambda tokens=tokens: disturbed.load().generated_tokens >= tokens)
        await disturbed.commit_shared(PolicyVersion(tokens))
    actual = await asyncio.gather(*tasks)
    assert [_get_bits(one) for one in actual] == [_get_bits(other) for other in expected]
    assert len(set(actual[0].versions.tolist())) > 1
    await undisturbed.close()
    await disturbed.close()


async def test_a_groups_prompt_is_prefilled_once_for_all_its_members():
    engine = _make_engine(_make_model(CONFIGS["llama"]), slots=3)
    prompt = [1, 5, 6, 7, 8]
    completions = await _generate_all(engine, [_make_request(i, prompt) for i in range(8)])
    # The last prompt token is fed by the first decode step; seven members copied the other four.
    assert engine.runner.stats.prefilled_tokens == 4
    assert len({tuple(one.token_ids.tolist()) for one in completions}) > 1
    await engine.close()


def _generate_greedy(model: Any, request: Request) -> list[int]:
    """The tokens that transformers generates, without stop ids."""
    ids = torch.from_numpy(request.token_ids.astype(np.int64))[None]
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.sampling.max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return generated[0, ids.shape[1] :].tolist()


async def test_members_admitted_beside_other_prompts_still_get_their_own_prefix():
    model = _make_model(CONFIGS["llama"])
    engine = _make_engine(model, slots=4)
    lengths = [3, 11, 5, 7]
    requests = [
        _make_request(i, PROMPTS[i % 5], temperature=0.0, max_tokens=lengths[i % 4])
        for i in range(20)
    ]
    actual = await _generate_all(engine, requests)
    for request, completion in zip(requests, actual, strict=True):
        assert completion.token_ids.tolist() == _generate_greedy(model, request)
    await engine.close()


async def test_a_prefix_is_copied_before_its_slot_is_overwritten():
    model = _make_model(CONFIGS["llama"])
    engine = _make_engine(model, slots=3)
    prompts = [[1, 5], [1, 6, 6], [1, 7, 7, 7], [1, 8, 8, 8, 8]]
    long = asyncio.create_task(engine.generate(_make_request(0, prompts[0], max_tokens=100)))
    await _generate_all(engine, [_make_request(i, prompts[i], max_tokens=2) for i in (1, 2)])
    await _wait_until(lambda: engine.runner.table.count == 1)
    # Slot 2 still holds prompt 2. Slot 1 needs it, while prompt 3 takes slot 2.
    requests = [_make_request(i, prompts[i], temperature=0.0, max_tokens=6) for i in (2, 3)]
    actual = await _generate_all(engine, requests)
    assert not long.done()
    assert [one.token_ids.tolist() for one in actual] == [
        _generate_greedy(model, r) for r in requests
    ]
    await engine.abort(SampleId(0, 0))
    await long
    await engine.close()


async def test_an_abort_ends_the_request_that_has_the_id_now():
    engine = _make_engine(_make_model(CONFIGS["llama"]), slots=2)
    await engine.pause()
    cancelled = asyncio.create_task(engine.generate(_make_request(0, [1, 5], max_tokens=9)))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    again = asyncio.create_task(engine.generate(_make_request(0, [1, 5], max_tokens=9)))
    await asyncio.sleep(0)
    await engine.abort(SampleId(0, 0))
    async with asyncio.timeout(5):
        assert (await again).stop is StopReason.ABORTED
    await engine.close()


async def test_prefill_is_spread_over_steps_by_the_token_budget():
    engine = _make_engine(_make_model(CONFIGS["llama"]), slots=8, prefill_tokens=10)
    prompts = [[1, *([3 + i] * 6)] for i in range(4)]
    await engine.pause()
    tasks = [
        asyncio.create_task(engine.generate(_make_request(i, ids, max_tokens=9)))
        for i, ids in enumerate(prompts)
    ]
    await asyncio.sleep(0)
    engine.runner.step()
    assert engine.runner.stats.prefilled_tokens == 6
    assert (engine.load().running, engine.load().waiting) == (1, 3)
    await engine.resume()
    await asyncio.gather(*tasks)
    assert engine.runner.stats.prefilled_tokens == 24
    await engine.close()


async def test_a_stop_id_ends_a_sample_and_is_part_of_it():
    model = _make_model(CONFIGS["llama"])
    engine_without_stop = _make_engine(model)
    ids = (
        await engine_without_stop.generate(_make_request(0, [1, 5], temperature=0.0))
    ).token_ids.tolist()
    engine_with_stop = _make_engine(model, stop_ids=(ids[3],))
    completion = await engine_with_stop.generate(_make_request(0, [1, 5], temperature=0.0))
    first = ids.index(ids[3])
    assert completion.token_ids.tolist() == ids[: first + 1]
    assert completion.stop is StopReason.STOP
    await engine_without_stop.close()
    await engine_with_stop.close()


def _decode_letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + number) for number in ids)


async def test_a_stop_string_ends_a_sample_even_when_it_spans_tokens():
    engine = _make_engine(_make_model(CONFIGS["llama"]), decode=_decode_letters)
    text = _decode_letters((await engine.generate(_make_request(0, [1, 5]))).token_ids.tolist())
    stop = text[6:9]
    completion = await engine.generate(_make_request(0, [1, 5], stop=("never", stop)))
    assert _decode_letters(completion.token_ids.tolist()) == text[: text.index(stop) + 3]
    assert completion.stop is StopReason.STOP
    await engine.close()


async def test_stop_strings_without_a_decode_function_raise():
    engine = _make_engine(_make_model(CONFIGS["llama"]))
    with pytest.raises(EngineError, match="decode"):
        await engine.generate(_make_request(0, [1], stop=("x",)))
    await engine.close()


async def test_a_full_cache_ends_a_sample_as_truncated():
    engine = _make_engine(_make_model(CONFIGS["llama"]))
    completion = await engine.generate(_make_request(0, [1] * 127, max_tokens=50))
    assert (len(completion.token_ids), completion.stop) == (1, StopReason.LENGTH)
    with pytest.raises(EngineError, match=r"128 tokens.*max_length=128"):
        await engine.generate(_make_request(0, [1] * 128))
    await engine.close()


async def test_a_request_continued_at_its_limit_or_after_a_stop_returns_unchanged():
    engine = _make_engine(_make_model(CONFIGS["llama"]), stop_ids=(2,))
    earlier = await engine.generate(_make_request(0, [1, 5], max_tokens=4))
    again = await engine.generate(_make_request(0, [1, 5], max_tokens=4, continue_from=earlier))
    assert again.token_ids.tolist() == earlier.token_ids.tolist()
    assert again.stop is StopReason.LENGTH
    await engine.close()


async def test_after_a_commit_tokens_use_the_learners_writes_and_have_the_new_version():
    model = _make_model(CONFIGS["llama"])
    engine = _make_engine(model)
    before = await engine.generate(_make_request(0, [1, 5], temperature=0.0))
    other = _make_model(CONFIGS["llama"], seed=1)
    await engine.pause()
    with torch.no_grad():
        for target, source in zip(model.parameters(), other.parameters(), strict=True):
            target.copy_(source)
    await engine.commit_shared(PolicyVersion(3))
    await engine.resume()
    after = await engine.generate(_make_request(0, [1, 5], temperature=0.0))
    fresh = _make_engine(other)
    expected = await fresh.generate(_make_request(0, [1, 5], temperature=0.0))
    assert before.token_ids.tolist() != after.token_ids.tolist()
    assert after.token_ids.tolist() == expected.token_ids.tolist()
    assert set(after.versions.tolist()) == {3}
    with pytest.raises(EngineError, match="commit_shared"):
        await engine.update(model.named_parameters(), PolicyVersion(4))
    await engine.close()
    await fresh.close()


async def test_logits_that_are_not_finite_fail_the_requests_but_not_the_engine():
    model = tiny_model(VOCABULARY, hidden=32)
    engine = _make_engine(model)
    norm = model.model.norm.weight
    with torch.no_grad():
        norm.fill_(float("nan"))
    requests = [_make_request(i, [1, 5]) for i in range(2)]
    async with asyncio.timeout(30):
        errors = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
    assert all(isinstance(error, EngineError) and "not finite" in str(error) for error in errors)
    with torch.no_grad():
        norm.fill_(1.0)
    assert len((await engine.generate(requests[0])).token_ids) == 20
    await engine.close()


async def test_an_error_in_the_engines_thread_reaches_every_waiting_caller():
    engine = _make_engine(_make_model(CONFIGS["llama"]), slots=1)
    engine.runner.step = lambda: [][0]
    requests = [_make_request(i, [5]) for i in range(2)]
    async with asyncio.timeout(30):
        errors = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
    assert [type(error) for error in errors] == [EngineError, EngineError]
    assert "IndexError" in str(errors[0])
    assert engine.load().running == engine.load().waiting == 0
    await engine.close()


def test_attention_that_the_cache_does_not_support_is_refused_at_load_with_its_name():
    weights = EngineWeights(tiny_family("doge", attention=CACHED))
    with pytest.raises(ModelError, match="DogeAttention attends with a mask of its own"):
        NativeEngine(weights, InferConfig(slots=1, max_length=32), stops=StopRules())


async def test_the_event_loop_stays_responsive_while_the_engine_works():
    engine = _make_engine(_make_model(CONFIGS["llama"]), slots=8)
    task = asyncio.gather(
        *(engine.generate(_make_request(i, [1], max_tokens=100)) for i in range(8))
    )
    await _wait_until(lambda: engine.runner.stats.decode_steps > 0)
    iterations = 0
    while not task.done():
        await asyncio.sleep(0)
        iterations += 1
    await task
    # With forwards on the event loop, it would iterate only a few times in each of 100 steps.
    assert iterations > 2000
    await engine.close()
