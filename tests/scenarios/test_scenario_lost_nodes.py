"""A machine of the cluster is lost, or its network fails: the run completes on what is left, or
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
from conftest import checkpoint_state, toy
from machines import Machine
from node_cluster import NodeCluster, wait_for_step

from rollick import RunResult, run_recipe
from rollick.checkpoint import CheckpointStore
from rollick.cluster.node_watch import SILENT_S
from rollick.commands.supervise import last_logged_step
from rollick.config.load import dump_recipe
from rollick.observe.faults import Fault, read_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FIXED = ("run.deterministic=true", "train.optimizer.lr=1e-4", "sampling.max_tokens=20")
LEARNER_APART = ("devices.policy=cpu:1", "devices.generators=cpu:0")
ENGINE_APART = ("devices.generators=cpu:1-2",)
RANK_APART = (
    "devices.policy=cpu:1-2",
    "devices.generators=cpu:0",
    "train.strategy=fsdp",
    "run.deterministic=false",
)
ON_CLUSTER = ("cluster.backend=ray", "cluster.cpus_per_worker=1", "cluster.place_timeout_s=25")
FAULT_AT, STEPS = 5, 40
END_S = 150.0
"""Every run has ended this long after the fault."""

Act = Callable[[NodeCluster, Machine], object]


class Ended(NamedTuple):
    code: int
    messages: str
    folder: Path
    seconds: float
    """Since the fault."""

    def faults(self, role: str) -> list[Fault]:
        return [fault for fault in read_faults(self.folder) if fault.role == role]


class Runner:
    """Runs the toy on a cluster, and lets something happen to the machine with workers."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder

    def calm(self, *overrides: str, steps: int = STEPS) -> RunResult:
        """The same run in this process."""
        options = (*FIXED, "cluster.backend=inline", *overrides)
        return run_recipe(toy(self.model, self.folder, *options, name="calm", steps=steps))

    def on_cluster(
        self, cpus: Sequence[int], act: Act, *overrides: str, steps: int = STEPS
    ) -> Ended:
        with NodeCluster(cpus) as cluster:
            options = (*FIXED, *ON_CLUSTER, f"cluster.address={cluster.address}", *overrides)
            loaded = toy(self.model, self.folder, *options, name="faulty", steps=steps)
            recipe, folder = self.folder / "recipe.yaml", self.folder / "faulty"
            recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
            with cluster.train(recipe) as process:
                try:
                    wait_for_step(process, folder, FAULT_AT)
                    begun = time.monotonic()
                    act(cluster, machine_with_workers(cluster))
                    _, messages = process.communicate(timeout=END_S)
                except subprocess.TimeoutExpired:
                    pytest.fail(f"the run hangs after step {last_logged_step(folder)}")
                finally:
                    process.kill()
            return Ended(process.returncode, messages, folder, time.monotonic() - begun)


@pytest.fixture
def runner(tiny_folder: Path, tmp_path: Path) -> Runner:
    return Runner(tiny_folder, tmp_path)


def machine_with_workers(cluster: NodeCluster) -> Machine:
    """The one that does not have the controller."""
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


def check_completed(ended: Ended, *, steps: int = STEPS) -> None:
    assert ended.code == 0, ended.messages
    assert last_logged_step(ended.folder) == steps


@pytest.mark.parametrize("act", [kill, stop, cut])
def test_a_learner_whose_machine_is_lost_continues_on_another_with_the_same_weights(
    runner: Runner, act: Act
) -> None:
    ended = runner.on_cluster((1, 1, 1), act, *LEARNER_APART)
    check_completed(ended)
    [fault] = ended.faults("policy")
    assert fault.kind == "node"
    if act is not kill:
        assert fault.detected_at - fault.failed_at > SILENT_S / 2
    assert fault.rejoined_at is not None
    calm = runner.calm(*LEARNER_APART)
    assert checkpoint_state(replace(calm, folder=ended.folder)) == checkpoint_state(calm)


def test_a_learner_whose_machine_is_lost_without_room_elsewhere_leaves_a_good_checkpoint(
    runner: Runner,
) -> None:
    ended = runner.on_cluster((1, 1), kill, *LEARNER_APART, "checkpoint.every=2")
    assert ended.code == 69, ended.messages
    assert "no machine of the cluster has room for host 1" in ended.messages
    assert ended.seconds < 60
    [fault] = ended.faults("policy")
    assert fault.kind == "node"
    assert "no machine of the cluster has room" in (fault.gave_up or "")
    checkpoint = CheckpointStore(ended.folder / "checkpoints", keep_last=1, keep_best=1).latest()
    assert checkpoint is not None
    assert checkpoint.step >= FAULT_AT - 1


@pytest.mark.parametrize("act", [kill, stop, cut])
def test_without_the_machine_of_an_engine_the_run_completes_on_the_others(
    runner: Runner, act: Act
) -> None:
    ended = runner.on_cluster((2, 1), act, *ENGINE_APART, steps=400)
    check_completed(ended, steps=400)
    fault = ended.faults("generators")[0]
    assert fault.rank == 1
    assert fault.rejoined_at is None
    assert "rerouting" in ended.messages


@pytest.mark.parametrize("overrides", [LEARNER_APART, ENGINE_APART], ids=["learner", "engine"])
def test_a_network_that_is_cut_for_ten_seconds_only_delays_the_run(
    runner: Runner, overrides: tuple[str, ...]
) -> None:
    cpus = (2, 1) if overrides == ENGINE_APART else (1, 1)
    check_completed(runner.on_cluster(cpus, cut_for_ten_seconds, *overrides))


def test_a_slow_network_that_loses_packets_only_delays_the_run(runner: Runner) -> None:
    ended = runner.on_cluster((1, 1), slow_down, *LEARNER_APART, steps=10)
    check_completed(ended, steps=10)
    assert read_faults(ended.folder) == []


def test_a_policy_that_loses_a_rank_without_room_elsewhere_continues_with_fewer(
    runner: Runner,
) -> None:
    ended = runner.on_cluster((2, 1), kill, *RANK_APART)
    check_completed(ended)
    assert "the policy continues with 1 ranks instead of 2" in ended.messages
    [fault] = ended.faults("policy")
    assert fault.kind == "node"
    assert fault.rejoined_at is not None
