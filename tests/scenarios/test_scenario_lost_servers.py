"""The network to a judge or an environment server on another machine fails: a short outage changes
nothing, after a long one the run ends with exit code 69, says which server it was, and can be
resumed."""

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
from conftest import figures, learner_state, toy
from machines import Machine, Machines
from node_cluster import wait_for_step

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
"""Every run has ended this long after the fault."""


@dataclass(frozen=True)
class Service:
    """What a run calls over the network."""

    program: str
    overrides: Sequence[str]
    blames: str
    """What the run's error says of the server."""


def judge(address: str, patience_s: int) -> Service:
    options = {"url": f"http://{address}/v1", "model": "m", "retries": 0, "request_s": 2}
    rewards = [{"name": "judge", "options": {**options, "timeout_s": patience_s}}]
    domain = {"source": "rollick.testing.toys:letter_rows", "rewards": rewards}
    overrides = (f"data.domains={{letters: {domain}}}",)
    blames = f"no verdict of http://{address}/v1 within {patience_s} s"
    return Service("judge_server.py", overrides, blames)


def environment(address: str, patience_s: int) -> Service:
    options = {"url": f"http://{address}", "show": "text"}
    domain = {"limit": 8, "environment": {"name": "openenv", "turn_tokens": 3, "options": options}}
    overrides = (
        "pipeline=agentic",
        f"data.domains={{letters: {domain}}}",
        f"environments.step_timeout_s={patience_s}",
        "environments.threads=16",
        "sampling.max_tokens=12",
        "infer.max_length=256",
    )
    return Service("env_server.py", overrides, f"the server at http://{address}")


class Network:
    """A machine with the run and one with a server."""

    def __init__(
        self, machines: Machines, model: Path, folder: Path, service: Callable[[str, int], Service]
    ) -> None:
        self.home, self.far = machines.machines
        self.network = machines.network
        self.model, self.folder = model, folder
        self._service = service
        self.start_server()

    def service(self, patience_s: int) -> Service:
        return self._service(f"{self.far.address}:{PORT}", patience_s)

    def start_server(self) -> None:
        program = [sys.executable, str(STAND_INS / self.service(0).program)]
        self._start(self.far, [*program, self.far.address, str(PORT)], None)

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

    def write_recipe(self, name: str, *, patience_s: int) -> Path:
        fixed = ("run.deterministic=true", "rollout.drop_no_signal=false", "data.validation={}")
        overrides = (*fixed, *self.service(patience_s).overrides)
        loaded = toy(self.model, self.folder, *overrides, name=name, steps=STEPS)
        recipe = self.folder / f"{name}.yaml"
        recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
        return recipe

    def run(
        self, recipe: Path, fault: Callable[[Network], None] | None = None, *options: str
    ) -> tuple[int, str, float]:
        """Exit code, messages, and seconds since the fault or the start."""
        command = [sys.executable, "-m", "rollick.cli", "train", str(recipe), *options]
        folder, log = self.folder / recipe.stem, recipe.with_suffix(".log")
        with log.open("w") as messages:
            process = self._start(self.home, command, messages)
        try:
            begun = time.monotonic()
            if fault is not None:
                wait_for_step(process, folder, FAULT_AT)
                begun = time.monotonic()
                fault(self)
            code = process.wait(END_S)
            return code, log.read_text(), time.monotonic() - begun
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run hangs after step {last_logged_step(folder)}")
        finally:
            process.kill()
            process.wait()

    def signal_server(self, number: signal.Signals) -> None:
        for pid in self.far.processes():
            if pid != self.far.init:
                os.kill(pid, number)


@pytest.fixture(params=[judge, environment])
def net(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path) -> Iterator[Network]:
    with Machines(2) as machines:
        yield Network(machines, tiny_folder, tmp_path, request.param)


def cut_for_three_seconds(net: Network) -> None:
    net.network.cut(net.far)
    time.sleep(3)
    net.network.join(net.far)


def restart_the_server(net: Network) -> None:
    net.signal_server(signal.SIGKILL)
    time.sleep(2)
    net.start_server()


def slow_down(net: Network) -> None:
    net.network.degrade(delay_s=0.05, loss=0.02)


def cut(net: Network) -> None:
    net.network.cut(net.far)


def stop(net: Network) -> None:
    """Its kernel still accepts connections, and nothing answers."""
    net.signal_server(signal.SIGSTOP)


def repair(net: Network) -> None:
    net.network.join(net.far)
    net.far.send(signal.SIGCONT)


def result_of(net: Network, name: str) -> RunResult:
    return RunResult(net.folder / name, STEPS, {}, interrupted=False)


def test_a_short_outage_or_a_bad_network_changes_nothing_but_the_time(net: Network) -> None:
    calm = net.write_recipe("calm", patience_s=25)
    assert net.run(calm)[0] == 0
    for fault in (cut_for_three_seconds, restart_the_server, slow_down):
        recipe = net.write_recipe(fault.__name__, patience_s=25)
        code, messages, _ = net.run(recipe, fault)
        assert code == 0, messages
        rows = figures(result_of(net, recipe.stem))
        assert len(rows) == STEPS
        assert {row["rollout/failed_scores"] for row in rows} == {0}
        assert learner_state(result_of(net, recipe.stem)) == learner_state(result_of(net, "calm"))


@pytest.mark.parametrize("fault", [cut, stop])
def test_a_long_outage_ends_the_run_with_a_checkpoint_from_which_it_is_resumed(
    net: Network, fault: Callable[[Network], None]
) -> None:
    recipe = net.write_recipe("lost", patience_s=12)
    code, messages, seconds = net.run(recipe, fault)
    assert code == 69, messages
    assert net.service(12).blames in messages
    assert "could not be scored" in messages
    assert seconds < 90
    store = CheckpointStore(net.folder / "lost" / "checkpoints", keep_last=1, keep_best=1)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == last_logged_step(net.folder / "lost") < STEPS
    repair(net)
    code, messages, _ = net.run(recipe, None, "--resume")
    assert code == 0, messages
    rows = figures(result_of(net, "lost"))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
