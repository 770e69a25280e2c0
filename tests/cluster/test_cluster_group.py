"""One set of tests for both backends: a role behaves the same in this process and on Ray.

Most tests share one group of two hosts (opening one on Ray takes seconds), so they compare
differences of counts, never totals.
"""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager, nullcontext

import numpy as np
import pytest
import pytest_asyncio

from rollick.children.process_tree import is_stopped
from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import WorkerGroup, open_group
from rollick.cluster.worker import RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig
from rollick.errors import PlacementError, WeightError, WorkerError, WorkerHung, WorkerOutOfFiles

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTER = "counter_role:make_counter"


@pytest.fixture(scope="module")
def ray_on_this_machine():
    import ray

    from rollick.cluster.ray_start import start_ray

    # Ray's processes inherit the environment: a worker imports counter_role from this folder.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
        started = start_ray(None)
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="module", params=["inline", "ray"])
def backend(request) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_on_this_machine")
    return request.param


def make_device_map(**roles: str) -> DeviceMap:
    return DeviceMap({role: parse_devices(text) for role, text in roles.items()})  # type: ignore


@asynccontextmanager
async def open_counters(backend: str, *, target: str = COUNTER, args=(), env=None, **roles: str):
    devices = make_device_map(**roles)
    cluster = ClusterConfig(backend=backend, place_timeout_s=60, call_timeout_s=60)
    specs = [RoleSpec(role, target, args) for role in devices.roles]
    async with open_group(devices, specs, cluster=cluster, threads=1, env=env) as group:
        yield group


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(backend):
    roles = {"generators": "cpu:0-1", "policy": "cpu:0", "reference": "cpu:1"}
    async with open_counters(backend, **roles) as group:
        yield group


async def wait_for_waits(group: WorkerGroup, *, running: int, cancelled: int) -> None:
    """Poll until generator 0 has this number of running waits and of cancelled waits."""
    async with asyncio.timeout(30):
        while await group.call("generators", "waiting") != (running, cancelled):
            pass


async def test_roles_on_one_device_share_a_process_and_see_those_built_before(group, backend):
    assert await group.call("policy", "neighbours") == []
    assert await group.call("generators", "neighbours", rank=0) == ["policy"]
    assert await group.call("generators", "neighbours", rank=1) == ["reference"]
    count = await group.call("policy", "add", 5)
    assert await group.call("generators", "count_of", "policy") == count
    policy, first, second = [
        await group.call("policy", "where"),
        *await group.broadcast("generators", "where"),
    ]
    assert policy[:3] == first[:3] == (0, 0, "cpu")
    assert second[:3] == (1, 1, "cpu")
    assert policy[3] == first[3]
    assert (second[3] == first[3]) == (backend == "inline")
    assert (policy[3] == os.getpid()) == (backend == "inline")
    expected = {"policy 0": policy[3], "generators 0": first[3]}
    expected |= {"generators 1": second[3], "reference 0": second[3]}
    assert group.worker_processes() == ({} if backend == "inline" else expected)


async def test_calls_of_every_shape_return_their_results(group):
    before = await group.broadcast("generators", "add", 0)
    assert await group.call("generators", "add", 6, rank=1) == before[1] + 6
    assert await group.call("generators", "add_async", 1, rank=1) == before[1] + 7
    after = await group.broadcast("generators", "add", 10)
    assert after == [before[0] + 10, before[1] + 17]
    assert await group.scatter("generators", "total", [[1, 2, 3], [4]], 2) == [12, 8]
    assert await group.scatter("generators", "total", [None, [4]], 2) == [None, 8]
    assert await group.broadcast("generators", "mean", np.ones(300_000)) == [1.0, 1.0]


async def test_parts_and_ranks_that_do_not_fit_are_refused(group):
    with pytest.raises(WorkerError, match="'total' got 3 parts for 2 ranks of generators"):
        await group.scatter("generators", "total", [[1], [2], [3]], 2)
    with pytest.raises(PlacementError, match="generators rank 2 does not exist"):
        await group.call("generators", "add", rank=2)
    with pytest.raises(WorkerError, match="Counter has no method 'subtract'"):
        await group.call("policy", "subtract")


async def test_a_slow_call_blocks_no_other_and_can_be_cancelled(group):
    _, cancelled = await group.call("generators", "waiting")
    slow = asyncio.create_task(group.call("generators", "wait", 60.0))
    blocked = asyncio.create_task(group.call("policy", "block", 1.0))
    await wait_for_waits(group, running=1, cancelled=cancelled)
    assert await group.call("generators", "total", [1, 2], 2) == 6
    assert not blocked.done()
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    await wait_for_waits(group, running=0, cancelled=cancelled + 1)
    assert await blocked == "blocked"


async def test_a_call_past_its_deadline_fails_and_is_cancelled_in_the_worker(group):
    _, cancelled = await group.call("generators", "waiting")
    begun_at = time.time()
    name = r"generators 0 on host 0 .* 'wait' within 0\.2 s"
    with pytest.raises(WorkerHung, match=name) as hung:
        await group.call("generators", "wait", 60.0, timeout_s=0.2)
    assert hung.value.failed_at == pytest.approx(begun_at, abs=0.1)
    await wait_for_waits(group, running=0, cancelled=cancelled + 1)


async def test_one_failing_rank_ends_the_wait_for_all(group):
    _, cancelled = await group.call("generators", "waiting")
    with pytest.raises(WorkerError, match="TypeError in 'wait'"):
        await group.scatter("generators", "wait", [60.0, "soon"])
    await wait_for_waits(group, running=0, cancelled=cancelled + 1)


async def test_plain_methods_of_a_role_run_one_after_another(group):
    calls = [group.call("policy", "interval", 0.05) for _ in range(2)]
    (_, first_end), (second_begin, _) = sorted(await asyncio.gather(*calls))
    assert second_begin >= first_end


async def test_errors_of_rollick_travel_as_they_are(group):
    with pytest.raises(WeightError) as caught:
        await group.call("policy", "refuse")
    assert type(caught.value) is WeightError
    assert caught.value.message == "the fingerprint is ab, not cd"
    assert caught.value.fix == "publish again"


async def test_a_worker_without_free_file_descriptors_is_named(group):
    with pytest.raises(WorkerOutOfFiles, match="no more files can be opened") as caught:
        await group.call("policy", "open_too_many_files")
    assert caught.value.fix == "ulimit -n 4096"


@pytest.mark.parametrize("method", ["divide", "divide_async"])
async def test_other_errors_name_role_host_and_method_and_include_their_traceback(group, method):
    with pytest.raises(WorkerError) as caught:
        await group.call("generators", method, rank=1)
    first, *traceback = str(caught.value).splitlines()
    assert first == (
        "generators 1 on host 1 (cpu:1: generators 1, reference 0) "
        f"raised ZeroDivisionError in '{method}': division by zero"
    )
    assert any("self.count / 0" in line for line in traceback)


async def test_a_role_that_cannot_be_built_fails_the_opening(backend):
    with pytest.raises(WorkerError, match=r"ValueError in '.*make_nothing': rank 0 on cpu has no"):
        async with open_counters(backend, target="counter_role:make_nothing", policy="cpu"):
            pytest.fail("the group opened")


async def test_a_role_may_be_built_by_a_coroutine_on_the_loop():
    target = "counter_role:make_counter_on_the_loop"
    async with open_counters("inline", target=target, policy="cpu") as group:
        assert await group.call("policy", "add", 2) == 2


@pytest.mark.parametrize("crash", [False, True])
async def test_roles_are_closed_last_built_first_also_after_a_crash(backend, crash, tmp_path):
    log_file = tmp_path / "closed.txt"
    with pytest.raises(KeyError) if crash else nullcontext():
        async with open_counters(
            backend, args=(log_file,), policy="cpu", generators="cpu"
        ) as group:
            if crash:
                raise KeyError("crash")
    assert log_file.read_text().splitlines() == ["1 0", "0 0"]
    with pytest.raises(WorkerError, match="'add' was called on a closed group"):
        await group.call("policy", "add")


async def test_a_role_without_a_spec_is_named():
    cluster = ClusterConfig(backend="inline")
    devices = make_device_map(policy="cpu", judge="cpu")
    with pytest.raises(WorkerError, match="no RoleSpec for judge, policy"):
        async with open_group(devices, [], cluster=cluster, threads=1):
            pytest.fail("the group opened")


async def test_a_worker_gets_variables_and_survives_an_interrupt_and_an_invalid_reply(
    ray_on_this_machine, monkeypatch
):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    async with open_counters("ray", env={"ROLLICK_TEST": "yes"}, policy="cpu") as group:
        assert await group.call("policy", "variable", "ROLLICK_TEST") == "yes"
        assert await group.call("policy", "variable", "OMP_NUM_THREADS") == "1"
        assert await group.call("policy", "variable", "ONEDNN_MAX_CPU_ISA") == "AVX2"
        with pytest.raises(WorkerError, match="could not answer 'unsendable'"):
            await group.call("policy", "unsendable")
        *_, pid = await group.call("policy", "where")
        os.kill(pid, signal.SIGINT)
        assert await group.call("policy", "block", 0.1) == "blocked"


async def test_rays_processes_are_outside_the_controllers_process_group(ray_on_this_machine):
    async with open_counters("ray", policy="cpu") as group:
        *_, worker = await group.call("policy", "where")
        with open(f"/proc/{worker}/stat") as file:  # noqa: ASYNC230
            raylet = int(file.read().rpartition(")")[2].split()[1])
        assert os.getpgid(0) not in (os.getpgid(worker), os.getpgid(raylet))


async def test_a_dead_worker_is_an_error_that_names_host_and_roles(ray_on_this_machine):
    async with open_counters("ray", policy="cpu:0", generators="cpu:0-1") as group:
        waiting = asyncio.create_task(group.call("generators", "wait", 60.0))
        await wait_for_waits(group, running=1, cancelled=0)
        name = r"host 0 \(cpu:0: policy 0, generators 0\) was lost"
        with pytest.raises(WorkerError, match=name) as lost:
            await group.call("policy", "die")
        assert lost.value.exit_code == 69
        with pytest.raises(WorkerError, match="was lost in 'wait'"):
            await waiting
        with pytest.raises(WorkerError, match="was lost in 'add'"):
            await group.call("policy", "add")
        assert await group.call("generators", "add", rank=1) == 1


async def test_a_worker_that_is_stopped_failed_when_it_last_ran(ray_on_this_machine, monkeypatch):
    from rollick.cluster import pool

    monkeypatch.setattr(pool, "LOOK_S", 0.5)
    async with open_counters("ray", policy="cpu") as group:
        await group.call("policy", "add")
        stopped_at = time.time()
        os.kill(group.worker_processes()["policy 0"], signal.SIGSTOP)
        with pytest.raises(WorkerHung, match="was stopped by a signal") as hung:
            await group.call("policy", "add")
        assert stopped_at - 2 < hung.value.failed_at <= stopped_at
        assert time.time() - stopped_at > 0.5


async def test_a_lost_worker_is_replaced_by_a_spare_that_has_imported(
    ray_on_this_machine, monkeypatch
):
    from rollick.cluster import pool

    monkeypatch.setattr(pool, "SPARE_DELAY_S", 0)
    cluster = ClusterConfig(spare_workers=1, place_timeout_s=60)
    specs = [RoleSpec("policy", COUNTER)]
    async with open_group(
        make_device_map(policy="cpu"), specs, cluster=cluster, threads=1
    ) as group:
        spares = group.transport._spares
        for _ in range(2):
            spare = await wait_for_spare(spares)
            assert spare not in group.worker_processes().values()
            with pytest.raises(WorkerError, match="was lost"):
                await group.call("policy", "die")
            await group.restart("policy", 0)
            assert group.worker_processes() == {"policy 0": spare}
            assert (await group.call("policy", "where"))[3] == spare


async def test_a_spare_that_is_stopped_is_not_used(ray_on_this_machine, monkeypatch):
    from rollick.cluster import pool

    monkeypatch.setattr(pool, "SPARE_DELAY_S", 0)
    cluster = ClusterConfig(spare_workers=1, place_timeout_s=60)
    specs = [RoleSpec("policy", COUNTER)]
    async with open_group(
        make_device_map(policy="cpu"), specs, cluster=cluster, threads=1
    ) as group:
        spare = await wait_for_spare(group.transport._spares)
        os.kill(spare, signal.SIGSTOP)
        while not is_stopped(spare):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await group.restart("policy", 0)
        assert (await group.call("policy", "where"))[3] != spare


async def wait_for_spare(spares) -> int:
    """Wait until the only spare has imported, and return its process id."""
    async with asyncio.timeout(30):
        while not spares._idle.get("cpu"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return (await spares._idle["cpu"][0][1]).pid


async def test_a_worker_that_cannot_be_placed_fails_within_its_deadline(ray_on_this_machine):
    cluster = ClusterConfig(place_timeout_s=1, cpus_per_worker=0.5)
    begin = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        async with open_group(
            make_device_map(policy="0"), [RoleSpec("policy", COUNTER)], cluster=cluster, threads=1
        ):
            pytest.fail("the group opened")
    assert 1 <= time.monotonic() - begin < 10
    assert str(caught.value).startswith(
        "1 of 1 workers were not placed within 1 s; required: "
        "host 0 (cuda:0: policy 0) CPU 0.5 GPU 1; free: CPU "
    )


async def test_a_placement_that_this_machine_can_never_hold_is_refused_at_once(ray_on_this_machine):
    from rollick.cluster.pool import check_totals

    hosts = make_device_map(policy="cpu", generators="0-1").hosts()
    with pytest.raises(PlacementError, match=r"the workers do not fit .* GPU 1; available: CPU "):
        check_totals(hosts, ClusterConfig())
    with pytest.raises(PlacementError, match=r"CPU 1000 GPU 0; available: CPU "):
        check_totals(hosts[:1], ClusterConfig(cpus_per_worker=1000))
    check_totals(hosts[:1], ClusterConfig())
