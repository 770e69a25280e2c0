"""Aborts on Ray, where a call with large arguments may arrive after a small one that follows it."""

import asyncio
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEngine

from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import open_group
from rollick.cluster.worker import HostContext, RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig
from rollick.roles.engines import Generators
from rollick.types import Request, SampleId, Sampling, StopReason
from rollick.workers.generator import GeneratorWorker

PROMPT = np.arange(100_000, dtype=np.int32)
"""400 kB: Ray sends arguments of this size through its object store."""
TRIES = 50


def make_generator(context: HostContext, rank: int) -> GeneratorWorker:
    return GeneratorWorker(FakeEngine(seconds=math.inf, slots=TRIES))


@pytest.fixture
def ray_with_this_folder() -> Iterator[None]:
    import ray

    from rollick.cluster.ray_start import start_ray

    # Ray's processes inherit the environment: a worker imports this module and `fakes`.
    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        for folder in (here, here.parent):
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        started = start_ray(None)
    yield
    if started:
        ray.shutdown()


@pytest.mark.slow
async def test_an_abort_right_after_a_large_submit_reaches_its_request(
    ray_with_this_folder: None,
) -> None:
    devices = DeviceMap({"generators": parse_devices("cpu")})
    specs = [RoleSpec("generators", f"{__name__}:make_generator")]
    cluster = ClusterConfig(backend="ray", place_timeout_s=60, call_timeout_s=60)
    async with (
        open_group(devices, specs, cluster=cluster, threads=1) as group,
        Generators(group, "generators").connect() as generators,
    ):
        engine = generators.engines[0]
        for index in range(TRIES):
            request = Request(SampleId(0, index), PROMPT, Sampling(max_tokens=4), stream=index)
            task = asyncio.create_task(engine.generate(request))
            await asyncio.sleep(0.001)
            async with asyncio.timeout(30):
                await engine.abort(request.uid)
                assert (await task).stop is StopReason.ABORTED
