"""Signals to the process group of a controller: only the controller handles them, not Ray."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONTROLLER = """
import asyncio, signal
import numpy as np
from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import open_group
from rollick.cluster.worker import RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig

async def main():
    interrupt, terminate = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate.set)
    devices = DeviceMap({"policy": parse_devices("cpu")})
    specs = [RoleSpec("policy", "counter_role:make_counter")]
    async with open_group(devices, specs, cluster=ClusterConfig(), threads=1) as group:
        print((await group.call("policy", "where"))[3], flush=True)
        await interrupt.wait()
        print(await group.call("policy", "add", 3), flush=True)
        await terminate.wait()
        await asyncio.sleep(3)  # A save takes time: Ray must outlive the signal to its group.
        print(await group.call("policy", "add", 4), flush=True)
        # A large argument travels through Ray's object store, which is in another process.
        print(await group.broadcast("policy", "mean", np.ones(1_000_000)), flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_signalled_controller_still_reaches_its_workers_and_leaves_none_behind(monkeypatch):
    # Ray's processes inherit the environment: a worker imports counter_role from this folder.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    command = [sys.executable, "-c", CONTROLLER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdout is not None
        worker = int(child.stdout.readline())
        os.killpg(child.pid, signal.SIGINT)
        assert child.stdout.readline() == "3\n"
        os.killpg(child.pid, signal.SIGTERM)
        assert child.communicate(timeout=60) == ("7\n[1.0]\n", None)
    assert child.returncode == 0
    assert not Path(f"/proc/{worker}").exists()
