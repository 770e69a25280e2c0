"""The command line: parses arguments, calls a function of commands/, prints its result.

    options.py     argument types and output that commands share
    recipes.py     check, config, list, init
    runs.py        train, eval, export, replay, demo, serve
    inspection.py  doctor, compare, trace, simulate
    components.py  reward test, env test, env show, sandbox

`rollick --help` and `rollick check` must be fast, so every back end is imported inside its command
and nothing here loads torch, ray or transformers at import. `main` prints a RollickError to stderr
and exits with the error's code (errors.py); any other exception is a bug: it keeps its traceback
and exits with code 1.
"""

from __future__ import annotations

import sys

from rollick.cli import recipes, runs, inspection, components  # isort: skip (order of --help)
from rollick.cli.options import app
from rollick.errors import RollickError

__all__ = ["app", "components", "inspection", "main", "recipes", "runs"]


def main() -> None:
    """The entry point of the `rollick` command."""
    try:
        app()
    except RollickError as error:
        from rich.text import Text

        from rollick.observe.terminal import SafeConsole

        # Text, not markup: a message may have brackets; soft wrap keeps file:line:column clickable.
        SafeConsole(stderr=True).print(Text(str(error), style="red"), soft_wrap=True)
        sys.exit(error.exit_code)
