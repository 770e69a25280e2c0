"""A run's checkpoints: complete or absent, verified before use, and never lost to a later save."""

import errno
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rollick.checkpoint import TIE_BREAK, Checkpoint, CheckpointStore
from rollick.errors import CheckpointError
from rollick.run_folder import run_lock

POINTS = ("created", "written", "synced", "manifest", "renamed", "verified")


def make_writer(text: str):
    def write(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(text.encode() * 100)
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "moments.bin").write_text(text)

    return write


def make_store(folder: Path, *, keep_last: int = 3, keep_best: int = 0) -> CheckpointStore:
    return CheckpointStore(folder, keep_last=keep_last, keep_best=keep_best)


def save(store: CheckpointStore, step: int, score: float | None = None) -> Path:
    return store.save(step, make_writer(f"w{step}"), meta={"version": step}, score=score)


def folder_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def load_newest(store: CheckpointStore) -> Checkpoint:
    checkpoint = store.latest()
    assert checkpoint is not None
    return checkpoint


def test_a_saved_checkpoint_is_loaded_with_its_files_meta_and_score(tmp_path: Path):
    store = make_store(tmp_path / "new")
    path = store.save(12, make_writer("a"), meta={"ledger": [1, 2], 3: "x"}, score=0.5)
    assert path == tmp_path / "new" / "step-000012"
    assert load_newest(store) == Checkpoint(path, 12, {"ledger": [1, 2], "3": "x"}, 0.5)
    assert (path / "optimizer" / "moments.bin").read_text() == "a"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["weights.bin"]["bytes"] == 100
    assert sorted(manifest["files"]) == ["optimizer/moments.bin", "weights.bin"]


def test_a_folder_without_checkpoints_has_no_latest_and_is_not_created(tmp_path: Path):
    store = make_store(tmp_path / "none")
    assert store.latest() is None
    assert store.best() is None
    assert not (tmp_path / "none").exists()


def test_steps_are_ordered_as_numbers_beyond_six_digits(tmp_path: Path):
    store = make_store(tmp_path)
    save(store, 999_999)
    save(store, 1_000_000)
    assert load_newest(store).step == 1_000_000


def test_the_last_and_the_best_are_kept_and_the_others_deleted(tmp_path: Path):
    store = make_store(tmp_path, keep_last=2, keep_best=1)
    for step, score in [(1, 0.1), (2, 0.9), (3, 0.3), (4, None), (5, 0.2)]:
        save(store, step, score)
    assert folder_names(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    best = store.best()
    assert best is not None
    assert (best.step, best.score) == (2, 0.9)


def test_of_equal_scores_the_higher_tie_break_is_best(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=3, keep_best=1)
    for step, tie_break in [(1, 0.2), (2, 0.4), (3, 0.3), (4, "junk"), (5, float("nan"))]:
        store.save(step, make_writer("w"), meta={TIE_BREAK: tie_break}, score=0.0)
    assert store.best_step() == 2
    store.save(6, make_writer("w"), meta={TIE_BREAK: 0.1}, score=0.5)
    assert store.best_step() == 6


def test_the_newer_of_equal_scores_is_best_and_a_score_that_is_not_finite_is_none(tmp_path: Path):
    store = make_store(tmp_path)
    for step, score in [(1, 0.5), (2, 0.5), (3, float("nan"))]:
        save(store, step, score)
    best = store.best()
    assert best is not None
    assert best.step == 2
    assert load_newest(store).score is None


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "weights.bin was changed after it was saved": lambda p: flip_a_byte(p / "weights.bin"),
    "weights.bin has 7 bytes, but 200 were saved": lambda p: os.truncate(p / "weights.bin", 7),
    "optimizer/moments.bin is missing": lambda p: (p / "optimizer" / "moments.bin").unlink(),
    "manifest.json is missing": lambda p: (p / "manifest.json").unlink(),
    "manifest.json cannot be read": lambda p: os.truncate(p / "manifest.json", 20),
    "manifest.json was changed": lambda p: (p / "manifest.json").write_text(
        (p / "manifest.json").read_text().replace('"version": 2', '"version": 7')
    ),
}


@pytest.mark.parametrize("problem", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_taken(
    tmp_path: Path, problem: str, caplog: pytest.LogCaptureFixture
):
    store = make_store(tmp_path)
    save(store, 1)
    DAMAGES[problem](save(store, 2))
    with caplog.at_level(logging.WARNING):
        assert load_newest(store).step == 1
    assert len(store.problems) == 1
    assert store.problems[0].startswith(f"step-000002 is damaged: {problem}")
    assert problem in caplog.text


def test_any_flipped_bit_of_a_manifest_is_found(tmp_path: Path):
    store = make_store(tmp_path)
    path = save(store, 1) / "manifest.json"
    original = path.read_bytes()
    for index in range(0, len(original), 7):
        path.write_bytes(original[:index] + bytes([original[index] ^ 1]) + original[index + 1 :])
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
            make_store(tmp_path).latest()


def test_when_no_checkpoint_is_intact_the_run_stops_and_does_not_start_over(tmp_path: Path):
    store = make_store(tmp_path)
    for step in (1, 2):
        flip_a_byte(save(store, step) / "weights.bin")
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints.*step-000002.*step-000001"
    ):
        store.latest()


def test_a_manifest_that_names_files_outside_its_folder_is_refused(tmp_path: Path):
    from rollick import checkpoint

    path = save(make_store(tmp_path), 1) / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["files"]["../../secret"] = {"bytes": 1, "blake2b": ""}
    digest = checkpoint._compute_digest(content)  # pyright: ignore[reportPrivateUsage]
    path.write_text(json.dumps({**content, "digest": digest}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        make_store(tmp_path).latest()


def test_a_damaged_newer_checkpoint_neither_pushes_out_good_ones_nor_is_deleted(tmp_path: Path):
    store = make_store(tmp_path, keep_last=1)
    os.truncate(save(store, 12) / "weights.bin", 3)
    save(store, 10)
    save(store, 11)
    assert folder_names(tmp_path) == ["step-000011", "step-000012"]
    assert load_newest(store).step == 11


def test_what_was_just_saved_is_kept_also_beside_newer_steps(tmp_path: Path):
    store = make_store(tmp_path, keep_last=1)
    save(store, 10)
    save(store, 6)
    assert folder_names(tmp_path) == ["step-000006", "step-000010"]


def test_a_step_that_is_saved_again_replaces_the_one_before(tmp_path: Path):
    store = make_store(tmp_path)
    save(store, 3)
    store.save(3, make_writer("again"), meta={})
    assert (load_newest(store).path / "optimizer" / "moments.bin").read_text() == "again"
    assert folder_names(tmp_path) == ["step-000003"]


def fill_the_disk(folder: Path) -> None:
    (folder / "half.bin").write_text("half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_the_disk_and_say_it_otherwise(folder: Path) -> None:
    """Raise the error of another library for a full disk."""
    error = "Error while serializing: I/O error: No space left on device (os error 28)"
    raise RuntimeError(f"{error}\nTraceback of the worker:\n  File ...")


@pytest.mark.parametrize("write", [fill_the_disk, fill_the_disk_and_say_it_otherwise])
def test_a_full_disk_leaves_the_older_checkpoints_and_no_temporary(tmp_path: Path, write):
    store = make_store(tmp_path, keep_last=1)
    save(store, 1)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match=f"step {step} was not saved.*No space") as caught:
            store.save(step, write, meta={})
        assert "Traceback" not in str(caught.value)
        assert folder_names(tmp_path) == ["step-000001"]
        assert (load_newest(store).path / "optimizer" / "moments.bin").read_text() == "w1"
    save(store, 2)
    assert load_newest(store).step == 2


def test_an_error_of_the_writer_is_raised_unchanged_and_leaves_no_temporary(tmp_path: Path):
    def write(folder: Path) -> None:
        raise ZeroDivisionError

    store = make_store(tmp_path)
    with pytest.raises(ZeroDivisionError):
        store.save(1, write, meta={})
    assert folder_names(tmp_path) == []


def test_a_meta_that_is_not_json_fails_before_anything_is_written(tmp_path: Path):
    calls: list[Path] = []
    with pytest.raises(TypeError, match="not JSON serializable"):
        make_store(tmp_path).save(1, calls.append, meta={"x": object()})
    assert calls == []


def test_a_checkpoint_that_does_not_read_back_deletes_nothing(tmp_path: Path):
    def damage(point: str) -> None:
        if point == "renamed":
            flip_a_byte(tmp_path / "step-000002" / "weights.bin")

    save(make_store(tmp_path), 1)
    save(make_store(tmp_path), 2)
    store = make_store(tmp_path, keep_last=1)
    store._at_point = damage
    with pytest.raises(CheckpointError, match=r"written: weights\.bin was changed"):
        store.save(2, make_writer("again"), meta={})
    assert folder_names(tmp_path) == ["step-000001", "step-000002"]
    assert (
        load_newest(make_store(tmp_path)).path / "optimizer" / "moments.bin"
    ).read_text() == "w2"


def test_files_that_are_written_become_a_checkpoint_when_it_is_finished(tmp_path: Path):
    save(make_store(tmp_path), 1)
    store = make_store(tmp_path)
    finish = store.begin(2, make_writer("new"), meta={})
    assert load_newest(store).step == 1
    with pytest.raises(CheckpointError, match="another process is saving"):
        save(make_store(tmp_path), 3)
    assert finish() == tmp_path / "step-000002"
    assert load_newest(store).step == 2
    save(make_store(tmp_path), 3)


KILLED_SAVE = """
import os, signal, sys
from pathlib import Path
from rollick.checkpoint import CheckpointStore

folder, step, death = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def at_point(point):
    if point == death:
        os.kill(os.getpid(), signal.SIGKILL)

def write(path):
    (path / "weights.bin").write_bytes(b"new" * 100)
    at_point("in_write")
    (path / "optimizer").mkdir()
    (path / "optimizer" / "moments.bin").write_text("new")

store = CheckpointStore(folder, keep_last=1, keep_best=0)
store._at_point = at_point
store.save(step, write, meta={"version": step})
"""


def save_and_be_killed(folder: Path, step: int, point: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", KILLED_SAVE, str(folder), str(step), point], check=False
    )
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("point", [*POINTS, "in_write"])
def test_a_kill_at_any_point_of_a_save_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, point: str
):
    save(make_store(tmp_path), 1)
    save_and_be_killed(tmp_path, 2, point)
    store = make_store(tmp_path)
    assert not [name for name in folder_names(tmp_path) if name.startswith(".")]
    assert load_newest(store).step == (2 if point in ("renamed", "verified") else 1)
    assert store.problems == []
    save(store, 2)
    assert load_newest(store).meta == {"version": 2}


@pytest.mark.parametrize("point", ["manifest", "moved_old", "renamed", "verified"])
def test_a_kill_while_a_step_is_replaced_leaves_one_of_the_two(tmp_path: Path, point: str):
    save(make_store(tmp_path), 2)
    save_and_be_killed(tmp_path, 2, point)
    text = (load_newest(make_store(tmp_path)).path / "optimizer" / "moments.bin").read_text()
    assert text == ("new" if point in ("renamed", "verified") else "w2")
    assert folder_names(tmp_path) == ["step-000002"]


def test_opening_the_folder_while_another_process_saves_keeps_its_temporary_folder(tmp_path: Path):
    seen: list[list[str]] = []

    def check_folder(folder: Path) -> None:
        reader = make_store(tmp_path)
        assert load_newest(reader).step == 1
        seen.append(folder_names(tmp_path))
        (folder / "weights.bin").write_text("x")

    save(make_store(tmp_path), 1)
    make_store(tmp_path).save(2, check_folder, meta={})
    assert seen == [[".tmp-step-000002", "step-000001"]]
    assert load_newest(make_store(tmp_path)).step == 2


def test_two_saves_at_once_in_one_folder_are_refused(tmp_path: Path):
    def save_inside(folder: Path) -> None:
        save(make_store(tmp_path), 3)

    with pytest.raises(CheckpointError, match="another process is saving"):
        make_store(tmp_path).save(2, save_inside, meta={})


def test_a_second_run_in_one_folder_is_refused_by_the_pid_of_the_first(tmp_path: Path):
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from rollick.run_folder import run_lock
        with run_lock(Path(sys.argv[1])):
            sys.stdout.write("locked\\n"); sys.stdout.flush()
            sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other_run:
        assert other_run.stdout is not None
        assert other_run.stdout.readline() == b"locked\n"
        with pytest.raises(
            CheckpointError, match=f"in use by another run .process {other_run.pid} on"
        ):
            run_lock(tmp_path).__enter__()
        other_run.kill()
    with run_lock(tmp_path):
        pass


def test_a_lock_is_free_again_after_its_run_and_not_before(tmp_path: Path):
    refused = pytest.raises(CheckpointError, match=f"process {os.getpid()}")
    with run_lock(tmp_path / "run"), refused:
        run_lock(tmp_path / "run").__enter__()
    with run_lock(tmp_path / "run"):
        pass


def rewrite_manifest(path: Path, **changes: object) -> None:
    """Change the manifest and its digest, which guards against damage, not against intent."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["digest"]
    content = {key: value for key, value in (manifest | changes).items() if value != "absent"}
    text = json.dumps(content, sort_keys=True).encode()
    digest = hashlib.blake2b(text, digest_size=32).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**content, "digest": digest}))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["weights.bin", "manifest.json"])
def test_a_file_that_is_a_link_to_a_device_is_damage(tmp_path: Path, name: str):
    path = save(make_store(tmp_path), 1)
    rewrite_manifest(path, files={"weights.bin": {"bytes": 0, "blake2b": "0"}})
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        make_store(tmp_path).latest()


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "one"},
        {"step": "absent"},
        {"meta": "absent"},
        {"files": ["weights.bin"]},
        {"files": {"weights.bin": 3}},
        {"files": {"weights.bin": {}}},
        {"score": [1]},
    ],
)
def test_a_manifest_with_other_contents_is_damage(tmp_path: Path, changes: dict[str, object]):
    path = save(make_store(tmp_path), 1)
    rewrite_manifest(path, **changes)
    with pytest.raises(CheckpointError, match="is not the manifest of a checkpoint"):
        make_store(tmp_path).latest()


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "[" * 100_000, '{"digest": 3}', "\0"])
def test_a_manifest_that_is_not_one_is_damage(tmp_path: Path, text: str):
    path = save(make_store(tmp_path), 1)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        make_store(tmp_path).latest()


def test_a_manifest_that_names_an_impossible_file_is_damage(tmp_path: Path):
    path = save(make_store(tmp_path), 1)
    rewrite_manifest(path, files={"a\0b": {"bytes": 1, "blake2b": "0"}})
    with pytest.raises(CheckpointError, match="cannot be read"):
        make_store(tmp_path).latest()
