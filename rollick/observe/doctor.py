"""What a run says of itself while it goes on, and what that means.

    controller -> Situation -> RUN/waits.json -> diagnose -> Diagnosis -> words, a table, JSON

Owns the file's form and the judgement; who looks at a session, at processes and at checkpoints is
pipelines/doctor.py. The file is replaced as a whole, so a reader never sees half of it.
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
"""A controller that has not reported for so long is blocked, stopped or (elsewhere) dead."""
QUIET_AFTER_S = 60.0
"""A run in which no sample moved for so long is worth a look."""
SHOWN_ENGINES = 16

State = Literal[
    "starting", "running", "quiet", "silent", "finished", "interrupted", "failed", "died", "unknown"
]
STYLES: Mapping[str, str] = {
    "starting": "cyan",
    "running": "green",
    "finished": "green",
    "interrupted": "yellow",
    "quiet": "yellow",
}


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as the controller sees it. What it does not know is 0 or None."""

    engine: int
    in_flight: int
    """Requests of ours that it holds."""
    limit: int | None
    """Requests that it is to decode at once."""
    running: int
    waiting: int
    kv_share: float | None
    version: int
    last_answer_s: float | None
    """Seconds since a request last ended there."""


@dataclass(frozen=True, slots=True)
class RewardView:
    """The rewards, since the run (or its resume) began."""

    under_way: int
    calls: int
    failures: int
    timeouts: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Situation:
    """Who waits for whom, at one moment of a run. Times are seconds of the wall clock."""

    name: str
    pipeline: str
    host: str
    pid: int
    process_start: int
    """The kernel's start time of the process: a later process with its number has another."""
    written_at: float
    began_at: float
    step: int
    """Steps that are done."""
    steps: int
    version: int
    phase: str
    phase_since: float
    stuck_after_s: float
    quiet_s: float = 0.0
    """How long no sample has moved."""
    waits_for: str = ""
    queued: int = 0
    engines: Sequence[EngineView] = ()
    rewards: RewardView | None = None
    outcome: str = ""
    """Empty while it goes on; then finished, interrupted or failed."""
    error: str = ""

    def sentence(self) -> str:
        """Who waits for whom."""
        lasting = duration(max(0.0, self.written_at - self.phase_since))
        step = f"step {min(self.step + 1, self.steps)}"
        if self.phase == "start":
            return f"workers and models are being opened, for {lasting}"
        if self.phase == "validate":
            step = f"the validation of step {self.step}"
        if self.waits_for and self.phase in ("generate", "validate"):
            return f"{step} waits for {self.waits_for}"
        meanwhile = f"; the next batch waits for {self.waits_for}" if self.waits_for else ""
        return f"{step} is in its phase {self.phase} for {lasting}{meanwhile}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is in a run's folder besides waits.json."""

    folder: Path
    alive: bool | None
    """Whether its process lives; None if that cannot be known from here."""
    checkpoint: int | None = None
    checkpoint_at: float = 0.0
    step: int | None = None
    """The last step that was logged."""
    stuck: Path | None = None
    """Where the stacks of a run that hung are."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is the matter with a run, and what to do."""

    run: str
    state: State
    headline: str
    waits: str
    advice: str
    last_checkpoint: str
    situation: Situation | None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def lines(self) -> list[str]:
        """For people, without the engines."""
        said = [f"{self.run}: {self.headline}", self.waits, self.last_checkpoint, self.advice]
        return [line for line in said if line]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def write_situation(folder: Path, situation: Situation) -> None:
    """Replace the run's waits.json."""
    fresh = folder / f"{WAITS}.new"
    fresh.write_text(json.dumps(asdict(situation)), encoding="utf-8")
    fresh.replace(folder / WAITS)


def read_situation(folder: Path) -> Situation | None:
    """What the run last said; None if it said nothing that can be read."""
    try:
        said: Any = json.loads((folder / WAITS).read_text("utf-8"))
        values = {f.name: said[f.name] for f in fields(Situation)}
        values["engines"] = tuple(EngineView(**engine) for engine in said["engines"])
        values["rewards"] = RewardView(**said["rewards"]) if said["rewards"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Situation(**values)


def diagnose(
    situation: Situation | None,
    found: Finding,
    *,
    now: float,
    environment: Mapping[str, str] | None = None,
) -> Diagnosis:
    """What the run's last words and its folder mean, at the wall clock's second `now`."""
    state = _state(situation, found, now)
    live = situation if situation is not None and not situation.outcome else None
    return Diagnosis(
        run=str(found.folder),
        state=state,
        headline=_headline(state, situation, found, now),
        waits=_waits(state, live, now) if live else "",
        advice=_advice(state, situation, found),
        last_checkpoint=_last_checkpoint(found, now),
        situation=situation,
        environment=environment or {},
    )


def _state(situation: Situation | None, found: Finding, now: float) -> State:
    if situation is None:
        return "starting" if found.alive else "unknown"
    if situation.outcome:
        return cast("State", situation.outcome)
    if found.alive is False:
        return "died"
    if now - situation.written_at > SILENT_AFTER_S:
        return "silent"
    if situation.phase == "start":
        return "starting"
    return "quiet" if situation.quiet_s > QUIET_AFTER_S else "running"


def _headline(state: State, said: Situation | None, found: Finding, now: float) -> str:
    if said is None:
        logged = "" if found.step is None else f"; step {found.step} was logged"
        return "starting" if state == "starting" else f"no process has told how it is{logged}"
    ago = duration(max(0.0, now - said.written_at))
    who = f"process {said.pid} on {said.host}"
    done = f"step {said.step} of {said.steps} done, version {said.version}"
    words: Mapping[State, str] = {
        "starting": f"starting ({who})",
        "running": f"running ({who}), {done}",
        "quiet": f"running ({who}), {done}, but no sample has moved for {duration(said.quiet_s)}",
        "silent": f"{who} has not reported for {ago}, {done}",
        "finished": f"finished {ago} ago, {done}",
        "interrupted": f"stopped by a signal {ago} ago, {done}",
        "failed": f"failed {ago} ago, {done}: {said.error}",
        "died": f"dead: {who} is gone without a word; it last reported {ago} ago, {done}",
    }
    return words[state]


def _waits(state: State, said: Situation, now: float) -> str:
    if state in ("died", "silent"):
        return f"when it last reported: {said.sentence()}"
    return f"{said.sentence()} (as of {duration(max(0.0, now - said.written_at))} ago)"


def _advice(state: State, said: Situation | None, found: Finding) -> str:
    begin = "from that checkpoint" if found.checkpoint is not None else "from its beginning"
    resume = f"the same command with --resume goes on {begin}"
    stacks = f"; stacks are in {found.stuck}" if found.stuck else ""
    words: Mapping[State, str] = {
        "finished": "nothing is to be done; `rollick export` writes its policy",
        "interrupted": resume,
        "failed": f"mend the cause; {resume}{stacks}",
        "died": f"killed, out of memory, or its machine restarted? {resume}",
        "silent": "its event loop is blocked (by a long call in the controller's own process), or "
        "the process is stopped; `py-spy dump --pid` of it shows where" + stacks,
        "unknown": f"it never began, or was made by an older version; {resume}",
    }
    if state == "quiet" and said is not None:
        return (
            "look at the engine, reward or environment that is named; the run ends by itself "
            f"after {duration(said.stuck_after_s)} without a move (run.stuck_after_s){stacks}"
        )
    return words.get(state, "")


def _last_checkpoint(found: Finding, now: float) -> str:
    if found.checkpoint is None:
        return "no checkpoint yet"
    ago = duration(max(0.0, now - found.checkpoint_at))
    return f"last checkpoint: step {found.checkpoint}, {ago} ago"


def duration(seconds: float) -> str:
    """`310 s`, `12 min`, `5 h`, `3 days`: about how long."""
    for limit, unit, name in ((600, 1, "s"), (36_000, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86_400:.3g} days"


def render(diagnosis: Diagnosis) -> RenderableType:
    """The diagnosis for a terminal."""
    first, *rest = diagnosis.lines()
    parts: list[RenderableType] = [Text(first, style=STYLES.get(diagnosis.state, "red"))]
    parts += [Text(line) for line in rest]
    said = diagnosis.situation
    if said is not None and not said.outcome:
        parts += _tables(said)
    if diagnosis.environment:
        parts.append(environment_table(diagnosis.environment))
    return Rendered(*parts)


def environment_table(environment: Mapping[str, str]) -> Table:
    """What the machine and its packages are."""
    table = Table.grid(padding=(0, 2))
    for name, value in environment.items():
        table.add_row(Text(name, style="cyan"), Text(value))
    return table


def _tables(said: Situation) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if said.engines:
        names = ("engine", "in flight", "limit", "decodes", "queues", "cache", "version")
        table = Table(*names, "last answer", box=None)
        # Those that have not answered for longest come first: they are why one looks.
        longest = sorted(said.engines, key=lambda engine: -(engine.last_answer_s or 0.0))
        for engine in longest[:SHOWN_ENGINES]:
            table.add_row(*_engine_cells(engine))
        parts.append(table)
        more = len(said.engines) - SHOWN_ENGINES
        if more > 0:
            parts.append(Text(f"and {more} engines more"))
    if said.queued:
        parts.append(Text(f"{said.queued} requests wait for an engine"))
    if said.rewards is not None:
        rewards = said.rewards
        failed = f"{rewards.failures} failed, {rewards.timeouts} of them by time-out"
        parts.append(
            Text(f"rewards: {rewards.under_way} under way, {rewards.calls} done, {failed}")
        )
    return parts


def _engine_cells(engine: EngineView) -> list[str]:
    answered = engine.last_answer_s
    return [
        str(engine.engine),
        str(engine.in_flight),
        "-" if engine.limit is None else str(engine.limit),
        str(engine.running),
        str(engine.waiting),
        "-" if engine.kv_share is None else f"{engine.kv_share:.0%}",
        str(engine.version),
        "none yet" if answered is None else f"{duration(answered)} ago",
    ]
