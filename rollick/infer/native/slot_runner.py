"""The runner for the CPU, and for deterministic runs on any device.

    waiting -> admit (copy the cached prefix, compute the rest) -> decode once per step -> finished

A row's cache slot holds all of its tokens except the last, which is the input of the next decode.
So a prefill needs no logits, and the samples of a group share their prompt. A prompt longer than a
step's budget is prefilled in chunks. Each stays in the cache, where the next step finds it as a
prefix.

If rows keep their cache after a weight update, the tokens they sample from then on are flagged, and
other sequences do not reuse their prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.forward import BatchedForward, Forward, PrefillChunk, TiledForward
from rollick.infer.native.philox import uniforms
from rollick.infer.native.prefill_plan import PrefillPlan
from rollick.infer.native.runner import AdmissionQueue, FinishedRequest, RunnerStats
from rollick.infer.native.sampler import SampledTokens, sample, sample_row_by_row
from rollick.infer.native.sequence_table import EngineRequest, PrefixMatch, SequenceTable
from rollick.infer.native.slot_cache import SlotCache
from rollick.infer.native.stop_conditions import StopConditions
from rollick.infer.request_validation import check_finite
from rollick.types import SampleId, StopReason


class SlotRunner:
    kv_capacity = 0
    """0: no token limit, because every slot fits a full sequence."""

    def __init__(
        self,
        module: nn.Module,
        infer: InferConfig,
        *,
        device: str,
        deterministic: bool,
        stops: StopRules,
    ) -> None:
        self.version = 0
        self.stats = RunnerStats()
        self.queue = AdmissionQueue()
        self.table = SequenceTable(slots=infer.slots, max_length=infer.max_length)
        self.cache = SlotCache()
        self._cache_is_stale = False
        self._infer = infer
        self._stops = StopConditions(stops)
        self._sample = sample_row_by_row if deterministic else sample
        self._forward: Forward = (TiledForward if deterministic else BatchedForward)(
            module, self.cache, device=device
        )

    @property
    def has_work(self) -> bool:
        return self.queue.has_work or self.table.num_running > 0

    @property
    def kv_tokens(self) -> int:
        """Tokens of running requests that the cache holds."""
        return int((self.table.length[self.table.running_rows] - 1).sum())

    def abort(self, uid: SampleId) -> FinishedRequest | None:
        """End a waiting or running request with its tokens so far."""
        # First, because a newer request may have the same id.
        self._discard_dropped()
        row = self.table.row_of(uid)
        return self.queue.abort(uid) if row is None else self.table.finish(row, StopReason.ABORTED)

    def synchronize(self) -> list[FinishedRequest]:
        """Wait for the decodes in flight; returns the requests that they ended. Steps of this
        runner leave nothing in flight."""
        return []

    def commit(self, version: int, *, keep_cache: bool) -> None:
        """The weights are now those of `version`. Running rows recompute their cache before they
        continue, unless `keep_cache`."""
        self.version = version
        self._cache_is_stale = self._cache_is_stale or not keep_cache
        self.table.forget_prefixes()
        self._forward.invalidate()

    def check_copies(self) -> None:
        """Raises EngineCorrupt if a copy of the weights has changed since it was made."""
        self._forward.check_copies()

    def free(self) -> None:
        """Free the cache; running rows recompute it when they continue."""
        self._cache_is_stale = True
        self.table.forget_prefixes()
        self.cache.free()
        self._forward.invalidate()

    def clear(self) -> None:
        self.table.clear()
        self.queue.clear()
        self.free()

    def step(self) -> list[FinishedRequest]:
        """Decode one token for every running request; returns the requests that ended."""
        started, prefilled_before = perf_counter(), self.stats.prefilled_tokens
        with torch.inference_mode():
            self._discard_dropped()
            self._recompute_cache()
            self._admit()
            self._compact()
            lengths = self.table.length[: self.table.count].copy()
            finished = self._append(self._decode()) if len(lengths) else []
        self.stats.record_step(lengths, started=started, prefilled_before=prefilled_before)
        return finished

    def probe_logits(self, sequences: Sequence[Sequence[int]], *, prefilled: int) -> Tensor:
        """Logits [tokens, V] of the tokens after the first `prefilled` of each sequence, which are
        decoded one by one. Longest sequence first; only while there are no requests."""
        logits: list[list[Tensor]] = [[] for _ in sequences]
        self.cache.reserve(slots=len(sequences), length=len(sequences[0]))
        with torch.inference_mode():
            prefixes = [np.asarray(ids[:prefilled]) for ids in sequences]
            self._forward.prefill([PrefillChunk(row, ids) for row, ids in enumerate(prefixes)])
            for position in range(prefilled, len(sequences[0])):
                token_R = np.asarray([ids[position] for ids in sequences if len(ids) > position])
                logits_RV = self._forward.decode(token_R, np.full(len(token_R), position))
                for row, logits_V in enumerate(logits_RV):
                    logits[row].append(logits_V)
        self.free()
        return torch.stack([logits_V for row_logits in logits for logits_V in row_logits])

    def _discard_dropped(self) -> None:
        for request in self.queue.receive():
            if request in self.table.requests:
                self.table.finish(self.table.requests.index(request), StopReason.ABORTED)

    def _recompute_cache(self) -> None:
        """Recompute the cache of running rows after `commit` or `free` marked it stale."""
        if not self._cache_is_stale:
            return
        self._cache_is_stale = False
        plan = self._create_plan()
        for row in self.table.running_rows:
            context = self.table.tokens[row, : self.table.length[row]]
            plan.add(row, context, plan.find_prefix(context))
            self.table.cached[row] = len(context) - 1
            self.table.cache_version[row] = self.version
        self.stats.prefilled_tokens += plan.run()

    def _admit(self) -> None:
        """Start waiting requests in free rows, within this step's prefill budget."""
        plan = self._create_plan()
        waiting, budget = self.queue.waiting, self._infer.prefill_tokens
        while waiting and self.table.num_free:
            request = waiting[0]
            prefix = plan.find_prefix(request.context)
            cost = len(request.context) - 1 - prefix.length
            if cost > budget:
                if budget == self._infer.prefill_tokens:
                    self._prefill_part(request, prefix, plan)
                break
            waiting.popleft()
            budget -= cost
            row = self._allocate_row(prefix)
            self.table.start(row, request, version=self.version)
            plan.add(row, request.context, prefix)
        self.stats.prefilled_tokens += plan.run()

    def _prefill_part(self, request: EngineRequest, prefix: PrefixMatch, plan: PrefillPlan) -> None:
        """Prefill one step's budget of the context and retain it; the request keeps waiting."""
        row = self._allocate_row(prefix)
        cached = prefix.length + self._infer.prefill_tokens
        self.table.store_prefix(row, request.context, cached=cached)
        plan.add(row, request.context[: cached + 1], prefix)

    def _allocate_row(self, prefix: PrefixMatch) -> int:
        """Allocate a row for a sequence that starts with `prefix`; relocates what it retains."""
        table, source = self.table, prefix.row if prefix.length else None
        row = table.allocate_row(source)
        if source is not None and table.cached[source] == prefix.length:
            # The new sequence contains all of the source prefix: stop retaining it there.
            table.retained[source] = 0
        if table.retained[row]:
            slot = table.spare_slot(row, avoid=source)
            if slot is not None:
                self.cache.reserve(slots=slot + 1, length=self.cache.length)
                self.cache.copy(row, [slot], length=int(table.cached[row]))
                table.relocate(row, slot)
        return row

    def _create_plan(self) -> PrefillPlan:
        return PrefillPlan(self.table, self.cache, self._forward, budget=self._infer.prefill_tokens)

    def _compact(self) -> None:
        for move in self.table.compact():
            if move.swaps:
                self.cache.swap(move.source, move.target, length=move.length)
            else:
                self.cache.copy(move.source, [move.target], length=move.length)

    def _decode(self) -> SampledTokens:
        table, count = self.table, self.table.count
        rows, length_R = np.arange(count), table.length[:count]
        self.cache.reserve(slots=count, length=int(length_R.max()))
        logits_RV = self._forward.decode(table.tokens[rows, length_R - 1], length_R - 1)
        uniform_R = uniforms(table.stream[:count], length_R - table.prompt_length[:count])
        metadata = table.sampling_metadata(self._stops.logit_bias(table, rows, length_R))
        sampled = self._sample(logits_RV, metadata, uniform_R=uniform_R)
        exact_R = self._forward.exact_logits(sampled.tokens_R)
        if exact_R is not None:
            sampled = sampled.with_exact_logits(logits_RV, exact_R, metadata)
        return sampled

    def _append(self, sampled: SampledTokens) -> list[FinishedRequest]:
        table, rows, version = self.table, np.arange(self.table.count), self.version
        check_finite(sampled.logprobs_R, table.uid, version=version)
        table.append(rows, sampled.tokens_R, sampled.logprobs_R, version=version)
        self.stats.generated_tokens += table.count
        self.stats.decode_steps += 1
        ended = self._stops.find_ended(table, rows, sampled.tokens_R)
        return [table.finish(row, reason) for row, reason in ended]
