"""The model's forwards on a GPU: prefill packed prompts, decode all rows as one CUDA graph.

Owns the memory of the KV cache, the graphs and the compiled layers. For tests it also runs on the
CPU, without graphs and with the kernels' references.

Graphs hold addresses: of the rows' state, of the cache, and of the parameters, which an optimizer
writes in place. `free` drops graphs and cache together. A decoder of a known architecture is
computed directly, without its modules (models/decoder/paged.py). The layers of others are compiled
one by one: once for the first number of rows and once for all other numbers. A module that cannot
be compiled runs as a graph, and one that cannot be captured runs eagerly; each logs a warning.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rollick.infer.native.gpu.device_sampler import DeviceState, StateField, sample_on_device
from rollick.infer.native.sampler import LogitBias
from rollick.models.attention.paged import (
    PAGE,
    PagedDecode,
    PagedPrefill,
    PagedStep,
    attach_cache,
    to_device,
    use_step,
)
from rollick.models.decoder.batch_invariant import use_batch_invariant_kernels
from rollick.models.decoder.fused_linear import fuse_linears, unfuse_linears
from rollick.models.decoder.paged import PagedDecoder, paged_decoder
from rollick.models.head.logprobs import head_logits, output_head
from rollick.models.loading.probe import cache_shape

_log = logging.getLogger("rollick")

_COPY_BATCH = 64
"""Pages that are copied at once: each copy goes through temporary memory."""

_UNSUPPORTED = (RuntimeError, AssertionError, NotImplementedError, TypeError)
"""Errors of the compiler, or of graph capture, for modules that it does not support."""


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    cuda_graphs: bool = True
    compile_layers: bool = True
    triton_kernels: bool = True
    fused_linears: bool = True
    """One product for query, key and value, and one for gate and up, where their weights are
    adjacent in memory."""
    batch_invariant: bool = False
    """Compute with the learner's kernels (models/decoder/batch_invariant.py): slower, but the
    log-probs are equal."""
    direct_decoder: bool = True
    """Compute decoders of a known architecture without their modules, and so without the compiler.
    Needs `fused_linears`."""

    @classmethod
    def zero_mismatch(cls) -> ForwardOptions:
        """Log-probs equal to the learner's: no compiler, which rounds elsewhere."""
        return cls(
            compile_layers=False, fused_linears=False, batch_invariant=True, direct_decoder=False
        )


class LogitUse(Enum):
    """What a captured decode does with its logits."""

    SAMPLE = "sample from all tokens"
    TRUNCATE = "apply top-k, top-p and min-p, then sample"
    RETURN = "only return them: a bias is added before sampling"


@dataclass(frozen=True, slots=True, eq=False)
class PagedChunk:
    """Tokens of a sequence, from position `start` on, to compute into its pages."""

    pages: Sequence[int]
    token_ids: npt.NDArray[np.int32]
    start: int


def graph_buckets(slots: int) -> list[int]:
    """The numbers of rows for which graphs are captured."""
    sizes: list[int] = []
    size = 8
    while size < slots:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 3)) if size >= 32 else size
    return [*sizes, max(8, slots)]


def decoder_layers(module: nn.Module, count: int) -> Sequence[nn.Module]:
    """The layers of a language model, alone or inside a multimodal one, by any name; none if they
    are not in one list."""
    decoder: Any = module.get_decoder()  # pyright: ignore[reportCallIssue]
    lists = (child for child in decoder.modules() if isinstance(child, nn.ModuleList))
    return list(next((layers for layers in lists if len(layers) == count), ()))


class PagedForward:
    def __init__(
        self, module: nn.Module, *, device: str, options: ForwardOptions, max_length: int
    ) -> None:
        shape = cache_shape(module)
        config: Any = module.config
        text_config: Any = config.get_text_config()
        self._module = module
        self._device = device
        self.options = options
        """Options that the module does not support are switched off when they fail."""
        self._num_layers = int(text_config.num_hidden_layers)
        self._kv_heads, self._head_dim = shape.kv_heads, shape.key_dim
        self._group_size = shape.group
        self._max_length = max_length
        self.cache: Tensor | None = None
        self._decoder: PagedDecoder | None = None
        self._graphs: dict[tuple[int, LogitUse], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._graph_pool: Any = None
        self._compiled = False
        self._on_gpu = device.startswith("cuda")
        if options.batch_invariant:
            use_batch_invariant_kernels(module)

    @property
    def dtype(self) -> torch.dtype:
        return next(self._module.parameters()).dtype

    @property
    def page_bytes(self) -> int:
        return 2 * self._num_layers * self._kv_heads * PAGE * self._head_dim * self.dtype.itemsize

    def reserve(self, pages: int) -> None:
        if self.cache is not None:
            return
        shape = (self._num_layers, 2, pages, self._kv_heads, PAGE, self._head_dim)
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self._device)
        if self.options.fused_linears:
            # Repeated at each call: the parameters may no longer be adjacent.
            fuse_linears(self._module)
        caches = [(layer[0], layer[1]) for layer in self.cache]
        attach_cache(self._module, caches)
        if self.options.direct_decoder and not self.options.batch_invariant:
            kernels = self.options.triton_kernels
            self._decoder = paged_decoder(
                self._module, caches, positions=self._max_length, kernels=kernels
            )

    def free(self) -> None:
        self._graphs.clear()
        self._graph_pool = None
        self.cache = None
        self._decoder = None
        attach_cache(self._module, None)
        unfuse_linears(self._module)
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def prefill(self, chunks: Sequence[PagedChunk]) -> None:
        queries = 64
        if self.options.triton_kernels:
            from rollick.models.attention.paged_kernels import prefill_queries

            queries = prefill_queries(self._group_size)
        step = PagedPrefill.of(
            [chunk.pages for chunk in chunks],
            [(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks],
            queries=queries,
            device=self._device,
            kernels=self.options.triton_kernels,
        )
        token_ids = np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64)
        token_N = to_device(token_ids, self._device)
        with torch.compiler.set_stance("force_eager"):
            self._hidden(token_N, step.position_N, step)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages in all layers; no target may be a source of the same call."""
        assert self.cache is not None
        for start in range(0, len(pairs), _COPY_BATCH):
            batch = np.asarray(pairs[start : start + _COPY_BATCH], np.int64)
            source, target = to_device(np.ascontiguousarray(batch.T), self._device)
            self.cache[:, :, target] = self.cache[:, :, source]

    def decode(
        self, device_state: DeviceState, *, bucket: int, truncate: bool, bias: LogitBias | None
    ) -> None:
        """Sample one more token for the rows below `bucket`."""
        use = LogitUse.TRUNCATE if truncate else LogitUse.SAMPLE
        if bias is not None:
            use = LogitUse.RETURN
        graph = self._get_graph(device_state, bucket, use) if self._on_gpu else None
        if graph is None:
            logits_RV = self._decode(device_state, bucket, use)
        else:
            graph[0].replay()
            logits_RV = graph[1]
        if bias is not None:
            index = (to_device(bias.row_B, self._device), to_device(bias.token_B, self._device))
            value_B = to_device(bias.value_B, self._device)
            logits_RV.index_put_(index, value_B, accumulate=True)
            self._sample(logits_RV, device_state, truncate=truncate)

    def probe_logits(self, sequences: Sequence[Sequence[int]], *, prefilled: int) -> Tensor:
        """As SlotRunner.probe_logits. One page for each sequence, and an unused row beside them."""
        logits: list[list[Tensor]] = [[] for _ in sequences]
        count = len(sequences)
        device_state = DeviceState.empty(rows=count + 1, pages=1, stop_ids=[], device=self._device)
        device_state.page_table[:count, 0] = torch.arange(1, count + 1)
        with torch.inference_mode():
            self.reserve(count + 1)
            prefixes = [np.asarray(ids[:prefilled], np.int32) for ids in sequences]
            self.prefill([PagedChunk([row + 1], ids, 0) for row, ids in enumerate(prefixes)])
            for position in range(prefilled, len(sequences[0])):
                token_R = torch.tensor([ids[position] for ids in sequences if len(ids) > position])
                device_state.state.zero_()
                device_state.state[StateField.TOKEN, : len(token_R)] = token_R.to(self._device)
                device_state.state[StateField.LENGTH, : len(token_R)] = position + 1
                logits_RV = self._decode(device_state, len(token_R) + 1, LogitUse.RETURN)
                for row, logits_V in enumerate(logits_RV[: len(token_R)]):
                    logits[row].append(logits_V)
            self.free()
        return torch.stack([logits_V for row_logits in logits for logits_V in row_logits])

    def _sample(self, logits_RV: Tensor, device_state: DeviceState, *, truncate: bool) -> None:
        kernels = self.options.triton_kernels
        sample_on_device(logits_RV, device_state, truncate=truncate, kernels=kernels)

    def _decode(self, device_state: DeviceState, bucket: int, use: LogitUse) -> Tensor:
        length_R = device_state.state[StateField.LENGTH, :bucket]
        step = PagedDecode(
            device_state.page_table[:bucket],
            length_R,
            splits=self._num_splits(bucket),
            kernels=self.options.triton_kernels,
            batch_invariant=self.options.batch_invariant,
        )
        # An unused row has no last token; its position only has to exist.
        position_R = (length_R - 1).clamp(min=0)
        hidden_RD = self._hidden(device_state.state[StateField.TOKEN, :bucket], position_R, step)
        logits_RV = head_logits(
            hidden_RD, output_head(self._module), batch_invariant=self.options.batch_invariant
        )
        if use is not LogitUse.RETURN:
            self._sample(logits_RV, device_state, truncate=use is LogitUse.TRUNCATE)
        return logits_RV

    def _hidden(self, token_N: Tensor, position_N: Tensor, step: PagedStep) -> Tensor:
        if self._decoder is not None:
            return self._decoder.hidden(token_N, step)
        decoder: Any = self._module.base_model
        with use_step(step):
            return decoder(
                input_ids=token_N[None], position_ids=position_N[None], use_cache=False
            ).last_hidden_state[0]

    def _num_splits(self, bucket: int) -> int:
        """The number of splits of each row's keys, so that a few rows still occupy the device."""
        programs = bucket * self._kv_heads
        return 1 if programs >= 256 else min(8, 1 << (256 // programs).bit_length() - 1)

    def _get_graph(
        self, device_state: DeviceState, bucket: int, use: LogitUse
    ) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """The captured decode; None if the module cannot be captured."""
        key = bucket, use
        while self.options.cuda_graphs and key not in self._graphs:
            try:
                self._graphs[key] = self._capture(device_state, bucket, use)
            except torch.OutOfMemoryError:
                raise
            except _UNSUPPORTED as error:
                self._disable_option(error)
        return self._graphs.get(key)

    def _disable_option(self, error: BaseException) -> None:
        """Continue without the fastest option that is still on."""
        name = type(self._module).__name__
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if self._decoder is not None:
            failed = "computed without its modules"
            self._decoder = None
            self.options = replace(self.options, direct_decoder=False)
        elif self.options.compile_layers:
            failed = "compiled"
            self.options = replace(self.options, compile_layers=False)
            for layer in self._decoder_layers:
                layer._compiled_call_impl = None
        else:
            failed = "captured as a CUDA graph"
            self.options = replace(self.options, cuda_graphs=False)
        _log.warning("%s cannot be %s and generates more slowly: %s", name, failed, reason)

    @property
    def _decoder_layers(self) -> Sequence[Any]:
        return decoder_layers(self._module, self._num_layers)

    def _warm_up(self, device_state: DeviceState, bucket: int, use: LogitUse) -> None:
        """Run twice, to compile. The first bucket also runs with another number of rows, so that
        nothing is compiled later."""
        sizes = [bucket, bucket]
        if self.options.compile_layers and self._decoder is None and not self._compiled:
            self._compiled = True
            for layer in self._decoder_layers:
                layer.compile()
            sizes.append(max(2, bucket // 2))
        with warnings.catch_warnings():
            # The compiler recommends TF32 with a warning, which some users turn into an error.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            for size in sizes:
                self._decode(device_state, size, use)

    def _capture(
        self, device_state: DeviceState, bucket: int, use: LogitUse
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a decode. Restores the rows' state, which the warm-up changes."""
        saved_state = device_state.state.clone()
        side_stream: Any = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side_stream):
                self._warm_up(device_state, bucket, use)
        finally:
            torch.cuda.current_stream().wait_stream(side_stream)
            device_state.state.copy_(saved_state)
        graph = torch.cuda.CUDAGraph()
        # Another thread, such as the learner's, may use the device at the same time.
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            logits_RV = self._decode(device_state, bucket, use)
        self._graph_pool = graph.pool()
        return graph, logits_RV
