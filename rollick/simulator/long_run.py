"""Simulates the failures of a run of days or weeks, with two ways to recover.

    restart all   every failure ends the run, which restarts from its newest checkpoint
    rebuild part  a lost engine is replaced while the others continue; a lost learner is rebuilt
                  from the snapshot on its host; only if that host is lost too, the run restarts

Failures are a Poisson process over all devices. A failure during a repair restarts the repair.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from random import Random
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from rollick.config.schema.section import Section, Share
from rollick.simulator.step_time import NonNegativeSeconds

DAY_S = 86_400.0
RUNS = 100
"""Number of simulated runs; their mean is reported."""

PositiveNumber = Annotated[float, Field(gt=0)]


class FailureConfig(Section):
    """How often devices fail, and what a repair takes."""

    gpu_hours_between_failures: PositiveNumber = 49_152.0
    """One interruption every 3 hours on 16,384 GPUs (Llama 3, arXiv 2407.21783)."""
    host_lost_share: Share = 0.78
    """Share of the failures that lose the host's memory, and so the snapshot: the share of
    hardware faults in that report."""
    detect_s: NonNegativeSeconds = 60.0
    """From a failure to its detection."""
    restart_s: NonNegativeSeconds = 600.0
    """A restart of the run: starting processes and groups, loading models and the checkpoint."""
    engine_restart_s: NonNegativeSeconds = 300.0
    """A new engine, with the current weights."""
    learner_restart_s: NonNegativeSeconds = 180.0
    """New learner processes, with the state of the snapshot."""
    checkpoint_every_s: PositiveNumber = 1800.0
    """Training time between two checkpoints."""
    save_s: NonNegativeSeconds = 10.0
    """Time that training waits for a checkpoint."""


@dataclass(frozen=True, slots=True)
class LongRun:
    """What to simulate: the devices of a run, its steps and its failures."""

    failures: FailureConfig
    engines: int
    learners: int
    """Devices of the learner."""
    gpus: int
    """All devices; fewer than the sum if roles share them."""
    step_s: float
    days: float = 14.0

    @property
    def hours_between_failures(self) -> float:
        return self.failures.gpu_hours_between_failures / self.gpus


@dataclass(slots=True)
class SimulatedRun:
    """The time of a run by use, in seconds: the four sum to its wall time."""

    run: LongRun
    random: Random = field(compare=False)
    progress_s: float = 0.0
    """Progress that was not lost."""
    save_s: float = 0.0
    recover_s: float = 0.0
    redo_s: float = 0.0
    failures: int = 0
    unsaved_s: float = 0.0
    """Progress since the last checkpoint."""

    @property
    def wall_s(self) -> float:
        return self.progress_s + self.save_s + self.recover_s + self.redo_s

    @property
    def ettr(self) -> float:
        return self.progress_s / self.wall_s

    @property
    def left_s(self) -> float:
        return self.run.days * DAY_S - self.wall_s

    def train(self, seconds: float) -> None:
        """Train and save for `seconds`, at most until the end of the run."""
        config, seconds = self.run.failures, min(seconds, self.left_s)
        while seconds > 0:
            trained = min(seconds, config.checkpoint_every_s - self.unsaved_s)
            self.progress_s += trained
            self.unsaved_s += trained
            seconds -= trained
            if seconds > 0:
                saved = min(seconds, config.save_s)
                self.save_s += saved
                seconds -= saved
                self.unsaved_s = 0.0

    def lose_work(self, seconds: float) -> None:
        lost = min(seconds, self.unsaved_s)
        self.progress_s -= lost
        self.redo_s += lost
        self.unsaved_s -= lost

    def repair(self, seconds: float) -> None:
        """Wait for a repair. A failure during the repair restarts it."""
        while (failed_after := self.draw_failure()) < min(seconds, self.left_s):
            self.recover_s += failed_after
            self.failures += 1
        self.recover_s += min(seconds, self.left_s)

    def lose_engine(self) -> None:
        """The other engines continue: the run loses one engine's share of the repair time."""
        repair_s = self.run.failures.detect_s + self.run.failures.engine_restart_s
        lost = min(repair_s / self.run.engines, self.unsaved_s)
        self.progress_s -= lost
        self.recover_s += lost

    def draw_failure(self) -> float:
        return self.random.expovariate(1 / (3600 * self.run.hours_between_failures))


def simulate_long_run(run: LongRun, *, restart_all: bool, seed: int) -> SimulatedRun:
    random, config = Random(seed), run.failures
    simulated = SimulatedRun(run, random)
    while True:
        simulated.train(simulated.draw_failure())
        if simulated.left_s <= 0:
            return simulated
        simulated.failures += 1
        hits_learner = random.random() < run.learners / run.gpus
        has_snapshot = random.random() >= config.host_lost_share
        if restart_all or (hits_learner and not has_snapshot):
            simulated.lose_work(simulated.unsaved_s)
            simulated.repair(config.detect_s + config.restart_s)
        elif hits_learner:
            simulated.lose_work(random.uniform(0, run.step_s))
            simulated.repair(config.detect_s + config.learner_restart_s)
        else:
            simulated.lose_engine()


@dataclass(frozen=True, slots=True)
class LongRunReport:
    """Means over RUNS simulated runs."""

    days: float
    engines: int
    gpus: int
    hours_between_failures: float
    failures: float
    ettr_restart_all: float
    ettr: float
    """If only the lost part is rebuilt."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> list[tuple[str, str]]:
        frequency = f"a failure every {self.hours_between_failures:.3g} h"
        lost, lost_all = ((1 - ettr) * self.days for ettr in (self.ettr, self.ettr_restart_all))
        return [
            ("long run", f"{self.days:g} days on {self.gpus} GPUs: {frequency}"),
            ("  rebuild part", f"ETTR {self.ettr:.2%}, {lost:.2g} days lost"),
            ("  restart all", f"ETTR {self.ettr_restart_all:.2%}, {lost_all:.2g} days lost"),
        ]


def compare_repairs(run: LongRun) -> LongRunReport:
    rebuilt, restarted = (
        [simulate_long_run(run, restart_all=restart_all, seed=seed) for seed in range(RUNS)]
        for restart_all in (False, True)
    )
    return LongRunReport(
        days=run.days,
        engines=run.engines,
        gpus=run.gpus,
        hours_between_failures=run.hours_between_failures,
        failures=fmean(simulated.failures for simulated in restarted),
        ettr_restart_all=fmean(simulated.ettr for simulated in restarted),
        ettr=fmean(simulated.ettr for simulated in rebuilt),
    )
