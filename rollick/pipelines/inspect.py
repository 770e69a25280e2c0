"""What one does with a model or a run besides training it: evaluate, export, replay.

A replay takes a dump (groups, batch and policy of one step) and runs one half of the step alone:
generation, to see whether the same ids draw the same tokens, or training, to see whether the
learner agrees with the engine (before the first update pi/mu is 1 and the KL is 0).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollick.checkpoint import Checkpoint, CheckpointStore
from rollick.cluster.devices import DeviceMap
from rollick.config.load import LoadedRecipe, load_recipe
from rollick.data.batch import Batch
from rollick.data.store import load_batch, load_groups, samples_to_rows
from rollick.errors import CheckpointError, ConfigError, RollickError
from rollick.pipelines.base import Session, open_session
from rollick.pipelines.domains import training_sampling
from rollick.pipelines.episodes import playing_episode
from rollick.pipelines.evaluate import EvalReport
from rollick.pipelines.rl import evaluate_prompts
from rollick.rollout.episode import Episode, OneEngine, single_turn
from rollick.train.local import LocalStrategy
from rollick.train.parallel.checkpoint import export_state, is_sharded
from rollick.types import FloatArray, Group, PolicyVersion, Sample
from rollick.workers.learner import TrainReport


def is_run(path: str) -> bool:
    """Whether the path is a run's folder (and not a model's)."""
    return (Path(path) / "recipe.yaml").is_file()


def find_checkpoint(run: Path, *, best: bool = False, step: int | None = None) -> Checkpoint:
    """The newest checkpoint of a run, the one with the best validation, or that of a step."""
    store = CheckpointStore(run / "checkpoints", keep_last=1, keep_best=1)
    if step is not None:
        found = store.of_step(step)
    else:
        found = store.best() if best else store.latest()
    if found is None:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{run} has {which}", fix="train it first")
    return found


def export_run(
    run: Path, out: Path, *, best: bool = False, adapter: bool = False, step: int | None = None
) -> Path:
    """A run's policy as a plain Hugging Face folder; or its adapter alone, as PEFT loads it."""
    if not is_run(str(run)):
        raise ConfigError(f"{run} is not a run's folder", fix="give the folder with recipe.yaml")
    checkpoint = find_checkpoint(run, best=best, step=step)
    recipe = load_recipe(run / "recipe.yaml", check=False).recipe
    if recipe.model.dtype == "auto" and "cpu" not in recipe.devices.policy:
        # Trained and sampled in bfloat16 on a GPU: exported as the weights that were sampled.
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


def plan_evaluation(
    model: str, recipe: Path, overrides: Sequence[str], *, best: bool = False
) -> tuple[LoadedRecipe, Checkpoint | None]:
    """The recipe with the model put in, and the checkpoint to load if the model is a run."""
    checkpoint = find_checkpoint(Path(model), best=best) if is_run(model) else None
    path = model
    if checkpoint is not None:
        path = load_recipe(Path(model) / "recipe.yaml", check=False).recipe.model.path
    return _scratch(recipe, overrides, purpose="eval", model=path), checkpoint


def plan_replay(
    dump: Path, recipe: Path, overrides: Sequence[str], *, only: str
) -> Coroutine[Any, Any, TrainReplay | GenerateReplay]:
    """The work of replaying one half of a dumped step."""
    halves = {"train": replay_training, "generate": replay_generation}
    if only not in halves:
        raise ConfigError(f"there is no half {only!r}", fix="--only takes generate or train")
    if not (dump / "learner").is_dir():
        raise ConfigError(
            f"{dump} is not a dump", fix="make one with observe.dump_steps=[1]; see RUN/dumps/"
        )
    return halves[only](_scratch(recipe, overrides, purpose="replay"), dump)


def _scratch(
    recipe: Path, overrides: Sequence[str], *, purpose: str, model: str | None = None
) -> LoadedRecipe:
    """The recipe in a run folder of its own, with nothing but the work itself."""
    name = f"{purpose}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    quiet = [f"run.name={name}", "observe.sinks=[]"]
    if model is not None:
        quiet.append(f"model.path={json.dumps(model)}")
    return load_recipe(recipe, [*quiet, *overrides])


async def evaluate_model(loaded: LoadedRecipe, *, checkpoint: Checkpoint | None) -> EvalReport:
    """Evaluate on the recipe's validation prompts, or on its training prompts if it has none.

    Saves the report and every sample in the session's folder.
    """
    if not DeviceMap.of(loaded.recipe).ranks("generators"):
        raise ConfigError(
            "this recipe has nothing to evaluate with: "
            f"pipeline {loaded.recipe.pipeline} generates only to validate",
            fix="give it data.validation with prompts and rewards",
        )
    async with open_session(loaded) as session:
        if checkpoint is not None:
            await session.group.together("policy", "load", checkpoint.path / "learner")
            await session.publisher.publish(PolicyVersion(checkpoint.step))
        held_out = bool(loaded.recipe.data.validation)
        prompts = session.open_prompts(validation=held_out).all()
        async with session.phase("validate"):
            report = await session.until_stopped(evaluate_prompts(session, prompts))
        if report is None:
            raise RollickError("a signal stopped the evaluation", fix="start it again")
        session.folder.append_rows("samples.jsonl", samples_to_rows(report.groups))
        text = json.dumps(report.to_json(), indent=2)
        (session.folder.path / "evaluation.json").write_text(text, encoding="utf-8")
        return report


@dataclass(frozen=True, slots=True)
class TrainReplay:
    """What training on a dumped batch showed."""

    max_ratio_error: float
    """Largest |pi/mu - 1| over the trained tokens before the update; 0 up to rounding at step 1."""
    kl: float
    """Mean k3 between pi and mu before the update."""
    loss: float
    grad_norm: float
    tokens: int


@dataclass(frozen=True, slots=True)
class GenerateReplay:
    """What generating a dump's samples again showed."""

    samples: int
    identical: int
    """Samples whose tokens are the same ones as in the dump."""
    score_then: float
    score_now: float


async def replay_training(loaded: LoadedRecipe, dump: Path) -> TrainReplay:
    """The training half of a dumped step, from the policy that the step began with."""
    batch = load_batch(dump / "batch")
    async with open_session(loaded) as session:
        await session.group.together("policy", "load", dump / "learner")
        logprobs_N = await session.group.together("policy", "logprobs", batch)
        report: TrainReport = await session.group.together("policy", "train", batch)
    return _compare(batch, logprobs_N, report)


def _compare(batch: Batch, logprobs_N: FloatArray, report: TrainReport) -> TrainReplay:
    trained = batch.loss_mask_N
    difference = logprobs_N[trained] - batch.logprobs_N[trained]
    ratio = np.exp(difference)
    return TrainReplay(
        max_ratio_error=float(np.abs(ratio - 1).max()),
        kl=float((1 / ratio - 1 + difference).mean()),
        loss=report.loss,
        grad_norm=report.grad_norm,
        tokens=report.tokens,
    )


async def replay_generation(loaded: LoadedRecipe, dump: Path) -> GenerateReplay:
    """The generating half of a dumped step: the same prompts, ids and random streams."""
    groups = load_groups(dump / "groups")
    async with open_session(loaded) as session:
        await session.group.together("policy", "load", dump / "learner")
        await session.publisher.publish(PolicyVersion(0))
        async with session.phase("generate"):
            samples = await session.until_stopped(_generate_again(session, groups))
        if samples is None:
            raise RollickError("a signal stopped the replay", fix="start it again")
        scores = [await session.score(sample) for sample in samples]
    before = {sample.uid: sample for group in groups for sample in group.samples}
    same = [np.array_equal(s.token_ids, before[s.uid].token_ids) for s in samples]
    then = [m.score.value for group in groups for m in group.members if m.score.ok]
    return GenerateReplay(
        samples=len(samples),
        identical=sum(same),
        score_then=float(np.mean(then)),
        score_now=float(np.mean([score.value for score in scores if score.ok])),
    )


async def _generate_again(session: Session, groups: Sequence[Group]) -> list[Sample]:
    seed, sampling = session.recipe.run.seed, training_sampling(session.recipe)
    answer = playing_episode(session, sampling, session.recipe.data.domains, purpose="train")
    answer = answer or single_turn(session.codec, sampling, seed=seed)
    ways = [OneEngine(engine) for engine in session.engines]
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(_sample(answer, sample, ways[group.uid % len(ways)]))
            for group in groups
            for sample in group.samples
        ]
    return [task.result() for task in running]


async def _sample(answer: Episode, sample: Sample, way: OneEngine) -> Sample:
    return await answer(sample.uid, sample.prompt, way)
