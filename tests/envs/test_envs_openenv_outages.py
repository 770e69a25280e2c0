"""An OpenEnv server behind a network that fails: the environment soon raises ServiceUnavailable,
and does not wait for the server in each episode."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from proxy import Proxy

from rollick.envs.adapters import openenv_env
from rollick.envs.adapters.openenv_env import RemoteEnv, action_schema
from rollick.errors import EnvError, ServiceUnavailable

STAND_INS = Path(__file__).parents[1] / "stand_ins"


def load_stand_in(name: str) -> Any:
    spec = spec_from_file_location(name, STAND_INS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy to a server. Its clients notice within a second that pings get no reply."""
    if find_spec("openenv") is None:
        monkeypatch.setitem(sys.modules, "openenv", load_stand_in("openenv"))
    server = load_stand_in("env_server").listen("127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(openenv_env, "CONNECT_S", 0.5)
    with Proxy(server.socket.getsockname()[1]) as proxy:
        yield proxy
    server.shutdown()
    action_schema.cache_clear()


@pytest.fixture
def env(proxy: Proxy) -> Iterator[RemoteEnv]:
    env = RemoteEnv(url=f"http://127.0.0.1:{proxy.port}", show="text", timeout_s=1.0)
    yield env
    with suppress(Exception):
        env.close()


def test_a_late_network_only_delays_an_episode(proxy: Proxy, env: RemoteEnv) -> None:
    proxy.delay_s = 0.1
    assert str(env.reset(0)[0]).startswith("step 0")
    assert [env.step("hello")[2] for _ in range(3)] == [False, False, True]
    assert proxy.connections == 2


@pytest.mark.parametrize("fault", ["refuse", "hold"])
def test_a_server_that_cannot_be_reached_is_unavailable_and_not_tried_by_each_episode(
    proxy: Proxy, env: RemoteEnv, fault: str
) -> None:
    getattr(proxy, fault)()
    begun = time.monotonic()
    with pytest.raises(ServiceUnavailable, match=f"{env.url} cannot be reached"):
        env.reset(0)
    attempts = proxy.connections
    for seed in range(100):
        with pytest.raises(ServiceUnavailable, match=f"{env.url} cannot be reached"):
            RemoteEnv(url=env.url).reset(seed)
    assert time.monotonic() - begun < openenv_env.RETRY_S
    assert proxy.connections == attempts


def test_a_server_that_returns_is_used_again(
    proxy: Proxy, env: RemoteEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv_env, "RETRY_S", 0.1)
    proxy.refuse()
    with pytest.raises(ServiceUnavailable):
        env.reset(0)
    proxy.restore()
    time.sleep(0.2)
    assert str(env.reset(0)[0]).startswith("step 0")


def test_a_connection_that_is_lost_between_two_steps_is_an_outage(
    proxy: Proxy, env: RemoteEnv
) -> None:
    env.reset(0)
    env.step("hello")
    proxy.refuse()
    with pytest.raises(ServiceUnavailable, match=f"the connection to the server at {env.url}"):
        env.step("hello")


def test_a_server_that_answers_others_but_no_step_fails_the_episode(
    proxy: Proxy, env: RemoteEnv
) -> None:
    env.reset(0)
    with pytest.raises(EnvError, match=r"did not answer within 1 s"):
        env.step("hang")


def test_a_server_that_stops_during_a_step_is_unavailable_before_the_limit_of_the_step(
    proxy: Proxy, env: RemoteEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the pool would kill the process, and count a timeout of the environment."""
    monkeypatch.setattr(openenv_env, "MARGIN_S", 0.5)
    env.timeout_s, env.step_timeout_s = 50.0, 2.0
    env.reset(0)
    proxy.hold()
    begun = time.monotonic()
    with pytest.raises(ServiceUnavailable, match=env.url):
        env.step("hello")
    env.close()  # Does not wait for the server either.
    assert time.monotonic() - begun < env.step_timeout_s
