"""A run whose learner is on two ranks, end to end on Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rollick import LoadedRecipe, RunResult
from rollick.commands.export import export_run
from rollick.observe.faults import read_faults
from rollick.pipelines.loop import RunLoop
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import open_rl

SHARDED = (
    "cluster.backend=ray",
    "devices.policy=cpu:0-1",
    "devices.generators=cpu:1-2",  # one in the process of rank 1, one in its own process
    "train.strategy=fsdp",
    "train.parallel.data=2",
)


def read_column(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_two_ranks_is_that_on_one(run_toy: Callable[..., RunResult], tmp_path: Path):
    """The same seed gives the same prompts; in the first step, only rounding differs."""
    alone = run_toy("cluster.backend=ray", "checkpoint.every=1", name="alone", steps=2)
    sharded = run_toy(*SHARDED, "checkpoint.every=1", name="sharded", steps=2)
    loss_name, size_name = "train/loss", "controller/batch_mb"
    first = read_column(alone.folder, loss_name)[0]
    assert read_column(sharded.folder, loss_name)[0] == pytest.approx(first, abs=1e-4)
    # Each rank gets only its rows, so two ranks together get as much as one.
    assert read_column(sharded.folder, size_name)[0] == pytest.approx(
        read_column(alone.folder, size_name)[0]
    )
    assert read_column(alone.folder, size_name)[0] > 0
    resumed = run_toy(*SHARDED, "checkpoint.every=1", name="sharded", steps=3, resume=True)
    assert resumed.step == 3
    out = export_run(resumed.folder, tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0


@contextmanager
def throttle_process(pid: int) -> Iterator[None]:
    """Make the process share one core with three busy processes."""
    core = {min(os.sched_getaffinity(0))}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), core)
    busy_processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)
    ]
    try:
        for process in busy_processes:
            os.sched_setaffinity(process.pid, core)
        yield
    finally:
        for process in busy_processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_slow_rank_is_named_within_ten_steps_and_gets_less_work(
    toy: Callable[..., LoadedRecipe],
) -> None:
    options = (*SHARDED, "devices.generators=cpu:2", "rollout.drop_no_signal=false")
    loaded = toy(*options, steps=10)
    async with open_run(loaded) as run, open_rl(run) as pipeline:
        group = run.roles.policy.group
        transport: Any = group.transport
        host = group.device_map.host_of("policy", 1)
        with throttle_process(transport.processes[host.index].pid):
            result = await RunLoop(run, pipeline).run()
    faults = [fault for fault in read_faults(result.folder) if fault.role == "policy"]
    assert [(fault.kind, fault.rank) for fault in faults] == [("slow", 1)]
    assert result.metrics["speed/slow_ranks"] == 1
    usual, slow = run.roles.policy.batch_split.speeds
    assert usual == 1.0
    assert slow < 0.55


ALL_SHARDED = (
    "cluster.backend=ray",
    "algorithm=ppo",
    "algorithm.kl={coefficient: 0.1}",
    "rollout.drop_no_signal=false",
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_with_all_models_on_two_ranks_is_that_on_one(run_toy: Callable[..., RunResult]):
    """PPO with a critic and a reference, which share the policy's ranks."""
    alone = run_toy(*ALL_SHARDED, name="ppo_alone", steps=2)
    sharded = run_toy(*ALL_SHARDED, *SHARDED, "checkpoint.every=1", name="ppo_sharded", steps=2)
    for name in ("train/loss", "critic/loss", "critic/explained_variance"):
        first = read_column(alone.folder, name)[0]
        assert read_column(sharded.folder, name)[0] == pytest.approx(first, abs=1e-4), name
    resumed = run_toy(*ALL_SHARDED, *SHARDED, name="ppo_sharded", steps=3, resume=True)
    assert resumed.step == 3


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_critic_on_two_ranks_of_its_own_survives_the_loss_of_one(
    toy: Callable[..., LoadedRecipe],
) -> None:
    critic = ("critic.parallel={data: 2}", "devices.critic=cpu:1-2", "cluster.restarts=1")
    loaded = toy(*ALL_SHARDED, *critic, steps=3)
    async with open_run(loaded) as run, open_rl(run) as pipeline:
        await pipeline.step()
        run.recovery.finish_step()
        await run.recovery.settle()
        os.kill(run.roles.critic.group.worker_processes()["critic 1"], signal.SIGKILL)
        result = await RunLoop(run, pipeline).run()
    assert result.step == 3
    faults = [fault for fault in read_faults(result.folder) if fault.role == "critic"]
    assert len(faults) == 1
    assert faults[0].rejoined_at is not None


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("in_place", ["false", "true"])
def test_shards_reach_engines_in_the_learners_process_and_elsewhere(
    run_toy: Callable[..., RunResult], in_place: str
):
    """After each publish, engines and learner compute the same log-probs."""
    channel = ("weights.channel=broadcast", f"weights.in_place={in_place}")
    result = run_toy(*SHARDED, *channel, "rollout.drop_no_signal=false", steps=4)
    assert result.step == 4
    mismatch = read_column(result.folder, "train/mean/mismatch_kl")
    assert len(mismatch) == 4
    assert max(mismatch) < 1e-6
