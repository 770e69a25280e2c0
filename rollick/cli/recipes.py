"""Commands about recipes: check, config, list, init."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rollick.cli.options import AsJson, Overrides, RecipeFile, app, sub_app, wrap_lines

config_app = sub_app("config", "Show recipes, their schema and presets.")


@app.command()
def check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    deep: Annotated[bool, Option("--deep", help="Also import what the recipe names.")] = False,
    recipe_only: Annotated[
        bool, Option("--recipe-only", help="Skip the checks of this machine.")
    ] = False,
) -> None:
    """Check a recipe, and whether this machine can run it. Starts nothing."""
    from rollick.commands.recipe import check_and_describe

    description = check_and_describe(recipe, overrides or (), deep=deep, recipe_only=recipe_only)
    typer.echo(wrap_lines(f"OK {recipe}\n{description}"))


@app.command()
def init(
    name: Annotated[str, Argument(metavar="PROJECT", help="Name of the starter: rlvr.")],
    folder: Annotated[Path | None, Argument(metavar="[FOLDER]", help="Default: the name.")] = None,
) -> None:
    """Write a starter project: a recipe and the Python files it names."""
    from rollick.starters.projects import write_starter

    folder = folder or Path(name)
    for path in write_starter(name, folder):
        typer.echo(str(path))
    typer.echo(f"next: cd {folder} && rollick check recipe.yaml && rollick train recipe.yaml")


@app.command("list")
def list_all(as_json: AsJson = False) -> None:
    """Print all names that a recipe can use, by kind."""
    from rollick.commands.recipe import describe_names
    from rollick.config.names import NAMES, names_of

    if as_json:
        typer.echo(json.dumps({kind: names_of(kind) for kind in NAMES}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("kind", "names", box=None)
    for kind in NAMES:
        table.add_row(kind.replace("_", " "), describe_names(kind))
    Console().print(table)


@config_app.command("show")
def config_show(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print a recipe with all defaults, overrides and interpolations resolved."""
    from rollick.config.load import dump_recipe, load_recipe

    typer.echo(dump_recipe(load_recipe(recipe, overrides or ()).recipe), nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from rollick.config.load import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2))


@config_app.command("preset")
def config_preset(
    name: Annotated[str, Argument(metavar="NAME", help="Preset; see `rollick list`.")],
) -> None:
    """Print the algorithm section of a preset, with all defaults."""
    from rollick.commands.recipe import describe_preset

    typer.echo(describe_preset(name), nl=False)
