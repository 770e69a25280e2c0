"""The encoding between boxes: data, and nothing that can act.

None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and range keep their
type, and so do these types themselves; what is a subclass of one of them (a Counter, a named tuple)
arrives as the plain one, and an iterator arrives as an iterator over what it would have given.
Everything else is a WireError. A decoder builds only these types, so no `__eq__`, `__hash__` or
`__reduce__` of the sender ever runs where the data arrive.

    value -> tag, then a length or count and the content -> value

The same module runs in this process and inside the boxes: it imports only what the interpreter
has loaded by itself (inside/__init__.py says why).
"""

from __future__ import annotations

from _collections_abc import Iterator
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DEPTH = 200
MAX_ITEMS = 200_000
"""Of an iterator: one without end must not fill the memory."""
COUNT_BYTES = 4

CONSTANTS = {None: b"N", True: b"T", False: b"F"}
SEQUENCES: dict[type[Any], bytes] = {list: b"l", tuple: b"t", set: b"S", frozenset: b"z"}
BUILDERS: dict[int, Callable[[list[Any]], Any]] = {
    ord("l"): list,
    ord("t"): tuple,
    ord("S"): set,
    ord("z"): frozenset,
    ord("g"): iter,
}


TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range)
}


class WireError(ValueError):
    """A value that is not data, or bytes that are not an encoding."""


def encode(value: Any) -> bytes:
    """WireError if the value, or something inside it, is not data."""
    parts: list[bytes] = []
    _encode(value, parts, 0)
    return b"".join(parts)


def decode(content: bytes) -> Any:
    """WireError unless the bytes are exactly one encoded value."""
    try:
        value, end = _decode(content, 0, 0)
    except (IndexError, TypeError, OverflowError, ValueError) as error:
        raise WireError(f"the bytes are not an encoded value: {error}") from None
    if end != len(content):
        raise WireError(f"{len(content) - end} bytes too many")
    return value


def _encode(value: Any, parts: list[bytes], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise WireError(f"a value is nested more than {MAX_DEPTH} deep")
    if value is None or value is True or value is False:
        parts.append(CONSTANTS[value])
    elif isinstance(value, str):
        _sized(b"s", str.encode(value, "utf-8", "surrogatepass"), parts)
    elif isinstance(value, int):
        _sized(
            b"i", int.to_bytes(value, int.bit_length(value) // 8 + 1, "little", signed=True), parts
        )
    elif isinstance(value, float):
        _sized(b"f", float.hex(value).encode(), parts)
    elif isinstance(value, complex):
        parts.append(b"c")
        for number in (value.real, value.imag):
            _encode(number, parts, depth + 1)
    elif isinstance(value, bytes | bytearray):
        _sized(b"b", bytes(value), parts)
    elif isinstance(value, range):
        parts.append(b"r")
        for number in (value.start, value.stop, value.step):
            _encode(number, parts, depth + 1)
    elif isinstance(value, type) and TYPES.get(value.__name__) is value:
        _sized(b"y", value.__name__.encode(), parts)
    elif isinstance(value, dict):
        pairs: list[tuple[Any, Any]] = list(dict.items(value))
        parts += (b"d", _count(pairs))
        for key, item in pairs:
            _encode(key, parts, depth + 1)
            _encode(item, parts, depth + 1)
    else:
        _encode_many(value, parts, depth)


def _encode_many(value: Any, parts: list[bytes], depth: int) -> None:
    kind = next((kind for kind in SEQUENCES if isinstance(value, kind)), None)
    if kind is not None:
        tag, items = SEQUENCES[kind], list(kind.__iter__(value))
    else:
        if not isinstance(value, Iterator):
            name = type(value).__name__
            raise WireError(f"a {name} is not data (numbers, text, lists, tuples, dicts, sets)")
        tag, items = b"g", list(islice(value, MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise WireError(f"an iterator gives more than {MAX_ITEMS} values")
    parts += (tag, _count(items))
    for item in items:
        _encode(item, parts, depth + 1)


def _sized(tag: bytes, content: bytes, parts: list[bytes]) -> None:
    parts += (tag, _count(content), content)


def _count(items: bytes | list[Any]) -> bytes:
    try:
        return len(items).to_bytes(COUNT_BYTES, "little")
    except OverflowError:
        raise WireError(f"a value has {len(items)} parts or bytes: too many") from None


def _decode(content: bytes, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends."""
    if depth > MAX_DEPTH:
        raise WireError(f"a value is nested more than {MAX_DEPTH} deep")
    tag = content[at]
    at += 1
    if tag in b"NTF":
        return {78: None, 84: True, 70: False}[tag], at
    if tag == 99:  # c
        numbers, at = _decode_items(content, at, 2, depth)
        if not all(type(number) is float for number in numbers):
            raise WireError("a complex of what are no floats")
        return complex(*numbers), at
    if tag == 114:  # r
        numbers, at = _decode_items(content, at, 3, depth)
        if not all(type(number) is int for number in numbers):
            raise WireError("a range of what are no whole numbers")
        return range(*numbers), at
    size = int.from_bytes(content[at : at + COUNT_BYTES], "little")
    at += COUNT_BYTES
    if at > len(content):
        raise WireError("the bytes end too early")
    if tag in b"isbyf":
        return _decode_sized(tag, content[at : at + size], size), at + size
    if tag == 100:  # d
        items, at = _decode_items(content, at, 2 * size, depth)
        return dict(zip(items[::2], items[1::2], strict=True)), at
    if tag not in BUILDERS:
        raise WireError(f"unknown tag {tag}")
    items, at = _decode_items(content, at, size, depth)
    return BUILDERS[tag](items), at


def _decode_sized(tag: int, content: bytes, size: int) -> Any:
    if len(content) != size:
        raise WireError("the bytes end too early")
    if tag == 105:  # i
        return int.from_bytes(content, "little", signed=True)
    if tag == 102:  # f
        return float.fromhex(content.decode("ascii"))
    if tag == 121:  # y
        kind = TYPES.get(content.decode())
        if kind is None:
            raise WireError("an unknown type")
        return kind
    return content.decode("utf-8", "surrogatepass") if tag == 115 else content


def _decode_items(content: bytes, at: int, count: int, depth: int) -> tuple[list[Any], int]:
    if count > len(content) - at:
        raise WireError("the bytes end too early")
    items: list[Any] = []
    for _ in range(count):
        item, at = _decode(content, at, depth + 1)
        items.append(item)
    return items, at
