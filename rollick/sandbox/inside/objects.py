"""Proxies in the test box for objects that live in the candidate's box, for pytest files.

    Box(3).size  ->  use: lookup "Box", call, getattr "size"  ->  plain data

A proxy forwards operations to the object. A class of the candidate is a class here too, so that
`type(x) is Box`, `isinstance` and `except` work.

A function that should return a number must not pass by returning an object that is equal to
everything, and must not learn what the tests expect. So a proxy is equal to plain data only if the
*content* of its object is. Objects are compared with each other only if the tests named their
class. Only objects that the tests have built support operators with plain data.

Runs inside boxes: see inside/__init__.py.
"""

from __future__ import annotations

import builtins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FORWARDED = ("__name__", "__qualname__", "__dict__")
"""Double-underscore attributes that are read from the object; the proxy itself has the others."""
SINGLE_ITEMS, CHUNK = 64, 512
"""The first items of an iterator are requested one by one, later ones in chunks."""
OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("lshift", "rshift"),
)
COMPARISONS = ("lt", "le", "gt", "ge")
UNARY = (
    *("neg", "pos", "abs", "invert", "index", "int", "float", "complex", "round", "bytes", "copy"),
)
FORWARDED_CLASS_METHODS = ("setattr", "delattr", "len", "iter", "getitem")
FORWARDED_METHODS = (*FORWARDED_CLASS_METHODS, "reversed", "setitem", "delitem")


def number_of(value: Any) -> int | None:
    """The number of the object, class or exception of the candidate that a value stands for."""
    if isinstance(value, RemoteObject):
        return value.rollick_number
    if isinstance(value, type):
        return vars(value).get("rollick_class")
    if isinstance(value, BaseException):
        _, number = vars(value).get("_rollick_error", (None, None))
        return number
    return None


def is_failed_assertion(error: BaseException) -> bool:
    """Whether it is a failed assertion of the tests: an AssertionError, or one of pytest's."""
    return isinstance(error, AssertionError) or not isinstance(error, Exception)


def get_error_text(self: Any) -> str:
    return self.__dict__.get("_rollick_text", "")


def get_error_attribute(self: Any, name: str) -> Any:
    candidate, _ = self.__dict__.get("_rollick_error", (None, None))
    if candidate is None or name.startswith("_"):
        raise AttributeError(name)
    return candidate.use("getattr", self, name)


ERROR_METHODS = {"__str__": get_error_text, "__getattr__": get_error_attribute}
"""Methods of the local classes of the candidate's exceptions."""


def get_tuple_attribute(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(self).rollick_owner.use("getattr", self, name)


def may_suppress(candidate: Any, error: BaseException, traceback: Any) -> bool:
    """Whether a context manager of the candidate may suppress an exception of the tests.

    It could otherwise end a block before its assertions, and the test would pass. So it may only
    suppress an exception that does not depend on the candidate: of a `raise`, or of a statement
    without names (`1 / 0`), directly in the block.
    """
    if is_failed_assertion(error) or traceback is None or traceback.tb_next is not None:
        return False
    ast = __import__("ast")
    blocks = (node for node in ast.walk(ast.parse(candidate.source)) if isinstance(node, ast.With))
    for statement in (statement for block in blocks for statement in block.body):
        if statement.lineno <= traceback.tb_lineno <= statement.end_lineno:
            names = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
            is_constant = isinstance(statement, ast.Expr) and all(
                hasattr(builtins, name) for name in names
            )
            if is_constant or isinstance(statement, ast.Raise):
                return True
    return False


class RemoteObject:
    """A proxy of an object: forwards attributes, calls, items and conversions to text."""

    __slots__ = ("rollick_built", "rollick_candidate", "rollick_number")
    rollick_class = -1
    rollick_content = ""

    def __init__(self, candidate: Any, number: int, built: bool = False) -> None:
        object.__setattr__(self, "rollick_candidate", candidate)
        object.__setattr__(self, "rollick_number", number)
        object.__setattr__(self, "rollick_built", built)

    def __getattr__(self, name: str) -> Any:
        # pytest looks for its marks on every object.
        if name.startswith(("__", "pytest")) and name not in FORWARDED:
            raise AttributeError(name)
        return self.rollick_candidate.record_class(name, use(self, "getattr", name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = use(self, "call", *args, **kwargs)
        self.rollick_candidate.apply_changes(args)
        return value

    def __bool__(self) -> bool:
        return use(self, "bool") is True

    def __next__(self) -> Any:
        items, ended = use(self, "take", 1)
        if ended is True:
            raise StopIteration
        return items[0]

    def __contains__(self: Any, value: Any) -> bool:
        if self.rollick_built:
            return use(self, "contains", value) is True
        return any(item is value or item == value for item in self)

    def __str__(self) -> str:
        return str(use(self, "str"))

    def __repr__(self) -> str:
        return str(use(self, "repr"))

    def __format__(self, spec: str) -> str:
        return str(use(self, "format", spec))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy_built_mark(self, use(self, "deepcopy"))

    def __hash__(self) -> int:
        if is_comparable(self):
            return use(self, "hash")
        return hash(self.rollick_number)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RemoteObject):
            if is_comparable(self) and is_comparable(other):
                return use(self, "eq", other) is True
            return self.rollick_number == other.rollick_number
        return bool(type(self).rollick_content) and use(self, "content") == other

    def __enter__(self) -> Any:
        value = use(self, "enter")
        return self if number_of(value) == self.rollick_number else value

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        suppressed = use(self, "exit", error) is True
        if error is None or not suppressed:
            return False
        if not may_suppress(self.rollick_candidate, error, traceback):
            error.add_note(
                "The candidate's context manager suppressed this exception; see "
                "docs/sandbox.md for the exceptions that it may suppress."
            )
            return False
        return True

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, RemoteObject) and use(self, "has_instance", instance) is True

    def __subclasscheck__(self, cls: Any) -> bool:
        return number_of(cls) is not None and use(self, "is_subclass", cls) is True


class RemoteIterator(RemoteObject):
    """A generator or another iterator of the standard library."""

    __slots__ = ("rollick_state",)

    def __init__(self, candidate: Any, number: int, built: bool = False) -> None:
        super().__init__(candidate, number, built)
        object.__setattr__(self, "rollick_state", {"items": [], "num_received": 0, "ended": False})

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        state = self.rollick_state
        if not state["items"] and not state["ended"]:
            count = CHUNK if state["num_received"] >= SINGLE_ITEMS else 1
            items, state["ended"] = use(self, "take", count)
            state["items"] = items[::-1]
            state["num_received"] += len(items)
        if not state["items"]:
            raise StopIteration
        return state["items"].pop()


class RemoteMeta(type):
    """The type of the local classes that stand for classes of the candidate."""

    def __new__(
        cls, name: str, bases: tuple[Any, ...], body: dict[str, Any], **options: Any
    ) -> Any:
        """For a class of the tests; `make_class` does not call this."""
        base = next(base for base in bases if type(base) is RemoteMeta)
        return base.rollick_owner.share_box(f"a class of the tests derives from {base.__name__}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.rollick_owner.build(cls, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith(("__", "pytest")):
            raise AttributeError(name)
        return cls.rollick_owner.record_class(name, use(cls, "getattr", name))

    def __bool__(cls) -> bool:
        return True

    def __contains__(cls: Any, value: Any) -> bool:
        return any(item is value or item == value for item in cls)

    def __repr__(cls) -> str:
        return str(use(cls, "repr"))

    def __instancecheck__(cls, instance: Any) -> bool:
        if (
            isinstance(type(instance), RemoteMeta)
            and type(instance).rollick_class == cls.rollick_class
        ):
            return True
        return isinstance(instance, RemoteObject) and use(cls, "has_instance", instance) is True

    def __subclasscheck__(cls, subclass: Any) -> bool:
        if subclass is cls:
            return True
        return number_of(subclass) is not None and use(cls, "is_subclass", subclass) is True


def use(proxy: Any, operation: str, *args: Any, **kwargs: Any) -> Any:
    is_class = isinstance(proxy, RemoteMeta)
    candidate = proxy.rollick_owner if is_class else proxy.rollick_candidate
    return candidate.use(operation, proxy, *args, **kwargs)


def is_comparable(proxy: RemoteObject) -> bool:
    """Whether the tests expect such an object: they built it or use its class by name."""
    candidate = proxy.rollick_candidate
    return proxy.rollick_built or type(proxy).rollick_class in candidate.named_classes


def copy_built_mark(proxy: RemoteObject, value: Any) -> Any:
    """The value of an operation with the proxy, marked as built by the tests if the proxy is."""
    if not (isinstance(value, RemoteObject) and proxy.rollick_built):
        return value
    if value.rollick_number == proxy.rollick_number:
        return proxy
    return proxy.rollick_candidate.proxy(value.rollick_number, type(value), built=True)


def allows_operators(proxy: RemoteObject, others: tuple[Any, ...]) -> bool:
    return proxy.rollick_built or all(
        isinstance(operand, RemoteObject) and is_comparable(operand) for operand in (proxy, *others)
    )


def _make_forwarder(operation: str) -> Any:
    def operate(proxy: Any, *args: Any) -> Any:
        return use(proxy, operation, *args)

    return operate


def _make_operator(operation: str, *, is_reflected: bool = False) -> Any:
    def operate(self: RemoteObject, *others: Any) -> Any:
        if not allows_operators(self, others):
            return NotImplemented
        args = (*others, self) if is_reflected else (self, *others)
        return copy_built_mark(self, self.rollick_candidate.use(operation, *args))

    return operate


def _make_unary(operation: str) -> Any:
    def operate(self: RemoteObject, *options: Any) -> Any:
        return copy_built_mark(self, use(self, operation, *options))

    return operate


def _make_comparison(operation: str) -> Any:
    compare_content = getattr(__import__("_operator"), operation)

    def compare(self: RemoteObject, other: Any) -> Any:
        if isinstance(other, RemoteObject) and is_comparable(self) and is_comparable(other):
            return use(self, operation, other) is True
        if type(self).rollick_content and not isinstance(other, RemoteObject):
            return compare_content(use(self, "content"), other)
        return NotImplemented

    return compare


for _name in FORWARDED_METHODS:
    setattr(RemoteObject, f"__{_name}__", _make_forwarder(_name))
for _name in FORWARDED_CLASS_METHODS:
    setattr(RemoteMeta, f"__{_name}__", _make_forwarder(_name))
for _name in OPERATORS:
    setattr(RemoteObject, f"__{_name}__", _make_operator(_name))
    setattr(RemoteObject, f"__r{_name}__", _make_operator(_name, is_reflected=True))
    setattr(RemoteObject, f"__i{_name}__", _make_operator(f"i{_name}"))
for _name in COMPARISONS:
    setattr(RemoteObject, f"__{_name}__", _make_comparison(_name))
for _name in UNARY:
    setattr(RemoteObject, f"__{_name}__", _make_unary(_name))
