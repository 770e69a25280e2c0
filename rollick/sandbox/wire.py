"""The encoding between boxes: data, and nothing that can act.

None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and range keep their
type, and so do these types themselves; what is a subclass of one of them (a Counter, a named tuple)
arrives as the plain one, and an iterator arrives as an iterator over what it would have given.
Everything else is a WireError. A decoder builds only these types, so no `__eq__`, `__hash__` or
`__reduce__` of the sender ever runs where the data arrive.

    value -> tag, then a length or count and the content -> value

The same module runs in this process and inside the boxes: the standard library only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

MAX_DEPTH = 200
MAX_ITEMS = 200_000
"""Of an iterator: one without end must not fill the memory."""
U32 = struct.Struct("<I")
F64 = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")

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
    except (struct.error, IndexError, TypeError, UnicodeDecodeError, ValueError) as error:
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
        parts += (b"f", F64.pack(value))
    elif isinstance(value, complex):
        parts += (b"c", COMPLEX.pack(value.real, value.imag))
    elif isinstance(value, bytes | bytearray):
        _sized(b"b", bytes(value), parts)
    elif isinstance(value, range):
        parts.append(b"r")
        for number in (value.start, value.stop, value.step):
            _encode(number, parts, depth + 1)
    elif isinstance(value, type) and TYPES.get(value.__name__) is value:
        _sized(b"y", value.__name__.encode(), parts)
    elif isinstance(value, dict):
        pairs = list(dict.items(cast("dict[Any, Any]", value)))
        parts += (b"d", U32.pack(len(pairs)))
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
        tag, items = b"g", list(islice(cast("Iterator[Any]", value), MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise WireError(f"an iterator gives more than {MAX_ITEMS} values")
    parts += (tag, U32.pack(len(items)))
    for item in items:
        _encode(item, parts, depth + 1)


def _sized(tag: bytes, content: bytes, parts: list[bytes]) -> None:
    parts += (tag, U32.pack(len(content)), content)


def _decode(content: bytes, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends."""
    if depth > MAX_DEPTH:
        raise WireError(f"a value is nested more than {MAX_DEPTH} deep")
    tag = content[at]
    at += 1
    if tag in b"NTF":
        return {78: None, 84: True, 70: False}[tag], at
    if tag == 102:  # f
        return F64.unpack_from(content, at)[0], at + F64.size
    if tag == 99:  # c
        return complex(*COMPLEX.unpack_from(content, at)), at + COMPLEX.size
    if tag == 114:  # r
        numbers, at = _decode_items(content, at, 3, depth)
        if not all(type(number) is int for number in numbers):
            raise WireError("a range of what are no whole numbers")
        return range(*numbers), at
    (size,) = U32.unpack_from(content, at)
    at += U32.size
    if tag in b"isby":
        return _decode_sized(tag, content[at : at + size], size), at + size
    if tag == 100:  # d
        items, at = _decode_items(content, at, 2 * size, depth)
        return dict(zip(items[::2], items[1::2], strict=True)), at
    if tag not in BUILDERS:
        raise WireError(f"unknown tag {tag}")
    items, at = _decode_items(content, at, size, depth)
    return BUILDERS[tag](items), at


def _decode_sized(tag: int, content: bytes, size: int) -> int | str | bytes | type[Any]:
    if len(content) != size:
        raise WireError("the bytes end too early")
    if tag == 105:  # i
        return int.from_bytes(content, "little", signed=True)
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
