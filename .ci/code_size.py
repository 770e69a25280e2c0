"""Print how large the code is and where it is larger than it should be: code_size.py [--list]."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "rollick"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    extra = sum(a is not None for a in (arguments.vararg, arguments.kwarg))
    return len([name for name in names if name not in {"self", "cls"}]) + extra


def is_kernel(function: Function) -> bool:
    """Triton kernels take every pointer, stride and size as a parameter."""
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def attributes(node: ast.ClassDef) -> set[str]:
    """Names assigned on self anywhere in the class, and the fields of a dataclass."""
    fields = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    stored = {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and isinstance(item.value, ast.Name)
        and item.value.id == "self"
    }
    return fields | stored


def main() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    findings: dict[str, list[str]] = {
        "functions over 80 lines": [],
        "functions over 50 lines": [],
        "files over 400 lines": [],
        "functions with more than 7 parameters": [],
        "classes in pipelines/ with more than 12 attributes": [],
        "public class names defined twice": [],
    }
    total, classes = 0, Counter[str]()
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree, name = ast.parse(text), path.relative_to(PACKAGE.parent).as_posix()
        lines = text.count("\n")
        total += lines
        if lines > 400:
            findings["files over 400 lines"].append(f"{name}: {lines}")
        for function in functions(tree):
            where = f"{name}:{function.lineno} {function.name}"
            if length(function) > 80:
                findings["functions over 80 lines"].append(f"{where}: {length(function)}")
            if length(function) > 50:
                findings["functions over 50 lines"].append(f"{where}: {length(function)}")
            if parameters(function) > 7 and not is_kernel(function):
                findings["functions with more than 7 parameters"].append(
                    f"{where}: {parameters(function)}"
                )
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            if not node.name.startswith("_"):
                classes[node.name] += 1
            if "pipelines" in path.parts and len(attributes(node)) > 12:
                findings["classes in pipelines/ with more than 12 attributes"].append(
                    f"{name}:{node.lineno} {node.name}: {len(attributes(node))}"
                )
    findings["public class names defined twice"] = [n for n, count in classes.items() if count > 1]
    print(f"{total:6}  lines in rollick/")
    for title, places in findings.items():
        print(f"{len(places):6}  {title}")
        if "--list" in sys.argv:
            for place in places:
                print(f"          {place}")


if __name__ == "__main__":
    main()
