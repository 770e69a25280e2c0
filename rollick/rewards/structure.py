"""Rewards for the form of a completion: schemas, patterns, tags, length, repetition.

None of them looks at what is right; beside a reward that does, they keep its answers readable. The
repetition is a penalty (0 is none, -1 the worst), the others are between 0 and 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, cast

from rollick.errors import MissingExtra
from rollick.rewards.answers import after_thinking
from rollick.types import Sample

FENCE = re.compile(r"```(?:json)?\s*\n?(.*?)```", re.DOTALL | re.IGNORECASE)


def json_schema(completion: str, schema: Any) -> float:
    """1.0 if the completion (or its last fenced block) is JSON that fits the schema.

    schema: a JSON Schema, as an object or as text (a column or an option). One that is not a schema
    is an error in the data. References to other addresses are never followed.
    """
    validator = _validator(schema if isinstance(schema, str) else json.dumps(schema))
    said = after_thinking(completion)
    value = read_json(said) if said is not None else None
    return float(value is not None and validator.is_valid(value[0]))


def regex(completion: str, pattern: str, whole: bool = False) -> float:
    """1.0 if the pattern is found in the completion; with `whole`, if it is all of it.

    `.` also stands for the end of a line.
    """
    search = re.fullmatch if whole else re.search
    return float(
        search(pattern, completion.strip() if whole else completion, re.DOTALL) is not None
    )


def length(
    completion: str,
    sample: Sample,
    least: int = 0,
    most: int = 0,
    unit: Literal["tokens", "words", "characters"] = "words",
    slope: int = 0,
) -> float:
    """1.0 if the completion has at least `least` and at most `most` (0: no limit) units.

    slope: units outside these limits over which the value falls to 0; 0 is at once.
    """
    counts = {
        "tokens": sample.response_length,
        "words": len(completion.split()),
        "characters": len(completion),
    }
    if unit not in counts:
        raise ValueError(f"the unit {unit!r} is none of {', '.join(counts)}")
    count = counts[unit]
    outside = max(least - count, count - most if most else 0, 0)
    return max(0.0, 1.0 - outside / slope) if slope else float(outside == 0)


def repetition(completion: str, phrase: int = 4) -> float:
    """Minus the share of phrases (of `phrase` words) that were there before: a penalty."""
    return -repeated_share(completion, phrase=phrase)


def repeated_share(text: str, *, phrase: int = 4) -> float:
    """Share of the runs of `phrase` words that occurred before; 0 for a shorter text.

    In a text without spaces (Chinese, or one word without end) characters are counted.
    """
    words = text.lower().split()
    if len(words) < len(text) / 40:
        words = list(text)
    runs = [tuple(words[n : n + phrase]) for n in range(len(words) - phrase + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def tags(completion: str, order: str = "think,answer", prefilled: bool = False) -> float:
    """1.0 if the completion is `<think>...</think><answer>...</answer>` and nothing else.

    order: the tags, one after another, each with something in it. prefilled: the prompt's template
    already opened the first one.
    """
    names = [name.strip() for name in order.split(",") if name.strip()]
    if not names:
        raise ValueError("order names no tag")
    opened = [f"<{name}>" for name in names]
    closed = [f"</{name}>" for name in names]
    text = (opened[0] if prefilled else "") + completion.strip()
    if any(text.count(tag) != 1 for tag in (*opened, *closed)):
        return 0.0
    pairs = zip(opened, closed, strict=True)
    pattern = r"\s*".join(f"{re.escape(a)}(.+?){re.escape(b)}" for a, b in pairs)
    match = re.fullmatch(pattern, text, re.DOTALL)
    return float(match is not None and all(inner.strip() for inner in match.groups()))


def read_json(text: str) -> tuple[Any] | None:
    """The JSON value that the text is, or that its last fenced block holds; in a tuple of one."""
    for candidate in (text.strip(), *(block.strip() for block in reversed(FENCE.findall(text)))):
        try:
            return (json.loads(candidate),)
        except (ValueError, RecursionError):
            continue
    return None


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise MissingExtra.of("jsonschema", "rewards") from error
    parsed: Any = json.loads(schema)
    if not isinstance(parsed, Mapping | bool):
        raise ValueError(f"a JSON Schema is an object, not {schema[:60]}")
    kind: Any = validator_for(cast("Any", parsed))
    try:
        kind.check_schema(parsed)
    except SchemaError as error:
        raise ValueError(f"not a JSON Schema: {error.message}") from error
    return kind(parsed, registry=Registry())
