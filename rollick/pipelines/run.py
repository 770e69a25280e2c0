"""Entry points that run a recipe, or train from a few lines of Python, also in a notebook."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from rollick.cluster.machine import count_gpus, raise_open_files_limit, torch_supports_cuda
from rollick.config.load import LoadedRecipe, recipe_from_dict
from rollick.config.names import resolve
from rollick.errors import ConfigError, open_files_exhausted
from rollick.pipelines.state import RunInterrupted, RunObjects, RunResult
from rollick.types import RewardFn

LOG = logging.getLogger("rollick")
T = TypeVar("T")

BEGIN_S = 10.0
"""How long to wait for a started thread to begin its work."""
# Settings of `train` that depend on the device, for keys that its caller does not give. On a CPU a
# run then takes at most about five minutes. On a GPU the defaults of the schema fit.
SHORT_RUN: Mapping[str, Any] = {"steps": 20, "max_minutes": 5}
ON_CPU: Mapping[str, Any] = {
    "sampling": {"max_tokens": 32},
    # Refilling dropped groups would take an unpredictable time.
    "rollout": {"groups_per_step": 4, "group_size": 8, "drop_no_signal": False},
    "train": {"tokens_per_microbatch": 4096},
    "infer": {"slots": 32},
}
FEW_STEPS_LR = 1e-5
"""With so few steps, the schema's learning rate for long runs would change nothing."""
ON_GPU: Mapping[str, Any] = {"devices": {"policy": "0", "generators": "0"}}

Prompts = Iterable[str | Mapping[str, Any]] | Callable[[], Iterable[Any]] | str


def run_recipe(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> RunResult:
    """Run the recipe's pipeline to its end.

    SIGINT and SIGTERM save a checkpoint and raise RunInterrupted, which ends the script.
    """
    raise_open_files_limit()
    pipeline = resolve("pipelines", loaded.recipe.pipeline)
    try:
        result = wait_for(pipeline(loaded, objects=objects, resume=resume))
    except (OSError, RuntimeError) as error:  # torch raises RuntimeErrors.
        if exhausted := open_files_exhausted(error):
            raise exhausted from error
        raise
    if result.interrupted:
        interrupted = RunInterrupted(result)
        LOG.warning("%s", interrupted)  # Python prints nothing about a SystemExit.
        raise interrupted
    return result


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result, even inside a running event loop (a notebook)."""
    if not _in_event_loop():
        return asyncio.run(work)
    cancel: Future[Callable[[], Any]] = Future()  # Has a result when the work has begun.
    outcome: Future[T] = Future()

    async def start() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(start()))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="rollick")
    try:
        thread.start()
        return outcome.result()
    except KeyboardInterrupt:
        # A notebook's stop button: without this the run would continue in its thread.
        if not outcome.done():
            # The thread may not have started yet, or may have just ended.
            with suppress(TimeoutError, RuntimeError):
                cancel_work = cancel.result(BEGIN_S)
                cancel_work()
            if cancel.done():
                wait([outcome])
        raise


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def train(
    model: str,
    prompts: Prompts,
    reward: RewardFn | str | Mapping[str, RewardFn],
    *,
    validation: Prompts | None = None,
    resume: bool = False,
    **options: Any,
) -> RunResult:
    """Reinforcement learning in one call. A signal raises RunInterrupted, as in `run_recipe`.

    model: a Hugging Face folder or hub name, or a GGUF file.
    prompts: strings, rows (mappings with a "prompt" column), a function that returns them, or
        the path of a dataset.
    reward: a function that gets its arguments by name from the sample (`completion`, `prompt`)
        and its row; a name from `rollick list`; or several functions by name (they are added).
    validation: held-out prompts.
    options: any setting of a recipe by its dotted name with `__` for the dots, or by section:
        `run__steps=50`, `rollout={"group_size": 16}`. Without devices it uses the first GPU if
        there is one; on a CPU the default sizes are small (RUN/recipe.yaml shows
        what a run used).
    """
    rewards = _named_rewards(reward)
    functions = {name: fn for name, fn in rewards.items() if not isinstance(fn, str)}
    names = [f"object:{name}" if name in functions else str(fn) for name, fn in rewards.items()]
    sources: dict[str, Any] = {}
    domain = {"source": _source("prompts", prompts, sources), "rewards": names}
    data: dict[str, Any] = {"domains": {"prompts": domain}}
    if validation is not None:
        held_out = {"source": _source("validation", validation, sources), "rewards": names}
        data["validation"] = {"prompts": held_out}
    recipe: dict[str, Any] = {
        "run": {"name": time.strftime("run-%Y%m%d-%H%M%S")},
        "model": {"path": model},
        "data": data,
    }
    for dotted, value in options.items():
        _set(recipe, dotted.split("__"), value)
    recipe = add_default_sizes(recipe, has_gpu=torch_supports_cuda() and count_gpus() > 0)
    objects = RunObjects(prompts=sources, rewards=functions)
    loaded = recipe_from_dict(recipe, objects=objects.names, origin="rollick.train(…)")
    return run_recipe(loaded, objects=objects, resume=resume)


def _named_rewards(reward: RewardFn | str | Mapping[str, RewardFn]) -> Mapping[str, RewardFn | str]:
    if isinstance(reward, Mapping):
        return reward
    name = reward if isinstance(reward, str) else getattr(reward, "__name__", "reward")
    return {"reward" if name == "<lambda>" else name: reward}


def _source(name: str, prompts: Prompts, sources: dict[str, Any]) -> str:
    if isinstance(prompts, str):
        return prompts
    sources[name] = prompts if callable(prompts) else list(prompts)
    return f"object:{name}"


def _set(target: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner: Any = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{'__'.join(path)} is set, but {key} is also set as a plain value",
                fix="give the section, or its settings one by one",
            )
        target = inner
    if isinstance(value, Mapping):
        before = target.get(path[-1])
        value = (before if isinstance(before, dict) else {}) | dict(value)
    target[path[-1]] = value


def add_default_sizes(recipe: Mapping[str, Any], *, has_gpu: bool) -> dict[str, Any]:
    """The recipe with sizes for its device; uses the first GPU if there is one and the recipe names
    no device."""
    if "devices" not in recipe and has_gpu:
        return _fill(recipe, ON_GPU)
    if "cpu" not in str(_section(recipe, "devices").get("policy", "cpu")):
        return dict(recipe)
    filled = _fill(recipe, ON_CPU)
    if "steps" in _section(recipe, "run"):
        return filled
    if _section(recipe, "train").get("lora") is None:
        filled = _fill(filled, {"train": {"optimizer": {"lr": FEW_STEPS_LR}}})
    return _fill(filled, {"run": SHORT_RUN})


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the recipe; empty if it is not a mapping (the recipe is checked later)."""
    section = recipe.get(name)
    return section if isinstance(section, Mapping) else {}


def _fill(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the keys of `defaults` that it lacks, section by section."""
    filled = dict(given)
    for key, value in defaults.items():
        inner = filled.get(key)
        if key not in filled:
            filled[key] = value
        elif isinstance(inner, Mapping) and isinstance(value, Mapping):
            filled[key] = _fill(inner, value)
    return filled
