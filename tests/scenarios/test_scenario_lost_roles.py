"""Roles whose process is killed while a call to them is in flight: the role is rebuilt, the call is
retried, and the run ends with the same weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from toy_runs import checkpoint_state, figures, toy

from rollick import RunResult, run_recipe
from rollick.cluster.devices import HostSpec
from rollick.cluster.pool import RayTransport
from rollick.cluster.ray_start import start_ray
from rollick.cluster.worker import Call
from rollick.config.load import recipe_from_dict
from rollick.observe.faults import read_faults
from rollick.testing.batches import recipe_of
from rollick.testing.tiny import save_tiny
from rollick.testing.toys import toy_recipe, without_rollout
from rollick.trainer.reward_model import LocalRewardModel

pytestmark = pytest.mark.timeout(300)

FIXED = ("run.deterministic=true", "cluster.backend=ray", "train.optimizer.lr=3e-3")
KL = ("algorithm.preset=grpo", "algorithm.kl.coefficient=0.01")
REFERENCE = (*KL, "devices.reference=cpu:1")
CRITIC = ("algorithm=ppo", "devices.critic=cpu:1")
SHARED = (*KL, "devices.reference=cpu:0", "devices.generators=cpu:0-1", "infer.slots=4")
OPD = (
    "teacher.path={other}",
    "devices.teacher=cpu:1",
    "rollout.drop_no_signal=false",
    "algorithm.advantage=opd",
    "algorithm.loss=reinforce",
)
SCORED = (
    "data.domains.letters.rewards=[model]",
    "reward_model.path={scorer}",
    "devices.reward_model=cpu:1",
)

Run = Callable[..., RunResult]


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    assert start_ray(None)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the other models. Overrides name them in braces."""
    scorer = tmp_path_factory.mktemp("scorer")
    LocalRewardModel(recipe_of(tiny_folder), trainable=False).export(scorer)
    return {"other": save_tiny(tmp_path_factory.mktemp("other"), seed=1), "scorer": scorer}


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, folders: dict[str, Path], _ray: None) -> Run:
    def start(name: str, *overrides: str) -> RunResult:
        options = [*FIXED, *(text.format(**folders) for text in overrides)]
        return run_recipe(toy(tiny_folder, tmp_path, *options, name=name, steps=3))

    return start


@pytest.fixture
def run_distill(tiny_folder: Path, tmp_path: Path, folders: dict[str, Path], _ray: None) -> Run:
    """Runs the pipeline `distill` on the completions of the dataset."""
    domain = {"source": "rollick.testing.toys:letter_rows", "completion": "answer"}

    def start(name: str) -> RunResult:
        recipe = without_rollout(toy_recipe(tiny_folder, tmp_path, name=name, steps=3))
        recipe |= {"pipeline": "distill", "data": {"domains": {"letters": domain}}}
        recipe |= {"teacher": {"path": str(folders["other"])}, "devices": {"teacher": "cpu:1"}}
        recipe["train"] |= {"batch_size": 8}
        return run_recipe(recipe_from_dict(recipe, overrides=FIXED))

    return start


def kill_role_in_call(
    monkeypatch: pytest.MonkeyPatch, role: str, method: str, *, visit: int = 2
) -> None:
    """Kill the role's process when the method is called for the `visit`-th time."""
    send, visits = RayTransport.send, 0

    async def send_and_kill(self: RayTransport, host: HostSpec, call: Call, shared: Any) -> Any:
        nonlocal visits
        if (call.role, call.method) == (role, method):
            visits += 1
            if visits == visit:
                os.kill(self.processes[host.index].pid, signal.SIGKILL)
        return await send(self, host, call, shared)

    monkeypatch.setattr(RayTransport, "send", send_and_kill)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "method", "options"),
    [
        ("reference", "logprobs", REFERENCE),
        ("reference", "logprobs", SHARED),
        ("critic", "values", CRITIC),
        ("critic", "train", CRITIC),
        ("critic", "write_snapshot", CRITIC),
        ("teacher", "logprobs", OPD),
        ("reward_model", "scores", SCORED),
        ("policy", "offer_weights", ("devices.generators=cpu:1",)),
        ("policy", "send_weights", ("devices.generators=cpu:1",)),
    ],
)
def test_a_role_that_is_killed_in_a_call_is_rebuilt_and_changes_no_weights(
    run: Run, monkeypatch: pytest.MonkeyPatch, role: str, method: str, options: tuple[str, ...]
) -> None:
    baseline = run("calm", *options)
    kill_role_in_call(monkeypatch, role, method)
    check_rebuilt(run("faulty", *options), baseline)


@pytest.mark.slow
def test_a_teacher_that_is_killed_while_given_answers_are_distilled_changes_no_weights(
    run_distill: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = run_distill("calm")
    kill_role_in_call(monkeypatch, "teacher", "top_logprobs")
    check_rebuilt(run_distill("faulty"), baseline)


def check_rebuilt(faulty: RunResult, baseline: RunResult) -> None:
    repaired = [fault for fault in read_faults(faulty.folder) if fault.role != "generators"]
    assert [fault.kind for fault in repaired] == ["killed"]
    assert repaired[0].rejoined_at is not None
    assert checkpoint_state(faulty) == checkpoint_state(baseline)
    assert figures(faulty) == figures(baseline)
