"""`rollick eval`: evaluate a model, or the checkpoint of a run, on a recipe's prompts."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from rollick.checkpoint import Checkpoint
from rollick.cluster.devices import DeviceMap
from rollick.commands.export import find_checkpoint, is_run
from rollick.config.load import LoadedRecipe, load_recipe
from rollick.data.store import samples_to_rows
from rollick.errors import ConfigError, StoppedBySignal
from rollick.pipelines.evaluate import EvalReport, evaluate_prompts
from rollick.pipelines.open_run import open_run
from rollick.types import PolicyVersion

ONLY_TRAINING = ("data.validation={}", "evaluate.every=0", "evaluate.at_start=null")
"""Overrides with which a recipe has only training prompts."""


def plan_evaluation(
    model: str,
    recipe: Path,
    overrides: Sequence[str],
    *,
    best: bool = False,
    training: bool = False,
) -> tuple[LoadedRecipe, Checkpoint | None]:
    """The recipe with model.path set, and the checkpoint to load if `model` is a run. `training`:
    the recipe is for an evaluation on its training prompts."""
    overrides = [*overrides, *(ONLY_TRAINING if training else ())]
    checkpoint = find_checkpoint(Path(model), best=best) if is_run(model) else None
    path = model
    if checkpoint is not None:
        path = load_recipe(Path(model) / "recipe.yaml", check=False).recipe.model.path
    return load_scratch_recipe(recipe, overrides, purpose="eval", model=path), checkpoint


def load_scratch_recipe(
    recipe: Path, overrides: Sequence[str], *, purpose: str, model: str | None = None
) -> LoadedRecipe:
    """Load the recipe with a new, unique run name and without metric sinks."""
    name = f"{purpose}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    defaults = [f"run.name={name}", "observe.sinks=[]"]
    if model is not None:
        defaults.append(f"model.path={json.dumps(model)}")
    return load_recipe(recipe, [*defaults, *overrides])


async def evaluate_model(
    loaded: LoadedRecipe, *, checkpoint: Checkpoint | None, training: bool = False
) -> EvalReport:
    """Evaluate on the recipe's validation prompts; with `training`, on the training prompts of a
    recipe without validation.

    Saves the report and every sample in the run's folder.
    """
    if not DeviceMap.of(loaded.recipe).ranks("generators"):
        message = "this recipe has no generators: "
        message += f"pipeline {loaded.recipe.pipeline} generates only to validate"
        raise ConfigError(message, fix="add data.validation with prompts and rewards")
    if not training and not loaded.recipe.data.validation:
        fix = "add data.validation to it, or score the training prompts with --training"
        raise ConfigError("the recipe has no held-out prompts (data.validation)", fix=fix)
    async with open_run(loaded) as run:
        if checkpoint is not None:
            await run.roles.policy.load(checkpoint.path / "learner")
            await run.publisher.publish(PolicyVersion(checkpoint.step))
        prompts = run.open_prompts(validation=not training).all()
        async with run.phases.enter("validate"):
            report = await run.state.until_stopped(evaluate_prompts(run, prompts))
        if report is None:
            raise StoppedBySignal("a signal stopped the evaluation", fix="start it again")
        folder = run.state.folder
        folder.append_rows("samples.jsonl", samples_to_rows(report.groups))
        text = json.dumps(describe_report(report, training=training), indent=2)
        (folder.path / "evaluation.json").write_text(text, encoding="utf-8")
        return report


def describe_report(report: EvalReport, *, training: bool) -> dict[str, object]:
    """The report as JSON, with the source of its prompts."""
    return {"prompts": "training" if training else "validation", **report.to_json()}
