"""Calls of role methods are typed: no string outside the handles names one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rollick.roles import protocols
from rollick.workers.critic import CriticWorker
from rollick.workers.generator import GeneratorWorker
from rollick.workers.learner import LearnerWorker
from rollick.workers.scorer import RewardModelWorker, ScorerWorker

PACKAGE = Path(protocols.__file__).parents[1]
BASES = ("Role", "TrainedRole")
"""Protocols that several roles share."""
CALLERS = {"call", "broadcast", "call_collective", "scatter", "getattr", "Call"}
"""Functions that take the name of a method: those of a WorkerGroup, and `getattr`."""


def list_role_methods() -> dict[str, set[str]]:
    """The public methods of each role's Protocol, with those that it inherits."""
    return {
        name: {method for method in dir(member) if not method.startswith("_")}
        for name, member in vars(protocols).items()
        if isinstance(member, type) and name.endswith("Role") and name not in BASES
    }


METHODS = set[str]().union(*list_role_methods().values()) - {"close"}
"""`close` is also a method of many objects that are not roles."""


def find_method_strings(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each call of CALLERS with a string that is the name of a role's method."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = (
            node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        )
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        for value in values if function in CALLERS else ():
            if isinstance(value, ast.Constant) and value.value in METHODS:
                yield node.lineno, str(value.value)


def test_no_string_names_a_method_of_a_role() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    violations = [
        f"{file.relative_to(PACKAGE)}:{line} {name}"
        for file in files
        for line, name in find_method_strings(file.read_text("utf-8"))
    ]
    assert violations == []


def test_a_string_that_names_a_method_is_detected() -> None:
    assert list(find_method_strings("group.call('policy', 'train', batch)")) == [(1, "train")]
    assert list(find_method_strings("group.scatter(role, method='values')")) == [(1, "values")]
    assert list(find_method_strings("options.get('train')")) == []


def test_only_handles_hold_a_worker_group() -> None:
    """Pipelines open the group and give it to Roles; they call nothing on it."""
    holders = {
        str(file.relative_to(PACKAGE).parent)
        for file in PACKAGE.rglob("*.py")
        if "WorkerGroup" in file.read_text("utf-8")
    }
    assert holders == {"cluster", "roles"}


def test_every_method_of_a_role_is_defined_by_its_worker() -> None:
    """A worker inherits from its Protocol, so a missing method would silently do nothing."""
    workers = {
        "PolicyRole": LearnerWorker,
        "CriticRole": CriticWorker,
        "ScorerRole": ScorerWorker,
        "RewardModelRole": RewardModelWorker,
        "GeneratorRole": GeneratorWorker,
    }
    for name, methods in list_role_methods().items():
        worker, protocol = workers[name], getattr(protocols, name)
        inherited = {m for m in methods if getattr(worker, m) is getattr(protocol, m)}
        assert inherited == set()
