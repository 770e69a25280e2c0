"""How a vLLM is started and asked: its settings, its children's environment, its statistics.

The only module that imports vllm in the engine's process. Everything used has one name and one
meaning in the versions of TESTED, except compute_weight_checksums, which 0.23 does not have.

    InferConfig, ModelConfig -> engine_settings, child_environment -> start -> AsyncLLM
    Sampling -> sampling_params           vLLM's step -> Meter.record -> EngineLoad
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
from rollick.models.load import load_config, resolve_dtype, source_folder
from rollick.models.probe import safe_environment
from rollick.types import Sampling, stable_hash

TESTED = {"cpu": "0.32", "cuda": "0.23"}
"""The versions that this was written for, by device."""

CPU_CACHE_GB = 1.0
"""The cache on the CPU where the recipe does not say: vLLM would take most of the memory."""

WORKER_EXTENSION = "rollick.infer.vllm_worker.WeightReceiver"


class Meter(StatLoggerBase):
    """What vLLM pushes at each of its steps, summed up; nobody asks for it over the line."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        cache = vllm_config.cache_config
        self.kv_capacity = int((cache.num_gpu_blocks or 0) * cache.block_size)
        self.running = 0
        self.kv_tokens = 0
        self.preempted = 0
        self.generated_tokens = 0
        self.busy_seconds = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        """Work was handed to an idle engine: time counts from here on."""
        self._since = perf_counter()

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
            self.busy_seconds += now - self._since if self._since is not None else 0.0
            self._since = now

    def log_engine_initialized(self) -> None:
        pass


def start(infer: InferConfig, model: ModelConfig, *, device: str) -> tuple[AsyncLLM, Meter]:
    """A running vLLM with its child processes. Blocks while they load the model."""
    meters: list[Meter] = []

    def meter(vllm_config: Any, engine_index: int = 0) -> Meter:
        meters.append(Meter(vllm_config, engine_index))
        return meters[-1]

    settings = engine_settings(infer, model, device=device)
    with _environment(child_environment(infer, device=device)):
        try:
            client = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings), stat_loggers=[meter])
        except Exception as error:  # what a third party's start-up raises may be anything
            raise EngineError(
                f"vLLM {vllm.__version__} did not start for {model.path!r} on {device}: "
                f"{type(error).__name__}: {error}",
                fix="its child processes say why on standard error; see infer.vllm for its options",
            ) from error
    return client, meters[0]


def engine_settings(infer: InferConfig, model: ModelConfig, *, device: str) -> dict[str, Any]:
    """vLLM's engine arguments. Token ids in and out: it needs no tokenizer."""
    options = infer.vllm
    on_cpu = device.startswith("cpu")
    cache_gb = options.kv_cache_gb or (CPU_CACHE_GB if on_cpu else 0)
    _check_length(infer, model)
    return {
        "model": source_folder(model.path),
        "dtype": str(resolve_dtype(model, device)).removeprefix("torch."),
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        # Ids that end a sample and sampling defaults come from the recipe, not from the folder.
        "generation_config": "vllm",
        "max_model_len": infer.max_length,
        "max_num_seqs": infer.slots,
        "max_num_batched_tokens": max(infer.prefill_tokens, infer.slots),
        "enable_prefix_caching": True,
        "enforce_eager": options.enforce_eager,
        "tensor_parallel_size": options.tensor_parallel,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(cache_gb * 2**30) or None,
        # The log-prob of what was drawn: after temperature and cuts.
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": not on_cpu,
        "worker_extension_cls": WORKER_EXTENSION,
        # No log lines and no Prometheus of vLLM's own; the meter is fed all the same.
        "disable_log_stats": True,
    }


def child_environment(infer: InferConfig, *, device: str) -> dict[str, str]:
    """What vLLM's processes must find in their environment. They are spawned, so they do."""
    settings = {
        # A fork of a process with OpenMP threads hangs at its first parallel region.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if infer.vllm.enforce_eager:
        # vLLM compiles a small part of its sampler all the same, for many seconds on a CPU.
        settings["TORCH_COMPILE_DISABLE"] = "1"
    if device.startswith("cpu"):
        threads = max(1, torch.get_num_threads() // infer.vllm.tensor_parallel)
        # Threads that are not bound to cores: several engines may share a machine.
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        return settings | safe_environment()
    return settings | {"CUDA_VISIBLE_DEVICES": visible_devices(infer, device, os.environ)}


def visible_devices(infer: InferConfig, device: str, environment: Mapping[str, str]) -> str:
    """The GPUs of the engine: as many as it is parallel, from `device` on."""
    first = int(device.partition(":")[2] or 0)
    wanted = range(first, first + infer.vllm.tensor_parallel)
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not named:
        return ",".join(str(index) for index in wanted)
    seen = named.split(",")
    if wanted[-1] >= len(seen):
        raise EngineError(
            f"infer.vllm.tensor_parallel={len(wanted)} from {device} on needs more GPUs than the "
            f"{len(seen)} that this process sees",
            fix="lower infer.vllm.tensor_parallel, or give the generators more devices",
        )
    return ",".join(seen[index] for index in wanted)


def sampling_params(
    sampling: Sampling,
    *,
    room: int,
    drawn: int,
    stream: int,
    stop_ids: Sequence[int],
    watched: bool,
) -> SamplingParams:
    """What is left to draw of a sample that already has `drawn` tokens; `room` more fit the cache.

    Stop strings are not handed over: the engine reads the text, so that one may begin in tokens
    that an earlier part drew. `watched`: somebody reads the tokens as they come.
    """
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        logit_bias=dict(sampling.logit_bias) or None,
        max_tokens=min(sampling.max_tokens - drawn, room),
        min_tokens=max(0, sampling.min_tokens - drawn),
        seed=None if sampling.temperature == 0 else seed_of(stream, drawn),
        stop_token_ids=[*stop_ids, *sampling.stop_ids],
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if watched else RequestOutputKind.FINAL_ONLY,
    )


def seed_of(stream: int, drawn: int) -> int:
    """vLLM's generators count from the start of a request, so each part has a seed of its own."""
    return stream if drawn == 0 else stable_hash(stream, drawn)


def _check_length(infer: InferConfig, model: ModelConfig) -> None:
    longest = getattr(load_config(model), "max_position_embeddings", None)
    if isinstance(longest, int) and infer.max_length > longest:
        raise EngineError(
            f"infer.max_length={infer.max_length} is more than the {longest} positions of "
            f"{model.path!r}, and vLLM does not go beyond them",
            fix=f"set infer.max_length={longest}",
        )


@contextmanager
def _environment(settings: Mapping[str, str]) -> Generator[None]:
    """Only while the children start: this process keeps its own environment."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
