"""Checkpoints of a whole run: saved whole or not at all, verified before use, pruned with care.

Owns folders, manifests, hashes and the run's lock. What is inside a checkpoint is written by a
function that is passed in; nothing here knows of models or samples.

    save:  .tmp-step-000012/ <- write(), fsync, manifest.json, fsync  -> rename -> step-000012/
           then the new one is read back and verified, and only then are old ones deleted
    latest: newest step-* whose manifest, sizes and hashes hold; damaged ones are reported

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
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, cast

from rollick.errors import CheckpointError

JSON = Any
"""What json.dumps takes."""

MANIFEST = "manifest.json"
STEP_FOLDER = re.compile(r"^step-(\d{6,})$")
UNFINISHED = ".tmp-"
REPLACED = ".old-"
SAVE_LOCK = ".save.lock"
RUN_LOCK = "run.lock"
NEARLY_FULL_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: its folder, and what was noted at the save."""

    path: Path
    step: int
    meta: Mapping[str, JSON]
    score: float | None


class _Damaged(Exception):
    """What does not hold in a checkpoint folder."""


def _pass(point: str) -> None:
    """Nothing happens at the points of a save, unless a test wants a kill there."""


class CheckpointStore:
    """The checkpoints in one folder. Opening it removes what a killed save left behind.

    `problems` lists the damaged checkpoints that were met, in words. `at_point` is called with
    the name of each point that a save passes (fault injection): "created", "written", "synced",
    "manifest", "moved_old", "renamed", "verified".
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        keep_best: int,
        at_point: Callable[[str], None] = _pass,
    ) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._at_point = at_point
        self._clean()

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        meta: Mapping[str, JSON],
        score: float | None = None,
    ) -> Path:
        """Make step's checkpoint of the files that `write` puts into the folder it is given.

        A failure (a full disk, say) is a CheckpointError, and the older checkpoints are as before.
        A higher score is better; one that is not finite counts as none.
        """
        finite = score if score is not None and isfinite(score) else None
        # A meta that is not JSON fails here, before the work; its keys become text, as when read.
        about = json.loads(json.dumps({"step": step, "score": finite, "meta": dict(meta)}))
        unfinished = self.folder / f"{UNFINISHED}{_folder_name(step)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._saving():
                try:
                    self._fill(unfinished, write, about)
                    new = self._verify_new(self._publish(unfinished, step))
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    self._settle(self.folder / f"{REPLACED}{_folder_name(step)}")
                self._prune(new)
        except OSError as error:
            raise self._not_saved(step, error) from error
        return new.path

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; None only if there is none at all."""
        folders = self._folders()
        for path in reversed(folders):
            checkpoint = self._verified(path)
            if checkpoint is not None:
                return checkpoint
        if folders:
            raise CheckpointError(
                f"none of the {len(folders)} checkpoints in {self.folder} is whole: "
                + "; ".join(self.problems),
                fix="restore one from a backup, or start a new run in another folder",
            )
        return None

    def of_step(self, step: int) -> Checkpoint | None:
        """That of a step, verified; None if it is not kept, or damaged."""
        path = self.folder / _folder_name(step)
        return self._verified(path) if path.is_dir() else None

    def best(self) -> Checkpoint | None:
        """The checkpoint with the highest score, the newer of equals; None if none has one."""
        for checkpoint in _by_score(self._glance()):
            verified = self._verified(checkpoint.path)
            if verified is not None:
                return verified
        return None

    def _fill(self, folder: Path, write: Callable[[Path], None], about: Mapping[str, JSON]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._at_point("created")
        _call(write, folder)
        self._at_point("written")
        files = {name: _describe(folder / name) for name in _file_names(folder)}
        assert MANIFEST not in files, "this name is taken by the store"
        for name in files:
            _sync(folder / name)
        for inner in (path for path in folder.rglob("*") if path.is_dir()):
            _sync(inner)
        self._at_point("synced")
        content: dict[str, JSON] = {**about, "files": files}
        manifest = folder / MANIFEST
        manifest.write_text(json.dumps({**content, "digest": _digest_of(content)}, indent=1))
        _sync(manifest)
        _sync(folder)
        self._at_point("manifest")

    def _publish(self, unfinished: Path, step: int) -> Path:
        """One rename makes it a checkpoint. One of the same step is moved aside before."""
        path = self.folder / _folder_name(step)
        replaced = self.folder / f"{REPLACED}{path.name}"
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
            self._at_point("moved_old")
        unfinished.rename(path)
        _sync(self.folder)
        self._at_point("renamed")
        return path

    def _verify_new(self, path: Path) -> Checkpoint:
        try:
            checkpoint = _verify(path, hashes=True)
        except _Damaged as damage:
            raise CheckpointError(
                f"{path} was saved and does not read back as written: {damage}",
                fix="check the disk; no other checkpoint was deleted",
            ) from damage
        self._at_point("verified")
        return checkpoint

    def _prune(self, new: Checkpoint) -> None:
        """Delete what is neither new, nor among the last, nor among the best. Never damaged ones:
        they count for nothing here, and somebody may want to look at them."""
        whole = self._glance()
        kept = {new.path}
        kept.update(c.path for c in whole[-self._keep_last :])
        kept.update(c.path for c in _by_score(whole)[: self._keep_best])
        for checkpoint in whole:
            if checkpoint.path not in kept:
                self._delete(checkpoint.path)

    def _delete(self, path: Path) -> None:
        """Renamed first, so that a kill in between leaves a leftover, not half a checkpoint."""
        unfinished = path.with_name(f"{UNFINISHED}{path.name}")
        try:
            path.rename(unfinished)
            shutil.rmtree(unfinished)
        except OSError as error:
            log.warning("the old checkpoint %s cannot be deleted: %s", path, error)

    def _glance(self) -> list[Checkpoint]:
        """Checkpoints whose manifest and sizes hold, by step; hashes are not computed."""
        found: list[Checkpoint] = []
        for path in self._folders():
            try:
                found.append(_verify(path, hashes=False))
            except _Damaged as damage:
                self._report(path, damage)
        return found

    def _verified(self, path: Path) -> Checkpoint | None:
        try:
            return _verify(path, hashes=True)
        except _Damaged as damage:
            self._report(path, damage)
            return None

    def _report(self, path: Path, damage: _Damaged) -> None:
        problem = f"{path.name} is damaged: {damage}"
        if problem not in self.problems:
            self.problems.append(problem)
            log.warning("checkpoint %s is damaged and not used: %s", path, damage)

    def _folders(self) -> list[Path]:
        """The checkpoint folders, oldest step first."""
        if not self.folder.is_dir():
            return []
        found = [(m, path) for path in self.folder.iterdir() if (m := STEP_FOLDER.match(path.name))]
        return [path for _, path in sorted((int(m[1]), path) for m, path in found)]

    def _clean(self) -> None:
        """Remove leftovers of killed saves, unless another process is saving right now."""
        unfinished = list(self.folder.glob(f"{UNFINISHED}step-*"))
        replaced = list(self.folder.glob(f"{REPLACED}step-*"))
        if not unfinished and not replaced:
            return
        try:
            with self._saving():
                for path in unfinished:
                    shutil.rmtree(path, ignore_errors=True)
                for path in replaced:
                    self._settle(path)
        except BlockingIOError:
            log.info("%s: another process is saving; its temporary folder stays", self.folder)
        except OSError as error:
            log.warning("%s: leftovers of a killed save stay: %s", self.folder, error)

    def _settle(self, replaced: Path) -> None:
        """Of two checkpoints of one step keep the new one if it is whole, otherwise the old one."""
        if not replaced.is_dir():
            return
        path = self.folder / replaced.name.removeprefix(REPLACED)
        try:
            _verify(path, hashes=True)
        except _Damaged:
            shutil.rmtree(path, ignore_errors=True)
            replaced.rename(path)
        else:
            shutil.rmtree(replaced, ignore_errors=True)

    @contextmanager
    def _saving(self) -> Generator[None]:
        """Held while the folder is changed. The kernel lets go of it when the process dies."""
        with (self.folder / SAVE_LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def _not_saved(self, step: int, error: OSError) -> CheckpointError:
        if isinstance(error, BlockingIOError):
            return CheckpointError(
                f"step {step} was not saved: another process is saving in {self.folder}",
                fix="let only one run use a folder",
            )
        exists = self.folder.is_dir()
        free = f"{shutil.disk_usage(self.folder).free / 1e6:.0f} MB free" if exists else "absent"
        return CheckpointError(
            f"step {step} was not saved in {self.folder} ({free}): {error}; "
            "the other checkpoints are untouched",
            fix="free some space or lower checkpoint.keep_last; the folder must be writable",
        )


class RunLock:
    """Keeps a second run out of a folder: `with RunLock(folder): ...`.

    The kernel drops the lock when the process dies, so a kill leaves nothing to clean up.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RUN_LOCK
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def acquire(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace") or "unknown process"
            os.close(descriptor)
            raise CheckpointError(
                f"{self._path.parent} is in use by another run ({holder})",
                fix="wait for it or stop it, or give this run another name",
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """The file stays: deleting it would let two runs lock two files of one name."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            # Unlocked by name, because a forked child may hold a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


def _call(write: Callable[[Path], None], folder: Path) -> None:
    """Call the writer; a full disk is an OSError, whatever it was reported as.

    Broad, because torch and safetensors tell of it in errors of their own. Asked here, before
    the files so far are removed and the disk has room again.
    """
    try:
        write(folder)
    except OSError:
        raise
    except Exception as error:
        full = os.strerror(errno.ENOSPC)
        if full not in str(error) and shutil.disk_usage(folder).free >= NEARLY_FULL_BYTES:
            raise
        raise OSError(errno.ENOSPC, f"{full} ({error})") from error


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _by_score(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those with a score, best first; of equals the newer one first."""
    scored = [(c.score, c.step, c) for c in checkpoints if c.score is not None]
    return [c for *_, c in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def _file_names(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def _describe(path: Path) -> dict[str, JSON]:
    return {"bytes": path.stat().st_size, "blake2b": _hash_file(path)}


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _digest_of(content: Mapping[str, JSON]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verify(path: Path, *, hashes: bool) -> Checkpoint:
    """The checkpoint in `path`; _Damaged says what does not hold."""
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
        manifest: dict[str, JSON] = json.loads(path.read_bytes())
        digest = manifest.pop("digest")
    except FileNotFoundError:
        raise _Damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged(f"{MANIFEST} cannot be read: {error}") from error
    if digest != _digest_of(manifest):
        raise _Damaged(f"{MANIFEST} was changed")
    return manifest


def _verify_file(path: Path, name: str, expected: Mapping[str, JSON], *, hashes: bool) -> None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise _Damaged(f"{name} has {size} bytes, {expected['bytes']} were saved")
        if hashes and _hash_file(path) != expected["blake2b"]:
            raise _Damaged(f"{name} was changed after it was saved")
    except FileNotFoundError:
        raise _Damaged(f"{name} is missing") from None
    except OSError as error:
        raise _Damaged(f"{name} cannot be read: {error}") from error
