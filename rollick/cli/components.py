"""Commands for a single component: reward test, env test, env show, sandbox run, sandbox check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rollick.cli.options import (
    AsJson,
    RunFolder,
    parse_options,
    print_rows,
    print_untrusted,
    sub_app,
)

reward_app = sub_app("reward", "Test rewards.")
env_app = sub_app("env", "Test environments and show recorded episodes.")
sandbox_app = sub_app("sandbox", "Run untrusted programs in a sandbox.")

Picture = Annotated[Path | None, Option(help=".gif or .png file for the episode.")]
KeyValues = Annotated[
    list[str] | None, Option("--option", "-o", metavar="KEY=VALUE", help="An option.")
]


@reward_app.command("test")
def reward_test(
    reward: Annotated[str, Argument(metavar="NAME|FILE:NAME", help="A listed name, or your own.")],
    rows: Annotated[str | None, Argument(metavar="[ROWS]", help="Rows; default: examples.")] = None,
    completion: Annotated[str, Option(help="Column of the completions.")] = "completion",
    option: KeyValues = None,
    limit: Annotated[int, Option(min=1, help="Maximum number of rows.")] = 5,
    timeout_s: Annotated[float, Option(min=0.01, help="Time limit of a call.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Score a few rows with a reward, in a child process. Exit code 1 if a call fails."""
    import asyncio

    from rollick.commands.reward import read_test_rows, score_rows
    from rollick.config.schema import RewardSpec
    from rollick.observe.tables import reward_table
    from rollick.observe.terminal import SafeConsole

    spec = RewardSpec(name=reward, options=parse_options(option or ()))
    test_rows = read_test_rows(reward, rows, limit=limit, base=Path.cwd())
    results = asyncio.run(
        score_rows(spec, test_rows, completion=completion, timeout_s=timeout_s, base=Path.cwd())
    )
    if as_json:
        typer.echo("\n".join(json.dumps(result) for result in results))
    else:
        SafeConsole().print(reward_table(results))
    if any(result["status"] != "ok" for result in results):
        raise typer.Exit(1)


@env_app.command("test")
def env_test(
    name: Annotated[str, Argument(metavar="NAME|FILE:CLASS", help="One of `rollick list`.")],
    episodes: Annotated[int, Option(min=1, help="Number of episodes.")] = 100,
    policy: Annotated[str, Option(help="random, solver, a model or a run folder.")] = "random",
    option: KeyValues = None,
    seed: Annotated[int, Option(help="Seed of the first episode; then counted up.")] = 0,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Check an environment, then run episodes. Exit code 1 if there is a problem or an error."""
    from rollick.commands.env import test_env

    options = parse_options(option or ())
    problems, report = test_env(
        name, options, policy=policy, episodes=episodes, seed=seed, picture=picture
    )
    for problem in problems:
        print_untrusted(f"problem: {problem}\n", err=as_json)
    statistics = report.to_json()
    if as_json:
        typer.echo(json.dumps({"problems": problems, **statistics}))
    else:
        print_rows([(key, _format(value)) for key, value in statistics.items()], width=14)
    if problems or report.errors:
        raise typer.Exit(1)


def _format(value: object) -> str:
    if isinstance(value, tuple):
        return "; ".join(str(item) for item in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@env_app.command("show")
def env_show(
    run: RunFolder,
    sample: Annotated[str, Option(help="Sample id, such as g3.1; default: the newest.")] = "",
    step: Annotated[int | None, Option(help="Step of the recording.")] = None,
    training: Annotated[bool, Option("--training", help="Show a training sample.")] = False,
    picture: Picture = None,
) -> None:
    """Run a recorded episode again and print it turn by turn."""
    from rollick.episodes.recorded import describe_episode, find_episode, rerun_episode

    row = find_episode(run, sample=sample, step=step, training=training)
    episode = rerun_episode(row["episode"], base=run, pictures=picture is not None)
    print_untrusted(f"{describe_episode(row, episode)}\n")
    if picture is not None:
        from rollick.episodes.pictures import save_episode

        save_episode(picture, episode)


@sandbox_app.command("run")
def sandbox_run(
    file: Annotated[Path, Argument(metavar="FILE.py", help="Python program.")],
    stdin: Annotated[str, Option(help="Its standard input; -: read from stdin.")] = "",
    timeout_s: Annotated[float, Option(min=0.01, help="Time limit in seconds.")] = 10.0,
    memory_mb: Annotated[int, Option(min=32, help="Memory limit.")] = 512,
    allow_unsafe: Annotated[bool, Option("--allow-unsafe", help="Run without isolation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a program in a new sandbox; print status, output, time and isolation level."""
    from rollick.commands.sandbox import run_file
    from rollick.sandbox.base import Status

    text = sys.stdin.read() if stdin == "-" else stdin
    result = run_file(
        file, text, timeout_s=timeout_s, memory_mb=memory_mb, allow_unsafe=allow_unsafe
    )
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        print_untrusted(result.stdout, exact_in_pipe=True)
        print_untrusted(result.stderr, err=True, exact_in_pipe=True)
        summary = f"{result.status}, {result.seconds:.3f} s, isolation {result.level}"
        text = f"{summary}: {result.detail}" if result.detail else summary
        print_untrusted(f"{text}\n", err=True)
    if result.status is not Status.OK:
        raise typer.Exit(1 if result.status.is_conclusive else 2)


@sandbox_app.command("check")
def sandbox_check(as_json: AsJson = False) -> None:
    """Print the isolation layers of this machine. Exit code 2 if programs would be refused."""
    import asyncio

    from rollick.sandbox.layers import probe_layers

    layers = asyncio.run(probe_layers())
    if as_json:
        typer.echo(json.dumps(layers.to_json()))
    else:
        missing = [f"missing: {name}" for name in layers.missing]
        lines = [f"isolation {layers.isolation}", *(f"  {n}" for n in [*layers.active, *missing])]
        typer.echo("\n".join(lines + ([layers.problem] if layers.problem else [])))
    if layers.isolation == "none":
        raise typer.Exit(2)
