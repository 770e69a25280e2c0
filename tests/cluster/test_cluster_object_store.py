"""Room for Ray's messages when other files have filled the shared memory (a small tmpfs in a mount
namespace)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

IN_NAMESPACE = """
mount -t tmpfs -o size=200m none /dev/shm || exit 99
exec "$1" -c "$2"
"""
FILLED = """
import errno, time
import numpy as np, ray
from rollick.cluster.object_store import ObjectStore
from rollick.cluster.ray_start import start_ray
from rollick.errors import ClusterUnavailable

start_ray(None)
store = ObjectStore.open()
assert store.describe_shortage() == ""
with open("/dev/shm/filler", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
print(store.describe_shortage())
small, large = np.zeros(4 << 20, np.uint8), np.zeros(20 << 20, np.uint8)
for _ in range(8):
    store.check_room([small])
    kept = [ray.put(small) for _ in range(3)]
    time.sleep(1.2)  # Ray removes messages once a second.
try:
    store.check_room([large])
except ClusterUnavailable as error:
    print(error)
"""


def test_ray_survives_a_full_shared_memory_and_a_message_without_room_is_refused() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Smaller than /dev/shm, or Ray would use /tmp.
    env["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"] = str(100 << 20)
    command = ["unshare", "-Urm", "sh", "-c", IN_NAMESPACE, "sh", sys.executable, FILLED]
    completed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    if completed.returncode == 99:
        pytest.skip("no mount namespace of one's own here")
    assert completed.returncode == 0, completed.stderr
    shortage, refusal = completed.stdout.splitlines()
    assert shortage == (
        "/dev/shm has 0 MB free; Ray keeps messages to workers there, and 67 MB are reserved for "
        "them"
    )
    assert refusal.startswith("/dev/shm has no room for 84 MB, which Ray needs to send a batch")
