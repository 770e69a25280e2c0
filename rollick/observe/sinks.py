"""Where metrics can go besides metrics.jsonl. Each imports its library when it is opened."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollick.errors import MissingExtra
from rollick.observe.metrics import GuardedSink, Sink

JSONL = "jsonl"
"""metrics.jsonl is always written; naming it in a recipe is allowed and adds nothing."""


class TensorBoardSink:
    """Event files in the run's folder, written without torch."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Generated protobuf modules: their names exist at run time only.
        events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        value_of, summary_of = summaries.Summary.Value, summaries.Summary
        values = [value_of(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = summary_of(value=values)
        self.writer.add_event(events.Event(step=step, wall_time=time.time(), summary=summary))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """Weights & Biases."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        wandb = _library("wandb")
        self.run = wandb.init(
            project="rollick", name=run_name, dir=str(folder), config=dict(config), reinit=True
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class MlflowSink:
    """MLflow; the tracking server is taken from MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self.mlflow = _library("mlflow")
        self.mlflow.set_experiment("rollick")
        self.mlflow.start_run(run_name=run_name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow allows neither @ nor brackets in a metric's name.
        self.mlflow.log_metrics({name.replace("@", "_at_"): v for name, v in metrics.items()}, step)

    def close(self) -> None:
        self.mlflow.end_run()


class TrackioSink:
    """trackio: a local dashboard with W&B's calls."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self.trackio = _library("trackio")
        self.trackio.init(project="rollick", name=run_name, config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self.trackio.finish()


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra.of(name, name) from error


def open_sink(
    name: str,
    kind: Callable[[Path, str, Mapping[str, Any]], Sink],
    folder: Path,
    *,
    run_name: str,
    config: Mapping[str, Any],
) -> GuardedSink:
    """The sink in its own thread."""
    return GuardedSink(name, lambda: kind(folder, run_name, config))
