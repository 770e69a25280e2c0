"""Runs account for their wall time and record their faults."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine

from rollick.commands.doctor import diagnose_folder
from rollick.config.load import LoadedRecipe, dump_recipe, recipe_from_dict
from rollick.errors import EngineLost, RollickError, WorkerError, WorkerHung
from rollick.observe.faults import FaultLog, read_faults
from rollick.observe.goodput import (
    GOODPUT,
    STATES,
    TimeAccount,
    fault_metrics,
    read_goodput,
)
from rollick.observe.metric_table import is_documented
from rollick.observe.metrics import read_metrics
from rollick.pipelines.group_source import attribute_waits
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import RLPipeline, open_rl
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunResult
from rollick.rollout.fleet import Fleet
from rollick.rollout.request_queue import RequestNeeds
from rollick.testing.toys import toy_recipe
from rollick.types import SampleId

Toy = Callable[..., LoadedRecipe]
RunToy = Callable[..., RunResult]

ONE_ENGINE = ("devices.generators=cpu:1", "rollout.drop_no_signal=false")
NAMES = {f"time/goodput/{state}" for state in STATES}


def read_time_rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / GOODPUT).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line]


def check_sums(folder: Path) -> list[dict[str, Any]]:
    """Check that the seconds of a row sum to the time since the row before. Returns the rows."""
    rows = read_time_rows(folder)
    for before, row in pairwise(rows):
        assert sum(row["seconds"].values()) == pytest.approx(row["at"] - before["at"], abs=1e-5)
    assert (rows[0]["event"], rows[-1]["event"]) == ("opened", "stopped")
    wall_s = rows[-1]["at"] - rows[0]["at"]
    assert read_goodput(folder).wall_s == pytest.approx(wall_s, abs=1e-3)
    return rows


def test_the_states_of_a_run_sum_to_its_wall_time_and_are_metrics_of_its_steps(
    run_toy: RunToy,
) -> None:
    result = run_toy("checkpoint.every=1", "evaluate.every=1", "observe.report=true", steps=3)
    seconds_by_step = {row["step"]: row["seconds"] for row in check_sums(result.folder)[:-1]}
    goodput = read_goodput(result.folder)
    spent = {state for state, seconds in goodput.seconds.items() if seconds}
    assert {"start", "train", "generate", "publish", "save", "validate"} <= spent
    assert not spent & {"recover", "redo"}
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows[1:]:
        metrics = {name: value for name, value in row.items() if name in NAMES and value}
        seconds = seconds_by_step[row["step"]].items()
        assert metrics == {f"time/goodput/{state}": value for state, value in seconds}
        assert 0 < row["time/goodput/ettr"] < 1
    assert all(is_documented(name) for row in rows for name in row.keys() - {"step"})
    page = (result.folder / "report.html").read_text("utf-8")
    assert "Where the time went" in page
    assert "<h2>Faults</h2>" not in page
    description = diagnose_folder(result.folder).lines()
    assert any(line.startswith("effective training time ratio (ETTR) ") for line in description)


def test_supervised_training_accounts_for_its_time_too(run_toy: RunToy) -> None:
    letters = {"source": "rollick.testing.toys:letter_rows", "completion": "answer"}
    data = {"domains": {"letters": letters}}
    result = run_toy(pipeline="sft", data=data, train={"batch_size": 4}, steps=2)
    check_sums(result.folder)
    seconds = read_goodput(result.folder).seconds
    assert seconds["train"] > 0
    assert seconds["generate"] == 0


def test_steps_lost_in_a_crash_are_redo_and_the_resume_is_recovery(run_toy: RunToy) -> None:
    options = ("checkpoint.every=2", "evaluate.every=0")
    first = run_toy(*options, name="crashed", steps=3)
    # As after a kill in step 4: no checkpoint of step 3, and no row for the end of the process.
    for path in (first.folder / "checkpoints").glob("step-000003"):
        path.rename(first.folder / "lost")
    *kept_rows, _ = read_time_rows(first.folder)
    (first.folder / GOODPUT).write_text("".join(json.dumps(row) + "\n" for row in kept_rows))
    lost_s = sum(kept_rows[-1]["seconds"].values())
    resumed = run_toy(*options, name="crashed", steps=4, resume=True)
    goodput = read_goodput(resumed.folder)
    assert goodput.redone_steps == 1
    assert goodput.seconds["redo"] >= lost_s
    assert goodput.seconds["recover"] > 0
    row = read_metrics(resumed.folder / "metrics.jsonl")[-1]
    assert row["time/goodput/redone_steps"] == 1
    assert row["time/goodput/ettr"] < 1
    description = " ".join(diagnose_folder(resumed.folder).lines())
    assert "1 step done again" in description


async def test_a_wait_for_groups_is_accounted_by_what_the_engines_do(
    tmp_path: Path,
) -> None:
    now = 0.0
    account = TimeAccount.open(tmp_path, resume=False, clock=lambda: now)
    engine, uid = FakeEngine(slots=1), SampleId(0, 0)
    fleet = Fleet([engine], launch=lambda uid, number: None)
    fleet.may_gain_engine = lambda: True
    fleet.open()
    attribute_waits(account, fleet)
    account.begin_steps()
    with account.during("generate"):
        now += 1  # No request: wait.
        fleet.submit(uid, RequestNeeds(0, 1))
        fleet.dispatch()
        now += 10  # generate
        fleet.release(uid, tokens=4)
        now += 2  # A reward scores the sample: wait.
        fleet.submit(uid, RequestNeeds(0, 1))
        fleet.dispatch()
        now += 20  # generate
        fleet.remove(0, reason="it died")
        now += 40  # recover
        fleet.release(uid, tokens=0)
        fleet.submit(uid, RequestNeeds(0, 1))
        fleet.add(engine)
        now += 100  # generate
    now += 200  # train, although an engine generates
    account.close(1)
    seconds = read_goodput(tmp_path).seconds
    expected = {"wait": 3, "generate": 130, "recover": 40, "train": 200}
    assert {state: spent for state, spent in seconds.items() if spent} == expected


def lose_until_restarted(pipeline: RLPipeline, error: Callable[[str], WorkerError]) -> None:
    """Make calls to the host of generator 0 raise the error until it is restarted."""
    transport: Any = pipeline.roles.generators.group.transport  # pyright: ignore
    send: Callable[..., Awaitable[Any]] = transport.send
    replace_hosts: Callable[..., Awaitable[Any]] = transport.replace
    lost = True

    async def send_or_fail(host: Any, call: Any, shared: Any) -> Any:
        if host.roles.get("generators") == 0 and lost:
            raise error(f"{host} is gone")
        return await send(host, call, shared)

    async def replace_and_recover(hosts: Any) -> Any:
        nonlocal lost
        lost = False
        return await replace_hosts(hosts)

    transport.send, transport.replace = send_or_fail, replace_and_recover


@pytest.mark.parametrize("kind", ["killed", "hung"])
async def test_the_loss_of_the_only_engine_is_a_fault_and_its_repair_is_recovery(
    toy: Toy, kind: str
) -> None:
    hung_at = time.time() - 60
    error = partial(WorkerHung, failed_at=hung_at) if kind == "hung" else WorkerError
    async with open_run(toy(*ONE_ENGINE, steps=99)) as run, open_rl(run) as pipeline:
        await pipeline.step()
        goodput = run.telemetry.goodput
        before = goodput.finish_step(1)
        assert "time/goodput/recover" not in before
        lose_until_restarted(pipeline, error)
        await pipeline.step()
        after = goodput.finish_step(2)
        assert after["time/goodput/recover"] > 0
        assert after["time/goodput/generate"] > 0
        recover_s = after["time/goodput/recover"]
        folder = run.state.folder.path
    (fault,) = read_faults(folder)
    assert (fault.role, fault.rank, fault.kind, fault.gave_up) == ("generators", 0, kind, None)
    assert "is gone" in fault.cause
    assert fault.restarted_at is not None
    assert fault.rejoined_at is not None
    assert fault.detected_at <= fault.restarted_at <= fault.rejoined_at
    assert 0 < fault.recover_s <= recover_s
    assert fault.failed_at == (hung_at if kind == "hung" else fault.detected_at)
    recovery_s = fault_metrics([fault])["time/goodput/recovery/generators"]
    assert recovery_s == fault.rejoined_at - fault.failed_at


async def test_an_engine_that_cannot_be_restarted_is_one_fault_that_was_given_up(toy: Toy) -> None:
    async def run_until_lost() -> None:
        nonlocal folder
        options = (*ONE_ENGINE, "rollout.engine_restarts=2")
        async with open_run(toy(*options, steps=9)) as run, open_rl(run) as pipeline:
            folder = run.state.folder.path
            await pipeline.step()
            transport: Any = pipeline.roles.generators.group.transport  # pyright: ignore
            send: Callable[..., Awaitable[Any]] = transport.send

            async def send_or_fail(host: Any, call: Any, shared: Any) -> Any:
                if host.roles.get("generators") == 0:
                    raise WorkerError(f"{host} is gone")
                return await send(host, call, shared)

            transport.send = send_or_fail
            await pipeline.step()

    folder = Path()
    with pytest.raises(EngineLost):
        await run_until_lost()
    (fault,) = read_faults(folder)
    assert fault.gave_up == "the restarts are used up (rollout.engine_restarts)"
    assert fault.rejoined_at is None
    assert read_time_rows(folder)[-1]["event"] == "failed"


def test_each_skipped_step_is_a_fault(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from rollick.algorithms.losses import TokenLoss\n"
        "def broken(inputs, options):\n"
        "    return TokenLoss(inputs.logprobs_T * float('nan'))\n"
    )
    options = (f"algorithm.loss={tmp_path / 'own.py'}:broken", "train.max_skipped_steps=2")
    loaded = toy(*options, "observe.report=true", steps=4)
    with pytest.raises(RollickError, match="non-finite"):
        run_recipe(loaded)
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    faults = read_faults(folder)
    assert [(fault.role, fault.kind, fault.step) for fault in faults] == [
        ("policy", "not_finite", 0),
        ("policy", "not_finite", 1),
    ]
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert row["time/goodput/faults/policy"] == 1
    assert "faults of policy: 2 not finite" in diagnose_folder(folder).lines()
    page = (folder / "report.html").read_text("utf-8")
    assert "<h2>Faults</h2>" in page
    assert "<td>policy</td><td>2</td><td>2 not finite</td>" in page


def test_faults_of_earlier_processes_are_in_the_metrics_of_a_resumed_run(run_toy: RunToy) -> None:
    first = run_toy(name="faulty", steps=1)
    FaultLog(first.folder).begin("critic", 0, kind="killed", cause="signal 9", failed_at=5.0)
    resumed = run_toy(name="faulty", steps=2, resume=True)
    row = read_metrics(resumed.folder / "metrics.jsonl")[-1]
    assert row["time/goodput/faults/critic"] == 1
    assert row["time/goodput/redone_steps"] == 0
    assert read_goodput(resumed.folder).seconds["recover"] == 0


def start_training(recipe: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rollick.cli", "train", str(recipe), *arguments]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_killed_and_resumed_run_accounts_for_all_of_its_time(
    tiny_folder: Path, tmp_path: Path
) -> None:
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "runs" / "killed"
    values = toy_recipe(tiny_folder, tmp_path / "runs", name="killed", steps=100_000)
    overrides = ("checkpoint.every=5", "evaluate.every=0")
    loaded = recipe_from_dict(values, overrides=overrides)
    recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    process, deadline = start_training(recipe), time.monotonic() + 90
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 8:
        assert time.monotonic() < deadline, "the run made no eight steps"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = read_goodput(folder)
    assert before.last_row is not None
    last_step = before.last_row.step or 0
    assert start_training(recipe, "--resume", f"run.steps={last_step + 2}").wait(90) == 0
    goodput, rows = read_goodput(folder), read_time_rows(folder)
    assert goodput.wall_s == pytest.approx(rows[-1]["at"] - rows[0]["at"], abs=1e-3)
    assert goodput.processes == 2
    # A checkpoint that was being written counts only if it was complete.
    assert goodput.redone_steps in (last_step % 5, last_step % 5 + 5)
    assert goodput.seconds["redo"] > 0
    assert goodput.seconds["recover"] > 1  # At least a start of Python and torch.
