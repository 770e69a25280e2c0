"""The commands. Each is one function; what is heavy is imported inside it.

`rollick --help` and `rollick check` must answer at once, so nothing at the top of this file (or of
what it imports) loads torch, ray or transformers. `main` turns every RollickError into a message
on stderr and exit code 2; anything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollick.errors import ConfigError, MissingExtra, RollickError

if TYPE_CHECKING:
    from rollick.config.plugins import Plugin
    from rollick.config.scenario import Scenario
    from rollick.config.schema import DomainConfig, Recipe

app = typer.Typer(
    name="rollick",
    help="Reinforcement learning of language models, from a laptop to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at recipes and at what they can say.", no_args_is_help=True)
app.add_typer(config_app, name="config")
sandbox_app = typer.Typer(help="Run untrusted programs in a box.", no_args_is_help=True)
app.add_typer(sandbox_app, name="sandbox")
reward_app = typer.Typer(help="Try rewards.", no_args_is_help=True)
app.add_typer(reward_app, name="reward")
env_app = typer.Typer(help="Try environments.", no_args_is_help=True)
app.add_typer(env_app, name="env")

EXIT_INTERRUPTED = 75
"""Asked to stop by a signal, and saved (EX_TEMPFAIL: try again)."""

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe: a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[A.B=C]...", help="Settings on top, such as rollout.group_size=4."),
]


@app.command()
def check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    deep: Annotated[bool, typer.Option("--deep", help="Import all that the recipe names.")] = False,
) -> None:
    """Say whether a recipe is right, and what it will do; starts nothing."""
    from rollick.cluster.devices import describe_plan
    from rollick.config.check import check_recipe
    from rollick.config.load import load_recipe
    from rollick.config.problems import raise_problems

    loaded = load_recipe(recipe, overrides or ())
    if deep:
        raise_problems(check_recipe(loaded, deep=True), origin=str(recipe))
    typer.echo(f"OK {recipe}")
    typer.echo(_summary(loaded.recipe))
    typer.echo(describe_plan(loaded.recipe))
    typer.echo(_memory(loaded.recipe))


def _memory(recipe: Recipe) -> str:
    from rollick.pipelines.memory import describe_memory, plan_memory, read_shapes

    shapes = read_shapes(recipe)
    if shapes is None:
        return "\nmemory    told when the run starts: not all of its models are folders here"
    return f"\n{describe_memory(plan_memory(recipe, shapes))}"


def _summary(recipe: Recipe) -> str:
    from rollick.config.schema import SUPERVISED_LOSSES

    rollout = recipe.rollout
    if recipe.pipeline in SUPERVISED_LOSSES:
        kind = "pairs" if recipe.compares_pairs else "examples"
        size = f"{recipe.train.batch_size} {kind}"
    else:
        size = f"{rollout.groups_per_step} groups of {rollout.group_size} samples"
    rows = [
        ("pipeline", f"{recipe.pipeline}, {recipe.run.steps} steps of {size}"),
        ("model", f"{recipe.model.path} ({recipe.model.dtype})"),
        ("data", _shares(recipe.data.domains)),
        ("validation", _shares(recipe.data.validation) or "none"),
    ]
    return "\n".join(f"  {name:<12}{text}" for name, text in rows)


def _shares(domains: dict[str, DomainConfig]) -> str:
    total = sum(domain.share for domain in domains.values())
    return ", ".join(f"{name} {domain.share / total:.0%}" for name, domain in domains.items())


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="PROJECT", help="Which starter: rlvr.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Where; by default its name.")
    ] = None,
) -> None:
    """Write a starter project: a recipe and the Python that it names, to be changed."""
    from rollick.starters.projects import write_starter

    where = folder or Path(name)
    for path in write_starter(name, where):
        typer.echo(str(path))
    typer.echo(f"next: cd {where} && rollick check recipe.yaml && rollick train recipe.yaml")


@config_app.command("show")
def config_show(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print a recipe with every default, override and interpolation filled in."""
    from rollick.config.load import load_recipe

    typer.echo(load_recipe(recipe, overrides or ()).text, nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from rollick.config.load import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2))


@config_app.command("preset")
def config_preset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A preset; see `rollick list`.")],
) -> None:
    """Print the algorithm section that a preset stands for, defaults filled in."""
    from rollick.config.algorithm import AlgorithmConfig
    from rollick.config.presets import PRESETS
    from rollick.config.source import dump_yaml
    from rollick.config.wording import unknown_name

    if name not in PRESETS:
        message, fix = unknown_name("presets", name, own=False)
        raise ConfigError(message, fix=fix)
    section = AlgorithmConfig(preset=name).model_dump(mode="json")
    typer.echo(f"# {PRESETS[name].about} (arXiv {PRESETS[name].paper})")
    typer.echo(dump_yaml({"algorithm": section}), nl=False)


@app.command("list")
def list_names(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Print all that a recipe can name, by kind."""
    from rollick.config.names import NAMES, names_of

    names = {kind: names_of(kind) for kind in NAMES}
    if as_json:
        typer.echo(json.dumps(names))
        return
    from rich.console import Console
    from rich.table import Table

    from rollick.config.plugins import plugins

    table = Table("kind", "names", box=None)
    for kind, known in names.items():
        of_packages = plugins(kind)
        marked = [_marked(name, of_packages.get(name, ())) for name in known]
        table.add_row(kind.replace("_", " "), ", ".join(marked) or "none yet")
    Console().print(table)


def _marked(name: str, plugins: Sequence[Plugin]) -> str:
    """The name, with the packages that add it."""
    return f"{name} ({', '.join(plugin.package for plugin in plugins)})" if plugins else name


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
) -> None:
    """Run a recipe. A signal saves and stops it with exit code 75; --resume goes on."""
    from rollick.config.load import load_recipe
    from rollick.pipelines.run import run_recipe

    loaded = load_recipe(recipe, overrides or ())
    _show_log()
    result = run_recipe(loaded, resume=resume)
    typer.echo(f"{result.folder}: step {result.step}, score {result.score:.4g}")
    if result.interrupted:
        typer.echo("stopped by a signal; go on with --resume")
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="A model, or a run's folder.")],
    recipe: RecipeFile,
    overrides: Overrides = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint of a run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Score a model on a recipe's held-out prompts: pass@1, pass@k, intervals; samples are kept."""
    from rollick.pipelines.inspect import evaluate_model, plan_evaluation
    from rollick.pipelines.run import wait_for

    loaded, checkpoint = plan_evaluation(model, recipe, overrides or (), best=best)
    _show_log()
    report = wait_for(evaluate_model(loaded, checkpoint=checkpoint))
    if as_json:
        typer.echo(json.dumps(report.to_json()))
        return
    from rich.console import Console

    from rollick.observe.tables import evaluation_table

    Console().print(evaluation_table(report.figures()))
    typer.echo(f"samples: {Path(loaded.recipe.run.folder) / loaded.recipe.run.name}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint.")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only what train.lora trained, for PEFT.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="The checkpoint of this step; by default the newest.")
    ] = None,
) -> None:
    """Write a run's policy as a plain Hugging Face folder; adapters are added to its weights."""
    from rollick.pipelines.inspect import export_run

    typer.echo(str(export_run(run, out, best=best, adapter=adapter, step=step)))


@app.command()
def replay(
    dump: Annotated[Path, typer.Argument(metavar="DUMP", help="A folder under a run's dumps/.")],
    recipe: RecipeFile,
    overrides: Overrides = None,
    only: Annotated[str, typer.Option(help="Which half of the step: generate or train.")] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Run one half of a dumped step alone (observe.dump_steps makes dumps)."""
    from rollick.pipelines.inspect import plan_replay
    from rollick.pipelines.run import wait_for

    work = plan_replay(dump, recipe, overrides or (), only=only)
    _show_log()
    figures = asdict(wait_for(work))
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        typer.echo("\n".join(f"{name:<18}{value:.6g}" for name, value in figures.items()))


@app.command()
def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run's folder; none: this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Say how a run is: who waits for whom, whether it lives, and what to do."""
    from rich.console import Console

    from rollick.observe.doctor import environment_table, render
    from rollick.pipelines.doctor import environment_facts, examine

    if run is None:
        facts = environment_facts(probe=True)
        shown = environment_table(facts)
    else:
        diagnosis = examine(run)
        facts, shown = diagnosis.to_json(), render(diagnosis)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        Console().print(shown, soft_wrap=True)


@sandbox_app.command("run")
def sandbox_run(
    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="The program.")],
    stdin: Annotated[str, typer.Option(help="Its input; - takes this command's own.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Seconds that it may run.")] = 10.0,
    memory_mb: Annotated[int, typer.Option(min=32, help="Memory that it may use.")] = 512,
    allow_unsafe: Annotated[
        bool, typer.Option("--allow-unsafe", help="Run it even where there is no isolation.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Run one program in a fresh box; print status, output, time and isolation level."""
    import asyncio

    from rollick.sandbox.base import Limits, Program, Status
    from rollick.sandbox.local import LocalSandbox

    try:
        code = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", fix="give a Python file") from None
    given = sys.stdin.read() if stdin == "-" else stdin
    limits = Limits(wall_s=timeout_s, cpu_s=int(timeout_s) + 1, memory_mb=memory_mb)
    with LocalSandbox(warm=0, allow_unsafe=allow_unsafe) as sandbox:
        result = asyncio.run(sandbox.run(Program(code, given, limits)))
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        typer.echo(result.stdout, nl=False)
        typer.echo(result.stderr, nl=False, err=True)
        said = f"{result.status}, {result.seconds:.3f} s, isolation {result.isolation}"
        typer.echo(f"{said}: {result.detail}" if result.detail else said, err=True)
    if result.status is not Status.OK:
        raise typer.Exit(1 if result.status.judged else 2)


@sandbox_app.command("check")
def sandbox_check(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Say which layers of isolation hold on this machine; exit code 2 if programs are refused."""
    import asyncio

    from rollick.sandbox.layers import find_layers

    layers = asyncio.run(find_layers())
    if as_json:
        typer.echo(json.dumps(layers.to_json()))
    else:
        typer.echo(f"isolation {layers.isolation}")
        typer.echo("\n".join(f"  {name}" for name in layers.active))
        typer.echo(
            "\n".join(f"  missing: {name}" for name in layers.missing), nl=bool(layers.missing)
        )
        if layers.problem:
            typer.echo(layers.problem)
    if layers.isolation == "none":
        raise typer.Exit(2)


@reward_app.command("test")
def reward_test(
    reward: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE:NAME", help="A reward from `rollick list`, or yours."),
    ],
    rows: Annotated[
        str | None, typer.Argument(metavar="[ROWS]", help="Rows to try it on; none: its examples.")
    ] = None,
    completion: Annotated[
        str, typer.Option(help="The column with the completions.")
    ] = "completion",
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the reward.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows at the most.")] = 5,
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Seconds of a call.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row.")] = False,
) -> None:
    """Run one reward on a few rows, in a process as in a run; show values and times."""
    import asyncio

    from rollick.config.schema import RewardSpec
    from rollick.observe.tables import reward_table
    from rollick.pipelines.try_reward import read_options, rows_to_try, try_reward

    spec = RewardSpec(name=reward, options=read_options(option or ()))
    found = rows_to_try(reward, rows, limit=limit, base=Path.cwd())
    tried = asyncio.run(
        try_reward(spec, found, completion=completion, timeout_s=timeout_s, base=Path.cwd())
    )
    told = [one.to_json() for one in tried]
    if as_json:
        typer.echo("\n".join(json.dumps(one) for one in told))
    else:
        from rich.console import Console

        Console().print(reward_table(told))
    if not all(one.score.ok for one in tried):
        raise typer.Exit(1)


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default trace.json in the run.")
    ] = None,
) -> None:
    """Write every sample's timeline as JSON that ui.perfetto.dev opens."""
    from rollick.observe.timeline import write_timeline

    path = out or run / "trace.json"
    timeline = write_timeline(run, path)
    typer.echo(
        f"{path}: {len(timeline.lives)} samples, {timeline.trained} trained, "
        f"{timeline.seconds:.4g} s; open it at https://ui.perfetto.dev"
    )


@app.command()
def simulate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="A run whose lengths and times are taken."),
    ] = None,
    load: Annotated[Path | None, typer.Option(help="YAML: work, devices and faults.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps that are measured.")] = None,
    engines: Annotated[int | None, typer.Option(help="Engines, one on a device.")] = None,
    slots: Annotated[
        int | None, typer.Option(help="Samples that an engine decodes at once.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="median,tail of a turn's tokens, or a file of lengths.")
    ] = None,
    failures: Annotated[
        list[str] | None, typer.Option(help="ENGINE@SECONDS[-SECONDS]: lost, and back again.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="A PNG of the timeline to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Run a recipe's schedule on a virtual clock, with simulated engines, rewards and trainer."""
    from rollick.config.load import load_recipe
    from rollick.config.scenario import plan_scenario
    from rollick.observe.picture import draw_timeline
    from rollick.rollout.bubbles import describe
    from rollick.rollout.simulate import complete, simulate_timeline

    base, said = _scenario(load_recipe(recipe, overrides or ()).recipe, run)
    told = {"steps": steps, "engines": engines, "slots": slots}
    scenario = complete(plan_scenario(base, load, lengths=lengths, failures=failures or (), **told))
    report, timeline = simulate_timeline(scenario)
    if picture is not None:
        slots = scenario.devices.generators * scenario.devices.slots
        title = f"step {report.step_s:.3g} s, slots {report.slots_used:.0%} in use"
        draw_timeline(picture, timeline.points, timeline.phases, slots=slots, title=title)
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        typer.echo("\n".join(f"{name:<16}{text}" for name, text in [*said, *describe(report)]))


def _scenario(recipe: Recipe, run: Path | None) -> tuple[Scenario, list[tuple[str, str]]]:
    """What the recipe says, with the times of a run where one is given, and what was fitted."""
    from rollick.config.scenario import scenario_of_recipe

    scenario = scenario_of_recipe(recipe)
    if run is None:
        return scenario, []
    from rollick.pipelines.calibrate import calibrate_run

    calibration = calibrate_run(run)
    return calibration.apply(scenario), calibration.describe()


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="Folder, hub name, GGUF or a run's folder.")
    ],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str, typer.Option(envvar="ROLLICK_TOKEN", help="The API key; none makes one.")
    ] = "",
    name: Annotated[str, typer.Option(help="The model's name; by default its last part.")] = "",
    slots: Annotated[int, typer.Option(min=1, help="Answers that are drawn at once.")] = 32,
    max_length: Annotated[
        int, typer.Option(min=2, help="Tokens of prompt and answer together.")
    ] = 2048,
    engine: Annotated[str, typer.Option(help="Which engine; see `rollick list`.")] = "native",
    device: Annotated[str, typer.Option(help="cpu, cuda:0, or auto.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Compute dtype.")
    ] = "auto",
    template: Annotated[
        Literal["auto", "chat", "plain"], typer.Option(help="How messages become text.")
    ] = "auto",
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint of a run.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name that clients call this server by.")
    ] = None,
) -> None:
    """Serve a model to OpenAI's clients; on the loopback and with a token unless told otherwise."""
    _demand_extra("serve", "starlette", "uvicorn")
    from rollick.config.schema import InferConfig
    from rollick.pipelines.run import wait_for
    from rollick.pipelines.serve import ServedModel, model_of, serve_until_stopped
    from rollick.serve.server import Served, ServeSettings

    def announce(served: Served) -> None:
        typer.echo(f"serving {shown} at {served.base_url}")
        if not token:
            typer.echo(f"token {served.token}")
        sys.stdout.flush()

    local = Path(model)
    shown = name or (local.resolve().name.removesuffix(".gguf") if local.exists() else model)
    infer = InferConfig(engine=engine, slots=slots, max_length=max_length)
    settings = ServeSettings(host, port, token, tuple(allow_host or ()))
    _show_log()
    with model_of(model, best=best, dtype=dtype) as chosen:
        served = ServedModel(chosen, infer, shown, device, template)
        wait_for(serve_until_stopped(served, settings, announce))


@env_app.command("test")
def env_test(
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE:CLASS", help="An environment; see `rollick list`.")
    ],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes that are played.")] = 100,
    policy: Annotated[
        str, typer.Option(help="Who plays: random, solver, or a model: a folder, a file or a run.")
    ] = "random",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="KEY=VALUE for the environment.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The first seed; the others follow.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="A .gif or .png of the first episode to write.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as the last line.")] = False,
) -> None:
    """Say what is wrong with an environment, then play it. Exit code 1 if anything is."""
    from rollick.envs.base import find_env, make_env
    from rollick.envs.check import check_across_processes, check_env
    from rollick.envs.play import POLICIES, find_policy, play_episode, play_many

    options, make = _env_options(option or ()), find_env(name)
    plays = policy not in POLICIES and Path(policy).exists()
    player = find_policy("random" if plays else policy)
    problems = check_env(make, options, name=name) or check_across_processes(name, options)
    for problem in problems:
        typer.echo(f"wrong: {problem}", err=as_json)
    if plays:
        from rollick.pipelines.contest import play_model

        report = play_model(policy, name, options=options, episodes=episodes, seed=seed)
    else:
        seeds = range(seed, seed + episodes)
        report = play_many(make, seeds, options=options, policy=player, name=name)
    if picture is not None:
        from rollick.envs.pictures import save_episode

        env = make_env(make, options, name=name)
        save_episode(picture, play_episode(env, seed, player, pictures=True))
    figures = {"problems": problems, **report.to_json()}
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        shown = {key: value for key, value in figures.items() if key != "problems"}
        typer.echo("\n".join(f"{key:<14}{_figure(value)}" for key, value in shown.items()))
    if problems or report.errors:
        raise typer.Exit(1)


@env_app.command("show")
def env_show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    sample: Annotated[
        str, typer.Option(help="Which one, such as g3.1; by default the newest.")
    ] = "",
    step: Annotated[int | None, typer.Option(help="The step that it was recorded at.")] = None,
    training: Annotated[
        bool, typer.Option("--training", help="Of the training samples, not of validation.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="A .gif or .png to write.")] = None,
) -> None:
    """Play a recorded episode again and show it, turn by turn."""
    from rollick.envs.recorded import describe, find_episode, play_again

    row = find_episode(run, sample=sample, step=step, training=training)
    episode = play_again(row["played"], base=run, pictures=picture is not None)
    typer.echo(describe(row, episode))
    if picture is not None:
        from rollick.envs.pictures import save_episode

        save_episode(picture, episode)


def _env_options(given: Sequence[str]) -> dict[str, object]:
    """KEY=VALUE; a value is JSON where it can be read as such, else text."""
    options: dict[str, object] = {}
    for item in given:
        key, found, value = item.partition("=")
        if not found:
            raise ConfigError(f"the option {item!r} has no value", fix="write it as KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def _figure(value: object) -> str:
    if isinstance(value, tuple):
        return "; ".join(str(item) for item in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _demand_extra(extra: str, *packages: str) -> None:
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra.of(package, extra)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0,
    control: Annotated[
        bool, typer.Option("--control", help="Shuffle the scores: nothing must be learned.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where runs are written.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Results as the last line.")] = False,
) -> None:
    """Make a tiny model, warm it up, and train it by RL on two domains, offline, on Ray."""
    begun = time.perf_counter()
    from rollick.testing.demo import run_demo

    _show_log()
    result = run_demo(begun, seed=seed, control=control, folder=folder)
    if as_json:
        typer.echo(json.dumps(result.to_json()))


def _show_log() -> None:
    """Progress of long work, on stderr."""
    import logging

    logging.basicConfig(format="%(message)s")
    logging.getLogger("rollick").setLevel(logging.INFO)


def main() -> None:
    """The entry point of the `rollick` command."""
    try:
        app()
    except RollickError as error:
        _report(error)
        sys.exit(2)


def _report(error: RollickError) -> None:
    from rich.console import Console
    from rich.text import Text

    # Text, not markup: a message may hold brackets; soft wrap keeps file:line:column clickable.
    Console(stderr=True).print(Text(str(error), style="red"), soft_wrap=True)


if __name__ == "__main__":
    main()
