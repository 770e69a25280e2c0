"""Prepares this process to resume a run: imports, Ray, worker processes.

The supervisor keeps such a process (commands/supervise.py). When the run crashes, the prepared one
builds the models, restores the checkpoint and resumes it. It uses no device memory before.
"""

from __future__ import annotations

from rollick.children.process_tree import find_descendants
from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import modules_of
from rollick.cluster.machine import raise_open_files_limit
from rollick.config.load import LoadedRecipe
from rollick.config.names import resolve
from rollick.pipelines.open_run import role_specs, worker_environment, worker_threads
from rollick.pipelines.run_guard import PREPARED_PROCESSES


def prepare_run(loaded: LoadedRecipe) -> None:
    raise_open_files_limit()
    recipe, device_map = loaded.recipe, DeviceMap.of(loaded.recipe)
    resolve("pipelines", recipe.pipeline)
    # Workers of an existing cluster would need resources that the active run holds.
    if recipe.cluster.backend == "inline" or recipe.cluster.address is not None:
        return
    from rollick.cluster.pool import prepare_workers
    from rollick.cluster.spares import WorkerPlan

    earlier = find_descendants()
    modules = modules_of(role_specs(loaded, device_map, {}))
    plan = WorkerPlan(worker_threads(recipe), worker_environment(recipe), modules)
    prepare_workers([host.device.kind for host in device_map.hosts()], recipe.cluster, plan)
    PREPARED_PROCESSES.update(find_descendants() - earlier)
