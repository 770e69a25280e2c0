"""Sampling parameters of requests to the native engine, and its cache between requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.weight_update import EngineWeights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.loading.load import empty_model, share_parameters
from rollick.types import (
    Completion,
    PolicyVersion,
    Request,
    SampleId,
    Sampling,
    StopReason,
    frozen_array,
)

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
GEMMA3 = Gemma3TextConfig(
    **{**SIZES, "num_hidden_layers": 4},
    head_dim=16,
    sliding_window=6,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
QWEN3_MOE = Qwen3MoeConfig(
    **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
)
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
PROMPTS = ([1, 5, 6, 7], [1, 9], [3], [1, 5, 6, 7], [4] * 11)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _make_model(config: Any = None, *, seed: int = 0) -> Any:
    """A random model with large weights, so that tokens are far from equally likely."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(8)
    return model


def _make_engine(model: Any, *, stop_ids: tuple[int, ...] = (), **options: Any) -> NativeEngine:
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    deterministic = options.pop("deterministic", False)
    return NativeEngine(
        EngineWeights(module, shared=True),
        InferConfig(**{"slots": 4, "max_length": 128, **options}),
        deterministic=deterministic,
        stops=StopRules(stop_ids, lambda ids: "".join(chr(65 + number) for number in ids)),
    )


def _make_request(
    index: int, ids: Sequence[int], *, session: str | None = None, **sampling: Any
) -> Request:
    return Request(
        SampleId(0, index),
        frozen_array(ids, np.int32),
        Sampling(**{"max_tokens": 12, "temperature": 0.0, **sampling}),
        stream=100 + index,
        session=session,
    )


async def _generate_all(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def _generate_greedy(model: Any, ids: Sequence[int], count: int, **options: Any) -> list[int]:
    """The tokens that transformers generates."""
    prompt_ids = torch.tensor([list(ids)])
    generated = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=count,
        do_sample=False,
        **{"eos_token_id": None, **options},
    )
    return generated[0, len(ids) :].tolist()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("config", [GEMMA3, QWEN3_MOE, MIXTRAL], ids=lambda c: c.model_type)
async def test_greedy_tokens_equal_those_of_transformers(config, deterministic):
    model = _make_model(config)
    engine = _make_engine(model, deterministic=deterministic, slots=3)
    requests = [_make_request(index, ids, max_tokens=20) for index, ids in enumerate(PROMPTS)]
    for ids, completion in zip(PROMPTS, await _generate_all(engine, requests), strict=True):
        assert completion.token_ids.tolist() == _generate_greedy(model, ids, 20)
    await engine.close()


async def test_a_requests_own_stop_id_ends_only_its_sample():
    model = _make_model()
    engine = _make_engine(model)
    generated = _generate_greedy(model, [1, 5], 12)
    stop = generated[4]
    pair = [_make_request(0, [1, 5], stop_ids=(31, stop)), _make_request(1, [1, 5])]
    stopped, free = await _generate_all(engine, pair)
    assert stopped.token_ids.tolist() == generated[: generated.index(stop) + 1]
    assert (stopped.stop, free.stop) == (StopReason.STOP, StopReason.LENGTH)
    assert free.token_ids.tolist() == generated
    await engine.close()


async def test_no_stop_ends_a_sample_before_its_minimum_of_tokens():
    model = _make_model()
    generated = _generate_greedy(model, [1, 5], 12)
    engine = _make_engine(model, stop_ids=(generated[0],))
    early = await engine.generate(_make_request(0, [1, 5]))
    assert (len(early.token_ids), early.stop) == (1, StopReason.STOP)
    late = await engine.generate(_make_request(0, [1, 5], min_tokens=6, stop_ids=(generated[1],)))
    assert not {generated[0], generated[1]} & set(late.token_ids[:6].tolist())
    reference = _generate_greedy(
        model, [1, 5], 12, min_new_tokens=6, eos_token_id=[generated[0], generated[1]]
    )
    assert late.token_ids.tolist() == reference
    all_letters = tuple(chr(65 + number) for number in range(32))
    ended_by_string = await engine.generate(
        _make_request(0, [1, 5], min_tokens=6, stop=all_letters)
    )
    assert (len(ended_by_string.token_ids), ended_by_string.stop) == (6, StopReason.STOP)
    await engine.close()


async def test_a_bias_changes_the_logits_and_the_log_prob():
    model = _make_model()
    engine = _make_engine(model)
    generated = _generate_greedy(model, [1, 5], 1)[0]
    banned, plain = await _generate_all(
        engine,
        [
            _make_request(0, [1, 5], logit_bias=((generated, -np.inf), (9, 1.5))),
            _make_request(1, [1, 5]),
        ],
    )
    with torch.no_grad():
        logits = model(torch.tensor([[1, 5]])).logits[0, -1]
    logits[generated], logits[9] = -torch.inf, logits[9] + 1.5
    assert plain.token_ids[0] == generated
    assert banned.token_ids[0] == int(logits.argmax())
    expected = float(logits.log_softmax(-1).max())
    np.testing.assert_allclose(banned.logprobs[0], expected, atol=1e-5)
    assert generated not in banned.token_ids.tolist()
    await engine.close()


async def test_the_next_turn_of_a_session_computes_only_what_is_new():
    model = _make_model()
    engine = _make_engine(model, slots=4)
    first = await engine.generate(_make_request(0, [1, 5, 6, 7, 8, 9], session="a"))
    assert engine.runner.stats.prefilled_tokens == 5
    # Other requests run in the meantime, one in each of the other slots.
    for _ in range(2):
        await _generate_all(
            engine, [_make_request(i, [1, 20 + i, 3], max_tokens=3 + i) for i in range(1, 4)]
        )
    before = engine.runner.stats.prefilled_tokens
    history = [1, 5, 6, 7, 8, 9, *first.token_ids.tolist(), 10, 11, 12]
    second = await engine.generate(_make_request(0, history, session="a"))
    assert second.token_ids.tolist() == _generate_greedy(model, history, 12)
    # Prefilled: the last generated token, 10 and 11. The first decode step feeds 12.
    assert engine.runner.stats.prefilled_tokens - before == 3
    await engine.close()


async def test_a_session_whose_slot_was_reused_is_recomputed():
    model = _make_model()
    engine = _make_engine(model, slots=2)
    first = await engine.generate(_make_request(0, [1, 5, 6, 7, 8, 9], session="a"))
    await _generate_all(engine, [_make_request(i, [1, 20 + i, 3]) for i in range(1, 5)])
    history = [1, 5, 6, 7, 8, 9, *first.token_ids.tolist(), 10, 11, 12]
    second = await engine.generate(_make_request(0, history, session="a"))
    assert second.token_ids.tolist() == _generate_greedy(model, history, 12)
    await engine.close()


async def test_a_sessions_prefix_is_relocated_when_its_slot_is_needed():
    model = _make_model()
    engine = _make_engine(model, slots=3)
    prompts = [[1, 5, 6, 7, 8, 9], [1, 6, 6, 6, 6, 6]]
    turns = [
        _make_request(i, ids, session=f"s{i}", max_tokens=4 + i) for i, ids in enumerate(prompts)
    ]
    long_task = asyncio.create_task(engine.generate(_make_request(7, [1, 7], max_tokens=60)))
    generated = await _generate_all(engine, turns)
    others = [_make_request(i, [1, 10 + i, 4, 4], max_tokens=3) for i in (2, 3)]
    for request, completion in zip(others, await _generate_all(engine, others), strict=True):
        assert completion.token_ids.tolist() == _generate_greedy(
            model, request.token_ids.tolist(), 3
        )
    for turn, turn_completion in zip(turns, generated, strict=True):
        history = [*turn.token_ids.tolist(), *turn_completion.token_ids.tolist(), 10, 11]
        again = await engine.generate(_make_request(turn.uid.index, history, session=turn.session))
        assert again.token_ids.tolist() == _generate_greedy(model, history, 12)
    assert (await long_task).token_ids.tolist() == _generate_greedy(model, [1, 7], 60)
    await engine.close()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_new_weights_invalidate_a_retained_session(deterministic):
    model, other = _make_model(), _make_model(seed=1)
    engine = _make_engine(model, deterministic=deterministic)
    first = await engine.generate(_make_request(0, [1, 5, 6, 7, 8, 9], session="a"))
    await engine.pause()
    with torch.no_grad():
        for target, reference in zip(model.parameters(), other.parameters(), strict=True):
            target.copy_(reference)
    await engine.commit_shared(PolicyVersion(1))
    await engine.resume()
    history = [1, 5, 6, 7, 8, 9, *first.token_ids.tolist(), 10]
    second = await engine.generate(_make_request(0, history, session="a"))
    assert second.token_ids.tolist() == _generate_greedy(other, history, 12)
    assert set(second.versions.tolist()) == {1}
    await engine.close()


@pytest.mark.parametrize("config", [None, GEMMA3], ids=["llama", "windows"])
async def test_a_prompt_longer_than_a_steps_budget_is_computed_over_several_steps(config):
    model = _make_model(config)
    engine = _make_engine(model, prefill_tokens=8)
    short_task = asyncio.create_task(engine.generate(_make_request(0, [1, 5], max_tokens=30)))
    await asyncio.sleep(0)
    prompt = [1, *(3 + number % 20 for number in range(36))]
    await engine.pause()
    long_task = asyncio.create_task(engine.generate(_make_request(1, prompt)))
    await asyncio.sleep(0)
    prefilled = engine.runner.stats.prefilled_tokens
    prefilled_by_step: list[int] = []
    while engine.load().waiting:
        engine.runner.step()
        prefilled_by_step.append(engine.runner.stats.prefilled_tokens - prefilled)
    # 36 tokens in chunks of at most 8. The running request generated a token in each step.
    assert np.diff(prefilled_by_step)[-5:].tolist() == [8, 8, 8, 8, 4]
    assert engine.load().generated_tokens >= 6
    await engine.resume()
    assert (await long_task).token_ids.tolist() == _generate_greedy(model, prompt, 12)
    assert (await short_task).token_ids.tolist() == _generate_greedy(model, [1, 5], 30)
    await engine.close()


async def test_a_common_prefix_of_prompts_is_computed_once():
    model = _make_model()
    engine = _make_engine(model, slots=4)
    prefix = [1, *(3 + number % 25 for number in range(60))]
    prompts = [[*prefix, 5, 6], [*prefix, 7, 8, 9], [*prefix, 5, 6]]
    requests = [_make_request(index, ids) for index, ids in enumerate(prompts)]
    actual = await _generate_all(engine, requests)
    for ids, completion in zip(prompts, actual, strict=True):
        assert completion.token_ids.tolist() == _generate_greedy(model, ids, 12)
    assert engine.runner.stats.prefilled_tokens == 62 + 2
    await engine.close()


async def test_after_an_update_the_prefix_of_a_group_is_recomputed_once():
    model = _make_model()
    engine = _make_engine(model, slots=4)
    prompt = [1, *(3 + number % 25 for number in range(60))]
    requests = [_make_request(i, prompt, temperature=1.0, max_tokens=40) for i in range(3)]
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await engine.pause()
    for _ in range(3):
        engine.runner.step()
    before = engine.runner.stats.prefilled_tokens
    generated = int(engine.runner.table.length[0]) - len(prompt)
    await engine.commit_shared(PolicyVersion(1))
    engine.runner.step()
    assert engine.runner.stats.prefilled_tokens - before <= 60 + 3 * generated
    await engine.resume()
    for completion in await asyncio.gather(*tasks):
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        token_logprobs = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, token_logprobs.numpy(), atol=1e-4)
    await engine.close()


async def test_the_load_reports_the_tokens_in_the_cache():
    engine = _make_engine(_make_model(), slots=3)
    assert (engine.load().kv_tokens, engine.load().kv_capacity) == (0, 0)
    await engine.pause()
    tasks = [
        asyncio.create_task(engine.generate(_make_request(i, [1, 5, 6 + i], max_tokens=9)))
        for i in range(2)
    ]
    await asyncio.sleep(0)
    engine.runner.step()
    # Each has three prompt tokens and one generated token, which the next step feeds.
    assert engine.load().kv_tokens == 2 * 3
    await engine.resume()
    await asyncio.gather(*tasks)
    assert (engine.load().kv_tokens, engine.load().preempted) == (0, 0)
    await engine.close()
