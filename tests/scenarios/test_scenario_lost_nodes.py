"""A machine of the cluster is lost, or its network fails: the run completes on the others, or
ends with exit code 69 and a good checkpoint."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from machines import Machine
from node_cluster import NodeCluster, wait_for_step
from toy_runs import checkpoint_state, toy

from rollick import RunResult, run_recipe
from rollick.checkpoint import CheckpointStore
from rollick.cluster.node_watch import SILENT_S
from rollick.commands.supervise import last_logged_step
from rollick.config.load import dump_recipe
from rollick.observe.faults import Fault, read_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FIXED = ("run.deterministic=true", "train.optimizer.lr=1e-4", "sampling.max_tokens=20")
SEPARATE_LEARNER = ("devices.policy=cpu:1", "devices.generators=cpu:0")
SEPARATE_ENGINES = ("devices.generators=cpu:1-2",)
SEPARATE_RANK = (
    "devices.policy=cpu:1-2",
    "devices.generators=cpu:0",
    "train.strategy=fsdp",
    "run.deterministic=false",
)
ON_CLUSTER = ("cluster.backend=ray", "cluster.cpus_per_worker=1", "cluster.place_timeout_s=25")
FAULT_AT, STEPS = 5, 40
END_S = 150.0
"""Every run ends within this time after the fault."""

Act = Callable[[NodeCluster, Machine], object]


class Outcome(NamedTuple):
    code: int
    messages: str
    folder: Path
    seconds: float
    """Since the fault."""

    def faults(self, role: str) -> list[Fault]:
        return [fault for fault in read_faults(self.folder) if fault.role == role]


class Runner:
    """Runs the toy on a cluster, and injects a fault into the machine with workers."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder

    def baseline(self, *overrides: str, steps: int = STEPS) -> RunResult:
        """The same run in this process, without a fault."""
        options = (*FIXED, "cluster.backend=inline", *overrides)
        return run_recipe(toy(self.model, self.folder, *options, name="calm", steps=steps))

    def run_on_cluster(
        self, cpus: Sequence[int], act: Act, *overrides: str, steps: int = STEPS
    ) -> Outcome:
        with NodeCluster(cpus) as cluster:
            options = (*FIXED, *ON_CLUSTER, f"cluster.address={cluster.address}", *overrides)
            loaded = toy(self.model, self.folder, *options, name="faulty", steps=steps)
            recipe, folder = self.folder / "recipe.yaml", self.folder / "faulty"
            recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
            with cluster.train(recipe) as process:
                try:
                    wait_for_step(process, folder, FAULT_AT)
                    started_at = time.monotonic()
                    act(cluster, find_machine_with_workers(cluster))
                    _, messages = process.communicate(timeout=END_S)
                except subprocess.TimeoutExpired:
                    pytest.fail(f"the run hangs after step {last_logged_step(folder)}")
                finally:
                    process.kill()
            return Outcome(process.returncode, messages, folder, time.monotonic() - started_at)


@pytest.fixture
def runner(tiny_folder: Path, tmp_path: Path) -> Runner:
    return Runner(tiny_folder, tmp_path)


def find_machine_with_workers(cluster: NodeCluster) -> Machine:
    """The machine that has workers, but not the controller."""
    return next(each for each in cluster.machines[1:] if each.runs("HostActor"))


def kill(cluster: NodeCluster, machine: Machine) -> None:
    machine.kill()


def stop(cluster: NodeCluster, machine: Machine) -> None:
    machine.send(signal.SIGSTOP)


def cut(cluster: NodeCluster, machine: Machine) -> None:
    cluster.network.cut(machine)


def cut_for_ten_seconds(cluster: NodeCluster, machine: Machine) -> None:
    cluster.network.cut(machine)
    time.sleep(10)
    cluster.network.join(machine)


def slow_down(cluster: NodeCluster, machine: Machine) -> None:
    cluster.network.degrade(delay_s=0.1, loss=0.01)


def check_completed(outcome: Outcome, *, steps: int = STEPS) -> None:
    assert outcome.code == 0, outcome.messages
    assert last_logged_step(outcome.folder) == steps


@pytest.mark.parametrize("act", [kill, stop, cut])
def test_a_learner_whose_machine_is_lost_continues_on_another_with_the_same_weights(
    runner: Runner, act: Act
) -> None:
    outcome = runner.run_on_cluster((1, 1, 1), act, *SEPARATE_LEARNER)
    check_completed(outcome)
    [fault] = outcome.faults("policy")
    assert fault.kind == "node"
    if act is not kill:
        assert fault.detected_at - fault.failed_at > SILENT_S / 2
    assert fault.rejoined_at is not None
    baseline = runner.baseline(*SEPARATE_LEARNER)
    assert checkpoint_state(replace(baseline, folder=outcome.folder)) == checkpoint_state(baseline)


def test_a_learner_whose_machine_is_lost_without_room_elsewhere_leaves_a_good_checkpoint(
    runner: Runner,
) -> None:
    outcome = runner.run_on_cluster((1, 1), kill, *SEPARATE_LEARNER, "checkpoint.every=2")
    assert outcome.code == 69, outcome.messages
    assert "no machine of the cluster has room for host 1" in outcome.messages
    assert outcome.seconds < 60
    [fault] = outcome.faults("policy")
    assert fault.kind == "node"
    assert "no machine of the cluster has room" in (fault.gave_up or "")
    checkpoint = CheckpointStore(outcome.folder / "checkpoints", keep_last=1, keep_best=1).latest()
    assert checkpoint is not None
    assert checkpoint.step >= FAULT_AT - 1


@pytest.mark.parametrize("act", [kill, stop, cut])
def test_without_the_machine_of_an_engine_the_run_completes_on_the_others(
    runner: Runner, act: Act
) -> None:
    outcome = runner.run_on_cluster((2, 1), act, *SEPARATE_ENGINES, steps=400)
    check_completed(outcome, steps=400)
    fault = outcome.faults("generators")[0]
    assert fault.rank == 1
    assert fault.rejoined_at is None
    assert "rerouting" in outcome.messages


@pytest.mark.parametrize(
    "overrides", [SEPARATE_LEARNER, SEPARATE_ENGINES], ids=["learner", "engine"]
)
def test_a_network_that_is_cut_for_ten_seconds_only_delays_the_run(
    runner: Runner, overrides: tuple[str, ...]
) -> None:
    cpus = (2, 1) if overrides == SEPARATE_ENGINES else (1, 1)
    check_completed(runner.run_on_cluster(cpus, cut_for_ten_seconds, *overrides))


def test_a_slow_network_that_loses_packets_only_delays_the_run(runner: Runner) -> None:
    outcome = runner.run_on_cluster((1, 1), slow_down, *SEPARATE_LEARNER, steps=10)
    check_completed(outcome, steps=10)
    assert read_faults(outcome.folder) == []


def test_a_policy_that_loses_a_rank_without_room_elsewhere_continues_with_fewer(
    runner: Runner,
) -> None:
    outcome = runner.run_on_cluster((2, 1), kill, *SEPARATE_RANK)
    check_completed(outcome)
    assert "the policy continues with 1 ranks instead of 2" in outcome.messages
    [fault] = outcome.faults("policy")
    assert fault.kind == "node"
    assert fault.rejoined_at is not None
