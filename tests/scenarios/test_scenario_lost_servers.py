"""The network to a judge or an environment server on another machine fails. A short outage changes
nothing. A long one ends the run with exit code 69 and an error that names the server, and the run
can be resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from machines import Machine, Machines
from node_cluster import wait_for_step
from toy_runs import figures, learner_state, toy

from rollick import RunResult
from rollick.checkpoint import CheckpointStore
from rollick.commands.supervise import last_logged_step
from rollick.config.load import dump_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("httpx", reason="the extra rewards is not installed")

STAND_INS = Path(__file__).parents[1] / "stand_ins"
PORT = 8000
FAULT_AT, STEPS = 2, 12
END_S = 120.0
"""Every run ends within this time after the fault."""


@dataclass(frozen=True)
class Service:
    """A server that a run calls over the network."""

    program: str
    overrides: Sequence[str]
    expected_error: str
    """A part of the run's error message, which names the server."""


def judge(address: str, timeout_s: int) -> Service:
    options = {"url": f"http://{address}/v1", "model": "m", "retries": 0, "request_s": 2}
    rewards = [{"name": "judge", "options": {**options, "timeout_s": timeout_s}}]
    domain = {"source": "rollick.testing.toys:letter_rows", "rewards": rewards}
    overrides = (f"data.domains={{letters: {domain}}}",)
    expected_error = f"no verdict of http://{address}/v1 within {timeout_s} s"
    return Service("judge_server.py", overrides, expected_error)


def environment(address: str, timeout_s: int) -> Service:
    options = {"url": f"http://{address}", "show": "text"}
    domain = {"limit": 8, "environment": {"name": "openenv", "turn_tokens": 3, "options": options}}
    overrides = (
        "pipeline=agentic",
        f"data.domains={{letters: {domain}}}",
        f"environments.step_timeout_s={timeout_s}",
        "environments.threads=16",
        "sampling.max_tokens=12",
        "infer.max_length=256",
    )
    return Service("env_server.py", overrides, f"the server at http://{address}")


class TwoMachines:
    """One machine with the run and one with the server."""

    def __init__(
        self, machines: Machines, model: Path, folder: Path, service: Callable[[str, int], Service]
    ) -> None:
        self.run_machine, self.server_machine = machines.machines
        self.network = machines.network
        self.model, self.folder = model, folder
        self._service = service
        self.start_server()

    def service(self, timeout_s: int) -> Service:
        return self._service(f"{self.server_machine.address}:{PORT}", timeout_s)

    def start_server(self) -> None:
        program = [sys.executable, str(STAND_INS / self.service(0).program)]
        self._start(self.server_machine, [*program, self.server_machine.address, str(PORT)], None)

    def _start(
        self, machine: Machine, command: list[str], messages: IO[str] | None
    ) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(STAND_INS), *sys.path])
        return subprocess.Popen(
            machine.command(command),
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=messages,
            text=True,
        )

    def write_recipe(self, name: str, *, timeout_s: int) -> Path:
        fixed = ("run.deterministic=true", "rollout.drop_no_signal=false", "data.validation={}")
        overrides = (*fixed, *self.service(timeout_s).overrides)
        loaded = toy(self.model, self.folder, *overrides, name=name, steps=STEPS)
        recipe = self.folder / f"{name}.yaml"
        recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
        return recipe

    def run(
        self, recipe: Path, fault: Callable[[TwoMachines], None] | None = None, *options: str
    ) -> tuple[int, str, float]:
        """Returns the exit code, the messages, and the seconds since the fault or the start."""
        command = [sys.executable, "-m", "rollick.cli", "train", str(recipe), *options]
        folder, log = self.folder / recipe.stem, recipe.with_suffix(".log")
        with log.open("w") as messages:
            process = self._start(self.run_machine, command, messages)
        try:
            started_at = time.monotonic()
            if fault is not None:
                wait_for_step(process, folder, FAULT_AT)
                started_at = time.monotonic()
                fault(self)
            code = process.wait(END_S)
            return code, log.read_text(), time.monotonic() - started_at
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run hangs after step {last_logged_step(folder)}")
        finally:
            process.kill()
            process.wait()

    def signal_server(self, number: signal.Signals) -> None:
        for pid in self.server_machine.processes():
            if pid != self.server_machine.init:
                os.kill(pid, number)


@pytest.fixture(params=[judge, environment])
def net(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path) -> Iterator[TwoMachines]:
    with Machines(2) as machines:
        yield TwoMachines(machines, tiny_folder, tmp_path, request.param)


def cut_for_three_seconds(net: TwoMachines) -> None:
    net.network.cut(net.server_machine)
    time.sleep(3)
    net.network.join(net.server_machine)


def restart_the_server(net: TwoMachines) -> None:
    net.signal_server(signal.SIGKILL)
    time.sleep(2)
    net.start_server()


def slow_down(net: TwoMachines) -> None:
    net.network.degrade(delay_s=0.05, loss=0.02)


def cut(net: TwoMachines) -> None:
    net.network.cut(net.server_machine)


def stop(net: TwoMachines) -> None:
    """Stop the server's process. The kernel still accepts connections, but nothing responds."""
    net.signal_server(signal.SIGSTOP)


def repair(net: TwoMachines) -> None:
    net.network.join(net.server_machine)
    net.server_machine.send(signal.SIGCONT)


def make_result(net: TwoMachines, name: str) -> RunResult:
    return RunResult(net.folder / name, STEPS, {}, interrupted=False)


def test_a_short_outage_or_a_bad_network_changes_nothing_but_the_time(net: TwoMachines) -> None:
    baseline = net.write_recipe("calm", timeout_s=25)
    assert net.run(baseline)[0] == 0
    for fault in (cut_for_three_seconds, restart_the_server, slow_down):
        recipe = net.write_recipe(fault.__name__, timeout_s=25)
        code, messages, _ = net.run(recipe, fault)
        assert code == 0, messages
        rows = figures(make_result(net, recipe.stem))
        assert len(rows) == STEPS
        assert {row["rollout/failed_scores"] for row in rows} == {0}
        assert learner_state(make_result(net, recipe.stem)) == learner_state(
            make_result(net, "calm")
        )


@pytest.mark.parametrize("fault", [cut, stop])
def test_a_long_outage_ends_the_run_with_a_checkpoint_from_which_it_is_resumed(
    net: TwoMachines, fault: Callable[[TwoMachines], None]
) -> None:
    recipe = net.write_recipe("lost", timeout_s=12)
    code, messages, seconds = net.run(recipe, fault)
    assert code == 69, messages
    assert net.service(12).expected_error in messages
    assert "could not be scored" in messages
    assert seconds < 90
    store = CheckpointStore(net.folder / "lost" / "checkpoints", keep_last=1, keep_best=1)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == last_logged_step(net.folder / "lost") < STEPS
    repair(net)
    code, messages, _ = net.run(recipe, None, "--resume")
    assert code == 0, messages
    rows = figures(make_result(net, "lost"))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
