"""No string names a role's method outside the handles."""

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
TRANSPORT = {"call", "broadcast", "call_collective", "scatter", "getattr", "Call"}
"""What reaches a method by its name: the calls of a WorkerGroup, and Python's own."""


def role_methods() -> dict[str, set[str]]:
    """The public methods of each role's Protocol, with those that it inherits."""
    return {
        name: {method for method in dir(member) if not method.startswith("_")}
        for name, member in vars(protocols).items()
        if isinstance(member, type) and name.endswith("Role") and name not in BASES
    }


METHODS = set[str]().union(*role_methods().values()) - {"close"}
"""`close` is a method of many objects that are no roles."""


def named_by_string(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each call of the transport with a string that is a role's method."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = (
            node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        )
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        for value in values if function in TRANSPORT else ():
            if isinstance(value, ast.Constant) and value.value in METHODS:
                yield node.lineno, str(value.value)


def test_no_string_names_a_method_of_a_role() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} {name}"
        for file in files
        for line, name in named_by_string(file.read_text("utf-8"))
    ]
    assert wrong == []


def test_a_string_that_names_a_method_is_detected() -> None:
    assert list(named_by_string("group.call('policy', 'train', batch)")) == [(1, "train")]
    assert list(named_by_string("group.scatter(role, method='values')")) == [(1, "values")]
    assert list(named_by_string("options.get('train')")) == []


def test_only_handles_hold_a_worker_group() -> None:
    """Pipelines open the group and give it to Roles; they call nothing on it."""
    holders = {
        str(file.relative_to(PACKAGE).parent)
        for file in PACKAGE.rglob("*.py")
        if "WorkerGroup" in file.read_text("utf-8")
    }
    assert holders == {"cluster", "roles"}


def test_every_method_of_a_role_is_defined_by_its_worker() -> None:
    """A worker inherits from its Protocol: a method that it lacks would do nothing, silently."""
    workers = {
        "PolicyRole": LearnerWorker,
        "CriticRole": CriticWorker,
        "ScorerRole": ScorerWorker,
        "RewardModelRole": RewardModelWorker,
        "GeneratorRole": GeneratorWorker,
    }
    for name, methods in role_methods().items():
        worker, protocol = workers[name], getattr(protocols, name)
        inherited = {m for m in methods if getattr(worker, m) is getattr(protocol, m)}
        assert inherited == set()
