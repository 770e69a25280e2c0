"""metrics.jsonl has every step; every other sink is optional and may fail."""

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollick.config.names import NAMES, resolve
from rollick.observe.metric_table import is_documented
from rollick.observe.metrics import GuardedSink, MetricLog, read_metrics


class RecordingSink:
    """A sink that records its rows and calls `on_log` before each of them."""

    def __init__(self, on_log: Any = None) -> None:
        self.on_log = on_log or (lambda: None)
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.on_log()
        self.rows.append((step, metrics))

    def close(self) -> None:
        self.closed = True


def fail() -> None:
    raise ConnectionError("the server is gone")


def test_each_step_is_one_row_and_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, [])
    log.log(1, {"train/loss": 0.5, "train/grad_norm": float("inf"), "score/mean": float("nan")})
    log.log(2, {"train/loss": 0.25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 1, "train/loss": 0.5}', '{"step": 2, "train/loss": 0.25}']
    assert log.history == read_metrics(log.path) == [json.loads(line) for line in lines]


def test_a_resumed_log_drops_the_steps_that_will_be_repeated(tmp_path: Path) -> None:
    first = MetricLog(tmp_path, [])
    for step in range(1, 6):
        first.log(step, {"train/loss": float(step)})
    resumed = MetricLog(tmp_path, [])
    resumed.drop_rows_after(3)
    resumed.log(4, {"train/loss": 40.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert resumed.history == rows
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_log_that_was_never_written_can_be_resumed(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, [])
    log.drop_rows_after(3)
    assert log.history == []
    assert list(tmp_path.iterdir()) == []


def test_a_last_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 0.5}\n{"step": 2, "train/lo')
    assert read_metrics(path) == [{"step": 1, "train/loss": 0.5}]
    log = MetricLog(tmp_path, [])
    log.drop_rows_after(2)
    log.log(2, {"train/loss": 0.25})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("name", ["train/loss", "rollout/dropped/no_signal", "eval/letters/pass@1"])
def test_a_name_or_its_family_is_documented(name: str) -> None:
    assert is_documented(name)


@pytest.mark.parametrize("name", ["train/lost", "rollout/dropped", "evaluation", "train"])
def test_other_names_are_not_documented(name: str) -> None:
    assert not is_documented(name)


def test_a_sink_gets_every_step_in_order_and_is_closed() -> None:
    recorder = RecordingSink()
    sink = GuardedSink("recorder", lambda: recorder)
    for step in range(100):
        sink.log(step, {"a": float(step)})
    sink.close()
    assert [(step, row["a"]) for step, row in recorder.rows] == [(n, n) for n in range(100)]
    assert recorder.closed
    assert sink.failure is None


def test_what_is_changed_after_logging_does_not_reach_a_sink() -> None:
    release, recorder = threading.Event(), RecordingSink()
    recorder.on_log = lambda: release.wait(10)
    sink = GuardedSink("recorder", lambda: recorder)
    metrics = {"a": 1.0}
    sink.log(1, metrics)
    metrics["a"] = 2.0
    release.set()
    sink.close()
    assert recorder.rows == [(1, {"a": 1.0})]


def test_a_sink_that_raises_is_switched_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = GuardedSink("tracker", lambda: RecordingSink(fail))
    log = MetricLog(tmp_path, [sink])
    log.log(1, {"a": 1.0})
    sink._thread.join(10)
    log.log(2, {"a": 2.0})
    log.close()
    assert sink.failure == "ConnectionError: the server is gone"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["metrics sink tracker stopped: ConnectionError: the server is gone"]
    assert [row["step"] for row in read_metrics(log.path)] == [1, 2]


def test_a_sink_that_sleeps_does_not_slow_the_caller() -> None:
    release = threading.Event()
    sink = GuardedSink("sleeper", lambda: RecordingSink(lambda: release.wait(10)))
    started_at = time.perf_counter()
    for step in range(200):
        sink.log(step, {"a": 1.0})
    sink.close(grace_s=0.1)
    assert time.perf_counter() - started_at < 1
    release.set()
    sink._thread.join(10)
    assert not sink._thread.is_alive()


def test_a_flood_is_cut_and_counted_and_the_sink_still_ends_in_order() -> None:
    entered, release, recorder = threading.Event(), threading.Event(), RecordingSink()
    recorder.on_log = lambda: (entered.set(), release.wait(10))
    sink = GuardedSink("slow", lambda: recorder, capacity=3)
    sink.log(0, {"a": 1.0})
    assert entered.wait(10)
    for step in range(1, 50):
        sink.log(step, {"a": 1.0})
    threading.Timer(0.05, release.set).start()
    sink.close()
    assert recorder.closed
    assert [step for step, _ in recorder.rows] == [0, 1, 2, 3]
    assert sink.num_lost_steps == 46


def test_a_sink_that_failed_while_its_queue_was_full_is_closed_at_once() -> None:
    sink = GuardedSink("broken", lambda: RecordingSink(fail), capacity=1)
    for step in range(50):
        sink.log(step, {"a": 1.0})
    started_at = time.perf_counter()
    sink.close()
    assert time.perf_counter() - started_at < 1
    assert sink.failure is not None


def test_tensorboards_own_loader_reads_the_event_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink_class = resolve("sinks", "tensorboard")
    sink = GuardedSink("tensorboard", lambda: sink_class(tmp_path, "toy", {}))
    sink.log(1, {"train/loss": 0.5, "eval/pass@1": 0.25})
    sink.log(2, {"train/loss": 0.125})
    sink.close()
    assert sink.failure is None
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/pass@1", "train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.125)]


@pytest.mark.parametrize("name", sorted(set(NAMES["sinks"]) - {"tensorboard"}))
def test_a_sink_without_its_library_is_disabled_and_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    caplog.set_level(logging.WARNING)
    sink = GuardedSink(name, lambda: resolve("sinks", name)(tmp_path, "toy", {}))
    sink.log(1, {"train/loss": 0.5})
    sink.close()
    assert f"pip install 'rollick[{name}]'" in caplog.text
    assert f"metrics sink {name} stopped" in caplog.text
