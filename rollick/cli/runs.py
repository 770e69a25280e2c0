"""Commands that run a model: train, eval, export, replay, demo, serve."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from rollick.cli.options import AsJson, Overrides, RecipeFile, RunFolder, app, print_rows
from rollick.errors import MissingExtra

if TYPE_CHECKING:
    from rollick.serve.server import ServerAddress

Best = Annotated[bool, Option("--best", help="The run's best checkpoint, not the newest.")]
ModelOrRun = Annotated[
    str, Argument(metavar="MODEL|RUN", help="Model folder, hub name, GGUF file or run folder.")
]


def log_to_stderr() -> None:
    """Print rollick's INFO log messages to stderr."""
    import logging

    from rollick.observe.terminal import SafeFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("rollick").setLevel(logging.INFO)


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the last checkpoint.")] = False,
    restarts: Annotated[
        int, Option(min=0, help="After a crash, resume; at most N times without a new checkpoint.")
    ] = 0,
    standby: Annotated[
        bool,
        Option("--standby", help="With --restarts: keep a second, prepared process to resume in."),
    ] = False,
    wait: Annotated[bool, Option("--wait", hidden=True)] = False,
) -> None:
    """Run a recipe. A signal saves a checkpoint and exits with code 75; --resume continues.

    Exit codes: 2, a mistake to fix first; 69, a worker, the cluster or a server (judge, sandbox,
    environment) is lost, or open files, memory or disk are exhausted: try again with --resume,
    which --restarts does by itself; 75, stopped by a signal; 1, a bug.
    """
    if restarts:
        from rollick.commands.supervise import supervise_train

        log_to_stderr()
        raise typer.Exit(
            supervise_train(
                recipe, overrides or (), restarts=restarts, standby=standby, resume=resume
            )
        )
    from rollick.config.load import load_recipe
    from rollick.pipelines.run import run_recipe
    from rollick.pipelines.state import RunInterrupted

    loaded = load_recipe(recipe, overrides or ())
    log_to_stderr()
    if wait:
        from rollick.commands.standby import wait_for_start
        from rollick.pipelines.standby import prepare_run

        prepare_run(loaded)
        if not wait_for_start():
            return
        loaded = load_recipe(recipe, overrides or ())  # It may have changed meanwhile.
    try:
        result = run_recipe(loaded, resume=resume)
    except RunInterrupted as interrupted:
        typer.echo(str(interrupted.result))
        raise
    typer.echo(str(result))


@app.command("eval")
def evaluate(
    model: ModelOrRun,
    recipe: RecipeFile,
    overrides: Overrides = None,
    best: Best = False,
    training: Annotated[
        bool, Option("--training", help="Score the training prompts instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on a recipe's validation prompts: pass@1, pass@k, confidence intervals."""
    from rollick.commands.evaluate import describe_report, evaluate_model, plan_evaluation
    from rollick.pipelines.run import wait_for

    loaded, checkpoint = plan_evaluation(
        model, recipe, overrides or (), best=best, training=training
    )
    log_to_stderr()
    report = wait_for(evaluate_model(loaded, checkpoint=checkpoint, training=training))
    if as_json:
        typer.echo(json.dumps(describe_report(report, training=training)))
        return
    from rollick.observe.tables import evaluation_table
    from rollick.observe.terminal import SafeConsole

    title = f"on {'training' if training else 'held-out'} prompts"
    SafeConsole().print(evaluation_table(report.figures(), title=title))
    typer.echo(f"samples: {Path(loaded.recipe.run.folder) / loaded.recipe.run.name}")


@app.command()
def export(
    run: RunFolder,
    out: Annotated[Path, Argument(metavar="OUT", help="Folder to write.")],
    best: Best = False,
    adapter: Annotated[bool, Option("--adapter", help="Only the LoRA adapter, for PEFT.")] = False,
    step: Annotated[int | None, Option(help="Step of the checkpoint; default: the newest.")] = None,
) -> None:
    """Write a run's policy as a Hugging Face folder, with adapters merged into the weights."""
    from rollick.commands.export import export_run

    typer.echo(str(export_run(run, out, best=best, adapter=adapter, step=step)))


@app.command()
def replay(
    dump: Annotated[Path, Argument(metavar="DUMP", help="Folder under a run's dumps/.")],
    recipe: RecipeFile,
    overrides: Overrides = None,
    only: Annotated[str, Option(help="Half of the step: generate or train.")] = "train",
    as_json: AsJson = False,
) -> None:
    """Run one half of a dumped step again (observe.dump_steps writes dumps)."""
    from rollick.commands.replay import plan_replay
    from rollick.pipelines.run import wait_for

    work = plan_replay(dump, recipe, overrides or (), only=only)
    log_to_stderr()
    figures = asdict(wait_for(work))
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        print_rows([(name, f"{value:.6g}") for name, value in figures.items()], width=18)


@app.command()
def demo(
    seed: Annotated[int, Option(help="Seed of all random numbers.")] = 0,
    control: Annotated[
        bool, Option("--control", help="Shuffle the scores, so that nothing is learned.")
    ] = False,
    folder: Annotated[Path, Option(help="Folder for runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Create a tiny model, warm it up, and train it with RL on two domains, offline, on Ray."""
    started = time.perf_counter()
    from rollick.testing.demo import run_demo

    log_to_stderr()
    result = run_demo(started, seed=seed, control=control, folder=folder)
    if as_json:
        typer.echo(json.dumps(result.to_json()))


@app.command()
def serve(
    model: ModelOrRun,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    token: Annotated[str, Option(envvar="ROLLICK_TOKEN", help="API key; default: generated.")] = "",
    name: Annotated[str, Option(help="Name for clients; default: the last part of MODEL.")] = "",
    slots: Annotated[int, Option(min=1, help="Maximum concurrent completions.")] = 32,
    max_length: Annotated[int, Option(min=2, help="Maximum tokens of prompt and answer.")] = 2048,
    engine: Annotated[str, Option(help="Inference engine; see `rollick list`.")] = "native",
    device: Annotated[str, Option(help="cpu, cuda:0, or auto.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Option(help="Compute dtype.")
    ] = "auto",
    template: Annotated[
        Literal["auto", "chat", "plain"], Option(help="How messages become text.")
    ] = "auto",
    best: Best = False,
    allow_host: Annotated[list[str] | None, Option(help="Host name that clients may use.")] = None,
) -> None:
    """Serve a model with an OpenAI-compatible API. Default: loopback only, token required."""
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtra.of(package, "serve")
    from rollick.commands.serve import ServedModel, model_to_serve, serve_until_stopped
    from rollick.config.schema import InferConfig
    from rollick.pipelines.run import wait_for
    from rollick.serve.server import ServeSettings

    def announce(served: ServerAddress) -> None:
        typer.echo(f"serving {name} at {served.base_url}")
        if not token:
            typer.echo(f"token {served.token}")
        sys.stdout.flush()

    if not name:
        local = Path(model)
        name = local.resolve().name.removesuffix(".gguf") if local.exists() else model
    infer = InferConfig(engine=engine, slots=slots, max_length=max_length)
    settings = ServeSettings(host, port, token, tuple(allow_host or ()))
    log_to_stderr()
    with model_to_serve(model, best=best, dtype=dtype) as config:
        served = ServedModel(config, infer, name, device, template)
        wait_for(serve_until_stopped(served, settings, announce))
