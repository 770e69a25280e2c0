"""Supervised training whose engine is lost: the next validation uses the restarted one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rollick.config.load import LoadedRecipe
from rollick.errors import EngineLost, WorkerError
from rollick.pipelines import loop
from rollick.pipelines.evaluate import EvalReport, evaluate_prompts
from rollick.pipelines.open_run import OpenRun
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects
from rollick.pipelines.supervised import SupervisedPipeline
from rollick.types import Prompt

Toy = Callable[..., LoadedRecipe]
ROWS = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefgh"]
OBJECTS = RunObjects(prompts={"rows": ROWS}, rewards={"reward": lambda completion, answer: 1.0})
DATA = {
    "domains": {"letters": {"source": "object:rows", "completion": "answer"}},
    "validation": {"held_out": {"source": "object:rows", "rewards": ["object:reward"]}},
}


def load_sft(toy: Toy, *overrides: str) -> LoadedRecipe:
    options = ("devices.generators=cpu:1", "evaluate.every=1", "evaluate.at_start=false")
    return toy(*options, *overrides, pipeline="sft", steps=2, data=DATA)


class EngineKiller:
    """Loses the engine in the second step: before its weights are published, or after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after_publish: bool) -> None:
        self.versions: list[set[int]] = []
        """The policy versions of the samples of each validation."""
        prepare = SupervisedPipeline.prepare_validation

        async def prepare_validation(pipeline: SupervisedPipeline) -> None:
            if pipeline.state.step == 2 and not after_publish:
                self._kill(pipeline.run)
            await prepare(pipeline)

        async def evaluate(run: OpenRun, prompts: Sequence[Prompt]) -> EvalReport:
            if run.state.step == 2 and after_publish:
                self._kill(run)
            report = await evaluate_prompts(run, prompts)
            samples = [sample for group in report.groups for sample in group.samples]
            self.versions.append({v for s in samples for v in s.versions[s.loss_mask].tolist()})
            return report

        monkeypatch.setattr(SupervisedPipeline, "prepare_validation", prepare_validation)
        monkeypatch.setattr(loop, "evaluate_prompts", evaluate)

    def _kill(self, run: OpenRun) -> None:
        [engine] = run.roles.generators.engines
        engine.mark_lost(WorkerError("its process died"))


@pytest.mark.parametrize("after_publish", [False, True])
def test_a_lost_engine_validates_the_current_weights_after_its_restart(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, after_publish: bool
) -> None:
    killer: Any = EngineKiller(monkeypatch, after_publish=after_publish)
    run_recipe(load_sft(toy), objects=OBJECTS)
    assert killer.versions == [{1}, {2}]


def test_a_validation_fails_if_the_restarts_are_used_up(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    EngineKiller(monkeypatch, after_publish=False)
    limits = ("cluster.restarts=0", "cluster.place_timeout_s=0.5")
    with pytest.raises(EngineLost, match="all engines are lost"):
        run_recipe(load_sft(toy, *limits), objects=OBJECTS)
