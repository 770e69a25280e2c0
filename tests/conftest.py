"""Fixtures that several test packages share. They import heavy packages inside, when used."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from hypothesis import settings

if TYPE_CHECKING:
    from ranks import Ranks

    from rollick import LoadedRecipe, RunResult
    from rollick.infer.vllm.engine import VllmEngine

# Every run of the tests tries the same examples.
settings.register_profile("rollick", derandomize=True, database=None, deadline=None)
settings.load_profile("rollick")

OBJECTS = frozenset({"rows", "reward", "held_out"})
"""Names that a recipe made by `toy` may use as object:NAME."""

FILES_OF_ONE_WORKER = {
    "one vLLM": ("contracts/test_contract_engine.py", "infer/test_infer_vllm.py"),
    "one Ray": (
        "cluster/test_cluster_group.py",
        "cluster/test_cluster_signals.py",
        "scenarios/test_scenario_determinism.py",
    ),
}
"""Files that must run in one worker, because they share something expensive to start."""
FILES_SPLIT_BY_TEST = ("rollout/test_rollout_histories.py", "scenarios/test_scenario_presets.py")
"""Long files whose tests share nothing. They run last, test by test, to balance the workers."""

if "PYTEST_XDIST_WORKER" in os.environ:
    # A worker has one core. torch reads this at import; child processes inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if not Path("/dev/nvidiactl").exists():
    # Triton reads this at import, which torch triggers. Kernels then run in its CPU interpreter.
    os.environ["TRITON_INTERPRET"] = "1"


def unit_of(nodeid: str) -> tuple[int, str]:
    """The order and the name of the unit in which a test is scheduled, usually its file."""
    file = nodeid.split("::")[0]
    for name, files in FILES_OF_ONE_WORKER.items():
        if file.endswith(files):
            return 0, name
    return (2, nodeid) if file.endswith(FILES_SPLIT_BY_TEST) else (1, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: unit_of(item.nodeid)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class UnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)[1]

    config.option.loadscopereorder = False
    return UnitScheduling(config, log)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, as a Hugging Face folder."""
    from rollick.testing.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def toy(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedRecipe]:
    """Loads the toy recipe with overrides as text and sections as keywords, in its own folder."""
    from rollick.config.load import recipe_from_dict
    from rollick.testing.toys import toy_recipe, without_rollout

    run_numbers, runs = count(), tmp_path_factory.mktemp("runs")

    def load(*overrides: str, name: str = "", steps: int = 2, **sections: Any) -> LoadedRecipe:
        name = name or f"toy{next(run_numbers)}"
        recipe = toy_recipe(tiny_folder, runs, name=name, steps=steps) | sections
        if recipe.get("pipeline") in ("sft", "dpo", "distill"):
            recipe = without_rollout(recipe)
        return recipe_from_dict(recipe, overrides=overrides, objects=OBJECTS)

    return load


@pytest.fixture(scope="session")
def run_toy(toy: Callable[..., LoadedRecipe]) -> Callable[..., RunResult]:
    """Runs the toy recipe."""
    from rollick import run_recipe

    def run(*overrides: str, resume: bool = False, **options: Any) -> RunResult:
        return run_recipe(toy(*overrides, **options), resume=resume)

    return run


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Starts a process group of the given size; each size is started once per module."""
    from ranks import Ranks

    started: dict[int, Ranks] = {}
    with ExitStack() as stack:

        def start_ranks(count: int) -> Ranks:
            if count not in started:
                started[count] = stack.enter_context(Ranks(count))
            return started[count]

        yield start_ranks


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """The device of Triton kernels: a GPU, or the CPU for Triton's interpreter."""
    import torch

    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return "cuda" if torch.cuda.is_available() else "cpu"


class VllmEngines:
    """Creates engines that share one vLLM client; its processes start once for all tests.

    Tests that use it run on the event loop of the session, because vLLM's client is bound to one
    loop.
    """

    def __init__(self) -> None:
        self.started: tuple[Any, Any] | None = None
        self.slots = 0

    async def fresh(self, folder: Path, *, slots: int) -> VllmEngine:
        """Version 0 has the weights of `folder`. All folders must have models of the same sizes."""
        from rollick.config.schema import InferConfig, ModelConfig, VllmConfig
        from rollick.infer.engine import StopRules
        from rollick.infer.vllm.engine import VllmEngine
        from rollick.infer.vllm.start import start
        from rollick.models.loading.load import empty_model, load_model
        from rollick.testing.tiny import tiny_tokenizer

        options = VllmConfig(enforce_eager=True, kv_cache_gb=0.05)
        infer = InferConfig(engine="vllm", slots=slots, max_length=256, vllm=options)
        model = ModelConfig(path=str(folder))
        if self.started is None:
            self.started, self.slots = start(infer, model, device="cpu"), slots
        assert slots == self.slots
        client, stats = self.started
        engine = VllmEngine(
            _SharedClient(client),
            stats,
            infer,
            skeleton=empty_model(model, attention="eager"),
            device="cpu",
            stops=StopRules((), tiny_tokenizer().decode),
        )
        weights = load_model(model, device="cpu", attention="eager").named_parameters()
        await engine.update(weights, engine.load().version)  # pyright: ignore
        stats.__init__(client.vllm_config)
        return engine

    def close(self) -> None:
        if self.started is not None:
            self.started[0].shutdown()
            self.started = None
            gc.collect()


class _SharedClient:
    """vLLM's client without its shutdown, so that it outlives the engine of one test."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def shutdown(self) -> None:
        pass


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engines() -> AsyncIterator[VllmEngines]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    engines = VllmEngines()
    try:
        yield engines
    finally:
        engines.close()
