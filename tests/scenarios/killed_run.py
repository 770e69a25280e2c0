"""A run in a process of its own that is killed at random moments and resumed.

The processes are forked from one that has imported everything, so that a resume takes a second.
They import this module, so it must not import a conftest: several folders have one.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import uuid
from multiprocessing.process import BaseProcess
from pathlib import Path

from marked_processes import VARIABLE

from rollick import load_recipe, run_recipe
from rollick.commands.supervise import last_logged_step

PRELOADED = ["rollick.pipelines.rl", "rollick.workers.learner", "rollick.workers.generator"]


def train(recipe: str, mark: str) -> None:
    """Start the run, or resume it."""
    os.environ[VARIABLE] = mark
    loaded = load_recipe(Path(recipe))
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    run_recipe(loaded, resume=(folder / "recipe.yaml").exists())


class KilledRun:
    """A run that is started again after each kill."""

    def __init__(self, recipe: Path, folder: Path, seed: int) -> None:
        self.recipe, self.folder = recipe, folder
        self.rng = random.Random(seed)
        self.mark = uuid.uuid4().hex
        multiprocessing.set_forkserver_preload(PRELOADED)
        self._processes = multiprocessing.get_context("forkserver")

    def start(self) -> BaseProcess:
        process = self._processes.Process(target=train, args=(str(self.recipe), self.mark))
        process.start()
        return process

    def kill_at_random(self) -> None:
        """Kill the run while it starts or shortly after it logs its next step."""
        process, last_step = self.start(), last_logged_step(self.folder) or 0
        if self.rng.random() < 0.3:
            time.sleep(self.rng.uniform(0, 1))
        else:
            self._wait_for_step(process, last_step + 1)
            time.sleep(self.rng.uniform(0, 0.1))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run ended before the kill"

    def finish(self) -> None:
        process = self.start()
        process.join(300)
        assert process.exitcode == 0

    def _wait_for_step(self, process: BaseProcess, step: int) -> None:
        deadline = time.monotonic() + 120
        while (last_logged_step(self.folder) or 0) < step:
            assert process.is_alive(), "the run ended by itself"
            assert time.monotonic() < deadline, "the run made no progress in time"
            time.sleep(0.005)
