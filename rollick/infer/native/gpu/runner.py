"""The runner for GPUs: the host launches decodes ahead of reading their tokens.

A step launches one or more decodes for all running rows, then reads the tokens of earlier decodes.
So a few decodes are in flight when it returns. `synchronize` waits for them; call it before a
change of weights, version or cache.

    waiting -> a row -> prefilled (page_prefill.py) -> active
            -> one token per launch -> ended by the device (stop id, limit), which the host sees
               when it reads the tokens, or by the host (stop string, abort)

A row that ended is still in the launches in flight. Their tokens for it are discarded, and its
pages are reused only by later launches. When a smaller CUDA graph is enough for the running rows,
the runner waits for the launches in flight and compacts the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from rollick.config.schema import InferConfig
from rollick.errors import EngineError
from rollick.infer.engine import StopRules
from rollick.infer.native.gpu.device_sampler import DeviceState, PendingStep
from rollick.infer.native.gpu.forward import ForwardOptions, PagedForward, graph_buckets
from rollick.infer.native.gpu.page_pool import PagePool
from rollick.infer.native.gpu.page_prefill import PrefillQueue
from rollick.infer.native.gpu.row_progress import RowProgress
from rollick.infer.native.runner import AdmissionQueue, FinishedRequest, RunnerStats
from rollick.infer.native.sampler import RowIndices
from rollick.infer.native.sequence_table import SequenceTable
from rollick.infer.native.stop_conditions import StopConditions
from rollick.infer.request_validation import check_finite
from rollick.models.attention.paged import PAGE
from rollick.types import SampleId, StopReason

CACHE_MEMORY_SHARE = 0.6
"""Share of the free GPU memory that the cache may take."""

_STEPS_IN_FLIGHT = 2
"""Maximum launches in flight when a step returns, so that the device is busy meanwhile."""

_LAUNCHES_PER_STEP = 4
"""Launches of a step if the host need not act after each. They amortise the host's cost."""


class PagedRunner:
    def __init__(
        self,
        module: nn.Module,
        infer: InferConfig,
        *,
        device: str,
        stops: StopRules,
        options: ForwardOptions | None = None,
    ) -> None:
        self.version = 0
        self.stats = RunnerStats()
        self.queue = AdmissionQueue()
        self.table = SequenceTable(slots=infer.slots, max_length=infer.max_length)
        self.forward = PagedForward(
            module, device=device, options=options or ForwardOptions(), max_length=infer.max_length
        )
        self._pending: deque[PendingStep] = deque()
        self._ended: list[FinishedRequest] = []
        self._infer = infer
        self._device = device
        self._stops = StopConditions(stops)
        self._buckets = graph_buckets(infer.slots)
        self._progress = RowProgress(rows=self._buckets[-1], pages=-(-infer.max_length // PAGE))
        self._prefills = PrefillQueue(self.table, self._progress, self.forward)
        self._pool: PagePool | None = None
        self._state: DeviceState | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.queue.has_work or self.table.num_running or self._pending or self._ended)

    @property
    def kv_tokens(self) -> int:
        """Capacity of the pages in use, in tokens; shared pages count once."""
        return 0 if self._pool is None else self._pool.capacity - self._pool.available * PAGE

    @property
    def kv_capacity(self) -> int:
        return 0 if self._pool is None else self._pool.capacity

    def abort(self, uid: SampleId) -> FinishedRequest | None:
        self._discard_dropped()
        self._read_pending()
        for ended in self._ended:
            if ended[0].request.uid == uid:
                self._ended.remove(ended)
                return ended
        row = self.table.row_of(uid)
        return self.queue.abort(uid) if row is None else self._finish(row, StopReason.ABORTED)

    def probe_logits(self, sequences: Sequence[Sequence[int]], *, prefilled: int) -> Tensor:
        return self.forward.probe_logits(sequences, prefilled=prefilled)

    def synchronize(self) -> list[FinishedRequest]:
        self._read_pending()
        return self._take_ended()

    def commit(self, version: int, *, keep_cache: bool) -> None:
        """With `keep_cache`, rows whose cache is complete keep it; others are recomputed."""
        self._read_pending()
        self.version = version
        active, rows = self._progress.active, self.table.running_rows
        self._recompute([row for row in rows if not (keep_cache and active[row])])

    def forget_prefixes(self) -> None:
        if self._pool is not None:
            self._pool.forget_prefixes()

    def check_copies(self) -> None:
        """No-op: a GPU computes from the parameters."""

    def free(self) -> None:
        self._read_pending()
        self._recompute(self.table.running_rows)
        self._free_memory()

    def clear(self) -> None:
        while self._pending:
            self._pending.popleft().wait()
        self.table.clear()
        self.queue.clear()
        self._ended.clear()
        self._prefills.rows.clear()
        self._progress.clear()
        self._free_memory()

    def step(self) -> list[FinishedRequest]:
        started, prefilled_before = perf_counter(), self.stats.prefilled_tokens
        num_launched = 0
        with torch.no_grad():
            self._discard_dropped()
            self._admit()
            if self.table.num_running:
                self._allocate_memory()
                self._compact_rows()
                budget = self._infer.prefill_tokens
                self.stats.prefilled_tokens += self._prefills.run(self._page_pool, budget=budget)
            lengths = self.table.length[self._progress.active[: len(self.table.length)]]
            for _ in range(self._max_launches()):
                if not self._launch_decode():
                    break
                num_launched += 1
            if not num_launched:
                self._read_pending()
            while len(self._pending) > _STEPS_IN_FLIGHT:
                self._read_oldest()
        self.stats.record_step(
            lengths, started=started, prefilled_before=prefilled_before, decodes=num_launched
        )
        return self._take_ended()

    def _take_ended(self) -> list[FinishedRequest]:
        ended, self._ended = self._ended, []
        return ended

    def _discard_dropped(self) -> None:
        for request in self.queue.receive():
            if request in self.table.requests:
                self._finish(self.table.requests.index(request), StopReason.ABORTED)

    def _recompute(self, rows: list[int]) -> None:
        """Queue these rows for prefill with an empty cache, and forget all cached prefixes."""
        self.forget_prefixes()
        for row in rows:
            self._reset_row(row)
        # In table order, so that the samples of a group share pages.
        self._prefills.rows = deque(rows)

    def _free_memory(self) -> None:
        self._pool = None
        self._state = None
        self.forward.free()

    def _admit(self) -> None:
        if not self.table.num_running:
            self.table.holes.clear()
            self.table.count = 0
        while self.queue.waiting and self.table.num_free:
            request = self.queue.waiting.popleft()
            if self.table.holes:
                row = self.table.holes.pop()
            else:
                row, self.table.count = self.table.count, self.table.count + 1
            self.table.start(row, request, version=self.version)
            self._reset_row(row)
            self._prefills.rows.append(row)

    def _allocate_memory(self) -> None:
        if self._pool is not None:
            return
        pages_per_row = self._progress.page_table.shape[1]
        num_pages = 1 + self._infer.slots * pages_per_row
        if self._device.startswith("cuda"):
            free_bytes, _ = torch.cuda.mem_get_info()
            max_pages = int(CACHE_MEMORY_SHARE * free_bytes) // self.forward.page_bytes
            num_pages = min(num_pages, max_pages)
        if num_pages < 1 + pages_per_row:
            raise EngineError(
                f"the device has room for {num_pages - 1} pages of {PAGE} tokens; one sequence of "
                f"infer.max_length={self._infer.max_length} needs {pages_per_row}",
                fix="lower infer.max_length, or free memory on the device",
            )
        self.forward.reserve(num_pages)
        self._pool = PagePool(num_pages)
        rows, stop_ids = self._buckets[-1], self._stops.stop_ids.tolist()
        self._state = DeviceState.empty(
            rows=rows, pages=pages_per_row, stop_ids=stop_ids, device=self._device
        )

    def _max_launches(self) -> int:
        """How many decodes this step may launch; 1 if the host must act after each."""
        table, rows = self.table, slice(self.table.count)
        host_stops = table.has_stop_strings[rows] | table.has_stop_ids[rows]
        host_must_act = len(self.queue) or self._prefills.rows or host_stops.any()
        return 1 if host_must_act else _LAUNCHES_PER_STEP

    def _launch_decode(self) -> bool:
        """Launch one decode of all rows that need a token; returns False if none does."""
        rows = self._provide_pages()
        if not len(rows):
            return False
        state, progress, table = self._state, self._progress, self.table
        assert state is not None
        progress.upload(state, table, device=self._device)
        length_R = table.length[rows] + progress.in_flight[rows]
        self.forward.decode(
            state,
            bucket=self._choose_bucket(table.count),
            truncate=bool(table.sampling_metadata(None).truncated_R[rows].any()),
            bias=self._stops.logit_bias(table, rows, length_R),
        )
        epochs = progress.epoch[rows]
        pending = PendingStep.start(state.sampled, version=self.version, rows=rows, epochs=epochs)
        self._pending.append(pending)
        progress.in_flight[rows] += 1
        self.stats.decode_steps += 1
        return True

    def _provide_pages(self) -> RowIndices:
        """Give each row that samples next a page for its token; returns these rows. May preempt
        other rows."""
        while True:
            rows, without_page = self._progress.next_rows(self.table)
            new_pages = self._page_pool.allocate(len(without_page))
            if new_pages is None:
                self._preempt()
                continue
            for row, page in zip(without_page.tolist(), new_pages, strict=True):
                self._progress.add_page(row, page)
            return rows

    def _preempt(self) -> None:
        """Preempt the row with the fewest generated tokens: free its pages, recompute it later."""
        self._read_pending()
        candidates = np.flatnonzero(self._progress.active[: self.table.count])
        if not len(candidates):
            return
        num_generated = self.table.length[candidates] - self.table.prompt_length[candidates]
        row = int(candidates[np.argmin(num_generated)])
        self._reset_row(row)
        self._prefills.rows.append(row)
        self.stats.preempted += 1

    def _read_pending(self) -> None:
        while self._pending:
            self._read_oldest()

    def _read_oldest(self) -> None:
        step, progress, table = self._pending.popleft(), self._progress, self.table
        tokens, logprobs = step.wait()
        same_sequence = progress.epoch[step.rows] == step.epochs
        progress.in_flight[step.rows[same_sequence]] -= 1
        valid = same_sequence & progress.active[step.rows]
        rows, tokens, logprobs = step.rows[valid], tokens[valid], logprobs[valid]
        check_finite(logprobs, lambda index: table.uid(rows[index]), version=step.version)
        table.append(rows, tokens, logprobs, version=step.version)
        self.stats.generated_tokens += len(rows)
        for row, reason in self._stops.find_ended(table, rows, tokens):
            self._ended.append(self._finish(row, reason))

    def _finish(self, row: int, reason: StopReason) -> FinishedRequest:
        table, is_active = self.table, self._progress.active[row]
        may_continue = (
            reason is StopReason.ABORTED or table.request(row).request.session is not None
        )
        if is_active and may_continue and table.cache_version[row] == self.version:
            # Cached for the session's next turn, or for a continuation of this request.
            self._progress.filled[row] = table.length[row] - 1
            self._prefills.index_prefix(row, self._page_pool)
        if not is_active and row in self._prefills.rows:
            self._prefills.rows.remove(row)
        self._reset_row(row)
        finished = table.finish(row, reason)
        # Prefixes are retained in pages here, not in rows.
        table.retained[row] = 0
        return finished

    def _compact_rows(self) -> None:
        """Compact the rows if that makes a smaller graph enough."""
        if self._choose_bucket(self.table.num_running) == self._choose_bucket(self.table.count):
            return
        self._read_pending()
        moves = {move.source: move.target for move in self.table.compact()}
        for source, target in moves.items():
            self._progress.move(source, target)
        self._prefills.rows = deque(moves.get(row, row) for row in self._prefills.rows)

    def _reset_row(self, row: int) -> None:
        """Release the row's pages; its next cache is computed with the current version."""
        self.table.cache_version[row] = self.version
        pages = self._progress.reset(row)
        if self._pool is not None:
            self._pool.release(pages)

    def _choose_bucket(self, count: int) -> int:
        return next(size for size in self._buckets if size >= count)

    @property
    def _page_pool(self) -> PagePool:
        assert self._pool is not None
        return self._pool
