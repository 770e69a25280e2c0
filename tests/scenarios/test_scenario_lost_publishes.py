"""An engine whose process is killed halfway through a publish, on Ray: it never generates with half
of the weights, and the run ends with the same weights, metrics and samples as without the fault."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dying_engine
import pytest
import ray
from ledger_audit import audit
from toy_runs import checkpoint_state, figures, toy

from rollick import RunResult, run_recipe
from rollick.cluster.ray_start import start_ray
from rollick.observe.faults import read_faults
from rollick.rollout.ledger.log import read_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FIXED = ("run.deterministic=true", "observe.samples_per_step=1000", "infer.slots=4")
RAY = "cluster.backend=ray"
ONE_ENGINE, TWO_ENGINES = "devices.generators=cpu:1", "devices.generators=cpu:1-2"

Run = Callable[..., RunResult]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file with the point to die at. Ray's workers inherit the variable with its path."""
    folder = tmp_path_factory.mktemp("dying")
    path = dying_engine.install(folder / "plugins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([path, *filter(None, sys.path)]))
        patch.setenv(dying_engine.VARIABLE, str(folder / "plan"))
        patch.syspath_prepend(path.split(os.pathsep)[0])
        assert start_ray(None)
        yield folder / "plan"
        ray.shutdown()


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path) -> Run:
    def start(name: str, *overrides: str) -> RunResult:
        return run_recipe(toy(tiny_folder, tmp_path, *FIXED, *overrides, name=name, steps=4))

    return start


@pytest.mark.parametrize(
    "engines", [ONE_ENGINE, TWO_ENGINES], ids=["the only engine", "one of two"]
)
@pytest.mark.parametrize("point", ["receive", "commit"])
def test_an_engine_that_is_killed_halfway_through_a_publish_changes_nothing(
    run: Run, plan: Path, point: str, engines: str
) -> None:
    baseline = run("calm", engines)
    plan.write_text(f"{point}:2")
    faulty = run("faulty", RAY, engines)
    assert not plan.exists(), "no engine died"
    [fault] = read_faults(faulty.folder)
    assert (fault.role, fault.kind, fault.step) == ("generators", "killed", 1)
    assert engines == TWO_ENGINES or fault.rejoined_at is not None
    assert checkpoint_state(faulty) == checkpoint_state(baseline)
    assert figures(faulty) == figures(baseline)
    assert read_samples(faulty) == read_samples(baseline)
    assert audit(read_log(faulty.folder / "ledger.jsonl")).groups.trained == 16


def read_samples(result: RunResult) -> str:
    """The recorded samples, with their text and policy versions."""
    return (result.folder / "samples.jsonl").read_text("utf-8")
