"""Commands that look at runs or simulate one: doctor, compare, trace, simulate."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rollick.cli.options import AsJson, Overrides, RecipeFile, RunFolder, app, print_rows


@app.command()
def doctor(
    run: Annotated[
        Path | None, Argument(metavar="[RUN]", help="Folder of a run; without it: this machine.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Diagnose a run: is it alive, does it learn, what does each part wait for, what to change."""
    from rollick.commands.doctor import diagnose_folder, environment_facts
    from rollick.observe.diagnosis import environment_table, render_diagnosis
    from rollick.observe.terminal import SafeConsole

    if run is None:
        facts = environment_facts(probe=True)
        table = environment_table(facts)
    else:
        diagnosis = diagnose_folder(run)
        facts, table = asdict(diagnosis), render_diagnosis(diagnosis)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        SafeConsole().print(table, soft_wrap=True)


@app.command()
def selftest(
    recipe: Annotated[
        Path | None, Argument(metavar="[RECIPE]", help="Recipe with the devices and the cluster.")
    ] = None,
    devices: Annotated[
        str | None, Option(help="Devices, such as 0-7; default: all GPUs, or two CPU workers.")
    ] = None,
    address: Annotated[str | None, Option(help="Address of a Ray cluster.")] = None,
    out: Annotated[Path | None, Option(help="File for the results as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove on these devices what a run needs: collectives, sharding, weights, recovery."""
    from rollick.observe.tables import check_row, stderr_console
    from rollick.testing.selftest import Check, choose_devices, run_selftest

    console = stderr_console()

    def show(check: Check) -> None:
        console.print(check_row(check), soft_wrap=True)

    report = run_selftest(*choose_devices(recipe, devices, address), show)
    text = json.dumps(report.to_json())
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        counts = f"{report.count('pass')} passed, {report.count('fail')} failed"
        typer.echo(f"{counts}, {report.count('skip')} skipped on {report.devices}")
    if report.count("fail"):
        raise typer.Exit(1)


@app.command()
def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs.")],
    metric: Annotated[str | None, Option(help="Metric; default: held-out or mean score.")] = None,
    picture: Annotated[Path, Option(help="PNG file for the curves.")] = Path("compare.png"),
    as_json: AsJson = False,
) -> None:
    """Compare runs in a table and a picture. Runs that differ only in their seed are averaged."""
    from rollick.commands.compare import choose_metrics, group_runs
    from rollick.observe.comparison import comparison_table, draw_comparison, summarise

    groups = group_runs(runs)
    chosen, drawn = choose_metrics(groups, metric)
    summaries = [summarise(group, chosen) for group in groups]
    draw_comparison(picture, groups, drawn)
    if as_json:
        header = {"metric": chosen, "picture": str(picture)}
        typer.echo(json.dumps({**header, "groups": [asdict(each) for each in summaries]}))
        return
    from rollick.observe.terminal import SafeConsole

    SafeConsole().print(comparison_table(summaries, chosen))
    typer.echo(f"curves: {picture}")


@app.command()
def trace(
    run: RunFolder,
    out: Annotated[Path | None, Option(help="Output file; default: RUN/trace.json.")] = None,
) -> None:
    """Write the timeline of every sample as JSON for ui.perfetto.dev."""
    from rollick.observe.timeline import write_timeline

    path = out or run / "trace.json"
    timeline = write_timeline(run, path)
    typer.echo(
        f"{path}: {len(timeline.samples)} samples, {timeline.num_trained} trained, "
        f"{timeline.seconds:.4g} s; open it at https://ui.perfetto.dev"
    )


@app.command()
def simulate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    run: Annotated[
        Path | None, Option("--from", metavar="RUN", help="Run to take lengths and times from.")
    ] = None,
    load: Annotated[Path | None, Option(help="YAML file: work, devices and faults.")] = None,
    steps: Annotated[int | None, Option(help="Measured training steps.")] = None,
    engines: Annotated[int | None, Option(help="Engines, one per device.")] = None,
    slots: Annotated[int | None, Option(help="Concurrent samples of an engine.")] = None,
    lengths: Annotated[str | None, Option(help="Tokens of a turn: median,tail or a file.")] = None,
    failures: Annotated[
        list[str] | None, Option(help="ENGINE@SECONDS[-SECONDS]: engine failure, recovery.")
    ] = None,
    days: Annotated[
        float | None, Option(min=0.01, help="Length of a run: the time that failures cost it.")
    ] = None,
    picture: Annotated[Path | None, Option(help="PNG file for the timeline.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe's schedule on a virtual clock, with simulated engines, rewards and trainer."""
    from rollick.commands.simulate import build_scenario, run_simulation, simulate_failures
    from rollick.config.load import load_recipe
    from rollick.simulator.report import describe
    from rollick.simulator.scenario import plan_scenario

    base, calibration = build_scenario(load_recipe(recipe, overrides or ()).recipe, run)
    faults = failures or ()
    scenario = plan_scenario(
        base, load, lengths=lengths, failures=faults, steps=steps, engines=engines, slots=slots
    )
    report = run_simulation(scenario, picture=picture)
    long_run = simulate_failures(scenario, report, days=days) if days else None
    if as_json:
        long_json = {"long_run": long_run.to_json()} if long_run else {}
        typer.echo(json.dumps(report.to_json() | long_json))
    else:
        rows = [*calibration, *describe(report), *(long_run.describe() if long_run else ())]
        print_rows(rows, width=16)
