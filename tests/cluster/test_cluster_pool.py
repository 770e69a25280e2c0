import socket
import time

import pytest

from rollick.cluster.pool import worker_environment
from rollick.cluster.ray_start import check_address
from rollick.errors import PlacementError


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_an_address_without_a_server_fails_at_once():
    address = f"127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with pytest.raises(PlacementError, match=f"no Ray cluster answers at {address}"):
        check_address(address)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://127.0.0.1:10001", "is a Ray client address"),
        ("nonsense", "cluster.address=nonsense is not a Ray address"),
    ],
)
def test_an_address_that_cannot_work_is_refused(address, message):
    with pytest.raises(PlacementError, match=message):
        check_address(address)


def test_given_variables_override_those_that_rollick_sets(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert worker_environment(threads=2, env={}) == {"OMP_NUM_THREADS": "2"}
    assert worker_environment(threads=0, env={}) == {}
    assert worker_environment(threads=2, env={"OMP_NUM_THREADS": "5"}) == {"OMP_NUM_THREADS": "5"}
