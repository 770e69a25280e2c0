"""Roles whose process is killed while a call to them is in flight: the role is rebuilt, the call is
made again, and the run ends with the same weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import checkpoint_state, figures, toy

from rollick import RunResult, run_recipe
from rollick.cluster.devices import HostSpec
from rollick.cluster.pool import RayTransport
from rollick.cluster.ray_start import start_ray
from rollick.cluster.worker import Call
from rollick.observe.faults import read_faults

pytestmark = pytest.mark.timeout(300)

FIXED = ("run.deterministic=true", "cluster.backend=ray", "train.optimizer.lr=3e-3")
KL = ("algorithm.preset=grpo", "algorithm.kl.coefficient=0.01")
REFERENCE = (*KL, "devices.reference=cpu:1")
CRITIC = ("algorithm=ppo", "devices.critic=cpu:1")
SHARED = (*KL, "devices.reference=cpu:0", "devices.generators=cpu:0-1", "infer.slots=4")

Run = Callable[..., RunResult]


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    assert start_ray(None)
    yield
    ray.shutdown()


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, _ray: None) -> Run:
    def start(name: str, *overrides: str) -> RunResult:
        return run_recipe(toy(tiny_folder, tmp_path, *FIXED, *overrides, name=name, steps=3))

    return start


def kill_in(monkeypatch: pytest.MonkeyPatch, role: str, method: str, *, visit: int = 2) -> None:
    """Kill the role's process when the method is called for the `visit`-th time."""
    send, visits = RayTransport.send, 0

    async def killing(self: RayTransport, host: HostSpec, call: Call, shared: Any) -> Any:
        nonlocal visits
        if (call.role, call.method) == (role, method):
            visits += 1
            if visits == visit:
                os.kill(self.processes[host.index].pid, signal.SIGKILL)
        return await send(self, host, call, shared)

    monkeypatch.setattr(RayTransport, "send", killing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "method", "options"),
    [
        ("reference", "logprobs", REFERENCE),
        ("reference", "logprobs", SHARED),
        ("critic", "values", CRITIC),
        ("critic", "train", CRITIC),
        ("critic", "write_snapshot", CRITIC),
        ("policy", "offer_weights", ("devices.generators=cpu:1",)),
        ("policy", "send_weights", ("devices.generators=cpu:1",)),
    ],
)
def test_a_role_that_is_killed_in_a_call_is_rebuilt_and_changes_no_weights(
    run: Run, monkeypatch: pytest.MonkeyPatch, role: str, method: str, options: tuple[str, ...]
) -> None:
    calm = run("calm", *options)
    kill_in(monkeypatch, role, method)
    faulty = run("faulty", *options)
    repaired = [fault for fault in read_faults(faulty.folder) if fault.role != "generators"]
    assert [fault.kind for fault in repaired] == ["killed"]
    assert repaired[0].rejoined_at is not None
    assert checkpoint_state(faulty) == checkpoint_state(calm)
    assert figures(faulty) == figures(calm)
