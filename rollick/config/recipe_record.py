"""The copy of a recipe and its code in a run's folder, which works when the originals change.

    recipe                           RUN/recipe.yaml              copied
    rewards.py:score              -> code/rewards.py:score        RUN/code/rewards.py
    ../games/maze.py:Maze         -> code/__/games/maze.py:Maze   RUN/code/__/games/maze.py
    rows.jsonl, models/tiny       -> absolute paths               nothing: data and models are large

Modules next to a copied file that it imports are copied too; other files that it reads are not.
"""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from rollick.config.load import LoadedRecipe
from rollick.config.names import REFERENCE
from rollick.config.source import dump_yaml

CODE = "code"
USER_VALUES = ("options", "where")
"""Sections whose strings are values of the user, never names of files."""


@dataclass(frozen=True, slots=True)
class RecipeRecord:
    values: Mapping[str, Any]
    """The settings, with names that are valid in the run's folder."""
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """The code to copy: path in the run's folder -> original."""

    def write(self, run: Path) -> None:
        for name, original in self.files.items():
            copy = run / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, copy)
        (run / "recipe.yaml").write_text(dump_yaml(self.values), encoding="utf-8")

    def describe_changes(self, earlier: RecipeRecord, run: Path) -> list[str]:
        """The differences from an earlier record and from the code that it copied, one per line."""
        old, new = dict(flatten_settings(earlier.values)), dict(flatten_settings(self.values))
        lines = [
            f"{name}: {show_setting(old.get(name))} -> {show_setting(new.get(name))}"
            for name in dict.fromkeys([*old, *new])
            if old.get(name) != new.get(name)
        ]
        copies = {name: run / name for name in self.files}
        return lines + [
            f"{name}: the code changed"
            for name, copy in copies.items()
            if copy.is_file() and copy.read_bytes() != self.files[name].read_bytes()
        ]


def record_recipe(loaded: LoadedRecipe, run: Path) -> RecipeRecord:
    """The record of a recipe for the run's folder; writes nothing."""
    recorder = _Recorder(loaded.base_dir, run)
    values = recorder.convert(loaded.recipe.model_dump(mode="json"))
    return RecipeRecord(values, recorder.files)


def recorded_name(name: str, run: Path) -> str:
    """The name of the run's own copy of `file.py:name`; the name itself if there is none."""
    match = REFERENCE.match(name)
    if match is None or not match["module"].endswith(".py"):
        return name
    copy = f"{CODE}/{_path_in_code(match['module'])}"
    return f"{copy}:{match['attribute']}" if (run / copy).is_file() else name


@dataclass(slots=True)
class _Recorder:
    base_dir: Path
    run: Path
    files: dict[str, Path] = field(default_factory=dict[str, Path])

    def convert(self, value: Any, key: str = "") -> Any:
        match value:
            case dict():
                section = cast("dict[str, Any]", value)
                return {
                    name: item if name in USER_VALUES else self.convert(item, name)
                    for name, item in section.items()
                }
            case list():
                return [self.convert(item, key) for item in cast("list[Any]", value)]
            case str():
                return self._convert_string(key, value)
            case _:
                return value

    def _convert_string(self, key: str, text: str) -> str:
        match = REFERENCE.match(text)
        path, name = (match["module"], f":{match['attribute']}") if match else (text, "")
        is_code = path.endswith(".py") and (bool(name) or key == "agent")
        # Data is also looked for in the working directory; models only there.
        folders = {"source": (self.base_dir, Path.cwd()), "path": (Path.cwd(),)}
        folders["tokenizer"] = folders["path"]
        for folder in folders.get(key, (self.base_dir,)):
            file = folder / path
            if is_code and file.is_file():
                return self._add_code(file, path) + name
            if key in folders and not name and text and file.exists():
                return str(file.absolute())
        return text

    def _add_code(self, file: Path, name: str) -> str:
        """Add a file and the modules next to it that it imports; returns the path of its copy."""
        copies = self.run.resolve() / CODE
        if file.resolve().is_relative_to(copies):  # The recipe is the record of this run.
            return name
        copy = PurePosixPath(CODE) / _path_in_code(name)
        self.files[str(copy)] = file
        for module in _find_local_modules(file):
            self.files[str(copy.parent / module.relative_to(file.parent).as_posix())] = module
        return str(copy)


def _path_in_code(name: str) -> PurePosixPath:
    """The path of a copy in the folder `code`. `..` becomes `__`, so that copies have the same
    relative locations as the originals."""
    path = PurePosixPath(name)
    parts = path.relative_to("/").parts if path.is_absolute() else path.parts
    names = ["__" if part == ".." else part for part in parts]
    return PurePosixPath(*(["root"] if path.is_absolute() else []), *names)


def _find_local_modules(file: Path) -> list[Path]:
    """The files next to `file` that it imports, directly or indirectly."""
    modules: list[Path] = []
    unread = [file]
    while unread:
        for name in _imported_names(unread.pop()):
            package = file.parent / name
            files = [package.with_suffix(".py"), *sorted(package.rglob("*.py"))]
            new = [path for path in files if path.is_file() and path not in (file, *modules)]
            modules += new
            unread += new
    return modules


def _imported_names(file: Path) -> Iterator[str]:
    """The top-level names of the modules that a file imports, without the standard library's."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                modules = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                continue
        names = {module.partition(".")[0] for module in modules}
        yield from sorted(names - sys.stdlib_module_names)


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def show_setting(value: Any) -> str:
    """A value on one line, as written in a recipe."""
    match value:
        case None:
            return "not set"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(show_setting, cast('Sequence[Any]', value)))}]"
        case _:
            return str(value)
