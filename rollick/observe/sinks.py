"""Metric sinks besides metrics.jsonl, opened with the run's folder, name and recipe."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollick.errors import MissingExtra

NOT_IN_MLFLOW = re.compile(r"[^\w./: -]")
"""Characters that MLflow does not allow in a metric's name, such as # and @."""


class TensorBoardSink:
    """Event files in the run's folder, written without torch."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Generated protobuf modules define their names at run time.
        events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        value_of = summaries.Summary.Value
        values = [value_of(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = summaries.Summary(value=values)
        self.writer.add_event(events.Event(step=step, wall_time=time.time(), summary=summary))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _TrackerSink:
    """A run of Weights & Biases, or of trackio, which has the same API."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


def open_wandb(folder: Path, run_name: str, config: Mapping[str, Any]) -> _TrackerSink:
    options = {"dir": str(folder), "config": dict(config), "reinit": True}
    return _TrackerSink(_import_library("wandb").init(project="rollick", name=run_name, **options))


def open_trackio(folder: Path, run_name: str, config: Mapping[str, Any]) -> _TrackerSink:
    """trackio: a local dashboard."""
    trackio = _import_library("trackio")
    trackio.init(project="rollick", name=run_name, config=dict(config))
    return _TrackerSink(trackio)


class MlflowSink:
    """MLflow; MLFLOW_TRACKING_URI sets the tracking server."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self.mlflow = _import_library("mlflow")
        self.mlflow.set_experiment("rollick")
        self.mlflow.start_run(run_name=run_name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        names = {name: NOT_IN_MLFLOW.sub("_", name.replace("@", "_at_")) for name in metrics}
        self.mlflow.log_metrics({names[name]: value for name, value in metrics.items()}, step)

    def close(self) -> None:
        self.mlflow.end_run()


def _import_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra.of(name, name) from error
