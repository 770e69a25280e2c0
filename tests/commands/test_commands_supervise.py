"""`rollick train --restarts`: when a run restarts, its checkpoint, and the cleanup before it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollick.children.process_tree import find_descendants, is_running
from rollick.commands.supervise import STOPPED_S, RestartBudget, last_logged_step
from rollick.observe.faults import read_faults

SUPERVISOR = """
import logging, sys
from pathlib import Path
from rollick.children import process_tree
from rollick.commands import supervise

logging.basicConfig(format="%(message)s")
supervise.FIRST_DELAY_S = float(sys.argv[3])
folder = supervise.SHARED_MEMORY = Path(sys.argv[1])
process_tree.VMSTAT = folder / "vmstat"
def command(resume):
    return [sys.executable, "-I", str(folder / "child.py"), "resume" if resume else "new"]
standby = supervise.Standby(lambda: [*command(True), "wait"]) if "standby" in sys.argv else None
runs = supervise.RunSupervisor(command, folder, restarts=int(sys.argv[2]), standby=standby)
sys.exit(runs.run(resume="resume" in sys.argv))
"""

CHILD = """
import json, os, signal, subprocess, sys, time
sys.path[:0] = PATHS
folder = os.path.dirname(os.path.abspath(__file__))
os.chdir(folder)
plan = json.load(open("plan.json"))
if sys.argv[2:] == ["wait"]:
    open("standby.txt", "a").write(f"{os.getpid()} ")
    if os.path.exists("no_standby") or not sys.stdin.readline():
        sys.exit(1)
    sys.argv[1] = "standby"
attempts = open("attempts.txt").read().split() if os.path.exists("attempts.txt") else []
open("attempts.txt", "a").write(sys.argv[1] + "\\n")
open("recipe.yaml", "a").close()
action = plan[min(len(attempts), len(plan) - 1)]
def saved(step):
    from rollick.checkpoint import CheckpointStore
    from pathlib import Path
    CheckpointStore(Path("checkpoints"), keep_last=9, keep_best=0).save(
        step, lambda path: (path / "weights").write_text(str(step)), meta={})
if "handle" in action:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(action["handle"]))
if "kills" in action:
    open("vmstat", "w").write(f"nr_free_pages 5\\noom_kill {action['kills']}\\n")
if "share" in action:
    os.makedirs("rollick-snapshots-1", exist_ok=True)
    open("rollick-snapshots-1/lock", "w").close()
if "leave" in action:
    # A grandchild in a session of its own, whose parent is gone: only a subreaper finds it.
    script = "import time; time.sleep(600)"
    sleeper = f"[sys.executable, '-I', '-S', '-c', {script!r}]"
    options = "start_new_session=True, stdout=-3, stderr=-3"
    fork = f"import subprocess, sys; print(subprocess.Popen({sleeper}, {options}).pid)"
    pid = subprocess.run([sys.executable, "-I", "-c", fork], capture_output=True, text=True).stdout
    open("left.txt", "a").write(pid)
if "save" in action:
    saved(action["save"])
for row in action.get("time", []):
    with open("goodput.jsonl", "a") as file:
        file.write(json.dumps({"at": 0, **row}) + "\\n")
for row in action.get("faults", []):
    with open("faults.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")
for step in action.get("log", []):
    with open("metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step}) + "\\n")
while "until" in action and not os.path.exists(action["until"]):
    time.sleep(0.02)
open("ready.txt", "a").write("x")
if "signal" in action:
    os.kill(os.getpid(), action["signal"])
if "wait" in action:
    time.sleep(600)
sys.exit(action.get("exit", 0))
"""


def start_supervisor(
    folder: Path,
    *plan: dict[str, Any],
    restarts: int = 3,
    delay_s: float = 0.01,
    standby: bool = False,
    resume: bool = False,
) -> Any:
    paths = [path for path in sys.path if path]
    (folder / "child.py").write_text(CHILD.replace("PATHS", repr(paths)))
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-c", SUPERVISOR, str(folder), str(restarts), str(delay_s)]
    command += ["standby"] * standby + ["resume"] * resume
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def run_supervisor(folder: Path, *plan: dict[str, Any], **options: Any) -> tuple[int, str]:
    """Exit code and messages of a supervisor; each start of its run takes an action of `plan`."""
    with start_supervisor(folder, *plan, **options) as process:
        _, messages = process.communicate(timeout=60)
    return process.returncode, messages


def read_attempts(folder: Path) -> list[str]:
    return (folder / "attempts.txt").read_text().split()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, 2, 75])
def test_a_run_that_ended_for_good_is_not_started_again(tmp_path: Path, code: int) -> None:
    assert run_supervisor(tmp_path, {"exit": code})[0] == code
    assert read_attempts(tmp_path) == ["new"]
    assert read_faults(tmp_path) == []


@pytest.mark.parametrize(
    ("crash", "cause", "kind"),
    [
        ({"exit": 69}, "exit code 69", "raised"),
        ({"exit": 1}, "exit code 1", "raised"),
        ({"signal": signal.SIGKILL}, "killed by SIGKILL", "killed"),
        ({"signal": signal.SIGSEGV}, "killed by SIGSEGV", "killed"),
        ({"signal": signal.SIGTERM}, "killed by SIGTERM", "killed"),  # Not sent by us.
        ({"signal": signal.SIGSTOP}, "stopped by a signal, so it was killed", "hung"),
    ],
)
def test_a_crash_resumes_from_the_newest_checkpoint_and_is_recorded(
    tmp_path: Path, crash: dict[str, int], cause: str, kind: str
) -> None:
    first = {"save": 2, "log": [1, 2, 3], **crash}
    code, messages = run_supervisor(tmp_path, first, {"log": [3, 4], "exit": 0})
    assert code == 0
    assert read_attempts(tmp_path) == ["new", "resume"]
    expected = f"the run crashed: {cause}, after step 3; restart 1 of 3 now, from the checkpoint "
    assert expected + "of step 2" in messages
    (fault,) = read_faults(tmp_path)
    assert (fault.role, fault.rank, fault.kind, fault.cause, fault.step) == (
        "controller", 0, kind, cause, 3,
    )  # fmt: skip
    assert fault.restarted_at is not None
    assert fault.rejoined_at is not None
    assert fault.detected_at <= fault.restarted_at <= fault.rejoined_at
    noticed_after_s = fault.detected_at - fault.failed_at
    assert noticed_after_s >= STOPPED_S if kind == "hung" else noticed_after_s > 0
    assert fault.redone_steps == 1


def test_a_crash_costs_the_time_until_the_next_step_and_the_lost_steps(tmp_path: Path) -> None:
    steps = [{"step": step, "seconds": {"train": 10, "recover": 1}} for step in (1, 2, 3)]
    opened = {"event": "opened", "seconds": {"recover": 5, "redo": 3}}
    resumed = [opened, {"step": 2, "event": "restored"}]
    first = {"save": 2, "log": [1, 2, 3], "time": steps, "signal": 9}
    run_supervisor(tmp_path, first, {"time": resumed, "log": [3, 4], "exit": 0})
    (fault,) = read_faults(tmp_path)
    assert (fault.recover_s, fault.redo_s, fault.redone_steps) == (5, 3 + 10, 1)


def make_fault_row(number: int, *, at: float, **lost_s: float) -> dict[str, Any]:
    """A row of faults.jsonl: a learner that was repaired, and the time that it cost."""
    fields = {"id": f"f-{number}", "role": "policy", "rank": 0, "kind": "killed", "cause": ""}
    return {**fields, "step": 1, "failed_at": at, "detected_at": at, "rejoined_at": at, **lost_s}


def test_time_that_another_fault_cost_is_not_counted_for_the_crash_again(tmp_path: Path) -> None:
    now = time.time()
    first = {
        "save": 1,
        "log": [1],
        "time": [{"at": now - 100, "step": 1, "seconds": {"train": 10, "recover": 4}}],
        "faults": [
            make_fault_row(0, at=now - 110, recover_s=4),  # In the row of step 1.
            make_fault_row(1, at=now - 50, recover_s=20, redo_s=2),  # After that row: in no row.
        ],
        "signal": 9,
    }
    opened = {"at": now + 900, "event": "opened", "seconds": {"redo": 100, "recover": 30}}
    step = {"at": now + 1000, "step": 2, "seconds": {"train": 5, "recover": 7, "redo": 3}}
    later = [
        make_fault_row(2, at=now + 950, recover_s=7, redo_s=3),
        make_fault_row(3, at=now + 1100, recover_s=9),  # Not in a row yet.
    ]
    run_supervisor(
        tmp_path, first, {"time": [opened, step], "faults": later, "log": [2], "exit": 0}
    )
    [crash] = [fault for fault in read_faults(tmp_path) if fault.role == "controller"]
    assert (crash.recover_s, crash.redo_s) == (30, 100 - 22)


def test_crashes_before_a_step_have_a_cost_each(tmp_path: Path) -> None:
    def opened(recover_s: float) -> dict[str, Any]:
        return {"event": "opened", "seconds": {"recover": recover_s}}

    crash = {"save": 1, "log": [1], "signal": 9}
    again = {"time": [opened(5)], "signal": 9}
    run_supervisor(tmp_path, crash, again, {"time": [opened(7)], "log": [2], "exit": 0})
    first, second = read_faults(tmp_path)
    assert first.gave_up == "the restarted run ended before a step: killed by SIGKILL"
    assert (first.recover_s, second.recover_s) == (5, 7)


def test_a_run_that_was_killed_for_lack_of_memory_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("oom_kill 3\n")
    code, messages = run_supervisor(tmp_path, {"kills": 4, "signal": 9}, {"exit": 0})
    assert code == 0
    assert "the run crashed: killed by SIGKILL, probably out of memory" in messages


def test_a_crash_before_the_first_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    code, messages = run_supervisor(tmp_path, {"exit": 69}, {"exit": 0})
    assert code == 0
    assert "from the beginning" in messages


def test_a_damaged_newest_checkpoint_is_not_named_as_the_one_to_resume_from(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints" / "step-000009").mkdir(parents=True)
    _, messages = run_supervisor(tmp_path, {"save": 4, "exit": 69}, {"exit": 0})
    assert "from the checkpoint of step 4" in messages


@pytest.mark.parametrize(("crash", "code"), [({"exit": 69}, 69), ({"signal": 9}, 137)])
def test_restarts_without_a_new_checkpoint_end_when_the_budget_is_spent(
    tmp_path: Path, crash: dict[str, int], code: int
) -> None:
    exit_code, messages = run_supervisor(tmp_path, {"save": 1, **crash}, crash, restarts=2)
    assert exit_code == code
    assert read_attempts(tmp_path) == ["new", "resume", "resume"]
    assert "giving up: 2 restarts in a row made no new checkpoint" in messages
    gave_up = [fault.gave_up for fault in read_faults(tmp_path)]
    assert gave_up[-1] == "2 restarts in a row made no new checkpoint"
    assert len(gave_up) == 3


def test_a_restart_that_finds_a_mistake_ends_with_its_code(tmp_path: Path) -> None:
    assert run_supervisor(tmp_path, {"signal": 9}, {"exit": 2})[0] == 2
    assert read_attempts(tmp_path) == ["new", "resume"]


def test_each_new_checkpoint_refills_the_budget(tmp_path: Path) -> None:
    crashes = [{"save": step, "signal": 9} for step in (1, 2, 3, 4)]
    assert run_supervisor(tmp_path, *crashes, {"exit": 0}, restarts=1)[0] == 0
    assert len(read_attempts(tmp_path)) == 5


def test_delays_double_up_to_a_minute_and_start_again_after_progress() -> None:
    budget = RestartBudget(limit=9)
    assert [budget.take(3) for _ in range(10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, None]
    assert budget.take(4) == 0
    assert budget.take(4) == 1


def test_a_run_without_checkpoints_has_a_budget_too() -> None:
    budget = RestartBudget(limit=1)
    assert [budget.take(None), budget.take(None)] == [0, None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_code_of_the_run_is_returned(
    tmp_path: Path, number: signal.Signals
) -> None:
    with start_supervisor(tmp_path, {"handle": 75, "wait": True}) as process:
        wait_until((tmp_path / "ready.txt").exists)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 75
    assert read_attempts(tmp_path) == ["new"]


def test_a_run_that_dies_of_the_signal_is_not_started_again(tmp_path: Path) -> None:
    with start_supervisor(tmp_path, {"wait": True}) as process:
        wait_until((tmp_path / "ready.txt").exists)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 75
    assert read_attempts(tmp_path) == ["new"]


def test_a_signal_during_the_delay_ends_the_supervisor(tmp_path: Path) -> None:
    with start_supervisor(tmp_path, {"exit": 69}, delay_s=600) as process:
        wait_until(lambda: len(read_faults(tmp_path)) == 2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 75
    assert len(read_attempts(tmp_path)) == 2


@pytest.mark.parametrize("ending", [{"exit": 0}, {"signal": 9}])
def test_orphans_of_the_run_are_gone_before_it_is_started_again(
    tmp_path: Path, ending: dict[str, int]
) -> None:
    leave = {"leave": True, **ending}
    assert run_supervisor(tmp_path, leave, leave, {"exit": 0})[0] == 0
    orphans = [int(pid) for pid in (tmp_path / "left.txt").read_text().split()]
    assert len(orphans) == (2 if "signal" in ending else 1)
    assert [pid for pid in orphans if Path(f"/proc/{pid}").exists()] == []


def test_shared_memory_of_a_killed_run_is_freed_and_that_of_others_is_not(tmp_path: Path) -> None:
    (tmp_path / "rollick-snapshots-2").mkdir()
    with (tmp_path / "rollick-snapshots-2" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_supervisor(tmp_path, {"share": True, "signal": 9}, {"exit": 0})[0] == 0
        assert [path.name for path in tmp_path.glob("rollick-*")] == ["rollick-snapshots-2"]


def test_a_run_whose_supervisor_was_killed_gets_a_signal_to_save(tmp_path: Path) -> None:
    with start_supervisor(tmp_path, {"handle": 75, "wait": True}) as process:
        wait_until((tmp_path / "ready.txt").exists)
        (run,) = find_descendants(process.pid)
        process.kill()
        process.communicate(timeout=60)
        wait_until(lambda: not is_running(run))


PROGRESS = {"save": 1, "log": [1]}


def read_standby_pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "standby.txt").read_text().split()]


def test_a_standby_resumes_a_crashed_run_and_the_next_one_ends_with_it(tmp_path: Path) -> None:
    first = {**PROGRESS, "until": "standby.txt", "signal": 9}
    again = {"save": 2, "log": [2], "until": "standby.txt", "leave": True}
    code, messages = run_supervisor(tmp_path, first, again, standby=True)
    assert code == 0, messages
    assert read_attempts(tmp_path) == ["new", "standby"]
    assert [pid for pid in read_standby_pids(tmp_path) if Path(f"/proc/{pid}").exists()] == []
    assert [fault.rejoined_at is None for fault in read_faults(tmp_path)] == [False]


def test_without_progress_there_is_no_standby(tmp_path: Path) -> None:
    assert run_supervisor(tmp_path, {"signal": 9}, {"exit": 0}, standby=True)[0] == 0
    assert read_attempts(tmp_path) == ["new", "resume"]
    assert not (tmp_path / "standby.txt").exists()


def test_a_resumed_run_has_no_standby_before_its_first_step(tmp_path: Path) -> None:
    assert run_supervisor(tmp_path, {"save": 3, "log": [1, 2, 3], "exit": 75})[0] == 75
    for name in ("attempts.txt", "ready.txt"):
        (tmp_path / name).unlink()
    # A resumed run writes the rows of the earlier steps again.
    with start_supervisor(
        tmp_path, {"log": [3], "wait": True}, standby=True, resume=True
    ) as process:
        wait_until((tmp_path / "ready.txt").exists)
        time.sleep(2)  # Two polls of the supervisor.
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert read_attempts(tmp_path) == ["resume"]
    assert not (tmp_path / "standby.txt").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_that_does_not_work_is_not_used(tmp_path: Path, number: int) -> None:
    first = {**PROGRESS, "until": "go", "signal": 9}
    with start_supervisor(tmp_path, first, {"exit": 0}, standby=True) as process:
        wait_until(lambda: (tmp_path / "standby.txt").exists() and read_standby_pids(tmp_path))
        os.kill(read_standby_pids(tmp_path)[0], number)
        time.sleep(0.05)  # Until the signal has had its effect.
        (tmp_path / "go").touch()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert read_attempts(tmp_path) == ["new", "resume"]


def test_a_standby_that_ends_by_itself_is_not_started_for_ever(tmp_path: Path) -> None:
    (tmp_path / "no_standby").touch()
    with start_supervisor(tmp_path, {**PROGRESS, "wait": True}, standby=True) as process:
        wait_until((tmp_path / "standby.txt").exists)
        time.sleep(2.5)  # Two more polls of the supervisor.
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=60)
    assert len(read_standby_pids(tmp_path)) == 1
    assert "the standby process ended unexpectedly" in messages


def test_a_standby_whose_supervisor_was_killed_ends(tmp_path: Path) -> None:
    with start_supervisor(tmp_path, {**PROGRESS, "wait": True}, standby=True) as process:
        wait_until(lambda: (tmp_path / "standby.txt").exists() and read_standby_pids(tmp_path))
        (standby,) = [
            descendant
            for descendant in find_descendants()
            if descendant.pid == read_standby_pids(tmp_path)[0]
        ]
        process.kill()
        process.communicate(timeout=60)
        wait_until(lambda: not is_running(standby))


def test_a_supervisor_loads_no_torch_and_is_small() -> None:
    code = """
import re, sys
import rollick.commands.supervise
megabytes = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
print(sorted({"torch", "ray", "transformers", "pyarrow"} & {*sys.modules}), megabytes < 120)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "[] True\n"


def test_the_last_step_is_that_of_the_last_complete_row(tmp_path: Path) -> None:
    assert last_logged_step(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert last_logged_step(tmp_path) == 2
