"""In the test box, for pytest files: the candidate's box, and what crosses between the two.

    use(operation, args) -> pack -> request -> the candidate's box -> reply -> unpack

A value that is not plain data crosses as a tuple that begins with MARK (exports.py has the other
side): an object as its number and a description of its class. A function of the tests that is
passed to the candidate stays here, and is called here when the candidate asks for it.

What the tests pass that is neither data nor an object nor a function needs one box for both:
`share_box` ends this run. It must not depend on the candidate, so nothing that the candidate
returns may lead to it.

Runs inside boxes: see inside/__init__.py.
"""

from __future__ import annotations

import sys
from _collections_abc import Iterator, dict_items, dict_keys, dict_values
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

wire, values = sys.modules["rollick_wire"], sys.modules["rollick_values"]
tests, objects = sys.modules["rollick_tests"], sys.modules["rollick_objects"]

MARK = values.MARK
PLAIN = (bool, int, float, complex, str, bytes, bytearray, range)
CONTAINERS = (list, tuple, set, frozenset)
VIEWS = (dict_items, dict_keys, dict_values)
CALLABLE_MODULES = ("builtins", "functools", "operator")
"""Modules of the types of functions: other callable objects have a state and more methods."""
TEST_MODULE = "test_candidate"
FLAG_ARGS, FLAG_KWARGS, FLAG_ASYNC = 0x04, 0x08, 0x80


class ObjectCandidate(tests.Candidate):
    """The candidate's box as a pytest file sees it."""

    def __init__(
        self, requests: int, replies: int, share_box: Callable[[str], Any], source: str = ""
    ) -> None:
        super().__init__(requests, replies)
        self.share_box = share_box
        self.source = source
        self.classes: dict[int, type[Any]] = {}
        self.named_classes: set[int] = set()
        """Classes that the tests use by a name with a capital: the tests expect objects of them."""
        self.proxies: dict[tuple[int, bool], Any] = {}
        self.highest_number = -1
        """The highest number of an object so far."""
        self.functions: list[Any] = []
        """Functions of the tests that the candidate may call."""
        self.numbers: dict[int, int] = {}
        """The numbers of these functions, by `id`."""
        self.coroutines: dict[int, tuple[Any, int]] = {}
        """Coroutines that stand for the candidate's, with their numbers, by `id`."""
        self.errors: list[BaseException] = []
        self.changed: list[Any] = []
        """[position, new content] of each argument that the last call has changed in place."""

    def bind(self, names: list[str]) -> dict[str, Any]:
        return {name: self.look_up(name) for name in names}

    def look_up(self, name: str) -> Any:
        """The candidate's value of this name. One that it does not define raises on use."""
        try:
            reply = self.use("lookup", name)
        except Exception as error:
            return tests.StandIn(tests.make_raiser(error))
        if type(reply) is list and len(reply) == 2:
            return self.name_class(name, reply[1])
        error = NameError(f"the candidate does not define {name!r}")
        return tests.StandIn(tests.make_raiser(error))

    def name_class(self, name: str, value: Any) -> Any:
        """Mark a class as one that the tests name. Without a capital it is called as a function is:
        the tests may expect plain data from it."""
        if type(value) is not objects.RemoteMeta:
            return value
        number = value.rollick_class
        if not name[:1].isupper():
            return self.proxy(number, objects.RemoteObject)
        self.named_classes.add(number)
        return value

    def use(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self.unpack(self.request("use", operation, self.pack(list(args)), self.pack(kwargs)))

    def build(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a class. What it returns counts as built unless it is known from elsewhere."""
        highest = self.highest_number
        value = self.use("call", cls, *args, **kwargs)
        builds = cls.rollick_builds and cls.rollick_class in self.named_classes
        if builds and isinstance(value, objects.RemoteObject):
            number = value.rollick_number
            if number > highest or (number, True) in self.proxies:
                return self.proxy(number, type(value), built=True)
        return value

    def proxy(self, number: int, cls: type[Any], *, built: bool = False) -> Any:
        """The same proxy for the same object, so that `is` works."""
        self.highest_number = max(self.highest_number, number)
        if (number, built) not in self.proxies:
            proxy: Any = object.__new__(cls)
            proxy.__init__(self, number, built)
            self.proxies[number, built] = proxy
        return self.proxies[number, built]

    def request(self, *request: Any, max_bytes: int = tests.MAX_REPLY) -> Any:
        """Until the reply arrives, call the functions of the tests for which the candidate asks."""
        failure: BaseException | None = None
        reply = self.exchange(list(request), max_bytes)
        while type(reply) is list and len(reply) == 4 and reply[0] == "callback":
            answer, failed = self.run_callback(*reply[1:])
            failure = failure or failed
            reply = self.exchange(answer, max_bytes)
        if failure is not None:
            raise failure
        return self.read_reply(reply)

    def run_callback(
        self, number: Any, args: Any, kwargs: Any
    ) -> tuple[list[Any], BaseException | None]:
        """(answer, failed check). A failed check fails the test, even if the candidate catches the
        exception."""
        try:
            function = self.functions[number]
            value = function(*self.unpack(args), **self.unpack(kwargs))
            if hasattr(value, "cr_await") and id(value) not in self.coroutines:
                value = run_coroutine(value)
            return ["returned", self.pack(value)], None
        except BaseException as error:
            return ["raised", self.pack(error)], error if objects.is_failed_check(error) else None

    def read_reply(self, reply: Any) -> Any:
        if type(reply) is list and len(reply) == 2 and reply[0] == "value":
            return reply[1]
        if type(reply) is list and len(reply) == 3 and reply[:2] == ["value", None]:
            self.changed = reply[2]
            return None
        if type(reply) is list and len(reply) == 7 and reply[0] == "raise":
            raise self.make_error(*reply[1:])
        raise tests.CandidateError("the reply is neither a value nor an exception")

    def make_error(
        self, builtin: Any, text: Any, cls: Any, number: Any, args: Any, raised: Any
    ) -> BaseException:
        """An exception of the candidate; one that the tests have raised is that of the tests."""
        if type(raised) is int and 0 <= raised < len(self.errors):
            error = self.errors[raised]
            if isinstance(error, tests.END_OF_ITERATION):
                return tests.make_exception(type(error).__name__, str(text))
            return error
        kind: Any = self.unpack(cls) if cls is not None else None
        arguments = self.unpack(args)
        if isinstance(kind, type) and issubclass(kind, Exception):
            error = kind.__new__(kind, *arguments)
            error.args = arguments
        else:
            error = build_builtin(str(builtin), str(text), arguments)
        error.__dict__.update(_rollick_text=str(text), _rollick_error=(self, number))
        return error

    def apply_changes(self, args: tuple[Any, ...]) -> None:
        """Change the arguments as the candidate has changed them in its box. It may do so only in a
        call that returns None: `f(values) == sorted(values)` must not pass with other values."""
        changed, self.changed = self.changed, []
        for position, content in changed:
            if type(position) is not int or not 1 <= position <= len(args):
                raise tests.CandidateError("an argument that was not passed has changed")
            before, after = args[position - 1], self.unpack(content)
            if type(before) is not type(after) or type(after) not in (list, dict, set):
                raise tests.CandidateError("an argument has changed its type")
            if type(after) is list:
                # What the tests have built stays the same proxy.
                proxies = [each for each in before if isinstance(each, objects.RemoteObject)]
                same: dict[int | None, Any] = {each.rollick_number: each for each in proxies}
                before[:] = [same.get(objects.number_of(item), item) for item in after]
            else:
                before.clear()
                before.update(after)

    def unpack(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple and len(value) > 1 and value[0] == MARK:
            try:
                return self.unpack_marked(*value[1:])
            except tests.CandidateError:
                raise
            except Exception as error:
                raise tests.CandidateError(f"an invalid reply: {error}") from None
        if kind in CONTAINERS:
            return kind([self.unpack(item) for item in value])
        if kind is dict:
            return {self.unpack(key): self.unpack(item) for key, item in value.items()}
        return value

    def unpack_marked(self, kind: str, *parts: Any) -> Any:
        if kind == "object":
            number, described = parts
            return self.proxy(
                number, objects.RemoteObject if described is None else self.unpack(described)
            )
        if kind == "class":
            number = parts[0]
            if number not in self.classes:
                self.highest_number = max(self.highest_number, number)
                self.classes[number] = self.make_class(*parts)
            return self.classes[number]
        if kind == "import" and parts[0] == "builtins":
            return safe_builtin(parts[1])
        if kind == "iterator":
            return self.proxy(parts[0], objects.RemoteIterator)
        if kind == "coroutine":
            coroutine = self.wait(self.proxy(parts[0], objects.RemoteObject))
            self.coroutines[id(coroutine)] = (coroutine, parts[0])
            return coroutine
        if kind == "callback":
            return self.functions[parts[0]]
        if kind == "error":
            return self.make_error(*parts)
        if kind == "named":
            return tuple.__new__(self.unpack(parts[0]), self.unpack(parts[1]))
        return values.join_value(parts[0], self.unpack(parts[1]))

    async def wait(self, coroutine: Any) -> Any:
        return self.use("run", coroutine)

    def make_class(
        self,
        number: int,
        name: str,
        module: str,
        fields: Any,
        bases: Any,
        content: str,
        is_enum: bool,
    ) -> type[Any]:
        """The local class of one of the candidate's classes."""
        body: dict[str, Any] = {"__test__": False, "rollick_class": number}
        if bases:
            local = tuple(dict.fromkeys(self.unpack(base) for base in bases))
            if not all(issubclass(base, Exception) for base in local):
                raise tests.CandidateError("an exception is derived from another class")
            if (known := standard_exception(module, name)) is not None:
                return known
            return type(name, local, body | objects.ERROR_METHODS)
        body |= {"__slots__": (), "rollick_owner": self, "rollick_content": content}
        body["rollick_builds"] = not is_enum
        base: Any = objects.RemoteObject
        if fields:
            base = __import__("collections").namedtuple(name, fields)
            body["__getattr__"] = objects.tuple_attribute
        return type.__new__(objects.RemoteMeta, name, (base,), body)

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in PLAIN:
            return value
        if (number := objects.number_of(value)) is not None:
            return (MARK, "object", number)
        if kind is tests.StandIn:
            return value()  # raises what the candidate lacks
        if kind in CONTAINERS:
            return kind([self.pack(item) for item in value])
        if kind is dict:
            return {self.pack(key): self.pack(item) for key, item in value.items()}
        if isinstance(value, VIEWS):
            return [self.pack(item) for item in value]
        if type(kind) is objects.RemoteMeta:
            return (MARK, "named", kind.rollick_class, tuple([self.pack(item) for item in value]))
        if (parts := values.split_value(value)) is not None:
            return (MARK, "value", parts[0], self.pack(parts[1]))
        if id(value) in self.coroutines:
            return (MARK, "object", self.coroutines[id(value)][1])
        return self.pack_other(value, kind)

    def pack_other(self, value: Any, kind: type[Any]) -> Any:
        if isinstance(value, BaseException):
            return self.pack_error(value)
        if (name := importable_name(value)) is not None:
            return (MARK, "import", *name)
        if isinstance(value, type):
            if value.__module__ == TEST_MODULE:
                return self.share_box(f"the tests pass the class {value.__name__} to the candidate")
            raise TypeError(f"the class {value.__name__} cannot be passed to the candidate")
        if kind.__module__ in CALLABLE_MODULES and callable(value):
            return self.pack_function(value)
        if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            if isinstance(value, Iterator) and kind.__module__ != "_io":
                items = list(islice(value, wire.MAX_ITEMS + 1))
                if len(items) <= wire.MAX_ITEMS:
                    return iter([self.pack(item) for item in items])
                return self.share_box("the tests pass an endless iterator to the candidate")
            if isinstance(value, PLAIN):
                return value
            for base in (dict, *CONTAINERS):
                if isinstance(value, base):
                    return self.pack(base(value))
        return self.share_box(f"the tests pass a {kind.__name__} to the candidate")

    def pack_error(self, error: BaseException) -> Any:
        """An exception of the tests, by the name of its builtin class. The message of a failed
        check, which may have what the tests expect, is not sent."""
        self.errors.append(error)
        number = len(self.errors) - 1
        if objects.is_failed_check(error):
            return (MARK, "error", "AssertionError", "AssertionError", (), number)
        builtin = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
        plain = all(arg is None or type(arg) in PLAIN for arg in error.args)
        arguments = error.args if plain else (str(error),)
        return (MARK, "error", builtin.__name__, type(error).__name__, arguments, number)

    def pack_function(self, function: Any) -> Any:
        if id(function) not in self.numbers:
            self.functions.append(function)
            self.numbers[id(function)] = len(self.functions) - 1
        code = getattr(function, "__code__", None)
        name = str(getattr(function, "__name__", "callback"))
        is_async = code is not None and bool(code.co_flags & FLAG_ASYNC)
        number = self.numbers[id(function)]
        return (MARK, "callback", number, name, parameters_of(function), is_async)


def run_coroutine(coroutine: Any) -> Any:
    """Run a coroutine of the tests, possibly while their own loop waits for the candidate."""
    import asyncio

    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(coroutine)
    finally:
        asyncio._set_running_loop(outer)


def safe_builtin(name: str) -> type[Any]:
    """A class of plain data or a builtin exception; one that ends an iteration is replaced."""
    if name in wire.TYPES:
        return wire.TYPES[name]
    return type(tests.make_exception(name, ""))


def build_builtin(name: str, text: str, arguments: Any) -> BaseException:
    """A builtin exception with its arguments, or with its text if it does not take them."""
    fallback = tests.make_exception(name, text)
    if type(fallback).__name__ != name:
        return fallback
    try:
        return type(fallback)(*arguments)
    except Exception:
        return fallback


def standard_exception(module: str, name: str) -> type[Any] | None:
    """An exception of the standard library, if the tests have imported its module."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    cls = getattr(sys.modules.get(module), name, None)
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        return None
    return None if issubclass(cls, tests.END_OF_ITERATION) else cls


def importable_name(value: Any) -> tuple[str, str] | None:
    """(module, name) of a function or class of the standard library."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)):
        return None
    importable: Any = sys.modules.get(module)
    for part in name.split("."):
        importable = getattr(importable, part, None)
    is_standard = module.partition(".")[0] in sys.stdlib_module_names
    return (module, name) if is_standard and importable is value else None


def parameters_of(function: Any) -> list[Any] | None:
    """(name, whether it has a default) of each parameter; None if some are special."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_flags & (FLAG_ARGS | FLAG_KWARGS) or hasattr(function, "__self__"):
        return None
    if code.co_posonlyargcount or code.co_kwonlyargcount:
        return None
    names = code.co_varnames[: code.co_argcount]
    first = len(names) - len(function.__defaults__ or ())
    return [(name, position >= first) for position, name in enumerate(names)]
