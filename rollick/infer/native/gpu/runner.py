"""The engine's work on a GPU: the host plans ahead, the device draws by itself.

The same interface as the Runner of the CPU: `submit` and `drop` at any time, everything else
while no step runs. A step launches one decode or several for all running rows and then reads the
tokens of earlier ones; so a few are under way when it returns, and `settle` waits for them. Whoever
changes weights, version or cache settles first.

    waiting -> a row -> filled (filling.py) -> active
            -> a token for each launch -> ended: by the device (stop token, limit), which the host
               sees when the tokens arrive, or by the host (stop string, abort)

A row that ended goes on for a few launches; what it draws then is thrown away, and its pages are
written again only by work behind that. Rows keep their place; when so many have ended that a
smaller graph would do, the pipeline is drained and they move together.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter

import numpy as np
import torch
from torch import nn

from rollick.config.schema import InferConfig
from rollick.errors import EngineError
from rollick.infer.native.endings import Endings, RowNumbers, Stops
from rollick.infer.native.gpu.draw import DeviceRows
from rollick.infer.native.gpu.filling import PageFilling
from rollick.infer.native.gpu.flights import Flight
from rollick.infer.native.gpu.forward import PagedForward, Ways, buckets_of
from rollick.infer.native.gpu.pages import PagePool
from rollick.infer.native.gpu.progress import Progress, is_cut
from rollick.infer.native.rows import Job, Rows
from rollick.infer.native.runner import Finished
from rollick.models.paged_attention import PAGE
from rollick.types import Completion, SampleId, StepRecord, StopReason

MEMORY_SHARE = 0.6
"""Part of the free memory that the cache may take."""

_AHEAD = 2
"""Launches that stay unread when a step returns: the device works while the host does."""

_TOGETHER = 4
"""Launches of one step while nobody waits: what a turn of the host costs is shared by them."""


class PagedRunner:
    """Generates for many requests at once on one GPU, with the weights it is given."""

    def __init__(
        self,
        module: nn.Module,
        infer: InferConfig,
        *,
        device: str,
        stops: Stops,
        version: int,
        ways: Ways | None = None,
    ) -> None:
        self.version = version
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.decode_steps = 0
        self.busy_seconds = 0.0
        self.preempted = 0
        self.work = StepRecord(0, 0, 0, 0.0)
        """What the last step did."""
        self.decodes = 1
        """How many decodes that were."""
        self.rows = Rows(slots=infer.slots, max_length=infer.max_length)
        self.waiting: deque[Job] = deque()
        self.cache = PagedForward(
            module, device=device, ways=ways or Ways(), positions=infer.max_length
        )
        self._arrived: deque[Job] = deque()
        self._dropped: deque[Job] = deque()
        self._flights: deque[Flight] = deque()
        self._ended: Finished = []
        self._began: list[Job] = []
        self._infer = infer
        self._device = device
        self._endings = Endings(stops, max_length=infer.max_length)
        self._buckets = buckets_of(infer.slots)
        self._progress = Progress(width=self._buckets[-1], pages=-(-infer.max_length // PAGE))
        self._filling = PageFilling(self.rows, self._progress, self.cache)
        self._pool: PagePool | None = None
        self._on_device: DeviceRows | None = None

    @property
    def has_work(self) -> bool:
        return bool(
            self.waiting_count or self.rows.running or self._dropped or self._flights or self._ended
        )

    @property
    def waiting_count(self) -> int:
        return len(self.waiting) + len(self._arrived)

    @property
    def reads_text(self) -> bool:
        return self._endings.text_of is not None

    @property
    def kv_tokens(self) -> int:
        """Room that requests under way take; what they share counts once."""
        return 0 if self._pool is None else self._pool.capacity - self._pool.available * PAGE

    @property
    def kv_capacity(self) -> int:
        return 0 if self._pool is None else self._pool.capacity

    def submit(self, job: Job) -> None:
        """Safe while a step runs: only this side appends, only the other side takes."""
        self._arrived.append(job)

    def drop(self, job: Job) -> None:
        """Nobody waits for it any more: forget it at the next step."""
        self._dropped.append(job)

    def abort(self, uid: SampleId) -> tuple[Job, Completion] | None:
        """End a waiting or running request with what it has."""
        self._receive()
        self._forget_dropped()
        self._drain()
        for ended in self._ended:
            if ended[0].request.uid == uid:
                self._ended.remove(ended)
                return ended
        for job in self.waiting:
            if job.request.uid == uid:
                self.waiting.remove(job)
                return job, job.untouched(StopReason.ABORTED)
        for row in self.rows.used:
            if self.rows.job(row).request.uid == uid:
                return self._end(row, StopReason.ABORTED)
        return None

    def settle(self) -> Finished:
        """Wait until the device is idle; gives the requests that ended since the last step."""
        self._drain()
        ended, self._ended = self._ended, []
        return ended

    def commit(self, version: int, *, keep_cache: bool = False) -> None:
        """The weights are those of `version`: running rows compute their cache anew before they go
        on, or keep it, if it is complete."""
        self._drain()
        self.version = version
        self._invalidate([row for row in self.rows.used if not self._keeps(row, keep_cache)])

    def _keeps(self, row: int, keep_cache: bool) -> bool:
        return keep_cache and bool(self._progress.active[row])

    def _invalidate(self, rows: list[int]) -> None:
        """These rows compute their cache anew, and nobody finds anything in it."""
        self.forget_prefixes()
        for row in rows:
            self._empty(row)
        # In the order in which they are kept: members of a group then find each other's pages.
        self._filling.queue = deque(rows)

    def forget_prefixes(self) -> None:
        """Nothing that the cache holds is found by requests that come from now on."""
        if self._pool is not None:
            self._pool.forget_all()

    def free(self) -> None:
        """Give the cache's memory back; running rows compute it anew when they go on."""
        self._drain()
        self._invalidate(self.rows.used)
        self._pool = None
        self._on_device = None
        self.cache.free()

    def clear(self) -> None:
        """Forget all requests and free the cache."""
        while self._flights:
            self._flights.popleft().wait()
        self.rows.clear()
        for queue in (self.waiting, self._arrived, self._dropped, self._ended, self._began):
            queue.clear()
        self._filling.queue.clear()
        self._progress.clear()
        self._pool = None
        self._on_device = None
        self.cache.free()

    def step(self) -> Finished:
        """Launch tokens for every running request; gives those that ended so far."""
        started, prefilled = perf_counter(), self.prefilled_tokens
        launched = 0
        with torch.no_grad():
            self._receive()
            self._forget_dropped()
            self._admit()
            if self.rows.running:
                self._reserve()
                self._shrink()
                self.prefilled_tokens += self._filling.run(
                    self._there, budget=self._infer.prefill_tokens
                )
            lengths = self.rows.length[self._progress.active[: len(self.rows.length)]]
            for _ in range(self._launches()):
                if not self._launch():
                    break
                launched += 1
            if not launched:
                self._drain()
            while len(self._flights) > _AHEAD:
                self._land()
        ended, self._ended = self._ended, []
        seconds = perf_counter() - started
        self.busy_seconds += seconds
        self.decodes = max(1, launched)
        self.work = StepRecord(
            len(lengths) if launched else 0,
            int(lengths.sum()),
            self.prefilled_tokens - prefilled,
            seconds=seconds,
            longest=int(lengths.max(initial=0)),
        )
        return ended

    def _receive(self) -> None:
        while self._arrived:
            self.waiting.append(self._arrived.popleft())

    def _forget_dropped(self) -> None:
        while self._dropped:
            job = self._dropped.popleft()
            if job in self.waiting:
                self.waiting.remove(job)
            elif job in self.rows.jobs:
                self._end(self.rows.jobs.index(job), StopReason.ABORTED)

    def _admit(self) -> None:
        if not self.rows.running:
            self.rows.holes.clear()
            self.rows.count = 0
        while self.waiting and self.rows.free:
            job = self.waiting.popleft()
            ended = self._endings.before_start(job)
            if ended is not None:
                self._ended.append((job, job.untouched(ended)))
                continue
            if self.rows.holes:
                row = self.rows.holes.pop()
            else:
                row, self.rows.count = self.rows.count, self.rows.count + 1
            self.rows.put(row, job, version=self.version)
            job.placed_at = perf_counter()
            self._began.append(job)
            self._empty(row)
            self._filling.queue.append(row)

    def _reserve(self) -> None:
        if self._pool is not None:
            return
        one = self._progress.table.shape[1]
        count = 1 + self._infer.slots * one
        if self._device.startswith("cuda"):
            free, _ = torch.cuda.mem_get_info()
            count = min(count, int(MEMORY_SHARE * free) // self.cache.page_bytes)
        if count < 1 + one:
            raise EngineError(
                f"the device has room for {count - 1} pages of {PAGE} tokens, and one sequence of "
                f"infer.max_length={self._infer.max_length} needs {one}",
                fix="lower infer.max_length, or free memory on the device",
            )
        self.cache.reserve(count)
        self._pool = PagePool(count)
        self._on_device = DeviceRows.empty(
            rows=self._buckets[-1], pages=one, stops=self._endings.ids.tolist(), device=self._device
        )

    def _launches(self) -> int:
        """How many decodes this step may launch before the host looks at anything again."""
        table, rows = self.rows, slice(self.rows.count)
        host_ends = table.watches_text[rows] | table.own_stops[rows]
        busy = self.waiting or self._arrived or self._filling.queue or host_ends.any()
        return 1 if busy else _TOGETHER

    def _launch(self) -> bool:
        """One decode for all rows that can go on; whether there was any."""
        wanted = self._give_pages()
        if not len(wanted):
            return False
        there, progress = self._rows_there, self._progress
        progress.upload(there, self.rows, device=self._device)
        ahead = self.rows.length[wanted] + progress.flying[wanted]
        self.cache.decode(
            there,
            bucket=self._bucket(self.rows.count),
            cuts=is_cut(self.rows, wanted),
            bias=self._endings.bias(self.rows, wanted, ahead),
        )
        self._flights.append(
            Flight.start(
                there.drawn, version=self.version, rows=wanted, epochs=progress.epoch[wanted]
            )
        )
        progress.flying[wanted] += 1
        self.decode_steps += 1
        return True

    def _give_pages(self) -> RowNumbers:
        """Rows that draw next, each with a page for its next token; some may have to wait."""
        while True:
            wanted, short = self._progress.draws_next(self.rows)
            new = self._there.allocate(len(short))
            if new is None:
                self._preempt()
                continue
            for row, page in zip(short.tolist(), new, strict=True):
                self._progress.add_page(row, page)
            return wanted

    def _preempt(self) -> None:
        """Take the pages of the row that has drawn least; it is computed anew when it can be."""
        self._drain()
        candidates = np.flatnonzero(self._progress.active[: self.rows.count])
        if not len(candidates):
            return
        drawn = self.rows.length[candidates] - self.rows.prompt[candidates]
        row = int(candidates[np.argmin(drawn)])
        self._empty(row)
        self._filling.queue.append(row)
        self.preempted += 1

    def _drain(self) -> None:
        while self._flights:
            self._land()

    def _land(self) -> None:
        """Read the tokens of the oldest launch."""
        flight, progress, table = self._flights.popleft(), self._progress, self.rows
        tokens, logprobs = flight.wait()
        same = progress.epoch[flight.rows] == flight.epochs
        progress.flying[flight.rows[same]] -= 1
        valid = same & progress.active[flight.rows]
        rows, tokens, logprobs = flight.rows[valid], tokens[valid], logprobs[valid]
        if not np.isfinite(logprobs).all():
            broken = [str(table.job(int(row)).request.uid) for row in rows[~np.isfinite(logprobs)]]
            raise EngineError(
                f"the model of version {flight.version} gives logits that are not finite, "
                f"for {', '.join(broken[:4])}",
                fix="look for a diverged policy (gradient norm, learning rate) or a narrow dtype",
            )
        ends = table.length[rows]
        table.tokens[rows, ends] = tokens
        table.logprobs[rows, ends] = logprobs
        table.versions[rows, ends] = flight.version
        table.over_old[rows, ends] = table.cache_version[rows] < flight.version
        table.length[rows] = ends + 1
        self.generated_tokens += len(rows)
        self._note_first_tokens(rows)
        for row, reason in self._endings.of(table, rows, tokens):
            self._ended.append(self._end(row, reason))

    def _note_first_tokens(self, rows: RowNumbers) -> None:
        if not self._began:
            return
        now, landed = perf_counter(), {id(self.rows.jobs[row]) for row in rows}
        for job in self._began:
            if id(job) in landed:
                job.first_at = now
        running = {id(job) for job in self.rows.jobs if job is not None}
        self._began = [job for job in self._began if job.first_at is None and id(job) in running]

    def _end(self, row: int, reason: StopReason) -> tuple[Job, Completion]:
        continues = reason is StopReason.ABORTED or self.rows.job(row).request.session is not None
        current = self.rows.cache_version[row] == self.version
        if self._progress.active[row] and continues and current:
            # For a next turn, or the same request continued.
            self._progress.filled[row] = self.rows.length[row] - 1
            self._filling.remember(row, self._there)
        if not self._progress.active[row] and row in self._filling.queue:
            self._filling.queue.remove(row)
        self._empty(row)
        ended = self.rows.take(row, reason)
        # The pool remembers what the pages hold; a row itself keeps nothing.
        self.rows.kept[row] = 0
        return ended

    def _shrink(self) -> None:
        """Move the rows together where a smaller graph then does."""
        if self._bucket(self.rows.running) == self._bucket(self.rows.count):
            return
        self._drain()
        moves = {move.source: move.target for move in self.rows.close_holes()}
        for source, target in moves.items():
            self._progress.move(source, target)
        self._filling.queue = deque(moves.get(row, row) for row in self._filling.queue)

    def _empty(self, row: int) -> None:
        """The row holds nothing and is not computed; what it will hold is of this version."""
        self.rows.cache_version[row] = self.version
        pages = self._progress.empty(row)
        if self._pool is not None:
            self._pool.release(pages)

    def _bucket(self, count: int) -> int:
        return next(size for size in self._buckets if size >= count)

    @property
    def _there(self) -> PagePool:
        assert self._pool is not None
        return self._pool

    @property
    def _rows_there(self) -> DeviceRows:
        assert self._on_device is not None
        return self._on_device
