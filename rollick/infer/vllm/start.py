"""Starts vLLM: its arguments, its children's environment, its sampling parameters and statistics.

The only module that imports vllm in the engine's process. It uses only names that mean the same in
the tested versions: 0.32 on the CPU, 0.23 on CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input as tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import EngineError
from rollick.models.bf16_probe import safe_environment
from rollick.models.loading.load import load_config, resolve_dtype, source_folder
from rollick.types import Sampling, stable_hash

CPU_CACHE_GB = 1.0
"""Default size of the cache on the CPU, where vLLM's own default is most of the memory."""

WORKER_EXTENSION = "rollick.infer.vllm.worker.WeightReloader"


class LoadStats(StatLoggerBase):
    """Accumulates the statistics that vLLM reports after each step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        cache = vllm_config.cache_config
        self.kv_capacity = int((cache.num_gpu_blocks or 0) * cache.block_size)
        self.running = 0
        self.kv_tokens = 0
        self.preempted = 0
        self.generated_tokens = 0
        self.busy_seconds = 0.0
        self._last_time: float | None = None

    def start_clock(self) -> None:
        """Count busy time from now on, because an idle engine got a request."""
        self._last_time = perf_counter()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.running = int(scheduler_stats.num_running_reqs)
            self.kv_tokens = round(scheduler_stats.kv_cache_usage * self.kv_capacity)
        if iteration_stats is not None:
            now = perf_counter()
            self.generated_tokens += int(iteration_stats.num_generation_tokens)
            self.preempted += int(iteration_stats.num_preempted_reqs)
            if self._last_time is not None:
                self.busy_seconds += now - self._last_time
            self._last_time = now

    def log_engine_initialized(self) -> None:
        pass


def start(infer: InferConfig, model: ModelConfig, *, device: str) -> tuple[AsyncLLM, LoadStats]:
    """Start vLLM's processes. Blocks while they load the model."""
    created: list[LoadStats] = []

    def create_stats(vllm_config: Any, engine_index: int = 0) -> LoadStats:
        created.append(LoadStats(vllm_config, engine_index))
        return created[-1]

    arguments = AsyncEngineArgs(**engine_arguments(infer, model, device=device))
    with _environment(child_environment(infer, device=device)):
        try:
            client = AsyncLLM.from_engine_args(arguments, stat_loggers=[create_stats])
        except Exception as error:  # vLLM's start-up may raise anything
            raise EngineError(
                f"vLLM {vllm.__version__} did not start for {model.path!r} on {device}: "
                f"{type(error).__name__}: {error}",
                fix="see the errors of its child processes above, and infer.vllm for its options",
            ) from error
    return client, created[0]


def engine_arguments(infer: InferConfig, model: ModelConfig, *, device: str) -> dict[str, Any]:
    """vLLM's engine arguments. Requests and outputs are token ids: it needs no tokenizer."""
    options = infer.vllm
    on_cpu = device.startswith("cpu")
    cache_gb = options.kv_cache_gb or (CPU_CACHE_GB if on_cpu else 0)
    _check_length(infer, model)
    return {
        "model": source_folder(model.path),
        "dtype": str(resolve_dtype(model, device)).removeprefix("torch."),
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        # Stop ids and sampling defaults come from the recipe, not from the model folder.
        "generation_config": "vllm",
        "max_model_len": infer.max_length,
        "max_num_seqs": infer.slots,
        "max_num_batched_tokens": max(infer.prefill_tokens, infer.slots),
        "enable_prefix_caching": True,
        "enforce_eager": options.enforce_eager,
        "tensor_parallel_size": options.tensor_parallel,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(cache_gb * 2**30) or None,
        # Log-probs after temperature and truncation.
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": not on_cpu,
        "worker_extension_cls": WORKER_EXTENSION,
        # No log lines and no Prometheus; LoadStats is called all the same.
        "disable_log_stats": True,
    }


def child_environment(infer: InferConfig, *, device: str) -> dict[str, str]:
    """Environment variables of vLLM's processes, which are spawned."""
    settings = {
        # A forked process with OpenMP threads hangs in its first parallel region.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if infer.vllm.enforce_eager:
        # vLLM would still compile a part of its sampler, for many seconds on a CPU.
        settings["TORCH_COMPILE_DISABLE"] = "1"
    if device.startswith("cpu"):
        threads = max(1, torch.get_num_threads() // infer.vllm.tensor_parallel)
        # Not bound to cores: several engines may share a machine.
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        return settings | safe_environment()
    return settings | {"CUDA_VISIBLE_DEVICES": visible_devices(infer, device, os.environ)}


def visible_devices(infer: InferConfig, device: str, environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of the engine: `tensor_parallel` GPUs from `device` on."""
    first = int(device.partition(":")[2] or 0)
    indices = range(first, first + infer.vllm.tensor_parallel)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not visible:
        return ",".join(str(index) for index in indices)
    devices = visible.split(",")
    if indices[-1] >= len(devices):
        raise EngineError(
            f"infer.vllm.tensor_parallel={len(indices)} from {device} on needs more GPUs than the "
            f"{len(devices)} that this process sees",
            fix="lower infer.vllm.tensor_parallel, or give the generators more devices",
        )
    return ",".join(devices[index] for index in indices)


def sampling_params(
    sampling: Sampling,
    *,
    max_new_tokens: int,
    generated: int,
    stream: int,
    stop_ids: Sequence[int],
    incremental: bool,
) -> SamplingParams:
    """Parameters for the rest of a sample that has `generated` tokens. The engine checks stop
    strings itself, because one may start in an earlier segment. `incremental`: vLLM returns tokens
    as it generates them."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        logit_bias=dict(sampling.logit_bias) or None,
        max_tokens=max_new_tokens,
        min_tokens=max(0, sampling.min_tokens - generated),
        seed=None if sampling.temperature == 0 else segment_seed(stream, generated),
        stop_token_ids=[*stop_ids, *sampling.stop_ids],
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if incremental else RequestOutputKind.FINAL_ONLY,
    )


def segment_seed(stream: int, generated: int) -> int:
    """vLLM restarts its random generator with each request, so each segment has its own seed."""
    return stream if generated == 0 else stable_hash(stream, generated)


def _check_length(infer: InferConfig, model: ModelConfig) -> None:
    limit = getattr(load_config(model), "max_position_embeddings", None)
    if isinstance(limit, int) and infer.max_length > limit:
        raise EngineError(
            f"infer.max_length={infer.max_length} exceeds the {limit} positions of "
            f"{model.path!r}, which is vLLM's limit",
            fix=f"set infer.max_length={limit}",
        )


@contextmanager
def _environment(settings: Mapping[str, str]) -> Generator[None]:
    """Set variables while the children start, then restore them."""
    saved = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update(saved)
