"""Main program of a reward process: scores the samples that the pool sends.

The frames are those of child_loop.py. READY has the declarations of the rewards; WORK has jobs,
each a pickled sample with its rewards; STARTED names the jobs and rewards of a call; DONE has a job
and a score for each of its rewards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from rollick.children.child_loop import ChildSetup, FrameWriter, run_program
from rollick.children.process import FrameKind, describe_failure
from rollick.config.names import resolve
from rollick.errors import RewardError
from rollick.rewards.base import Declaration, call_batch, call_reward, declaration_of
from rollick.rewards.call_limits import kill_after_limit
from rollick.types import RewardFn, Sample, Score, ScoreStatus

ISOLATION = "process"
"""Default isolation level of a score: a process that is killed if it hangs."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
SCORE_FIELDS = tuple(each.name for each in fields(Score))


class RewardCall(NamedTuple):
    reward: str
    options: Mapping[str, Any]


CallId = tuple[int, int]
"""(job id, index of one of the job's calls)."""


def encode_scores(job: int, scores: Sequence[Score]) -> str:
    rows = [[getattr(score, name) for name in SCORE_FIELDS] for score in scores]
    return json.dumps([job, rows], default=dict)


def decode_scores(body: bytes) -> tuple[int, list[Score]]:
    job, rows = json.loads(body)
    records: list[dict[str, Any]] = [dict(zip(SCORE_FIELDS, row, strict=True)) for row in rows]
    for record in records:
        record["status"] = ScoreStatus(record["status"])
        record["turn_rewards"] = tuple(record["turn_rewards"])
    return job, [Score(**record) for record in records]


@dataclass(slots=True)
class RewardLoop:
    """Loads the reward functions and scores jobs, one call at a time."""

    writer: FrameWriter
    runner: asyncio.Runner
    functions: dict[str, RewardFn] = field(default_factory=dict[str, RewardFn])
    declared: dict[str, Declaration] = field(default_factory=dict[str, Declaration])

    def load(self, setup: ChildSetup) -> str:
        for name, definition in setup.definitions.items():
            self.functions[name] = _load_reward(definition, setup.base)
            self.declared[name] = declaration_of(self.functions[name])
        return json.dumps({name: asdict(declared) for name, declared in self.declared.items()})

    def work(self, content: Sequence[tuple[int, bytes]]) -> None:
        """Score each job. Batch rewards are called first, over all jobs."""
        samples: dict[int, Sample] = {}
        calls: dict[int, Sequence[RewardCall]] = {}
        for job, payload in content:
            try:
                samples[job], calls[job] = cloudpickle.loads(payload)
            except Exception as error:
                reason = f"the sample cannot be unpickled: {describe_failure(error)}"
                self.writer.add(FrameKind.DONE, encode_scores(job, [Score.failed(reason)]))
        batched = self._call_batches(samples, calls)
        for job in samples:
            scores = [
                batched.get((job, index)) or self._call([(job, index)], call, samples)[job, index]
                for index, call in enumerate(calls[job])
            ]
            self.writer.add(FrameKind.DONE, encode_scores(job, scores))

    def _call_batches(
        self, samples: Mapping[int, Sample], calls: Mapping[int, Sequence[RewardCall]]
    ) -> dict[CallId, Score]:
        groups: dict[str, list[tuple[CallId, RewardCall]]] = {}
        for job, job_calls in calls.items():
            for index, call in enumerate(job_calls):
                if self.declared[call.reward].batch:
                    key = json.dumps([call.reward, dict(call.options)], default=repr)
                    groups.setdefault(key, []).append(((job, index), call))
        scores: dict[CallId, Score] = {}
        for group in groups.values():
            size = self.declared[group[0][1].reward].batch
            for begin in range(0, len(group), size):
                batch = group[begin : begin + size]
                scores |= self._call([call_id for call_id, _ in batch], batch[0][1], samples)
        return scores

    def _call(
        self, call_ids: Sequence[CallId], call: RewardCall, samples: Mapping[int, Sample]
    ) -> dict[CallId, Score]:
        """Call a reward on one sample, or on several if it takes a batch."""
        # Reported before they run, so that the parent knows which call hung or crashed.
        self.writer.add(FrameKind.STARTED, json.dumps(call_ids))
        self.writer.flush()
        function, declared = self.functions[call.reward], self.declared[call.reward]
        batch, run = [samples[job] for job, _ in call_ids], self.runner.run
        try:
            if declared.batch:
                scores = call_batch(function, batch, call.options, run=run)
            else:
                scores = [call_reward(function, batch[0], call.options, run=run)]
        except RewardError as error:  # for example a missing column: fail the sample, not the run
            if len(call_ids) > 1:  # one bad row failed the batch
                single = [self._call([call_id], call, samples) for call_id in call_ids]
                return {call_id: score for each in single for call_id, score in each.items()}
            scores = [Score.failed(str(error))]
        completed: dict[CallId, Score] = {}
        for call_id, score in zip(call_ids, scores, strict=True):
            version, isolation = score.version or declared.version, score.isolation or ISOLATION
            completed[call_id] = replace(score, version=version, isolation=isolation)
        return completed


def _load_reward(definition: str | bytes, base: Path | None) -> RewardFn:
    if isinstance(definition, bytes):
        return cloudpickle.loads(definition)
    function = resolve("rewards", definition, base_dir=base)
    if not callable(function):
        kind = type(function).__name__
        raise RewardError(f"the reward {definition} is a {kind}", fix="name a function")
    return function


def main() -> None:
    # If the machine runs out of memory, the kernel kills this process, not the run. It has no
    # memory limit of its own: a reward may load a model.
    with suppress(OSError):  # not a Linux system
        OOM_SCORE.write_text("1000", encoding="ascii")
    kill_after_limit()
    with asyncio.Runner() as runner:
        run_program(lambda writer: RewardLoop(writer, runner))
