"""Tables of options for the generated pages, from the schema of rollick.config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollick.config.schema.section import IgnoredWith, Section

TYPES = {"integer": "whole number", "boolean": "true or false", "null": "none"}
SCALAR = "true or false or whole number or number or string or none"
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def describe_values(schema: Mapping[str, Any]) -> str:
    """The values that a key may have, from its JSON schema."""
    if "anyOf" in schema or "oneOf" in schema:
        parts = [describe_values(each) for each in schema.get("anyOf", schema.get("oneOf"))]
        return " or ".join(dict.fromkeys(parts)).replace(SCALAR, "any value")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema or "allOf" in schema:
        return "section"
    if schema["type"] == "array" and "prefixItems" in schema:
        return f"[{', '.join(describe_values(each) for each in schema['prefixItems'])}]"
    if schema["type"] == "array":
        return f"list of {describe_values(schema['items'])}"
    if schema["type"] == "object":
        values = schema.get("additionalProperties") or next(
            iter(schema["patternProperties"].values())
        )
        return f"name: {describe_values(values)}"
    bounds = [f"{sign} {schema[key]:g}" for key, sign in BOUNDS.items() if key in schema]
    return ", ".join([TYPES.get(schema["type"], schema["type"]), *bounds])


def describe_default(value: Any) -> str:
    if value is None:
        return "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value)}`".replace('"', "")


def plain_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def option_row(section: type[Section], key: str, prefix: str) -> str:
    """One row of a table: key, values, default, meaning."""
    schema = section.model_json_schema()["properties"][key]
    default = "" if "default" not in schema else describe_default(schema["default"])
    about = meaning_of(section, key)
    return f"| `{prefix}{key}` | {describe_values(schema)} | {default} | {about} |"


def meaning_of(section: type[Section], key: str) -> str:
    """The docstring of a key on one line, with the values of other keys that make it unused."""
    field = section.model_fields[key]
    unused = [item for item in field.metadata if isinstance(item, IgnoredWith)]
    notes = [
        f"Unused with {item.key} {', '.join(map(plain_value, item.values))}." for item in unused
    ]
    return " ".join([*(field.description or "Which one.").split(), *notes]).replace("|", "\\|")
