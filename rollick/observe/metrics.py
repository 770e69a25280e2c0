"""The metrics of a run: one flat mapping of names to numbers for each step.

metrics.jsonl in the run's folder is the truth; every other sink is a courtesy that may fail.
A metric that is logged is described in METRICS (a name ending in `/*` covers a family).
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

LOG = logging.getLogger("rollick")

METRICS: Mapping[str, str] = {
    "score/mean": "mean score of the step's scored samples, dropped groups included",
    "score/trained": "mean score of the samples that were trained on",
    "score/domain/*": "mean score by domain",
    "score/part/*": "mean of each reward, and of the parts that it gives (REWARD/PART), unweighted",
    "reward/calls/*": "calls of each reward since the step before (validation included), without "
    "those that were remembered",
    "reward/cached/*": "calls that were not needed, since an equal sample had been scored",
    "reward/failed/*": "calls that gave no score",
    "reward/mean/*": "what a reward counts (REWARD/FIGURE: tokens, cost, spread of votes), mean of "
    "the step's judged calls",
    "reward/total/*": "the same, summed over the run or since its resume",
    "watch/*": "1 where a rule of the hacking watch sees the score rise while something else "
    "breaks: length, repetition, format_only, identical, judge, held_out",
    "rollout/repetition": "mean share of an answer's four-word phrases that it had said before",
    "rollout/identical": "share of the samples that have the step's commonest answer",
    "rollout/groups": "groups trained on",
    "rollout/samples": "samples trained on",
    "rollout/tokens": "tokens drawn for the step",
    "rollout/response_length": "mean drawn tokens of a sample",
    "rollout/truncated": "share of samples that reached the token limit",
    "rollout/dropped/*": "groups dropped, by reason",
    "rollout/domain/*": "by domain: groups trained on and dropped, samples that ended, and of "
    "these the mean length and the shares that were truncated and that could not be scored",
    "rollout/failed_scores": "share of samples that could not be scored",
    "rollout/age_max": "age in versions of the oldest trained token",
    "rollout/age_mean": "mean age in versions of the trained tokens",
    "rollout/bias/length": "mean drawn tokens of the trained samples, minus that of all that "
    "ended, those in groups that a staleness rule dropped (stale, surplus) included",
    "rollout/bias/length_kept": "mean drawn tokens of the trained samples",
    "rollout/bias/length_shed": "mean drawn tokens of the ended samples in such dropped groups",
    "rollout/bias/score": "mean score of the trained samples, minus that of all that ended",
    "rollout/bias/score_kept": "mean score of the trained samples",
    "rollout/bias/score_shed": "mean score of the ended samples in such dropped groups",
    "rollout/cancelled": "samples cancelled on their way (spares, and those of dropped groups): "
    "they have no length and no score, so that the bias figures miss them",
    "rollout/cancelled_share": "these as a share of them and the scored samples",
    "rollout/masked_tokens": "tokens of the batch too old to be trained on (mask_stale_tokens)",
    "rollout/kept_cache_tokens": "tokens of the batch drawn over a cache that an older version had "
    "computed (at_publish: keep)",
    "rollout/deferred": "groups put off to a long round when the batch was taken (long_rounds)",
    "rollout/deferred_tokens": "tokens drawn for groups that were put off, and so in vain; counted "
    "when their engines have let go of them, with max_staleness above 0 perhaps a step later",
    "rollout/parked": "groups that wait for a long round",
    "rollout/long_groups": "groups trained on that had been put off",
    "rollout/long_length": "mean drawn tokens of their samples",
    "rollout/other_length": "mean drawn tokens of the other samples trained on",
    "env/episodes": "episodes of the training tasks that ended, those that failed included",
    "env/success": "share of them that solved their task, of those that did not fail",
    "env/turns": "mean turns of an episode",
    "env/summaries": "mean summaries of an episode that the policy wrote of turns out of sight",
    "env/valid": "share of the turns whose reply could be read as an action",
    "env/effective": "share of the turns that changed something",
    "env/failed/*": "episodes whose environment failed, by status: failed (it raised), garbage, "
    "timeout, crashed, lost (with another episode's process); like the next two since the run "
    "began or resumed, validation included",
    "env/restarts": "processes of environments that were replaced",
    "env/seconds": "seconds inside environments",
    "controller/lag_ms": "how late the controller's event loop was at most, in milliseconds",
    "controller/engines": "engines that answer",
    "controller/engine_restarts": "lost engines that were replaced, since the run began or resumed",
    "train/loss": "the objective, aggregated over the batch",
    "train/grad_norm": "global gradient norm before clipping (largest of the step)",
    "train/lr": "learning rate of the last optimizer step",
    "train/tokens": "tokens with a gradient",
    "train/effective_sample_size": "(sum pi/mu)^2 / sum (pi/mu)^2 as a share of the tokens",
    "train/kl_coefficient": "weight of the KL in the next step, where it is steered",
    "train/skipped_steps": "optimizer steps skipped for a non-finite gradient",
    "train/mean/*": "means over the trained tokens: entropy, clip share, KL, mismatch and so on",
    "train/max/*": "maxima over the trained tokens",
    "critic/loss": "loss of the critic, a mean over the tokens with a return",
    "critic/explained_variance": "1 - Var(return - value) / Var(return), values before the step",
    "critic/grad_norm": "global gradient norm before clipping (largest of the step)",
    "critic/lr": "learning rate of the last optimizer step of the critic",
    "critic/tokens": "tokens with a return, summed over the passes over the batch",
    "critic/skipped_steps": "optimizer steps of the critic skipped for a non-finite gradient",
    "critic/mean/*": "means over these tokens: value, return, squared error, clip share",
    "eval/*": "validation: score, pass@k and half-widths of their intervals, by domain",
    "time/*": "seconds of each phase",
    "time/reward/*": "mean seconds of a call of a reward",
    "speed/tokens_per_s": "drawn tokens over the step's seconds",
    "memory/predicted_gb": "gigabytes that the process which holds most was predicted to hold",
    "memory/seen_gb": "gigabytes that the process which holds most has held at its peak: of a GPU "
    "what torch allocated, else how far resident memory grew",
    "data/quarantined": "rows that cannot be used",
    "data/retired": "prompts that are solved (data.selection.retire_above) and drawn no more",
    "data/revived": "times that all prompts of a domain had retired and so came back",
    "data/pass_rate": "mean pass rate of the prompts that were tried, by all their samples so far",
    "version": "policy version after the step",
}


def is_documented(name: str) -> bool:
    """Whether METRICS describes the name, by itself or by family."""
    families = [known[:-1] for known in METRICS if known.endswith("/*")]
    return name in METRICS or any(name.startswith(family) for family in families)


class Sink(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class GuardedSink:
    """A sink in a thread of its own: a tracker that raises, sleeps or floods never stops a run."""

    def __init__(self, name: str, create: Callable[[], Sink], *, capacity: int = 1000) -> None:
        self.name = name
        self.failure: str | None = None
        self.lost = 0
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, args=(create,), daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.failure is not None:
            return
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self.lost += 1

    def close(self, *, grace_s: float = 10.0) -> None:
        """Give the sink `grace_s` seconds to take what waits and to end."""
        deadline = time.monotonic() + grace_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            # In short turns: a full queue of a sink that fails just now never has room again.
            try:
                self._queue.put(None, timeout=min(0.1, grace_s))
            except queue.Full:
                continue
            self._thread.join(max(0.0, deadline - time.monotonic()))
            return

    def _work(self, create: Callable[[], Sink]) -> None:
        # A process boundary in spirit: whatever a tracker raises must end here.
        try:
            sink = create()
            while (entry := self._queue.get()) is not None:
                sink.log(*entry)
            sink.close()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            LOG.warning("metrics sink %s is off: %s", self.name, self.failure)


class MetricLog:
    """Writes each step's metrics to all sinks, and keeps them for the report."""

    def __init__(self, folder: Path, sinks: Sequence[GuardedSink]) -> None:
        self.path = folder / "metrics.jsonl"
        self.sinks = list(sinks)
        self.history: list[dict[str, float]] = []

    def resume_at(self, step: int) -> None:
        """Forget what was logged after `step`: those steps will be made again."""
        if not self.path.exists():
            return
        rows = read_metrics(self.path)
        self.history = [row for row in rows if row["step"] <= step]
        rewrite(self.path, self.history)

    @property
    def last(self) -> dict[str, float]:
        """The newest row, without its step."""
        row = self.history[-1] if self.history else {}
        return {name: value for name, value in row.items() if name != "step"}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(v) for name, v in metrics.items() if math.isfinite(v)}
        row = {"step": step, **finite}
        self.history.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for sink in self.sinks:
            sink.log(step, finite)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def rewrite(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put other rows into a .jsonl file, all or nothing: a kill leaves the old ones."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fresh.replace(path)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl; a last line cut short by a kill is left out."""
    rows: list[dict[str, float]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            parsed: Any = json.loads(line)
        except json.JSONDecodeError:
            break
        rows.append(cast(dict[str, float], parsed))
    return rows
