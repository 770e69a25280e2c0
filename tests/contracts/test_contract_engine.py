"""Contract tests that every engine must pass. To add an engine, add its factory to ENGINES.

The oracle is plain transformers with the same model folder. vLLM runs for real, on the CPU. All
tests share its processes (conftest.py), so they run on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_engine import flip_byte

from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import EngineCorrupt, EngineError, WeightError
from rollick.infer.engine import Capability, Engine, StopRules, SupportsWeightCheck
from rollick.infer.native.engine import NativeEngine
from rollick.infer.vllm.weight_staging import stage_file
from rollick.infer.vllm.worker import write_bundle
from rollick.models.loading.fingerprint import fingerprint
from rollick.testing.tiny import save_tiny, tiny_model, tiny_tokenizer
from rollick.types import (
    Completion,
    Fingerprint,
    PolicyVersion,
    Request,
    SampleId,
    Sampling,
    StopReason,
    frozen_array,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

SIZES = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1}
SLOTS = 8
LONG = 200
"""The length of a request that still runs when a test interrupts it."""


async def _create_native(
    folder: Path, infer: InferConfig, *, deterministic: bool = False
) -> Engine:
    return NativeEngine.create(
        infer,
        ModelConfig(path=str(folder)),
        deterministic=deterministic,
        stops=StopRules((), tiny_tokenizer().decode),
    )


async def _create_deterministic(folder: Path, infer: InferConfig) -> Engine:
    return await _create_native(folder, infer, deterministic=True)


Factory = Callable[[Path, InferConfig], Awaitable[Engine]]


def _make_vllm_factory(request: pytest.FixtureRequest) -> Factory:
    engines = request.getfixturevalue("vllm_engines")
    return lambda folder, infer: engines.fresh(folder, slots=infer.slots)


ENGINES: dict[str, Callable[[pytest.FixtureRequest], Factory]] = {
    "native": lambda _: _create_native,
    "native, deterministic": lambda _: _create_deterministic,
    "vllm": _make_vllm_factory,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("engine"), seed=0, **SIZES)


@pytest.fixture(params=ENGINES)
def factory(request: pytest.FixtureRequest) -> Factory:
    return ENGINES[request.param](request)


@pytest.fixture(params=[name for name in ENGINES if name.startswith("native")])
def keep_cache_factory(request: pytest.FixtureRequest) -> Factory:
    """Engines with Capability.KEEP_CACHE."""
    return ENGINES[request.param](request)


@asynccontextmanager
async def _open_engine(factory: Factory, folder: Path) -> AsyncIterator[Engine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = await factory(folder, InferConfig(slots=SLOTS, max_length=256))
    try:
        async with asyncio.timeout(90):
            yield engine
    finally:
        await engine.close()
        torch.set_num_threads(threads)


def _make_model(seed: int) -> Any:
    return tiny_model(len(tiny_tokenizer()), seed=seed, **SIZES).eval()


def _make_weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, value.detach()) for name, value in _make_model(seed).named_parameters()]


def _make_request(
    index: int = 0,
    ids: Sequence[int] = (1, 8, 9),
    *,
    continue_from: Completion | None = None,
    **sampling: Any,
) -> Request:
    return Request(
        SampleId(0, index),
        frozen_array(ids, np.int32),
        Sampling(**{"max_tokens": 12, **sampling}),
        stream=1000 + index,
        group=0,
        continue_from=continue_from,
    )


async def _wait_for_tokens(engine: Engine, *, tokens: int = 5) -> None:
    target = engine.load().generated_tokens + tokens
    while engine.load().generated_tokens < target:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def _fill_slots(engine: Engine) -> list[asyncio.Task[Completion]]:
    """Start a long request in every slot."""
    return [
        asyncio.create_task(engine.generate(_make_request(index, max_tokens=LONG)))
        for index in range(SLOTS)
    ]


def _compute_logprobs(model: Any, prompt: Sequence[int], completion: Completion) -> np.ndarray:
    """Log-probs of the generated tokens from a full forward at temperature 1."""
    generated = torch.from_numpy(completion.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(prompt), generated])[None]).logits[0]
    token_logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, generated[:, None])
    return token_logprobs[:, 0].numpy()


async def test_a_completion_has_a_log_prob_and_a_version_for_each_token(factory, folder):
    async with _open_engine(factory, folder) as engine:
        completion = await engine.generate(_make_request())
    assert completion.uid == SampleId(0, 0)
    assert completion.stop is StopReason.LENGTH
    assert len(completion.token_ids) == 12
    assert completion.versions.tolist() == [0] * 12
    assert completion.seconds > 0
    np.testing.assert_allclose(
        completion.logprobs, _compute_logprobs(_make_model(0), (1, 8, 9), completion), atol=1e-4
    )
    assert not completion.token_ids.flags.writeable


async def test_greedy_always_takes_the_most_likely_token(factory, folder):
    async with _open_engine(factory, folder) as engine:
        completion = await engine.generate(_make_request(temperature=0.0))
    ids = torch.tensor([[1, 8, 9]])
    expected = _make_model(0).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    assert completion.token_ids.tolist() == expected[0, 3:].tolist()


async def test_a_sample_depends_only_on_its_random_stream(factory, folder):
    async with _open_engine(factory, folder) as engine:
        first = await engine.generate(_make_request(1))
        again, other = await asyncio.gather(
            engine.generate(_make_request(1)), engine.generate(_make_request(2))
        )
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.token_ids.tolist() != other.token_ids.tolist()


async def test_an_aborted_request_returns_its_tokens_so_far(factory, folder):
    async with _open_engine(factory, folder) as engine:
        task = asyncio.create_task(engine.generate(_make_request(max_tokens=LONG)))
        await _wait_for_tokens(engine)
        await engine.abort(SampleId(0, 0))
        completion = await task
    assert completion.stop is StopReason.ABORTED
    assert 5 <= len(completion.token_ids) < LONG
    assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)


async def test_an_aborted_waiting_request_returns_no_tokens(factory, folder):
    async with _open_engine(factory, folder) as engine:
        running = _fill_slots(engine)
        waiting = asyncio.create_task(engine.generate(_make_request(SLOTS)))
        # Requests may arrive late, because an engine may run in another process.
        while (engine.load().running, engine.load().waiting) != (SLOTS, 1):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.abort(SampleId(0, SLOTS))
        completion = await waiting
        assert not any(task.done() for task in running)
        for index in range(SLOTS):
            await engine.abort(SampleId(0, index))
        await asyncio.gather(*running)
    assert (completion.stop, len(completion.token_ids)) == (StopReason.ABORTED, 0)


async def test_aborting_an_unknown_request_does_nothing(factory, folder):
    async with _open_engine(factory, folder) as engine:
        await engine.abort(SampleId(7, 7))
        assert len((await engine.generate(_make_request())).token_ids) == 12


async def test_a_cancelled_call_frees_its_slot(factory, folder):
    async with _open_engine(factory, folder) as engine:
        running = _fill_slots(engine)
        await _wait_for_tokens(engine)
        running[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await running[0]
        assert len((await engine.generate(_make_request(0))).token_ids) == 12
        assert not any(task.done() for task in running[1:])
        await asyncio.gather(*running[1:])
        assert engine.load().running == 0


async def test_a_paused_engine_generates_nothing_and_resumes(factory, folder):
    async with _open_engine(factory, folder) as engine:
        undisturbed = await engine.generate(_make_request(max_tokens=LONG))
        task = asyncio.create_task(engine.generate(_make_request(max_tokens=LONG)))
        await _wait_for_tokens(engine)
        await engine.pause()
        generated = engine.load().generated_tokens
        await asyncio.sleep(0.05)
        assert engine.load().generated_tokens == generated
        assert not task.done()
        await engine.resume()
        completion = await task
    assert completion.token_ids.tolist() == undisturbed.token_ids.tolist()


async def test_a_paused_engine_still_aborts(factory, folder):
    async with _open_engine(factory, folder) as engine:
        task = asyncio.create_task(engine.generate(_make_request(max_tokens=LONG)))
        await _wait_for_tokens(engine)
        await engine.pause()
        await engine.abort(SampleId(0, 0))
        assert (await task).stop is StopReason.ABORTED


async def test_a_continued_request_generates_what_an_uninterrupted_one_would(factory, folder):
    async with _open_engine(factory, folder) as engine:
        uninterrupted = await engine.generate(_make_request(max_tokens=LONG))
        task = asyncio.create_task(engine.generate(_make_request(max_tokens=LONG)))
        await _wait_for_tokens(engine)
        await engine.abort(SampleId(0, 0))
        partial = await task
        continued = await engine.generate(_make_request(max_tokens=LONG, continue_from=partial))
        capabilities = engine.capabilities
    generated = len(partial.token_ids)
    assert continued.token_ids[:generated].tolist() == uninterrupted.token_ids[:generated].tolist()
    # A deterministic engine continues with exactly the same tokens.
    if Capability.DETERMINISTIC in capabilities:
        assert continued.token_ids.tolist() == uninterrupted.token_ids.tolist()
    np.testing.assert_allclose(
        continued.logprobs, _compute_logprobs(_make_model(0), (1, 8, 9), continued), atol=1e-4
    )
    assert continued.versions.tolist() == [0] * LONG
    assert continued.stop is StopReason.LENGTH


async def test_an_aborted_waiting_continuation_keeps_its_earlier_tokens(factory, folder):
    async with _open_engine(factory, folder) as engine:
        partial = await engine.generate(_make_request(max_tokens=4))
        await engine.pause()
        task = asyncio.create_task(engine.generate(_make_request(continue_from=partial)))
        await asyncio.sleep(0)
        await engine.abort(SampleId(0, 0))
        assert (await task).token_ids.tolist() == partial.token_ids.tolist()


async def test_tokens_after_an_update_use_the_new_weights_and_version(factory, folder):
    weights = _make_weights(1)
    async with _open_engine(factory, folder) as engine:
        task = asyncio.create_task(engine.generate(_make_request(max_tokens=LONG)))
        await _wait_for_tokens(engine)
        actual = await engine.update(weights, PolicyVersion(1), fingerprint(weights))
        completion = await task
        assert actual == fingerprint(weights)
        assert engine.load().version == 1
    versions = completion.versions.tolist()
    first_new = versions.index(1)
    assert versions == [0] * first_new + [1] * (LONG - first_new)
    assert 5 <= first_new < LONG
    old_logprobs, new_logprobs = (
        _compute_logprobs(_make_model(seed), (1, 8, 9), completion) for seed in (0, 1)
    )
    np.testing.assert_allclose(completion.logprobs[:first_new], old_logprobs[:first_new], atol=1e-4)
    np.testing.assert_allclose(completion.logprobs[first_new:], new_logprobs[first_new:], atol=1e-4)


async def test_tokens_on_a_cache_kept_over_an_update_are_flagged(keep_cache_factory, folder):
    async with _open_engine(keep_cache_factory, folder) as engine:
        assert Capability.KEEP_CACHE in engine.capabilities
        requests = [_make_request(0, max_tokens=30), _make_request(1, max_tokens=LONG)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await _wait_for_tokens(engine, tokens=10)
        await engine.update(_make_weights(1), PolicyVersion(1), keep_cache=True)
        later = await engine.generate(_make_request(2))
        for task in tasks:
            completion = await task
            flags = completion.versions == 1
            assert 0 < np.count_nonzero(flags) < len(flags)
            assert completion.kept_cache.tolist() == flags.tolist()
            old_logprobs = _compute_logprobs(_make_model(0), (1, 8, 9), completion)
            np.testing.assert_allclose(completion.logprobs[~flags], old_logprobs[~flags], atol=1e-4)
    new_logprobs = _compute_logprobs(_make_model(1), (1, 8, 9), completion)
    assert np.abs(completion.logprobs[flags] - new_logprobs[flags]).max() > 1e-3, (
        "of no single version"
    )
    assert later.kept_cache is None, "a later request reuses no cache of an older version"
    np.testing.assert_allclose(
        later.logprobs, _compute_logprobs(_make_model(1), (1, 8, 9), later), atol=1e-4
    )


async def test_a_continued_request_keeps_its_flags_and_recomputes_its_cache(
    keep_cache_factory, folder
):
    async with _open_engine(keep_cache_factory, folder) as engine:
        task = asyncio.create_task(engine.generate(_make_request(max_tokens=LONG)))
        await _wait_for_tokens(engine)
        await engine.pause()
        await engine.update(_make_weights(1), PolicyVersion(1), keep_cache=True)
        await engine.resume()
        await _wait_for_tokens(engine)
        await engine.abort(SampleId(0, 0))
        partial = await task
        continued = await engine.generate(_make_request(max_tokens=LONG, continue_from=partial))
    flagged = int(np.count_nonzero(partial.kept_cache))
    assert flagged == np.count_nonzero(partial.versions) >= 5
    assert (
        np.flatnonzero(continued.kept_cache).tolist() == np.flatnonzero(partial.kept_cache).tolist()
    )
    first_clean, new_logprobs = (
        len(partial.token_ids),
        _compute_logprobs(_make_model(1), (1, 8, 9), continued),
    )
    np.testing.assert_allclose(
        continued.logprobs[first_clean:], new_logprobs[first_clean:], atol=1e-4
    )


async def test_tokens_on_a_recomputed_cache_are_not_flagged(keep_cache_factory, folder):
    async with _open_engine(keep_cache_factory, folder) as engine:
        task = asyncio.create_task(engine.generate(_make_request(max_tokens=LONG)))
        await _wait_for_tokens(engine)
        await engine.update(_make_weights(1), PolicyVersion(1), keep_cache=True)
        await engine.commit_shared(PolicyVersion(1), keep_cache=True)
        await engine.update(_make_weights(2), PolicyVersion(2))
        completion = await task
    flags = completion.kept_cache
    assert flags is None or not flags[completion.versions == 2].any()


async def test_a_completion_has_its_queue_and_prefill_times(factory, folder):
    async with _open_engine(factory, folder) as engine:
        first, *_, last = await asyncio.gather(
            *(engine.generate(_make_request(index, max_tokens=LONG)) for index in range(SLOTS)),
            engine.generate(_make_request(SLOTS)),
        )
        await engine.pause()
        task = asyncio.create_task(engine.generate(_make_request()))
        await asyncio.sleep(0.02)
        await engine.abort(SampleId(0, 0))
        never_started = await task
    for done in (first, last):
        assert 0 < done.prefill_s < done.seconds - done.queued_s
    assert last.queued_s > 0.5 * first.seconds
    assert (never_started.queued_s, never_started.prefill_s) == (never_started.seconds, 0)
    assert never_started.seconds > 0.01


async def test_an_engine_that_cannot_keep_its_cache_raises(factory, folder):
    async with _open_engine(factory, folder) as engine:
        if Capability.KEEP_CACHE in engine.capabilities:
            await engine.update(_make_weights(0), PolicyVersion(1), keep_cache=True)
        else:
            with pytest.raises(EngineError, match="keep_cache"):
                await engine.update(_make_weights(0), PolicyVersion(1), keep_cache=True)
        assert engine.load().version == int(Capability.KEEP_CACHE in engine.capabilities)


async def test_an_update_of_a_paused_engine_leaves_it_paused(factory, folder):
    async with _open_engine(factory, folder) as engine:
        await engine.pause()
        await engine.update(_make_weights(1), PolicyVersion(1))
        task = asyncio.create_task(engine.generate(_make_request()))
        await asyncio.sleep(0.05)
        assert engine.load().generated_tokens == 0
        await engine.resume()
        assert (await task).versions.tolist() == [1] * 12


async def test_an_update_with_another_fingerprint_changes_nothing(factory, folder):
    async with _open_engine(factory, folder) as engine:
        before = await engine.generate(_make_request())
        with pytest.raises(WeightError, match="fingerprint"):
            await engine.update(_make_weights(1), PolicyVersion(1), Fingerprint("0" * 32))
        after = await engine.generate(_make_request())
        assert engine.load().version == 0
    assert after.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_array_equal(after.logprobs, before.logprobs)


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshapen", "interrupted"])
async def test_weights_that_do_not_fit_change_nothing(factory, folder, fault):
    name, tensor = _make_weights(1)[0]

    def stream():
        yield from _make_weights(1)[1:]
        if fault == "unknown":
            yield "model.extra", tensor
            yield name, tensor
        if fault == "misshapen":
            yield name, tensor[1:]
        if fault == "interrupted":
            raise ConnectionError("the sender died")

    async with _open_engine(factory, folder) as engine:
        before = await engine.generate(_make_request())
        with pytest.raises((WeightError, ConnectionError)):
            await engine.update(stream(), PolicyVersion(1))
        after = await engine.generate(_make_request())
    np.testing.assert_array_equal(after.logprobs, before.logprobs)
    assert after.versions.tolist() == [0] * 12


async def test_a_stop_string_ends_a_sample(factory, folder):
    decode = tiny_tokenizer().decode
    async with _open_engine(factory, folder) as engine:
        free = await engine.generate(_make_request(max_tokens=60))
        text = decode(free.token_ids.tolist())
        stop = text[20:22]
        completion = await engine.generate(_make_request(max_tokens=60, stop=(stop,)))
    assert completion.stop is StopReason.STOP
    actual = decode(completion.token_ids.tolist())
    assert actual == text[: text.index(stop) + 2]


async def test_after_sleep_and_wake_an_engine_generates_the_same(factory, folder):
    async with _open_engine(factory, folder) as engine:
        if Capability.SLEEP not in engine.capabilities:
            with pytest.raises(EngineError, match="sleep"):
                await engine.sleep()
            return
        before = await engine.generate(_make_request())
        await engine.sleep()
        task = asyncio.create_task(engine.generate(_make_request()))
        await asyncio.sleep(0.02)
        assert not task.done()
        await engine.wake()
        assert (await task).token_ids.tolist() == before.token_ids.tolist()


async def test_an_engine_whose_weights_only_updates_change_passes_every_check(factory, folder):
    async with _open_engine(factory, folder) as engine:
        assert isinstance(engine, SupportsWeightCheck)
        await engine.check_weights()
        await engine.generate(_make_request())
        await engine.check_weights()
        for version in (1, 2):
            await engine.update(_make_weights(version), PolicyVersion(version))
            await engine.generate(_make_request())
            await engine.check_weights()
        if Capability.SLEEP in engine.capabilities:
            await engine.sleep()
            await engine.wake()
            await engine.check_weights()


@pytest.mark.parametrize("has_decoded", [False, True])
async def test_an_engine_with_a_flipped_byte_fails_its_check(factory, folder, has_decoded):
    """The native engine on the CPU decodes from copies of the weights."""
    async with _open_engine(factory, folder) as engine:
        await engine.update(_make_weights(1), PolicyVersion(1))
        if has_decoded:
            await engine.generate(_make_request())
        await engine.check_weights()
        await _flip_byte(engine)
        with pytest.raises(EngineCorrupt, match="fingerprint"):
            await engine.check_weights()


async def _flip_byte(engine: Any) -> None:
    """Flip one bit of a weight in the engine's memory."""
    if isinstance(engine, NativeEngine):
        flip_byte(engine)
        return
    weights = [(name, value.clone()) for name, value in _make_weights(1)]
    norm = dict(weights)["model.norm.weight"]
    norm.view(torch.uint8)[3] ^= 0x40  # On a CPU, vLLM keeps other weights only as packed copies.
    with stage_file(sum(value.nbytes for _, value in weights)) as path:
        write_bundle(weights, path)
        await engine._client.llm.collective_rpc("rollick_reload", args=(path,))


async def test_a_prompt_that_does_not_fit_raises_with_both_numbers(factory, folder):
    async with _open_engine(factory, folder) as engine:
        with pytest.raises(EngineError, match=r"300.*256"):
            await engine.generate(_make_request(ids=[1] * 300))
        with pytest.raises(EngineError, match="empty"):
            await engine.generate(_make_request(ids=[]))


async def test_a_request_that_is_already_running_raises(factory, folder):
    async with _open_engine(factory, folder) as engine:
        task = asyncio.create_task(engine.generate(_make_request(max_tokens=LONG)))
        await _wait_for_tokens(engine)
        with pytest.raises(EngineError, match=r"g0\.0"):
            await engine.generate(_make_request())
        assert len((await task).token_ids) == LONG


async def test_load_counts_requests_tokens_and_time(factory, folder):
    async with _open_engine(factory, folder) as engine:
        assert (engine.load().running, engine.load().slots) == (0, SLOTS)
        await asyncio.gather(*(engine.generate(_make_request(index)) for index in range(10)))
        load = engine.load()
    assert (load.running, load.waiting, load.generated_tokens) == (0, 0, 120)
    assert load.busy_seconds > 0


async def test_closing_fails_pending_and_later_requests(factory, folder):
    async with _open_engine(factory, folder) as engine:
        task = asyncio.create_task(engine.generate(_make_request(max_tokens=LONG)))
        await _wait_for_tokens(engine)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(_make_request())
