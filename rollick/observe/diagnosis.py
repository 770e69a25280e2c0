"""The state that a run reports while it is active, and its diagnosis.

    controller -> RunSnapshot -> RUN/waits.json -> diagnose -> Diagnosis -> text, tables, JSON

pipelines/status.py collects the snapshot and the evidence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

from rich.console import Group as Rendered
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

WAITS = "waits.json"
REPORT_EVERY_S = 2.0
SILENT_AFTER_S = 15.0
"""A controller without a report for this long is blocked, stopped or (on another host) dead."""
QUIET_AFTER_S = 60.0
"""A run is quiet if no sample made progress for this long."""
MAX_SHOWN_ENGINES = 16

RunStatus = Literal[
    "starting", "running", "quiet", "silent", "finished", "interrupted", "failed", "died", "unknown"
]
GREEN, YELLOW = ("running", "finished"), ("interrupted", "quiet")
STYLES = {"starting": "cyan", **dict.fromkeys(GREEN, "green"), **dict.fromkeys(YELLOW, "yellow")}


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as the controller sees it. Unknown values are 0 or None."""

    engine: int
    in_flight: int
    """Requests of this run on the engine."""
    limit: int | None
    """Maximum requests that it decodes together."""
    running: int
    waiting: int
    kv_share: float | None
    version: int
    last_answer_s: float | None
    """Seconds since it last finished a request."""


@dataclass(frozen=True, slots=True)
class RewardView:
    """Reward calls since the run started or resumed."""

    under_way: int
    calls: int
    failures: int
    timeouts: int
    restarts: int


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """What a run is doing and what it waits for. Times are wall-clock seconds."""

    name: str
    pipeline: str
    host: str
    pid: int
    process_start: int
    """The kernel's start time of the process; distinguishes processes with the same pid."""
    written_at: float
    began_at: float
    step: int
    """Finished steps."""
    steps: int
    version: int
    phase: str
    phase_since: float
    stuck_after_s: float
    quiet_s: float = 0.0
    """Seconds since a sample last made progress."""
    waits_for: str = ""
    queued: int = 0
    engines: Sequence[EngineView] = ()
    rewards: RewardView | None = None
    processes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Process ids of the workers on the controller's machine, by role and rank."""
    outcome: str = ""
    """Empty while the run is active; then finished, interrupted or failed."""
    error: str = ""

    def describe(self) -> str:
        """One sentence: what the run does and what it waits for."""
        elapsed = _time_since(self.phase_since, self.written_at)
        step = f"step {min(self.step + 1, self.steps)}"
        if self.phase == "start":
            return f"starting workers and models for {elapsed}"
        if self.phase == "validate":
            step = f"the validation of step {self.step}"
        if self.waits_for and self.phase in ("generate", "validate"):
            return f"{step} waits for {self.waits_for}"
        meanwhile = f"; the next batch waits for {self.waits_for}" if self.waits_for else ""
        return f"{step} is in phase {self.phase} for {elapsed}{meanwhile}"


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """The contents of a run's folder besides waits.json."""

    folder: Path
    alive: bool | None
    """Whether its process is alive; None if this machine cannot tell."""
    checkpoint: int | None = None
    checkpoint_at: float = 0.0
    step: int | None = None
    """The last logged step."""
    stuck: Path | None = None
    """The file with the stacks of a run that hung."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    run: str
    state: RunStatus
    headline: str
    waits: str
    advice: str
    last_checkpoint: str
    snapshot: RunSnapshot | None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    learning: Mapping[str, str] = field(default_factory=dict[str, str])
    """Advice for a run that does not learn, by symptom."""
    reliability: Sequence[str] = ()
    """Lines about where the time went, and the faults."""

    def lines(self) -> list[str]:
        """Text lines, without the engine table."""
        lines = [f"{self.run}: {self.headline}", self.waits, self.last_checkpoint, self.advice]
        lines += [f"{symptom}: {message}" for symptom, message in self.learning.items()]
        return [line for line in (*lines, *self.reliability) if line]


def write_run_snapshot(folder: Path, snapshot: RunSnapshot) -> None:
    """Replace the run's waits.json atomically."""
    new_path = folder / f"{WAITS}.new"
    new_path.write_text(json.dumps(asdict(snapshot)), encoding="utf-8")
    new_path.replace(folder / WAITS)


def read_run_snapshot(folder: Path) -> RunSnapshot | None:
    """The run's last snapshot; None if there is none or it cannot be read."""
    try:
        saved: Any = json.loads((folder / WAITS).read_text("utf-8"))
        values = {f.name: saved[f.name] for f in fields(RunSnapshot)}
        values["engines"] = tuple(EngineView(**engine) for engine in saved["engines"])
        values["rewards"] = RewardView(**saved["rewards"]) if saved["rewards"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return RunSnapshot(**values)


def diagnose(snapshot: RunSnapshot | None, evidence: RunEvidence, *, now: float) -> Diagnosis:
    """Diagnose a run from its last snapshot and its folder at the wall-clock time `now`."""
    state = _state(snapshot, evidence, now)
    waits, checkpoint = "", "no checkpoint yet"
    if evidence.checkpoint is not None:
        saved = _time_since(evidence.checkpoint_at, now)
        checkpoint = f"last checkpoint: step {evidence.checkpoint}, {saved} ago"
    if snapshot is not None and not snapshot.outcome:
        waits = f"{snapshot.describe()} (as of {_time_since(snapshot.written_at, now)} ago)"
        if state in ("died", "silent"):
            waits = f"when it last reported: {snapshot.describe()}"
    return Diagnosis(
        run=str(evidence.folder),
        state=state,
        headline=_headline(state, snapshot, evidence, now),
        waits=waits,
        advice=_advice(state, snapshot, evidence),
        last_checkpoint=checkpoint,
        snapshot=snapshot,
    )


def _state(snapshot: RunSnapshot | None, evidence: RunEvidence, now: float) -> RunStatus:
    if snapshot is None:
        return "starting" if evidence.alive else "unknown"
    if snapshot.outcome:
        return cast("RunStatus", snapshot.outcome)
    if evidence.alive is False:
        return "died"
    if now - snapshot.written_at > SILENT_AFTER_S:
        return "silent"
    if snapshot.phase == "start":
        return "starting"
    return "quiet" if snapshot.quiet_s > QUIET_AFTER_S else "running"


def _headline(
    state: RunStatus, snapshot: RunSnapshot | None, evidence: RunEvidence, now: float
) -> str:
    if snapshot is None:
        logged = "" if evidence.step is None else f"; step {evidence.step} was logged"
        return "starting" if state == "starting" else f"no snapshot of the run{logged}"
    ago = _time_since(snapshot.written_at, now)
    process = f"process {snapshot.pid} on {snapshot.host}"
    quiet = format_duration(snapshot.quiet_s)
    done = f"step {snapshot.step} of {snapshot.steps} done, version {snapshot.version}"
    headlines: Mapping[RunStatus, str] = {
        "starting": f"starting ({process})",
        "running": f"running ({process}), {done}",
        "quiet": f"running ({process}), {done}, but no sample made progress for {quiet}",
        "silent": f"{process} has not reported for {ago}, {done}",
        "finished": f"finished {ago} ago, {done}",
        "interrupted": f"stopped by a signal {ago} ago, {done}",
        "failed": f"failed {ago} ago, {done}: {snapshot.error}",
        "died": f"dead: {process} exited without an outcome; it last reported {ago} ago, {done}",
    }
    return headlines[state]


def _advice(state: RunStatus, snapshot: RunSnapshot | None, evidence: RunEvidence) -> str:
    begin = "that checkpoint" if evidence.checkpoint is not None else "the beginning"
    resume = f"run the same command with --resume to continue from {begin}"
    stacks = f"; stacks are in {evidence.stuck}" if evidence.stuck else ""
    if state == "finished" and snapshot is not None and 0 < snapshot.step < snapshot.steps:
        return f"the run ended before its last step (run.max_minutes); {resume}"
    advice: Mapping[RunStatus, str] = {
        "finished": "nothing to do; `rollick export` writes the policy",
        "interrupted": resume,
        "failed": f"fix the cause, then {resume}{stacks}",
        "died": f"probably killed, out of memory, or the machine restarted; {resume}",
        "silent": "its event loop is blocked (by a long call in the controller process), or the "
        "process is stopped; `py-spy dump --pid PID` shows where" + stacks,
        "unknown": f"the run never started, or an older version of rollick wrote it; {resume}",
    }
    if state == "quiet" and snapshot is not None:
        limit = f"{format_duration(snapshot.stuck_after_s)} without progress (run.stuck_after_s)"
        check = "check the engine, reward or environment named above"
        return f"{check}; the run stops after {limit}{stacks}"
    return advice.get(state, "")


def _time_since(then: float, now: float) -> str:
    return format_duration(max(0.0, now - then))


def format_duration(seconds: float) -> str:
    """A rounded duration: `310 s`, `12 min`, `5 h`, `3 days`."""
    for limit, unit, name in ((600, 1, "s"), (36_000, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86_400:.3g} days"


def render_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    first, *rest = diagnosis.lines()
    parts: list[RenderableType] = [Text(first, style=STYLES.get(diagnosis.state, "red"))]
    parts += [Text(line) for line in rest]
    if diagnosis.snapshot is not None and not diagnosis.snapshot.outcome:
        parts += _tables(diagnosis.snapshot)
    if diagnosis.environment:
        parts.append(environment_table(diagnosis.environment))
    return Rendered(*parts)


def environment_table(environment: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in environment.items():
        table.add_row(Text(name, style="cyan"), Text(value))
    return table


def _tables(snapshot: RunSnapshot) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if snapshot.engines:
        names = ("engine", "in flight", "limit", "decodes", "queues", "cache", "version")
        table = Table(*names, "last answer", box=None)
        # The engines that have been silent longest come first: they are the likely cause.
        by_silence = sorted(snapshot.engines, key=lambda engine: -(engine.last_answer_s or 0.0))
        for engine in by_silence[:MAX_SHOWN_ENGINES]:
            table.add_row(*_engine_cells(engine))
        parts.append(table)
        hidden = len(snapshot.engines) - MAX_SHOWN_ENGINES
        if hidden > 0:
            parts.append(Text(f"and {hidden} more engines"))
    if snapshot.queued:
        parts.append(Text(f"{snapshot.queued} requests wait for an engine"))
    if snapshot.rewards is not None:
        rewards = snapshot.rewards
        failed = f"{rewards.failures} failed, {rewards.timeouts} of them timed out"
        done = f"{rewards.under_way} in flight, {rewards.calls} done"
        parts.append(Text(f"rewards: {done}, {failed}"))
    if snapshot.processes:
        workers = (f"{worker} {pid}" for worker, pid in snapshot.processes.items())
        parts.append(Text(f"worker processes: {', '.join(workers)}"))
    return parts


def _engine_cells(engine: EngineView) -> list[str]:
    limit = "-" if engine.limit is None else engine.limit
    cache = "-" if engine.kv_share is None else f"{engine.kv_share:.0%}"
    last_s = engine.last_answer_s
    answer = "none yet" if last_s is None else f"{format_duration(last_s)} ago"
    counts = (engine.in_flight, limit, engine.running, engine.waiting)
    return [str(cell) for cell in (engine.engine, *counts, cache, engine.version, answer)]
