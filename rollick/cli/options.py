"""The Typer application, and the argument types and output helpers that commands share."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import TextWrapper
from typing import Annotated, Any

import typer
from typer import Argument, Option

from rollick import __version__
from rollick.errors import ConfigError

app = typer.Typer(
    name="rollick",
    help="Reinforcement learning of language models, from a laptop to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"rollick {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool,
        Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


RecipeFile = Annotated[Path, Argument(metavar="RECIPE", help="Recipe: a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="[A.B=C]...", help="Overrides, such as rollout.group_size=4."),
]
RunFolder = Annotated[Path, Argument(metavar="RUN", help="Folder of a run.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object on one line.")]


def sub_app(name: str, text: str) -> typer.Typer:
    group = typer.Typer(help=text, no_args_is_help=True)
    app.add_typer(group, name=name)
    return group


def parse_options(items: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE items. A value that is not JSON is text."""
    options: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key.isidentifier():
            raise ConfigError(f"the option {item!r} is not KEY=VALUE", fix="write it as KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def print_untrusted(text: str, *, err: bool = False, exact_in_pipe: bool = False) -> None:
    """Print text that a model or a program wrote; `exact_in_pipe`: unchanged if no terminal reads
    it."""
    from rollick.observe.terminal import escape_controls

    stream = sys.stderr if err else sys.stdout
    exact = exact_in_pipe and not stream.isatty()
    typer.echo(text if exact else escape_controls(text), nl=False, err=err)


def print_rows(rows: Sequence[tuple[str, str]], *, width: int) -> None:
    typer.echo("\n".join(f"{name:<{width}}{text}" for name, text in rows))


def wrap_lines(text: str) -> str:
    """Break lines that are longer than the terminal at words, with an indent; not in a pipe."""
    width = shutil.get_terminal_size((sys.maxsize, 24)).columns
    wrapper = TextWrapper(width, subsequent_indent=" " * 10, break_long_words=False)
    lines = [wrapper.fill(line) if len(line) > width else line for line in text.splitlines()]
    return "\n".join(lines)
