"""Checkpoints of a run: saved atomically, verified before use, pruned after verification.

    begin:  .tmp-step-000012/ <- write()
    finish: hashes, fsync, manifest.json, fsync -> rename -> step-000012/
            then the new one is read back and verified, and only then are old ones deleted
    latest: newest step-* with a correct manifest, sizes and hashes; reports damaged ones

A kill at any point leaves step N-1 or step N as the newest loadable checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Any, cast

from rollick.errors import CheckpointError, DiskError, open_files_exhausted

JSON = Any
Writer = Callable[[Path], None]
Finish = Callable[[], Path]
"""Commits the written files as a checkpoint and returns its folder. Must be called once."""

MANIFEST = "manifest.json"
STEP_FOLDER = re.compile(r"^step-(\d{6,})$")
UNFINISHED_PREFIX = ".tmp-"
REPLACED_PREFIX = ".old-"
SAVE_LOCK = ".save.lock"
TIE_BREAK = "tie_break"
"""Key of `meta`: a number that orders checkpoints with equal scores."""
NEARLY_FULL_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 64 << 20

log = logging.getLogger("rollick")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: its folder, and the metadata of its save."""

    path: Path
    step: int
    meta: Mapping[str, JSON]
    score: float | None


class _Damaged(Exception):
    """A checkpoint folder is damaged; the message says how."""


class CheckpointStore:
    """The checkpoints in one folder. Opening it removes the leftovers of killed saves. `problems`
    describes the damaged checkpoints found so far."""

    def __init__(self, folder: Path, *, keep_last: int, keep_best: int) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._clean()

    def save(
        self, step: int, write: Writer, *, meta: Mapping[str, JSON], score: float | None = None
    ) -> Path:
        """Write and commit a checkpoint: calls `begin`, then the function that it returns."""
        return self.begin(step, write, meta=meta, score=score)()

    def begin(
        self, step: int, write: Writer, *, meta: Mapping[str, JSON], score: float | None = None
    ) -> Finish:
        """Write the files of a checkpoint: `write` gets the folder for them. The returned function
        commits them. It hashes all files, which takes a while; training may continue meanwhile.

        On failure (such as a full disk) the older checkpoints stay. A higher score is better; one
        that is not finite counts as none.
        """
        finite = score if score is not None and isfinite(score) else None
        # Raises early if meta is not JSON; its keys become strings, as when read.
        header = json.loads(json.dumps({"step": step, "score": finite, "meta": dict(meta)}))
        unfinished = self.folder / f"{UNFINISHED_PREFIX}{_folder_name(step)}"
        with self._wrap_errors(step), ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(self._hold_lock())
            stack.callback(shutil.rmtree, unfinished, ignore_errors=True)
            self._write(unfinished, write)
            cleanup = stack.pop_all()
        return partial(self._finish, unfinished, cleanup, header)

    def _finish(self, unfinished: Path, cleanup: ExitStack, header: Mapping[str, JSON]) -> Path:
        """Commit the files as a checkpoint. `cleanup` removes leftovers and releases the lock."""
        with self._wrap_errors(header["step"]), cleanup:
            try:
                self._write_manifest(unfinished, header)
                new = self._verify_new(self._move_into_place(unfinished, header["step"]))
            finally:
                name = f"{REPLACED_PREFIX}{_folder_name(header['step'])}"
                self._resolve_replaced(self.folder / name)
            self._prune(new)
        return new.path

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint; None if there is none. Raises if all are damaged."""
        folders = self._list_folders()
        for path in reversed(folders):
            if checkpoint := self._verify_or_report(path):
                return checkpoint
        if folders:
            raise CheckpointError(
                f"none of the {len(folders)} checkpoints in {self.folder} is intact: "
                + "; ".join(self.problems),
                fix="restore one from a backup, or start a new run in another folder",
            )
        return None

    def of_step(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step; None if it does not exist or is damaged."""
        path = self.folder / _folder_name(step)
        return self._verify_or_report(path) if path.is_dir() else None

    def best(self) -> Checkpoint | None:
        """The checkpoint with the highest score, the newer of equals; None if none has one."""
        for checkpoint in _sort_by_score(self._list_intact()):
            if verified := self._verify_or_report(checkpoint.path):
                return verified
        return None

    def best_step(self) -> int | None:
        """The step of `best`, from manifests and sizes alone: nothing is hashed."""
        return next((checkpoint.step for checkpoint in _sort_by_score(self._list_intact())), None)

    def newest_step(self) -> int | None:
        """The step of `latest`, from manifests and sizes alone: nothing is hashed."""
        return next((checkpoint.step for checkpoint in reversed(self._list_intact())), None)

    def _at_point(self, name: str) -> None:
        """Called at each point of a save; tests override it to inject faults."""

    def _write(self, folder: Path, write: Writer) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._at_point("created")
        try:
            write(folder)
        except Exception as error:  # torch and safetensors raise their own errors.
            # Reports a full disk as OSError. Checks it before the written files are removed, which
            # frees space.
            disk_full = os.strerror(errno.ENOSPC)
            is_nearly_full = shutil.disk_usage(folder).free < NEARLY_FULL_BYTES
            if isinstance(error, OSError) or not (disk_full in str(error) or is_nearly_full):
                raise
            # The first line: the error of a worker contains its traceback.
            reason = str(error).partition("\n")[0]
            raise OSError(errno.ENOSPC, f"{disk_full} ({reason})") from error
        self._at_point("written")

    def _write_manifest(self, folder: Path, header: Mapping[str, JSON]) -> None:
        files: dict[str, JSON] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                file_record = {"bytes": path.stat().st_size, "blake2b": _hash_file(path)}
                files[path.relative_to(folder).as_posix()] = file_record
            _fsync(path)
        assert MANIFEST not in files, "this name is reserved"
        self._at_point("synced")
        content: dict[str, JSON] = {**header, "files": files}
        manifest = folder / MANIFEST
        manifest.write_text(json.dumps({**content, "digest": _compute_digest(content)}, indent=1))
        _fsync(manifest)
        _fsync(folder)
        self._at_point("manifest")

    def _move_into_place(self, unfinished: Path, step: int) -> Path:
        """Rename the folder to a checkpoint. An existing one of this step is moved aside first."""
        path = self.folder / _folder_name(step)
        replaced = self.folder / f"{REPLACED_PREFIX}{path.name}"
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
            self._at_point("moved_old")
        unfinished.rename(path)
        _fsync(self.folder)
        self._at_point("renamed")
        return path

    def _verify_new(self, path: Path) -> Checkpoint:
        try:
            checkpoint = _verify(path, hashes=True)
        except _Damaged as damage:
            raise CheckpointError(
                f"{path} was saved but does not read back as written: {damage}",
                fix="check the disk; no other checkpoint was deleted",
            ) from damage
        self._at_point("verified")
        return checkpoint

    def _prune(self, new: Checkpoint) -> None:
        """Delete checkpoints that are neither new, nor among the last, nor among the best. Ignores
        damaged ones: a user may want to inspect them."""
        intact = self._list_intact()
        best = _sort_by_score(intact)[: self._keep_best]
        kept = {c.path for c in (new, *intact[-self._keep_last :], *best)}
        for path in (c.path for c in intact if c.path not in kept):
            # Rename first, so that a kill leaves a removable leftover and no partial checkpoint.
            temporary = path.with_name(f"{UNFINISHED_PREFIX}{path.name}")
            try:
                path.rename(temporary)
                shutil.rmtree(temporary)
            except OSError as error:
                log.warning("the old checkpoint %s cannot be deleted: %s", path, error)

    def _list_intact(self) -> list[Checkpoint]:
        """Checkpoints with a correct manifest and file sizes, by step; does not compute hashes."""
        checkpoints = [self._verify_or_report(path, hashes=False) for path in self._list_folders()]
        return [checkpoint for checkpoint in checkpoints if checkpoint is not None]

    def _verify_or_report(self, path: Path, *, hashes: bool = True) -> Checkpoint | None:
        """The checkpoint in `path`. Damage is reported once, and gives None."""
        try:
            return _verify(path, hashes=hashes)
        except _Damaged as damage:
            problem = f"{path.name} is damaged: {damage}"
            if problem not in self.problems:
                self.problems.append(problem)
                log.warning("skipped the damaged checkpoint %s: %s", path, damage)
            return None

    def _list_folders(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if STEP_FOLDER.match(path.name)]
        return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))

    def _clean(self) -> None:
        """Remove leftovers of killed saves, unless another process is saving right now."""
        unfinished = list(self.folder.glob(f"{UNFINISHED_PREFIX}step-*"))
        replaced = list(self.folder.glob(f"{REPLACED_PREFIX}step-*"))
        if not unfinished and not replaced:
            return
        try:
            with self._hold_lock():
                for path in unfinished:
                    shutil.rmtree(path, ignore_errors=True)
                for path in replaced:
                    self._resolve_replaced(path)
        except BlockingIOError:
            log.info("%s: another process is saving; its temporary folder stays", self.folder)
        except OSError as error:
            log.warning("%s: leftovers of a killed save stay: %s", self.folder, error)

    def _resolve_replaced(self, replaced: Path) -> None:
        """Keep the new checkpoint of a step if it is intact, otherwise restore the old one."""
        if not replaced.is_dir():
            return
        path = self.folder / replaced.name.removeprefix(REPLACED_PREFIX)
        try:
            _verify(path, hashes=True)
        except _Damaged:
            shutil.rmtree(path, ignore_errors=True)
            replaced.rename(path)
        else:
            shutil.rmtree(replaced, ignore_errors=True)

    @contextmanager
    def _hold_lock(self) -> Generator[None]:
        """Hold the folder's lock. The kernel releases it when the process dies."""
        with (self.folder / SAVE_LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    @contextmanager
    def _wrap_errors(self, step: int) -> Generator[None]:
        try:
            yield
        except BlockingIOError as error:
            raise CheckpointError(
                f"step {step} was not saved: another process is saving in {self.folder}",
                fix="use one folder per run",
            ) from error
        except OSError as error:
            if exhausted := open_files_exhausted(error):
                raise exhausted from error
            disk = shutil.disk_usage(self.folder) if self.folder.is_dir() else None
            free = f"{disk.free / 1e6:.0f} MB free" if disk else "missing"
            raise DiskError(
                f"step {step} was not saved in {self.folder} ({free}): {error}; "
                "the other checkpoints are untouched",
                fix="free some space or lower checkpoint.keep_last; the folder must be writable",
            ) from error


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _sort_by_score(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Checkpoints with a score, best first; ties: higher TIE_BREAK, then newer first."""

    def rank(checkpoint: Checkpoint) -> tuple[float, float, int]:
        tie_break: JSON = checkpoint.meta.get(TIE_BREAK)
        is_number = isinstance(tie_break, int | float) and isfinite(tie_break)
        return checkpoint.score or 0.0, tie_break if is_number else 0.0, checkpoint.step

    return sorted((c for c in checkpoints if c.score is not None), key=rank, reverse=True)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _compute_digest(content: Mapping[str, JSON]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verify(path: Path, *, hashes: bool) -> Checkpoint:
    """The checkpoint in `path`. Raises _Damaged if it is not intact."""
    manifest = _read_manifest(path / MANIFEST)
    if path.name != _folder_name(manifest["step"]):
        raise _Damaged(f"its manifest is of step {manifest['step']}")
    for name, expected in cast("Mapping[str, Mapping[str, JSON]]", manifest["files"]).items():
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise _Damaged(f"its manifest names {name}, outside the folder")
        _verify_file(path / name, name, expected, hashes=hashes)
    return Checkpoint(path, manifest["step"], manifest["meta"], manifest["score"])


def _read_manifest(path: Path) -> dict[str, JSON]:
    try:
        size = _read_file_size(path, MANIFEST)
        if size > MAX_MANIFEST_BYTES:
            raise _Damaged(f"{MANIFEST} has {size} bytes")
        manifest: dict[str, JSON] = json.loads(path.read_bytes())
        digest = manifest.pop("digest")
        is_unchanged = digest == _compute_digest(manifest)
    except FileNotFoundError:
        raise _Damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if open_files_exhausted(error):
            raise
        raise _Damaged(f"{MANIFEST} cannot be read: {error}") from error
    if not is_unchanged:
        raise _Damaged(f"{MANIFEST} was changed")
    if not _is_manifest(manifest):
        raise _Damaged(f"{MANIFEST} is not the manifest of a checkpoint")
    return manifest


def _is_manifest(content: Mapping[str, JSON]) -> bool:
    """Whether the keys have the types that `save` writes."""
    types = {"step": int, "meta": dict, "files": dict, "score": int | float | None}
    if any(key not in content or not isinstance(content[key], t) for key, t in types.items()):
        return False
    files = cast("Mapping[str, JSON]", content["files"]).values()
    return all(isinstance(file, dict) and file.keys() >= {"bytes", "blake2b"} for file in files)  # pyright: ignore[reportUnknownMemberType]


def _read_file_size(path: Path, name: str) -> int:
    """The size of a regular file. Raises _Damaged for a device or a pipe, which has no end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _Damaged(f"{name} is not a regular file")
    return status.st_size


def _verify_file(path: Path, name: str, expected: Mapping[str, JSON], *, hashes: bool) -> None:
    try:
        size = _read_file_size(path, name)
        if size != expected["bytes"]:
            raise _Damaged(f"{name} has {size} bytes, but {expected['bytes']} were saved")
        if hashes and _hash_file(path) != expected["blake2b"]:
            raise _Damaged(f"{name} was changed after it was saved")
    except FileNotFoundError:
        raise _Damaged(f"{name} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if open_files_exhausted(error):
            raise
        raise _Damaged(f"{name!r} cannot be read: {error}") from error
