"""The model's forwards on a GPU: prefill packed prompts, decode all rows as one captured graph.

Owns the memory of keys and values, the graphs and the compiled layers. Does not decide who is
computed. On the CPU everything runs too, without graphs and with the references of the kernels,
which is how it is tested.

    decode(bucket) -> the graph of the bucket -> replay
                      (captured when it is first wanted: embed, layers, head, draw)

Graphs hold addresses: of the rows' state, of the cache, and of the parameters, which an optimizer
writes in place. `free` drops graphs and cache together. A plain decoder is computed without its
modules (paged_decoder.py). The layers of others are compiled one by one, which is one compilation
for the first number of rows and one for all others. A module that cannot be compiled runs as a
graph, and one that cannot be captured runs as it is: slower, with a warning.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rollick.infer.native.gpu.draw import DeviceRows, Field, draw
from rollick.infer.native.sampler import Bias
from rollick.models.fixed import fix_arithmetic
from rollick.models.fused import use_alone, use_fused
from rollick.models.head import head_logits, output_head
from rollick.models.paged_attention import (
    PAGE,
    PagedDecode,
    PagedPrefill,
    PagedStep,
    attach_cache,
    running,
    to_device,
)
from rollick.models.paged_decoder import PlainDecoder, plain_decoder

_log = logging.getLogger(__name__)

_COPY_TOGETHER = 64
"""Pages that are copied in one go: a copy passes through memory of its own."""


_REFUSALS = (RuntimeError, AssertionError, NotImplementedError, TypeError)
"""What compilers and captures raise about modules that they cannot take."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How forwards are run; what a device lacks is off."""

    graphs: bool = True
    compiled: bool = True
    kernels: bool = True
    fused: bool = True
    """Query, key and value as one product, gate and up too, where their weights are neighbours."""
    fixed: bool = False
    """Compute with the learner's kernels (models/fixed.py): slower, and log-probs agree."""
    plain: bool = True
    """Decoders of the plain kind without their modules, and so without a compiler; needs `fused`.
    Others are computed as if this were off."""

    @classmethod
    def zero_mismatch(cls) -> Ways:
        """A compiler would round in other places than the learner does."""
        return cls(compiled=False, fused=False, fixed=True, plain=False)


class Ending(Enum):
    """What a captured decode does with its logits."""

    DRAW = "from all tokens"
    CUT = "from those that the rows' cuts leave"
    LEAVE = "nothing: they are changed before somebody draws"


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Positions [start, stop) of a sequence, to be computed into its pages."""

    pages: Sequence[int]
    token_ids: npt.NDArray[np.int32]
    start: int

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.start + len(self.token_ids)


def buckets_of(slots: int) -> list[int]:
    """Numbers of rows that graphs are captured for: steps of an eighth to a half."""
    sizes: list[int] = []
    size = 8
    while size < slots:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 3)) if size >= 32 else size
    return [*sizes, max(8, slots)]


class PagedForward:
    """Runs the module over a paged cache."""

    def __init__(
        self, module: nn.Module, *, device: str, ways: Ways, positions: int | None = None
    ) -> None:
        """`positions` is how long a sequence may get; as long as the model allows by default."""
        config: Any = module.config
        self._module = module
        self._device = device
        self._ways = ways
        self._layers = int(config.num_hidden_layers)
        heads = int(config.num_attention_heads)
        self._kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self._group = heads // self._kv_heads
        self._dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._positions = positions or int(config.max_position_embeddings)
        self._store: Tensor | None = None
        self._plain: PlainDecoder | None = None
        self._graphs: dict[tuple[int, Ending], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None
        self._compiled = False
        self._on_gpu = device.startswith("cuda")
        if ways.fixed:
            fix_arithmetic(module)

    @property
    def ways(self) -> Ways:
        """What is left of the ways that were asked for."""
        return self._ways

    @property
    def bytes(self) -> int:
        """Memory of keys and values."""
        return 0 if self._store is None else self._store.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return next(self._module.parameters()).dtype

    @property
    def page_bytes(self) -> int:
        return 2 * self._layers * self._kv_heads * PAGE * self._dim * self.dtype.itemsize

    def reserve(self, pages: int) -> None:
        """Take the memory of the cache, if it is not held."""
        if self._store is not None:
            return
        shape = (self._layers, 2, pages, self._kv_heads, PAGE, self._dim)
        self._store = torch.zeros(shape, dtype=self.dtype, device=self._device)
        if self._ways.fused:
            # Anew each time: parameters that moved while there was no cache may have parted.
            use_fused(self._module)
        caches = [(layer[0], layer[1]) for layer in self._store]
        attach_cache(self._module, caches)
        if self._ways.plain and not self._ways.fixed:
            self._plain = plain_decoder(
                self._module, caches, positions=self._positions, kernels=self._ways.kernels
            )

    def free(self) -> None:
        """Give the memory of cache and graphs back."""
        self._graphs.clear()
        self._pool = None
        self._store = None
        self._plain = None
        attach_cache(self._module, None)
        use_alone(self._module)
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        queries = 64
        if self._ways.kernels:
            from rollick.models.paged_kernels import prefill_queries

            queries = prefill_queries(self._group)
        step = PagedPrefill.of(
            [chunk.pages for chunk in chunks],
            [chunk.span for chunk in chunks],
            queries=queries,
            device=self._device,
            kernels=self._ways.kernels,
        )
        token_ids = np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64)
        token_N = to_device(token_ids, self._device)
        if self._plain is not None:
            self._plain.hidden(token_N, step)
            return
        with torch.compiler.set_stance("force_eager"):
            self._hidden(token_N, step.position_N, step)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Pages into others, in all layers; a target is no source of the same call."""
        assert self._store is not None
        for start in range(0, len(pairs), _COPY_TOGETHER):
            some = np.asarray(pairs[start : start + _COPY_TOGETHER], np.int64)
            source, target = to_device(np.ascontiguousarray(some.T), self._device)
            self._store[:, :, target] = self._store[:, :, source]

    def decode(
        self, rows: DeviceRows, *, bucket: int, cuts: bool = False, bias: Bias | None = None
    ) -> None:
        """One more token for the rows below `bucket`."""
        ending = Ending.LEAVE if bias is not None else Ending.CUT if cuts else Ending.DRAW
        graph = self._graph(rows, bucket, ending) if self._on_gpu else None
        if graph is None:
            logits_RV = self._decode(rows, bucket, ending)
        else:
            graph[0].replay()
            logits_RV = graph[1]
        if bias is not None:
            place = (to_device(bias.row_B, self._device), to_device(bias.token_B, self._device))
            value_B = to_device(bias.value_B, self._device)
            logits_RV.index_put_(place, value_B, accumulate=True)
            draw(logits_RV, rows, cuts=cuts, kernels=self._ways.kernels)

    def _decode(self, rows: DeviceRows, bucket: int, ending: Ending) -> Tensor:
        length_R = rows.state[Field.LENGTH, :bucket]
        step = PagedDecode(
            rows.table[:bucket],
            length_R,
            splits=self._splits(bucket),
            kernels=self._ways.kernels,
            fixed=self._ways.fixed,
        )
        token_R = rows.state[Field.TOKEN, :bucket]
        if self._plain is not None:
            hidden_RD = self._plain.hidden(token_R, step)
        else:
            hidden_RD = self._hidden(token_R, length_R - 1, step)
        logits_RV = head_logits(hidden_RD, *output_head(self._module), tiled=self._ways.fixed)
        if ending is not Ending.LEAVE:
            draw(logits_RV, rows, cuts=ending is Ending.CUT, kernels=self._ways.kernels)
        return logits_RV

    def _hidden(self, token_N: Tensor, position_N: Tensor, step: PagedStep) -> Tensor:
        decoder: Any = self._module.base_model
        with running(step):
            return decoder(
                input_ids=token_N[None], position_ids=position_N[None], use_cache=False
            ).last_hidden_state[0]

    def _splits(self, bucket: int) -> int:
        """Parts that each row's keys are cut into, so that few rows still fill the device."""
        programs = bucket * self._kv_heads
        return 1 if programs >= 256 else min(8, 1 << (256 // programs).bit_length() - 1)

    def _graph(
        self, rows: DeviceRows, bucket: int, ending: Ending
    ) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """The captured decode; None where there can be none."""
        key = bucket, ending
        while self._ways.graphs and key not in self._graphs:
            try:
                self._graphs[key] = self._capture(rows, bucket, ending)
            except torch.OutOfMemoryError:
                raise
            except _REFUSALS as error:
                self._step_down(error)
        return self._graphs.get(key)

    def _step_down(self, error: BaseException) -> None:
        """Go on with less of what makes decoding fast."""
        lost = (
            "computed without its modules"
            if self._plain is not None
            else "compiled"
            if self._ways.compiled
            else "captured as a graph"
        )
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        _log.warning(
            "%s cannot be %s and generates more slowly: %s",
            type(self._module).__name__,
            lost,
            first,
        )
        if self._plain is not None:
            self._plain = None
            self._ways = replace(self._ways, plain=False)
            return
        if not self._ways.compiled:
            self._ways = replace(self._ways, graphs=False)
            return
        self._ways = replace(self._ways, compiled=False)
        for layer in self._decoder_layers:
            layer._compiled_call_impl = None

    @property
    def _decoder_layers(self) -> Sequence[Any]:
        decoder: Any = self._module.base_model
        return decoder.layers

    def _warm(self, rows: DeviceRows, bucket: int, ending: Ending) -> None:
        """Run twice to compile what has to be; the first time also another number of rows, so that
        no compilation is left for later."""
        sizes = [bucket, bucket]
        if self._ways.compiled and self._plain is None and not self._compiled:
            self._compiled = True
            for layer in self._decoder_layers:
                layer.compile()
            sizes.append(max(2, bucket // 2))
        with _no_advice():
            for size in sizes:
                self._decode(rows, size, ending)

    def _capture(
        self, rows: DeviceRows, bucket: int, ending: Ending
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Warm up, then capture. The rows' state stays as it was."""
        before = rows.state.clone()
        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                self._warm(rows, bucket, ending)
        finally:
            torch.cuda.current_stream().wait_stream(side)
            rows.state.copy_(before)
        graph = torch.cuda.CUDAGraph()
        # Another thread, such as a learner's, may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_RV = self._decode(rows, bucket, ending)
        self._pool = graph.pool()
        return graph, logits_RV


@contextmanager
def _no_advice() -> Generator[None]:
    """The compiler advises less precise products, as a warning, which some make an error of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        yield
