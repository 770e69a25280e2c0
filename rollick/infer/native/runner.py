"""The engine's work, step by step: admit, prefill, decode, record.

Owns the waiting requests, the running rows and the cache. Knows nothing of asyncio: the engine
calls `step` in its own thread, and everything else only while no step runs (except `submit` and
`drop`, which may be called at any time).

    waiting -> admit (fill the cache: copy what it has of the context, compute the rest)
            -> decode, once per step -> record -> finished

A row's cache always holds all of its tokens but the last, which the next decode feeds. So a
prompt's prefill needs no logits, and the members of a group differ from their first own token on.
A prompt longer than a step's budget is computed in parts: each part is kept in the cache, where
the next step's look for what is known of the context finds it.

With a new version the running rows compute their cache anew, or keep it: then they know that theirs
is older, and flag what they draw, and nobody else begins with what they hold.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter

import numpy as np
import torch
from torch import nn

from rollick.config.schema import InferConfig
from rollick.errors import EngineError
from rollick.infer.native.cache import SlotCache
from rollick.infer.native.endings import Endings, Stops
from rollick.infer.native.filling import Filling
from rollick.infer.native.forward import BatchedForward, Forward, TiledForward
from rollick.infer.native.philox import uniforms
from rollick.infer.native.rows import Found, Job, Rows
from rollick.infer.native.sampler import Drawn, draw, draw_row_by_row
from rollick.types import Completion, SampleId, StepRecord, StopReason

Finished = list[tuple[Job, Completion]]


class Runner:
    """Generates for many requests at once, on one device, with the weights it is given."""

    def __init__(
        self,
        module: nn.Module,
        infer: InferConfig,
        *,
        device: str,
        deterministic: bool,
        stops: Stops,
        version: int,
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
        self.cache = SlotCache()
        self.rows = Rows(slots=infer.slots, max_length=infer.max_length)
        self.waiting: deque[Job] = deque()
        self._arrived: deque[Job] = deque()
        self._dropped: deque[Job] = deque()
        self._stale = False
        self._began: list[Job] = []
        self._infer = infer
        self._draw = draw_row_by_row if deterministic else draw
        self._forward: Forward = (TiledForward if deterministic else BatchedForward)(
            module, self.cache, device=device
        )
        self._endings = Endings(stops, max_length=infer.max_length)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting_count or self.rows.running or self._dropped)

    @property
    def waiting_count(self) -> int:
        return len(self.waiting) + len(self._arrived)

    @property
    def reads_text(self) -> bool:
        return self._endings.text_of is not None

    @property
    def kv_tokens(self) -> int:
        """Tokens of running requests that the cache holds."""
        return self.rows.kv_tokens

    @property
    def kv_capacity(self) -> int:
        """No limit: every slot has room for a whole sequence."""
        return 0

    def submit(self, job: Job) -> None:
        """Safe while a step runs: only this side appends, only the other side takes."""
        self._arrived.append(job)

    def drop(self, job: Job) -> None:
        """Nobody waits for it any more: forget it at the next step."""
        self._dropped.append(job)

    def abort(self, uid: SampleId) -> tuple[Job, Completion] | None:
        """End a waiting or running request with what it has."""
        self._receive()
        # A dropped request may have left its id to a later one, which is the one that is meant.
        self._forget_dropped()
        for job in self.waiting:
            if job.request.uid == uid:
                self.waiting.remove(job)
                return job, job.untouched(StopReason.ABORTED)
        for row in self.rows.used:
            if self.rows.job(row).request.uid == uid:
                return self.rows.take(row, StopReason.ABORTED)
        return None

    def settle(self) -> Finished:
        """Nothing is under way between two steps here; see PagedRunner."""
        return []

    def commit(self, version: int, *, keep_cache: bool = False) -> None:
        """The weights are those of `version`: running rows compute their cache anew before they go
        on, or keep it."""
        self.version = version
        self._stale = self._stale or not keep_cache
        self.rows.forget_held()
        self._forward.invalidate()

    def forget_prefixes(self) -> None:
        """Nothing that the cache holds of ended sequences is used again. Needs no running one."""
        self.rows.forget_held()

    def free(self) -> None:
        """Give the cache's memory back; running rows compute it anew when they go on."""
        self._stale = True
        self.rows.forget_held()
        self.cache.free()
        self._forward.invalidate()

    def clear(self) -> None:
        """Forget all requests and free the cache."""
        self.rows.clear()
        self.waiting.clear()
        self._arrived.clear()
        self._dropped.clear()
        self.free()

    def step(self) -> Finished:
        """One token for every running request; gives those that ended."""
        started, prefilled = perf_counter(), self.prefilled_tokens
        with torch.inference_mode():
            self._receive()
            self._forget_dropped()
            self._refresh()
            finished = self._admit()
            self._compact()
            batch, lengths = self.rows.count, self.rows.length[: self.rows.count]
            kv_tokens, longest = int(lengths.sum()), int(lengths.max(initial=0))
            if batch:
                self._record(self._decode())
                self._note_first_tokens()
                finished += self._take_ended()
        seconds = perf_counter() - started
        self.busy_seconds += seconds
        prefilled = self.prefilled_tokens - prefilled
        self.work = StepRecord(batch, kv_tokens, prefilled, seconds=seconds, longest=longest)
        return finished

    def _receive(self) -> None:
        while self._arrived:
            self.waiting.append(self._arrived.popleft())

    def _forget_dropped(self) -> None:
        while self._dropped:
            job = self._dropped.popleft()
            if job in self.waiting:
                self.waiting.remove(job)
            elif job in self.rows.jobs:
                self.rows.take(self.rows.jobs.index(job), StopReason.ABORTED)

    def _refresh(self) -> None:
        """After a change of weights: recompute the cache of the running rows."""
        if not self._stale:
            return
        self._stale = False
        filling = self._filling()
        for row in self.rows.used:
            context = self.rows.tokens[row, : self.rows.length[row]]
            filling.add(row, context, filling.find(context))
            self.rows.held[row] = len(context) - 1
            self.rows.cache_version[row] = self.version
        self._run(filling)

    def _admit(self) -> Finished:
        """Waiting requests into free rows, as far as this step's prefill budget reaches."""
        finished: Finished = []
        filling = self._filling()
        budget = self._infer.prefill_tokens
        while self.waiting and self.rows.free:
            job = self.waiting[0]
            ended = self._endings.before_start(job)
            if ended is not None:
                self.waiting.popleft()
                finished.append((job, job.untouched(ended)))
                continue
            found = filling.find(job.context)
            cost = len(job.context) - 1 - found.shared
            if cost > budget:
                if budget == self._infer.prefill_tokens:
                    self._admit_part(job, found, filling)
                break
            self.waiting.popleft()
            budget -= cost
            row = self._take_row(found)
            self.rows.put(row, job, version=self.version)
            job.placed_at = perf_counter()
            self._began.append(job)
            filling.add(row, job.context, found)
        self._run(filling)
        return finished

    def _admit_part(self, job: Job, found: Found, filling: Filling) -> None:
        """As much of the context as one step may compute; the request goes on waiting."""
        row = self._take_row(found)
        held = found.shared + self._infer.prefill_tokens
        self.rows.store(row, job.context, held=held)
        self.rows.keep(row)
        filling.add(row, job.context[: held + 1], found)
        self.rows.give_up(row)

    def _take_row(self, found: Found) -> int:
        """A row for what begins with what was found; what is kept there moves out of the way."""
        rows, source = self.rows, found.row if found.shared else None
        row = rows.place(source)
        if source is not None and rows.held[source] == found.shared:
            # The new sequence contains all of it, so it need not be kept a second time.
            rows.kept[source] = 0
        if rows.kept[row]:
            refuge = rows.refuge(row, avoid=source)
            if refuge is not None:
                self.cache.reserve(slots=refuge + 1, length=self.cache.length)
                self.cache.copy(row, [refuge], length=int(rows.held[row]))
                rows.flee(row, refuge)
        return row

    def _filling(self) -> Filling:
        return Filling(self.rows, self.cache, self._forward, budget=self._infer.prefill_tokens)

    def _run(self, filling: Filling) -> None:
        filling.run()
        self.prefilled_tokens += filling.computed_tokens

    def _note_first_tokens(self) -> None:
        if self._began:
            now = perf_counter()
            for job in self._began:
                job.first_at = now
            self._began.clear()

    def _compact(self) -> None:
        for move in self.rows.close_holes():
            if move.swaps:
                self.cache.swap(move.source, move.target, length=move.length)
            else:
                self.cache.copy(move.source, [move.target], length=move.length)

    def _decode(self) -> Drawn:
        count = self.rows.count
        self.cache.reserve(slots=count, length=int(self.rows.length[:count].max()))
        rows, length_R = np.arange(count), self.rows.length[:count]
        logits_RV = self._forward.decode(self.rows.tokens[rows, length_R - 1], length_R - 1)
        uniform_R = uniforms(self.rows.stream[:count], length_R - self.rows.prompt[:count])
        rules = self.rows.rules(self._endings.bias(self.rows, rows, length_R))
        drawn = self._draw(logits_RV, rules, uniform_R=uniform_R)
        exact_R = self._forward.exact(drawn.tokens_R)
        return drawn if exact_R is None else drawn.corrected(logits_RV, exact_R, rules)

    def _record(self, drawn: Drawn) -> None:
        if not np.isfinite(drawn.logprobs_R).all():
            broken = [
                str(self.rows.job(row).request.uid)
                for row in np.flatnonzero(~np.isfinite(drawn.logprobs_R)).tolist()
            ]
            raise EngineError(
                f"the model of version {self.version} gives logits that are not finite, "
                f"for {', '.join(broken[:4])}",
                fix="look for a diverged policy (gradient norm, learning rate) or a narrow dtype",
            )
        self.rows.append(drawn.tokens_R, drawn.logprobs_R, version=self.version)
        self.generated_tokens += self.rows.count
        self.decode_steps += 1

    def _take_ended(self) -> Finished:
        rows = np.arange(self.rows.count)
        last_R = self.rows.tokens[rows, self.rows.length[rows] - 1]
        return [
            self.rows.take(row, reason) for row, reason in self._endings.of(self.rows, rows, last_R)
        ]
