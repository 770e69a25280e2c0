"""A Ray cluster on the machines of a test, and a run on its first machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from machines import Machine, Machines

from rollick.cluster.ray_start import RAY_SETTINGS
from rollick.commands.supervise import last_logged_step

PORT = 6379
PACK = json.dumps({"scheduler_spread_threshold": 1.0})
"""Workers go to the first machine that has room."""
START_TIMEOUT_S = 60.0


class NodeCluster:
    """One machine for each entry of `cpus`; the first has the controller. The last `late` machines
    are not in the cluster until `add`."""

    def __init__(self, cpus: Sequence[int], *, late: int = 0) -> None:
        self._stack = ExitStack()
        self._cpus = cpus
        machines = self._stack.enter_context(Machines(len(cpus)))
        self.machines, self.network = machines.machines, machines.network
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._environment = {**os.environ, **RAY_SETTINGS, **token, **path}
        try:
            for machine in self.machines[: len(cpus) - late]:
                self.add(machine)
        except BaseException:
            self._stack.close()
            raise

    @property
    def head(self) -> Machine:
        return self.machines[0]

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def add(self, machine: Machine) -> None:
        """Start Ray on the machine."""
        node_options = ["--address", self.address]
        if machine is self.head:
            node_options = ["--head", "--port", str(PORT), "--include-dashboard=false"]
            node_options += ["--system-config", PACK]
        cpus = str(self._cpus[self.machines.index(machine)])
        options = ["--node-ip-address", machine.address, "--num-cpus", cpus, "--num-gpus", "0"]
        ray = [str(Path(sys.executable).with_name("ray")), "start", *node_options, *options]
        ray += ["--object-store-memory", str(200 << 20), "--disable-usage-stats"]
        try:
            machine.run(*ray, env=self._environment, timeout=START_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"Ray did not start: {error.stdout}{error.stderr}") from None

    def train(self, recipe: Path, *options: str) -> subprocess.Popen[str]:
        """Start `rollick train` on the first machine."""
        command = [sys.executable, "-m", "rollick.cli", "train", str(recipe), *options]
        return subprocess.Popen(
            self.head.command(command),
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while (last_logged_step(folder) or 0) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"step {step} was not made in time"
        time.sleep(0.02)
