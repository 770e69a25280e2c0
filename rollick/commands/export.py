"""`rollick export`: a run's policy as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from rollick.checkpoint import Checkpoint, CheckpointStore
from rollick.config.load import load_recipe
from rollick.errors import CheckpointError, ConfigError, writing_to
from rollick.trainer.local import LocalStrategy
from rollick.trainer.parallel.checkpoint import export_state, is_sharded


def is_run(path: str) -> bool:
    """Whether the path is a run's folder, not a model's."""
    return (Path(path) / "recipe.yaml").is_file()


def find_checkpoint(run: Path, *, best: bool = False, step: int | None = None) -> Checkpoint:
    """The newest checkpoint of a run, the one with the best validation, or that of a step."""
    store = CheckpointStore(run / "checkpoints", keep_last=1, keep_best=1)
    if step is not None:
        checkpoint = store.of_step(step)
    else:
        checkpoint = store.best() if best else store.latest()
    if checkpoint is None:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{run} has {which}", fix="train it first")
    return checkpoint


def _check_output(out: Path, run: Path, model: str) -> None:
    """Raises if `out` cannot be written, or is the run or its initial model."""
    if out.resolve() in (run.resolve(), Path(model).resolve()):
        source = "the run" if out.resolve() == run.resolve() else "the run's initial model"
        raise ConfigError(f"{out} is {source}, and would be overwritten", fix="give another folder")
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)


def export_run(
    run: Path, out: Path, *, best: bool = False, adapter: bool = False, step: int | None = None
) -> Path:
    """A run's policy as a plain Hugging Face folder; or its adapter alone, as PEFT loads it."""
    if not is_run(str(run)):
        raise ConfigError(f"{run} is not a run's folder", fix="give the folder with recipe.yaml")
    checkpoint = find_checkpoint(run, best=best, step=step)
    recipe = load_recipe(run / "recipe.yaml", check=False).recipe
    _check_output(out, run, recipe.model.path)
    if recipe.model.dtype == "auto" and "cpu" not in recipe.devices.policy:
        # The engine sampled in bfloat16 on a GPU: export the same weights.
        recipe = load_recipe(run / "recipe.yaml", ["model.dtype=bfloat16"], check=False).recipe
    state = checkpoint.path / "learner"
    if is_sharded(state):
        export_state(state, recipe.model, out)
        return out
    strategy = LocalStrategy(recipe, device="cpu")
    strategy.load(state)
    if adapter:
        strategy.export_adapter(out)
    else:
        strategy.export(out)
    return out
