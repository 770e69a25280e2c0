"""The detection of hung engines from their polls."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from rollick.cluster.deadlines import FLOORS_S, Deadlines
from rollick.errors import WorkerHung
from rollick.roles.engine_health import EngineHealth
from rollick.roles.protocols import POLL_TIMEOUT_S
from rollick.types import EngineLoad

CEILING_S = 1800.0
PROGRESS_FLOOR_S = FLOORS_S["progress"]


@dataclass
class PolledEngine:
    """An engine that is polled every POLL_TIMEOUT_S on a virtual clock."""

    deadlines: Deadlines = field(default_factory=lambda: Deadlines(CEILING_S))
    seconds: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.health = EngineHealth("generators", 0, self.deadlines, lambda: self.seconds)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(running=1, slots=4, generated_tokens=self.tokens)

    def poll(self, *, tokens: int, late_s: float = 0.0, has_requests: bool = True) -> None:
        self.tokens += tokens
        self.seconds += POLL_TIMEOUT_S + late_s
        self.health.check_progress(self.load, POLL_TIMEOUT_S + late_s, has_requests=has_requests)

    def poll_until_hung(self) -> float:
        started_at = self.seconds
        with pytest.raises(WorkerHung, match="generators 0 generated no token for"):
            self._poll_for(2 * CEILING_S)
        return self.seconds - started_at

    def _poll_for(self, seconds: float) -> None:
        end = self.seconds + seconds
        while self.seconds < end:
            self.poll(tokens=0)


def test_an_engine_that_does_not_answer_a_poll_is_detected_within_ten_seconds() -> None:
    engine = PolledEngine()
    engine.poll(tokens=3)
    assert engine.health.poll_limit_s(engine.load) < 10 - POLL_TIMEOUT_S


def test_a_deadline_is_ten_times_the_slowest_answer() -> None:
    engine = PolledEngine()
    engine.poll(tokens=3, late_s=4.0)
    assert engine.health.poll_limit_s(engine.load) == POLL_TIMEOUT_S + 40.0


def test_an_engine_that_has_generated_nothing_may_compile_up_to_the_ceiling() -> None:
    engine = PolledEngine()
    engine.poll(tokens=0)
    assert engine.health.poll_limit_s(engine.load) == POLL_TIMEOUT_S + CEILING_S
    assert engine.poll_until_hung() > CEILING_S


def test_an_engine_that_responds_without_generating_is_hung() -> None:
    engine = PolledEngine()
    for _ in range(3):
        engine.poll(tokens=5)
    assert PROGRESS_FLOOR_S < engine.poll_until_hung() <= PROGRESS_FLOOR_S + POLL_TIMEOUT_S


def test_a_hung_engine_failed_when_it_made_its_last_token() -> None:
    engine = PolledEngine()
    for _ in range(3):
        engine.poll(tokens=5)
    with pytest.raises(WorkerHung) as hung:
        engine._poll_for(2 * CEILING_S)
    assert hung.value.failed_at == pytest.approx(time.time() - PROGRESS_FLOOR_S, abs=5)


def test_an_engine_with_slow_steps_has_more_time_for_the_next() -> None:
    engine = PolledEngine()
    engine.poll(tokens=1)
    for _ in range(19):
        engine.poll(tokens=0)
    engine.poll(tokens=1)
    assert engine.poll_until_hung() > 10 * 20 * POLL_TIMEOUT_S > PROGRESS_FLOOR_S


def test_an_engine_without_requests_is_idle() -> None:
    engine = PolledEngine()
    for _ in range(3):
        engine.poll(tokens=5)
    for _ in range(1000):
        engine.poll(tokens=0, has_requests=False)
    engine.poll(tokens=0)


def test_a_paused_engine_makes_no_tokens_for_as_long_as_it_is_paused() -> None:
    engine = PolledEngine()
    for _ in range(3):
        engine.poll(tokens=5)
    engine.health.is_paused = True
    for _ in range(1000):
        engine.poll(tokens=0)
    engine.health.is_paused = False
    assert engine.poll_until_hung() > PROGRESS_FLOOR_S


def test_an_engine_makes_no_tokens_while_it_loads_weights() -> None:
    engine = PolledEngine()
    for _ in range(3):
        engine.poll(tokens=5)
    with engine.health.expect_no_progress():
        for _ in range(1000):
            engine.poll(tokens=0)
    engine.poll(tokens=0)
    assert engine.poll_until_hung() > PROGRESS_FLOOR_S
