"""Write docs/configuration.md, the reference of every key of a recipe, from the schema.

    python docs/make_configuration.py

Nothing on the page is written by hand: change a default or a docstring in rollick/config/schema,
and run it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from option_tables import describe_default, describe_values, meaning_of

from rollick.config.schema import RECIPES
from rollick.config.schema.section import Section

PAGE = Path(__file__).parent / "configuration.md"
HEAD = """\
# Configuration

Every key of a recipe: its values, its default and what it does. A recipe is a YAML file; `rollick
check` finds mistakes in it, `rollick config show` prints it with every default filled in, and
`rollick config schema` prints a JSON Schema for editors.

```yaml
pipeline: rlvr
model: {path: HuggingFaceTB/SmolLM2-135M-Instruct}
data:
  domains:
    sums: {source: sums.jsonl, rewards: [last_number]}
rollout: {groups_per_step: 16, group_size: 8}
```

Any key can be overridden on the command line, `rollick train recipe.yaml rollout.group_size=4`, and
`extends: other.yaml` takes the keys of another recipe. `${a.b}` is the value of another key,
`${oc.env:NAME}` an environment variable; both are written to the run's folder as plain values, so
name the variable of an API key instead (`key_env`). Options of advantages, losses and corrections
are in [algorithms](algorithms/README.md). This page is written by `docs/make_configuration.py`.
"""


@dataclass
class Row:
    """A key, and the pipelines that have it."""

    values: str
    default: str
    meaning: str
    pipelines: list[str] = field(default_factory=list[str])


def sections_in(annotation: Any) -> tuple[type[Section] | None, str]:
    """The section that a key holds, and what comes between: `.NAME` for a mapping, `.N` a list."""
    if get_origin(annotation) is Annotated:
        return sections_in(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, ""
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, Mapping) and len(arguments) == 2:
        return sections_in(arguments[1])[0], ".NAME"
    if get_origin(annotation) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return sections_in(arguments[0])[0], ".N"
    rest = [each for each in arguments if each is not type(None)]
    return sections_in(rest[0]) if len(rest) == 1 and len(arguments) == 2 else (None, "")


class Reference:
    """Collects the keys of all pipelines. A section that occurs twice is described once."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.homes: dict[type[Section], str] = {}
        for recipe in RECIPES.values():
            for key, option in recipe.model_fields.items():
                if inner := sections_in(option.annotation)[0]:
                    self.homes.setdefault(inner, key)
        for pipeline, recipe in RECIPES.items():
            for key in recipe.model_fields:
                self.add(recipe, key, "", pipeline)

    def add(self, section: type[Section], key: str, prefix: str, pipeline: str) -> None:
        path, schema = f"{prefix}{key}", section.model_json_schema()["properties"][key]
        inner, between = sections_in(section.model_fields[key].annotation)
        default = describe_default(schema["default"]) if "default" in schema else ""
        if default.startswith("`{"):
            default = ""
        default = "empty" if default in ("``", "`[]`") else default
        values, meaning = describe_values(schema), meaning_of(section, key)
        home = self.homes.setdefault(inner, path) if inner else path
        if inner and home != path:
            values = f"as [{home}](#{home.split('.')[0]})"
        row = self.rows.setdefault(path, Row(values, default, meaning))
        row.pipelines.append(pipeline)
        if inner and home == path:
            # The name of a part differs by pipeline; docs/algorithms lists the names.
            for name in inner.model_fields:
                if f"{path}.{name}" != "algorithm.loss.name":
                    self.add(inner, name, f"{path}{between}.", pipeline)

    def top_level(self) -> list[str]:
        return [path for path in self.rows if "." not in path]

    def table(self, section: str) -> Iterator[str]:
        """The rows of a top-level section."""
        everywhere = self.rows[section].pipelines
        yield "| key | values | default | meaning |"
        yield "|---|---|---|---|"
        for path, row in self.rows.items():
            if path.startswith(f"{section}."):
                only = "" if row.pipelines == everywhere else f"({', '.join(row.pipelines)}) "
                yield f"| `{path}` | {row.values} | {row.default} | {only}{row.meaning} |"


def write_page() -> str:
    reference = Reference()
    parts = [HEAD.strip(), "## Pipelines", "\n".join(pipeline_table(reference))]
    for section in reference.top_level():
        row = reference.rows[section]
        if section == "pipeline":
            continue
        some = row.pipelines != list(RECIPES)
        pipelines = f" Pipelines: {', '.join(row.pipelines)}." if some else ""
        parts += [f"## {section}", f"{row.meaning}{pipelines}", "\n".join(reference.table(section))]
    return "\n\n".join(parts) + "\n"


def pipeline_table(reference: Reference) -> Iterator[str]:
    """What each pipeline does, and which sections only some of them have."""
    some = [
        name for name in reference.top_level() if reference.rows[name].pipelines != list(RECIPES)
    ]
    yield "| `pipeline` | what it does | its own sections |"
    yield "|---|---|---|"
    for pipeline, recipe in RECIPES.items():
        own = [f"[{name}](#{name})" for name in some if pipeline in reference.rows[name].pipelines]
        yield f"| `{pipeline}` | {getdoc(recipe)} | {', '.join(own) or '-'} |"


if __name__ == "__main__":
    PAGE.write_text(write_page(), "utf-8")
