"""A learner or critic whose process is killed or hangs: the run continues and ends with the same
weights, metrics and samples as without the fault."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from dying_learner import CRITIC_POINTS, POINTS, VARIABLE, install
from toy_runs import checkpoint_state, figures, toy

from rollick import LoadedRecipe, RunResult, run_recipe
from rollick.children.process_tree import process_exists
from rollick.cluster.ray_start import start_ray
from rollick.errors import WorkerLost
from rollick.observe.faults import Fault, read_faults
from rollick.observe.goodput import read_goodput
from rollick.pipelines.loop import RunLoop
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import open_rl

pytestmark = pytest.mark.timeout(240)

FIXED = (
    "run.deterministic=true",
    "cluster.backend=ray",
    "observe.samples_per_step=1000",
    "train.strategy=dying",
)
ALL_POINTS = [f"{point}:2" for point in POINTS]
SEPARATE = "devices.generators=cpu:1"
STEPS = 3
CRITIC = ("algorithm=ppo", "devices.critic=cpu:1", "train.strategy=local")
TWO_RANKS = ("devices.policy=cpu:0-1", "devices.generators=cpu:2", "train.strategy=dying_fsdp")

Run = Callable[..., RunResult]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file with the points to die at. Ray runs as long as the module: its workers inherit the
    variable with the path of this file."""
    folder = tmp_path_factory.mktemp("dying")
    path = install(folder / "plugins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([path, *filter(None, sys.path)]))
        patch.setenv(VARIABLE, str(folder / "plan"))
        patch.syspath_prepend(path.split(os.pathsep)[0])
        assert start_ray(None)
        yield folder / "plan"
        ray.shutdown()


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, plan: Path) -> Run:
    """Runs the toy on Ray in deterministic mode; `die` lists deaths as POINT:VISIT."""

    def start(name: str, *overrides: str, die: Sequence[str] = (), **options: Any) -> RunResult:
        options = {"steps": STEPS, **options}
        loaded = toy(tiny_folder, tmp_path, *FIXED, *overrides, name=name, **options)
        plan.write_text("\n".join(die))
        result = run_recipe(loaded)
        assert not plan.read_text(), "the learner did not die"
        return result

    return start


def read_rows(folder: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text("utf-8").splitlines()]


def find_faults(result: RunResult, role: str) -> list[Fault]:
    """The faults of the role, except slow ranks: on a busy machine, one rank may be slower."""
    faults = read_faults(result.folder)
    return [fault for fault in faults if fault.role == role and fault.kind != "slow"]


def check_equal(faulty: RunResult, baseline: RunResult) -> None:
    assert checkpoint_state(faulty) == checkpoint_state(baseline)
    assert figures(faulty) == figures(baseline)
    assert read_rows(faulty.folder, "samples.jsonl") == read_rows(baseline.folder, "samples.jsonl")


def check_repaired(
    result: RunResult, *, role: str = "policy", times: int = 1, kind: str = "killed"
) -> None:
    faults = find_faults(result, role)
    assert [fault.kind for fault in faults] == [kind] * times
    assert all(fault.rejoined_at is not None for fault in faults)


def test_a_learner_that_is_killed_in_its_update_ends_with_the_same_weights(run: Run) -> None:
    baseline = run("calm", SEPARATE)
    faulty = run("faulty", SEPARATE, die=["in_update:2"])
    check_repaired(faulty)
    check_equal(faulty, baseline)
    [fault], seconds = find_faults(faulty, "policy"), read_goodput(faulty.folder).seconds
    assert 0 < fault.redo_s == pytest.approx(seconds["redo"])
    assert 0 < fault.recover_s <= seconds["recover"]


def test_a_learner_that_is_killed_before_its_first_snapshot_begins_again(run: Run) -> None:
    baseline = run("calm", SEPARATE)
    faulty = run("faulty", SEPARATE, die=["snapshot:1"])
    check_repaired(faulty)
    check_equal(faulty, baseline)


@pytest.mark.slow
def test_a_resumed_learner_that_is_killed_before_its_first_snapshot_loads_the_checkpoint_again(
    run: Run, tiny_folder: Path, tmp_path: Path, plan: Path
) -> None:
    baseline = run("calm", SEPARATE)
    run("faulty", SEPARATE, "run.steps=2")
    loaded = toy(tiny_folder, tmp_path, *FIXED, SEPARATE, name="faulty", steps=STEPS)
    plan.write_text("snapshot:1")
    faulty = run_recipe(loaded, resume=True)
    check_repaired(faulty)
    check_equal(faulty, baseline)


@pytest.mark.slow
def test_a_batch_that_a_new_learner_trains_on_again_is_a_redone_step(run: Run) -> None:
    faulty = run("faulty", SEPARATE, die=["publish:2"])  # Before the snapshot of its step.
    [fault], goodput = find_faults(faulty, "policy"), read_goodput(faulty.folder)
    assert goodput.redone_steps == fault.redone_steps == 1
    assert read_rows(faulty.folder, "metrics.jsonl")[-1]["time/goodput/redone_steps"] == 1
    assert 0 < fault.redo_s == pytest.approx(goodput.seconds["redo"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("options", [(SEPARATE,), TWO_RANKS], ids=["one rank", "one of two ranks"])
def test_a_learner_that_is_killed_at_eight_points_ends_with_the_same_weights(
    run: Run, options: tuple[str, ...], seed: int
) -> None:
    options, steps = (*options, f"run.seed={seed}"), len(POINTS) + 2
    baseline = run("calm", *options, steps=steps)
    faulty = run("faulty", *options, steps=steps, die=ALL_POINTS)
    check_repaired(faulty, times=len(POINTS))
    check_equal(faulty, baseline)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_critic_that_is_killed_at_eight_points_ends_with_the_same_weights(
    run: Run, seed: int
) -> None:
    options, steps = (*CRITIC, f"run.seed={seed}"), len(CRITIC_POINTS) + 2
    baseline = run("calm", *options, steps=steps)
    assert any(name.startswith("critic/") for name in checkpoint_state(baseline))
    faulty = run("faulty", *options, steps=steps, die=[f"{point}:2" for point in CRITIC_POINTS])
    check_repaired(faulty, role="critic", times=len(CRITIC_POINTS))
    check_equal(faulty, baseline)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["backward:2", "before_update:2"])
def test_a_rank_that_is_stopped_while_the_other_waits_in_a_collective_is_replaced(
    run: Run, point: str
) -> None:
    baseline = run("calm", *TWO_RANKS)
    faulty = run("faulty", *TWO_RANKS, die=[f"{point}:stop"])
    check_repaired(faulty, kind="hung")
    check_equal(faulty, baseline)
    [fault] = find_faults(faulty, "policy")
    assert "stopped by a signal" in fault.cause
    assert fault.rejoined_at is not None
    assert fault.rejoined_at - fault.detected_at < 60
    assert fault.detected_at - fault.failed_at > 1


async def run_with_early_deadlines(loaded: LoadedRecipe) -> RunResult:
    """Run with a deadline of three seconds for training calls, not half a minute. Checks that the
    first processes of the policy have ended when the run is done."""
    async with open_run(loaded) as run, open_rl(run) as pipeline:
        group = run.roles.policy.group
        group.deadlines.floors_s["train"] = 3.0
        first_pids = [pid for name, pid in group.worker_processes().items() if "policy" in name]
        result = await RunLoop(run, pipeline).run()
        assert first_pids
        assert not any(map(process_exists, first_pids))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("options", [(SEPARATE,), TWO_RANKS], ids=["one rank", "one of two ranks"])
def test_a_learner_that_hangs_in_a_living_process_is_killed_at_its_deadline_and_replaced(
    run: Run, tiny_folder: Path, tmp_path: Path, plan: Path, options: tuple[str, ...]
) -> None:
    baseline = run("calm", *options)
    loaded = toy(tiny_folder, tmp_path, *FIXED, *options, name="faulty", steps=STEPS)
    plan.write_text("backward:2:hang")
    faulty = asyncio.run(run_with_early_deadlines(loaded))
    check_repaired(faulty, kind="hung")
    check_equal(faulty, baseline)
    [fault] = find_faults(faulty, "policy")
    assert "did not finish 'train' within" in fault.cause


@pytest.mark.slow
def test_a_learner_that_shares_its_process_with_the_engine_is_repaired_with_it(run: Run) -> None:
    baseline = run("calm")
    faulty = run("faulty", die=["backward:2"])
    check_repaired(faulty)
    check_equal(faulty, baseline)
    assert find_faults(faulty, "generators")[0].rejoined_at is not None


def test_without_snapshots_the_loss_of_the_learner_ends_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match="was lost"):
        run("bare", SEPARATE, "checkpoint.snapshot=false", die=["forward:2"])
    [fault] = [fault for fault in read_faults(tmp_path / "bare") if fault.role == "policy"]
    assert fault.gave_up == "there are no snapshots (checkpoint.snapshot)"


@pytest.mark.slow
def test_a_learner_that_dies_in_every_process_ends_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match="was lost"):
        run("endless", SEPARATE, "cluster.restarts=2", die=["forward:1:always"])
    faults = [fault for fault in read_faults(tmp_path / "endless") if fault.role == "policy"]
    assert [fault.gave_up for fault in faults[:-1]] == [None, None]
    assert faults[-1].gave_up == "the restarts are used up (cluster.restarts)"
