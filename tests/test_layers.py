"""The layers of the package: which imports and calls are allowed. Checked on the syntax tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from rollick.config.names import NAMES
from rollick.config.presets import PRESETS

PACKAGE = Path(__file__).parents[1] / "rollick"

LEVELS = {
    0: {"types", "errors", "interrupt"},
    1: {"config", "observe", "starters"},
    2: {"children", "data", "models", "sandbox"},
    3: {"algorithms"},
    4: {"cluster", "trainer", "infer", "rewards", "envs"},
    5: {"episodes", "weights", "checkpoint"},
    6: {"roles"},
    7: {"rollout", "run_folder"},
    8: {"workers", "serve"},
    9: {"simulator"},
    10: {"pipelines"},
    11: {"commands"},
    12: {"cli"},
    13: {"__main__"},
}
LEVEL_OF = {package: level for level, packages in LEVELS.items() for package in packages}

THIRD_PARTY = {
    "accelerate": {"models"},
    "aiohttp": {"envs"},
    "antlr4": set[str](),
    "PIL": {"episodes"},
    "cloudpickle": {"children", "cluster", "envs", "rewards"},
    "datasets": {"data"},
    "gguf": {"models"},
    "gymnasium": {"envs"},
    "httpx": {"envs", "rewards"},
    "huggingface_hub": {"config"},
    "jinja2": {"data"},
    "jsonschema": {"rewards"},
    "math_verify": {"rewards"},
    "matplotlib": {"observe"},
    "minigrid": {"envs"},
    "mlflow": {"observe"},
    "omegaconf": {"config"},
    "openenv": {"envs"},
    "pandas": set[str](),
    "py3langid": {"rewards"},
    "pyarrow": {"data"},
    "peft": {"trainer"},
    "pydantic": {"config", "simulator"},
    "pydantic_core": {"config", "simulator"},
    "pytest": {"sandbox"},
    "ray": {"cluster"},
    "reasoning_gym": {"data", "envs", "rewards"},
    "referencing": {"rewards"},
    "rich": {"cli", "observe"},
    "safetensors": {"infer", "models", "trainer", "weights"},
    "sglang": {"infer"},
    "starlette": {"serve"},
    "sympy": {"rewards"},
    "tensorboard": {"observe"},
    "textarena": {"envs"},
    "tokenizers": {"testing"},
    "trackio": {"observe"},
    "transformers": {"models", "testing"},
    "triton": {"infer", "models"},
    "typer": {"cli"},
    "uvicorn": {"serve"},
    "verifiers": {"envs"},
    "vllm": {"infer"},
    "wandb": {"observe"},
    "websockets": {"envs"},
    "yaml": {"config", "simulator"},
}
"""The packages that may import each third-party library. numpy and torch are allowed everywhere."""

EVERYWHERE = {"numpy", "torch"}

NO_TORCH = {
    "types", "errors", "interrupt", "config", "observe", "children", "cli", "__init__", "__main__"
}  # fmt: skip
"""Packages that `import rollick`, `rollick check` or a reward process load."""

UNPICKLES = {
    "children/child_loop.py": "frames from its own parent",
    "envs/child.py": "frames from its own parent",
    "rewards/child.py": "frames from its own parent",
}
"""Files that may read pickles, with the reason: both ends are processes of one run."""


@dataclass(frozen=True)
class Import:
    """One import statement, of a module or of a name inside one."""

    file: str
    line: int
    module: str

    @property
    def package(self) -> str:
        return package_of(self.file)

    def __str__(self) -> str:
        return f"rollick/{self.file}:{self.line} imports {self.module}"


def package_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


@cache
def parse_package() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def find_imports() -> Iterator[Import]:
    for file, tree in parse_package().items():
        typing_only = _find_typing_only(tree)
        for node in ast.walk(tree):
            if id(node) in typing_only and file == "__init__.py":
                continue
            for module in _imported_modules(node):
                yield Import(file, getattr(node, "lineno", 0), module)


def _find_typing_only(tree: ast.Module) -> set[int]:
    """Ids of the nodes under `if TYPE_CHECKING`."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }


def _imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return []


def find_own_imports() -> Iterator[tuple[Import, str]]:
    """Imports of rollick's own modules, each with the imported package."""
    for item in find_imports():
        parts = item.module.split(".")
        if parts[0] == "rollick" and len(parts) > 1:
            yield item, parts[1]


def test_every_package_has_a_level() -> None:
    packages = {package_of(file) for file in parse_package()}
    assert packages - {"__init__", "testing"} <= set(LEVEL_OF)


def test_imports_point_down() -> None:
    wrong = [
        str(item)
        for item, target in find_own_imports()
        if item.package != target
        and {item.package, target} <= set(LEVEL_OF)
        and LEVEL_OF[target] >= LEVEL_OF[item.package]
    ]
    assert wrong == []


def test_the_test_kit_is_imported_by_tests_and_cli_only() -> None:
    wrong = [
        str(item)
        for item, target in find_own_imports()
        if target == "testing" and item.package not in ("testing", "cli")
    ]
    assert wrong == []


def test_each_third_party_library_is_imported_only_where_allowed() -> None:
    wrong: list[str] = []
    for item in find_imports():
        top = item.module.split(".")[0]
        if top in sys.stdlib_module_names or top == "rollick" or top in EVERYWHERE:
            continue
        if item.package not in THIRD_PARTY.get(top, set()):
            wrong.append(str(item))
    assert wrong == []


def test_light_packages_never_import_torch() -> None:
    wrong = [
        str(item)
        for item in find_imports()
        if item.package in NO_TORCH
        and item.module.split(".")[0] in ("torch", "ray", "transformers", "datasets")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module", ["rollick", "rollick.config.load", "rollick.observe.metrics", "rollick.types"]
)
def test_light_modules_load_neither_torch_nor_ray(module: str) -> None:
    heavy = "{'torch', 'ray', 'transformers'}"
    code = f"import sys, {module}; print(sorted({heavy} & {{*sys.modules}}))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"


def find_calls() -> Iterator[tuple[str, ast.Call, str]]:
    for file, tree in parse_package().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield file, node, ast.unparse(node.func)


INSIDE_BOXES = "sandbox/inside/"
"""Code that runs in boxes only: it executes programs that models wrote."""


def test_nothing_is_evaluated_outside_the_sandbox() -> None:
    forbidden = {"eval", "exec", "compile", "__import__", "os.system"}
    wrong = [
        f"rollick/{file}:{node.lineno} {name}"
        for file, node, name in find_calls()
        if name in forbidden and not file.startswith(INSIDE_BOXES)
    ]
    assert wrong == []


def test_code_for_sandbox_boxes_is_imported_nowhere() -> None:
    wrong = [
        str(item) for item in find_imports() if item.module.startswith("rollick.sandbox.inside")
    ]
    assert wrong == []


def test_pickles_are_read_between_processes_of_one_run_only() -> None:
    readers = {"load", "loads", "Unpickler"}
    wrong = [
        f"rollick/{file}:{node.lineno} {name}"
        for file, node, name in find_calls()
        if name.split(".")[0] in ("pickle", "cloudpickle", "marshal", "dill", "shelve", "joblib")
        and name.split(".")[-1] in readers
        and file not in UNPICKLES
    ]
    assert wrong == []


def test_torch_and_numpy_read_no_pickles() -> None:
    wrong: list[str] = []
    for file, node, name in find_calls():
        keywords = {item.arg: ast.unparse(item.value) for item in node.keywords}
        if name == "torch.load" and keywords.get("weights_only") != "True":
            wrong.append(f"rollick/{file}:{node.lineno} torch.load without weights_only=True")
        if name in ("np.load", "numpy.load") and keywords.get("allow_pickle") != "False":
            wrong.append(f"rollick/{file}:{node.lineno} np.load without allow_pickle=False")
        if keywords.get("trust_remote_code") == "True":
            wrong.append(f"rollick/{file}:{node.lineno} trust_remote_code=True")
        if keywords.get("shell") == "True":
            wrong.append(f"rollick/{file}:{node.lineno} shell=True")
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            wrong.append(f"rollick/{file}:{node.lineno} {name}")
    assert wrong == []


def test_no_public_class_name_is_defined_twice() -> None:
    names = Counter(
        node.name
        for tree in parse_package().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_has_a_meaningless_name() -> None:
    meaningless = {"utils", "util", "common", "helpers", "misc", "manager"}
    assert [file for file in parse_package() if Path(file).stem in meaningless] == []


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, table in NAMES.items() for name in table]
)
def test_every_name_of_the_table_leads_to_a_definition(kind: str, name: str) -> None:
    module, attribute = NAMES[kind][name].split(":")
    file = "/".join(module.split(".")[1:]) + ".py"
    assert file in parse_package()
    defined = {
        node.name
        for node in parse_package()[file].body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    if kind == "presets":  # All are in one table, and are data.
        assert (attribute, name in PRESETS) == ("PRESETS", True)
    else:
        assert attribute in defined
