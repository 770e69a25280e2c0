"""The reward pool with real child processes: scores, failures, kills and cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollick.config.schema import RewardSpec
from rollick.errors import RewardError, WorkerLost
from rollick.observe.faults import FaultLog
from rollick.rewards.pool import RewardPool, RewardPoolStats
from rollick.testing.fakes import prompt, sample
from rollick.types import Sample, Score, ScoreStatus

LONG_TIMEOUT_S = 60.0
"""A timeout that no call should reach, even on a busy machine."""

REWARDS = '''
import ctypes, os, signal, subprocess, sys, time

def length(completion, scale=1.0):
    return scale * len(completion)

async def later(completion):
    import asyncio
    await asyncio.sleep(0)
    return completion == "4"

def act(completion, folder=""):
    """What the completion says is what happens."""
    with open(os.path.join(folder, "pid"), "w") as file:
        file.write(str(os.getpid()))
    if completion == "spin":
        while True:
            pass
    if completion == "family":
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        with open(os.path.join(folder, "grandchild"), "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    if completion in ("daemon", "daemon and exit"):
        sleep = "import time; time.sleep(600)"
        command = [sys.executable, "-S", "-c", sleep]
        child = subprocess.Popen(command, start_new_session=True, close_fds=True)
        with open(os.path.join(folder, "daemon"), "w") as file:
            file.write(str(child.pid))
    if completion == "daemon and exit":
        os._exit(7)
    if completion == "nap":
        time.sleep(0.3)
    if completion == "exit":
        os._exit(7)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "raise":
        raise ValueError("no good")
    if completion == "print":
        print("a line for the log")
        os.write(1, b"raw bytes\\n")
        print(input.__name__, sys.stdin.read() == "")
    if completion == "none":
        return None
    return 1.0

def loaded(completion):
    return not {"torch", "ray", "transformers", "pydantic"} & set(sys.modules)

def moves(completion):
    from rollick.types import Score
    return Score(1.5, turn_rewards=(0.5, 0.25))

def surroundings(cwd, path):
    return os.getcwd() == cwd and path in sys.path
'''


def make_sample(text: str, **row: Any) -> Sample:
    return sample(text, of=prompt(**row))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def make_specs(folder: Path) -> list[RewardSpec]:
    return [RewardSpec(name="act", options={"folder": str(folder)})]


def open_pool(folder: Path, timeout_s: float = LONG_TIMEOUT_S, **changes: Any) -> Any:
    """A pool whose only reward is `act`."""
    settings: dict[str, Any] = {"processes": 1, "timeout_s": timeout_s, "base": folder} | changes
    return RewardPool.open({"act": "mine.py:act"}, **settings)


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


async def wait_for_content(file: Path) -> None:
    """Wait until another process has written the file. pytest's timeout bounds the wait."""
    while not file.exists() or not file.read_text():  # noqa: ASYNC110, ASYNC240 - sets no Event
        await asyncio.sleep(0.001)


def find_children() -> set[int]:
    """Process ids of the live children of this process, from /proc."""
    child_pids: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and state not in "ZX":
            child_pids.add(int(stat.parent.name))
    return child_pids


@pytest.fixture(autouse=True)
def no_leftover_processes(request: pytest.FixtureRequest) -> Any:
    before = find_children()
    yield
    assert wait_until(lambda: find_children() <= before, seconds=5), "a process outlived its pool"


async def test_rewards_by_name_by_file_and_by_value_are_weighted_into_one_score(folder: Path):
    bonus = 0.25
    rewards = {
        "exact_match": "exact_match",
        "length": "mine.py:length",
        "later": "mine.py:later",
        "closure": lambda completion: bonus * len(completion),
        "loaded": "mine.py:loaded",
        "surroundings": "mine.py:surroundings",
    }
    async with RewardPool.open(rewards, processes=1, timeout_s=LONG_TIMEOUT_S, base=folder) as pool:
        score = await pool.score(
            make_sample("4", answer="4"),
            [
                RewardSpec(name="exact_match"),
                RewardSpec(name="length", weight=0.5, options={"scale": 10}),
                RewardSpec(name="length"),
                RewardSpec(name="later"),
                RewardSpec(name="closure", weight=4),
            ],
        )
        imports_score = await pool.score(make_sample("4"), [RewardSpec(name="loaded")])
        row = {"cwd": os.getcwd(), "path": str(Path(__file__).parent)}
        surroundings_score = await pool.score(
            make_sample("4", **row), [RewardSpec(name="surroundings")]
        )
    parts = {"exact_match": 1, "length": 10, "length#2": 1, "later": 1, "closure": 0.25}
    assert dict(score.parts) == parts
    assert score.value == 1 + 5 + 1 + 1 + 1
    assert imports_score.value == 1, "the child imports none of the large libraries"
    assert surroundings_score.value == 1, (
        "the child has the folder and the import path of its parent"
    )


async def test_turn_rewards_are_returned_from_the_child_weighted(folder: Path):
    rewards = {"moves": "mine.py:moves", "length": "mine.py:length"}
    async with RewardPool.open(rewards, processes=1, timeout_s=LONG_TIMEOUT_S, base=folder) as pool:
        score = await pool.score(
            make_sample("abcd"), [RewardSpec(name="moves", weight=2), RewardSpec(name="length")]
        )
    assert (score.value, score.turn_rewards) == (3 + 4, (1.0, 0.5))


async def test_many_callers_each_get_their_own_score_through_two_children(folder: Path):
    rewards = {"length": "mine.py:length"}
    async with RewardPool.open(rewards, processes=2, timeout_s=LONG_TIMEOUT_S, base=folder) as pool:
        specs = [RewardSpec(name="length")]
        texts = ["x" * n for n in range(300)]
        scores = await asyncio.gather(*(pool.score(make_sample(text), specs) for text in texts))
        assert [score.value for score in scores] == list(range(300))
        assert pool.stats.calls == 300
        assert pool.stats.failures == pool.stats.restarts == 0


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("raise", "act: ValueError: no good (mine.py:"),
        ("none", "act: returned None (NoneType)"),
        ("exit", "act: its process died (exit code 7)"),
        ("segfault", "act: its process died (killed by SIGSEGV)"),
    ],
)
async def test_a_failure_is_a_status_and_the_pool_continues(folder: Path, text: str, detail: str):
    async with open_pool(folder) as pool:
        texts = ["fine", "fine", text, "fine", "fine"]
        scores = await asyncio.gather(
            *(pool.score(make_sample(t), make_specs(folder)) for t in texts)
        )
        died = text in ("exit", "segfault")
        assert [score.ok for score in scores] == [True, True, False, True, True]
        assert scores[2].status is ScoreStatus.FAILED
        assert scores[2].detail.startswith(detail)
        assert (pool.stats.calls, pool.stats.failures, pool.stats.restarts) == (5, 1, int(died))


def read_oom_score(completion: str) -> float:
    return float(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))


async def test_the_kernel_kills_a_reward_process_first_if_memory_runs_out():
    rewards = {"preference": read_oom_score}
    async with RewardPool.open(rewards, processes=1, timeout_s=LONG_TIMEOUT_S) as pool:
        score = await pool.score(make_sample("x"), [RewardSpec(name="preference")])
        assert score.value == 1000.0


async def test_an_idle_child_that_dies_fails_no_sample(folder: Path):
    async with open_pool(folder) as pool:
        await pool.score(make_sample("fine"), make_specs(folder))
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        scores = await asyncio.gather(
            *(pool.score(make_sample("x"), make_specs(folder)) for _ in range(3))
        )
        assert all(score.ok for score in scores)
        assert (pool.stats.failures, pool.stats.restarts) == (0, 1)


async def test_a_hanging_call_is_killed_and_fails_no_other_sample(folder: Path):
    async with open_pool(folder, timeout_s=1.0) as pool:
        texts = ["fine", "spin", "fine", "fine"]
        scores = await asyncio.gather(
            *(pool.score(make_sample(t), make_specs(folder)) for t in texts)
        )
        assert [score.ok for score in scores] == [True, False, True, True]
        assert scores[1].status is ScoreStatus.TIMEOUT
        assert scores[1].detail == "act: no result within 1 s; its process was killed"
        stats = pool.stats
        assert (stats.calls, stats.failures, stats.timeouts, stats.restarts) == (4, 1, 1, 1)


async def test_a_hanging_call_failed_when_it_began(folder: Path):
    faults = FaultLog(folder)
    async with open_pool(folder, timeout_s=1.0, faults=faults) as pool:
        await pool.score(make_sample("spin"), make_specs(folder))
    [fault] = faults.faults
    assert fault.detected_at - fault.failed_at >= 1.0


async def test_a_time_out_kills_the_processes_that_the_reward_has_started(folder: Path):
    async with open_pool(folder, timeout_s=2.0) as pool:
        score = await pool.score(make_sample("family"), make_specs(folder))
        assert score.status is ScoreStatus.TIMEOUT
        for name in ("pid", "grandchild"):
            pid = int((folder / name).read_text())
            assert wait_until(lambda pid=pid: not is_alive(pid)), name


async def test_an_event_loop_that_was_blocked_does_not_time_out_a_call_that_is_done(folder: Path):
    async with open_pool(folder, timeout_s=0.9) as pool:
        running_call = asyncio.create_task(pool.score(make_sample("nap"), make_specs(folder)))
        await wait_for_content(folder / "pid")
        time.sleep(1.2)  # noqa: ASYNC251 - the point of the test
        assert (await running_call).ok


async def test_printing_and_reading_in_a_reward_does_not_disturb_the_pipe(folder: Path):
    async with open_pool(folder, output=folder / "log") as pool:
        assert (await pool.score(make_sample("print"), make_specs(folder))).value == 1
    assert (folder / "log").read_text() == "a line for the log\nraw bytes\ninput True\n"


async def test_an_in_process_reward_needs_no_child():
    async def half(sample: Sample) -> Score:
        return Score(0.5)

    before = find_children()
    async with RewardPool.open({}, processes=2, timeout_s=1, in_process={"model": half}) as pool:
        guard = find_children() - before
        score = await pool.score(make_sample("fine"), [RewardSpec(name="model", weight=2.0)])
        cached_score = await pool.score(make_sample("fine"), [RewardSpec(name="model")])
    assert (score.value, score.parts, cached_score.value) == (1.0, {"model": 0.5}, 0.5)
    assert pool.call_counts.take_metrics()["reward/cached/model"] == 1
    assert len(guard) == 1


async def test_leaving_the_pool_kills_a_running_reward_and_its_children(folder: Path):
    async with open_pool(folder) as pool:
        running_call = asyncio.create_task(pool.score(make_sample("family"), make_specs(folder)))
        queued = asyncio.create_task(pool.score(make_sample("fine"), make_specs(folder)))
        await wait_for_content(folder / "grandchild")
    for task in (running_call, queued):
        with pytest.raises(RewardError, match="the reward pool is closed"):
            await task
    pids = [int((folder / name).read_text()) for name in ("pid", "grandchild")]
    assert wait_until(lambda: not any(map(is_alive, pids)))


async def test_leaving_the_pool_ends_processes_that_a_reward_left_in_other_sessions(
    folder: Path,
):
    async with open_pool(folder) as pool:
        assert (await pool.score(make_sample("daemon"), make_specs(folder))).ok
        pid = int((folder / "daemon").read_text())
        assert is_alive(pid)
    assert not is_alive(pid)


async def test_processes_that_a_reward_left_end_with_its_process_when_that_is_replaced(
    folder: Path,
):
    async with open_pool(folder) as pool:
        assert not (await pool.score(make_sample("daemon and exit"), make_specs(folder))).ok
        assert (await pool.score(make_sample("fine"), make_specs(folder))).ok
        assert not is_alive(int((folder / "daemon").read_text()))


async def test_cancelling_the_task_that_holds_the_pool_leaves_nothing(folder: Path):
    started = asyncio.Event()

    async def hold_pool() -> None:
        async with open_pool(folder) as pool:
            started.set()
            await pool.score(make_sample("spin"), make_specs(folder))

    task = asyncio.create_task(hold_pool())
    await started.wait()
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_while_the_pool_opens_leaves_nothing(folder: Path):
    async def hold_pool() -> None:
        async with open_pool(folder, processes=2):
            pass

    task = asyncio.create_task(hold_pool())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_caller_does_not_block_the_others(folder: Path):
    async with open_pool(folder, timeout_s=0.7) as pool:
        spinning = asyncio.create_task(pool.score(make_sample("spin"), make_specs(folder)))
        queued = asyncio.create_task(pool.score(make_sample("raise"), make_specs(folder)))
        await asyncio.sleep(0.05)
        spinning.cancel()
        queued.cancel()
        assert (await pool.score(make_sample("fine"), make_specs(folder))).ok


async def test_an_error_in_the_body_is_raised_unchanged(folder: Path):
    with pytest.raises(KeyError, match="mine"):
        async with open_pool(folder):
            raise KeyError("mine")


def test_reward_processes_die_with_their_parent_even_if_it_is_killed(folder: Path):
    """SIGKILL of the parent while the child is inside C code that holds the interpreter lock."""
    (folder / "explode.py").write_text(
        "import os, re, subprocess\n"
        "def explode(completion, folder):\n"
        "    left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    open(os.path.join(folder, 'left'), 'w').write(str(left.pid))\n"
        "    open(os.path.join(folder, 'pid'), 'w').write(str(os.getpid()))\n"
        "    return bool(re.match('(a+)+$', 'a' * 60 + 'b'))\n"
    )
    (folder / "parent.py").write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from rollick.config.schema import RewardSpec\n"
        "from rollick.rewards.pool import RewardPool\n"
        "from rollick.testing.fakes import sample\n"
        "async def main(folder):\n"
        "    rewards = {'explode': 'explode.py:explode'}\n"
        "    spec = RewardSpec(name='explode', options={'folder': str(folder)})\n"
        "    opened = RewardPool.open(rewards, processes=1, timeout_s=600, base=folder)\n"
        "    async with opened as pool:\n"
        "        await pool.score(sample('x'), [spec])\n"
        "asyncio.run(main(Path(sys.argv[1])))\n"
    )
    parent = subprocess.Popen([sys.executable, folder / "parent.py", folder])
    pid_file = folder / "pid"
    try:
        assert wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()), seconds=60)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    for file in (pid_file, folder / "left"):
        assert wait_until(lambda file=file: not is_alive(int(file.read_text()))), file.name


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"exact_mach": "exact_mach"}, "'exact_mach' is not one of the rewards"),
        ({"f": "nowhere.py:f"}, "nowhere.py does not exist"),
        ({"f": "mine.py:f"}, "mine.py has no 'f'"),
        ({"f": "mine.py:REWARDS"}, "is a int"),
        ({"f": "broken.py:f"}, r"ZeroDivisionError: division by zero \(broken.py:1\)"),
        ({"f": "leaving.py:f"}, r"died while loading f \(exit code 3\)"),
    ],
)
async def test_a_reward_that_cannot_be_loaded_is_an_error_when_the_pool_opens(
    folder: Path, rewards: dict[str, str], message: str
):
    with (folder / "mine.py").open("a") as file:
        file.write("REWARDS = 3\n")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "leaving.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(RewardError, match=message):
        async with RewardPool.open(rewards, processes=1, timeout_s=1, base=folder):
            pass


KILLED_WHILE_LOADING = """
import os, signal
with open(__file__ + ".tries", "a+") as file:
    file.write("x")
    file.seek(0)
    if len(file.read()) <= TIMES:
        os.kill(os.getpid(), signal.SIGKILL)
def f(completion):
    return 0.5
"""


async def test_a_process_that_is_killed_while_it_loads_is_started_again(folder: Path):
    (folder / "killed.py").write_text(KILLED_WHILE_LOADING.replace("TIMES", "2"))
    async with RewardPool.open({"f": "killed.py:f"}, processes=1, timeout_s=9, base=folder) as pool:
        score = await pool.score(sample(), [RewardSpec(name="f")])
    assert score.value == 0.5


async def test_a_process_that_is_always_killed_while_it_loads_is_no_mistake_of_the_reward(
    folder: Path,
):
    (folder / "killed.py").write_text(KILLED_WHILE_LOADING.replace("TIMES", "9"))
    with pytest.raises(WorkerLost, match=r"died while loading f \(killed by SIGKILL"):
        async with RewardPool.open({"f": "killed.py:f"}, processes=1, timeout_s=9, base=folder):
            pass


async def test_a_function_that_cannot_be_pickled_raises_with_the_reason():
    lock = threading.Lock()

    def locked(completion: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(RewardError, match="'locked' cannot be sent to another process"):
        async with RewardPool.open({"locked": locked}, processes=1, timeout_s=1):
            pass


async def test_scoring_without_a_known_reward_raises(folder: Path):
    async with open_pool(folder) as pool:
        with pytest.raises(RewardError, match="has no reward"):
            await pool.score(make_sample("4"), [])
        with pytest.raises(RewardError, match="'length' was not given to the pool"):
            await pool.score(make_sample("4"), [RewardSpec(name="length")])


async def test_a_row_without_the_column_fails_its_sample_only(folder: Path):
    rewards = {"exact_match": "exact_match"}
    async with RewardPool.open(rewards, processes=1, timeout_s=LONG_TIMEOUT_S) as pool:
        specs = [RewardSpec(name="exact_match")]
        bad, good = await asyncio.gather(
            pool.score(make_sample("4"), specs), pool.score(make_sample("4", answer=4), specs)
        )
    assert "exact_match needs the argument 'answer'" in bad.detail
    assert good.value == 1


async def test_a_row_that_cannot_be_pickled_fails_its_sample_only(folder: Path):
    async with open_pool(folder) as pool:
        row = {"lock": threading.Lock()}
        score: Score = await pool.score(make_sample("fine", **row), make_specs(folder))
        assert "cannot be sent to a reward process" in score.detail
        assert pool.stats == RewardPoolStats(calls=1, failures=1)


async def test_a_reward_that_can_no_longer_be_loaded_stops_the_pool_with_that_error(folder: Path):
    async with open_pool(folder) as pool:
        (folder / "mine.py").unlink()
        queued = asyncio.create_task(pool.score(make_sample("exit"), make_specs(folder)))
        with pytest.raises(RewardError, match=r"mine.py does not exist"):
            await asyncio.gather(queued, pool.score(make_sample("fine"), make_specs(folder)))
        with pytest.raises(RewardError, match=r"mine.py does not exist"):
            await pool.score(make_sample("fine"), make_specs(folder))
