"""The main loop of a child process: reads frames, loads and runs user code, writes frames.

    pool (parent)                              child
      LOAD  user code by name   ------->         ChildProgram.load
                                <-------       READY, or LOAD_FAILED with the error
      WORK  pickled content     ------->         ChildProgram.work, for each call:
                                <-------         STARTED, before the call
                                <-------         DONE, with its result

Frame bodies are pickled to the child, and JSON from the child: the parent never unpickles data
from a process that runs user code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import cloudpickle

from rollick.children.process import HEADER, FrameKind, describe_failure, encode_frame
from rollick.errors import RollickError


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """The body of a LOAD frame."""

    definitions: Mapping[str, str | bytes]
    """By name: a reference to import, or a pickled function or class."""
    base: Path | None
    """Folder that file references are relative to."""
    threads: int = 1
    """Maximum number of concurrent calls in one child."""


class ChildProgram(Protocol):
    """Handles the frames that a child receives."""

    def load(self, setup: ChildSetup) -> str:
        """Load the user code; returns the body of the READY frame."""
        ...

    def work(self, content: Any) -> None:
        """Do the work of one WORK frame."""


@dataclass(slots=True)
class FrameWriter:
    """Buffers frames and writes them to the parent's pipe. Safe to use from several threads."""

    pipe: int
    _unsent: bytearray = field(default_factory=bytearray)
    _lock: Lock = field(default_factory=Lock)

    def add(self, kind: FrameKind, body: str) -> None:
        """Buffer a frame; the next `flush` sends it."""
        with self._lock:
            self._unsent += encode_frame(kind, body.encode())

    def flush(self) -> None:
        with self._lock:
            view = memoryview(bytes(self._unsent))
            self._unsent.clear()
            while view:
                view = view[os.write(self.pipe, view) :]


def run_program(create: Callable[[FrameWriter], ChildProgram]) -> None:
    inbox, outbox = move_standard_streams()
    writer = FrameWriter(outbox)
    program = create(writer)
    with os.fdopen(inbox, "rb") as pipe:
        while header := pipe.read(HEADER.size):
            kind, length = HEADER.unpack(header)
            content = cloudpickle.loads(pipe.read(length))
            if kind == FrameKind.LOAD:
                _load(program, content, writer)
            else:
                program.work(content)
            writer.flush()


def _load(program: ChildProgram, setup: ChildSetup, writer: FrameWriter) -> None:
    try:
        writer.add(FrameKind.READY, program.load(setup))
    except (Exception, SystemExit) as error:
        problem = {"message": describe_failure(error), "fix": ""}
        if isinstance(error, RollickError):
            problem = {"message": error.message, "fix": error.fix}
        writer.add(FrameKind.LOAD_FAILED, json.dumps(problem))


def move_standard_streams() -> tuple[int, int]:
    """Move the parent's pipes from stdin and stdout to new descriptors; returns them. Call this
    before loading user code, which then prints to stderr and has an empty stdin."""
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    return inbox, outbox
