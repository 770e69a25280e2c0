"""The scenario of a simulation: work, devices, failures. Read from YAML and validated.

Owns the keys of a load file (`rollick simulate --load FILE`, benchmarks/scheduler_load.yaml) and
how a recipe, such a file and single values are merged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from rollick.config.devices import parse_devices
from rollick.config.schema import Recipe, RolloutConfig, rl_recipe
from rollick.config.schema.section import NonNegative, Positive, Section, Share
from rollick.errors import ConfigError, DataError
from rollick.simulator.long_run import FailureConfig
from rollick.simulator.step_time import NonNegativeSeconds, StepTime


class LengthConfig(Section):
    """Tokens of one turn: log-normal, or drawn from a recorded trace."""

    median: Annotated[float, Field(gt=0)] = 600.0
    """Of a turn's tokens."""
    tail: Annotated[float, Field(ge=1)] = 20.0
    """The 99.9th percentile, as a multiple of the median."""
    max_tokens: Positive = 16384
    """A turn that would be longer ends here."""
    prompt_share: Share = 0.0
    """Share of the variance that the samples of one prompt have in common."""
    trace: tuple[Positive, ...] = ()
    """Recorded lengths, which replace median and tail."""


class LatencyConfig(Section):
    """Seconds of an environment or a reward: log-normal, or constant (tail 1)."""

    median_s: NonNegativeSeconds = 0.0
    """Median."""
    tail: Annotated[float, Field(ge=1)] = 1.0
    """The 99.9th percentile, as a multiple of the median."""
    max_s: NonNegativeSeconds = 0.0
    """Upper limit (a time-out); 0 is no limit."""
    trace: tuple[NonNegativeSeconds, ...] = ()
    """Recorded seconds, which replace median and tail."""


class WorkConfig(Section):
    """The samples: their number of tokens and turns, environments and rewards."""

    lengths: LengthConfig = LengthConfig()
    """Tokens of a turn."""
    prompt_tokens: Positive = 128
    """Tokens of each prompt; the samples of a group share them."""
    prompts: NonNegative = 0
    """Prompts of the dataset: group n has prompt n modulo this. 0 is a new one each time."""
    seen_before: NonNegative = 0
    """Samples of each prompt that the length predictor has seen in earlier epochs."""
    turns: Positive = 1
    """Minimum turns of an episode."""
    most_turns: NonNegative = 0
    """Maximum turns of an episode, uniformly distributed; 0 is `turns`."""
    observation_tokens: NonNegative = 0
    """Tokens that the environment adds after a turn."""
    environment: LatencyConfig = LatencyConfig()
    """Seconds in the environment after each turn but the last."""
    reward: LatencyConfig = LatencyConfig()
    """Seconds to score a sample."""
    flat: Share = 0.0
    """Share of the groups whose samples all have the same score: they carry no signal."""
    failed_scores: Share = 0.0
    """Share of the samples that cannot be scored."""


class DeviceConfig(Section):
    """The devices. Each generating device has one engine."""

    generators: Positive = 1
    """Devices that generate."""
    trainers: Positive = 1
    """Devices that train: the time of a batch is divided by their number."""
    colocated: bool = False
    """Whether generators and trainers share devices, as many as the smaller number: an engine on a
    training device pauses while it trains."""
    slots: Positive = 64
    """Sequences that an engine decodes at once."""
    kv_tokens: NonNegative = 0
    """Tokens that an engine's cache holds; 0 is no limit."""
    speeds: tuple[Annotated[float, Field(gt=0)], ...] = (1.0,)
    """Speeds of the engines, repeated as often as needed: [1, 0.5] makes every second one slow."""
    step_time: StepTime = StepTime()
    """The model of an engine's step."""
    train_base_s: NonNegativeSeconds = 0.0
    """Seconds of a training step that do not depend on its tokens."""
    train_token_s: NonNegativeSeconds = 0.0
    """Device-seconds to train on one token."""
    transfer_s: NonNegativeSeconds = 0.0
    """Seconds of the transfer of new weights, during which engines continue."""
    publish_s: NonNegativeSeconds = 0.0
    """Seconds in which engines load new weights, and pause."""
    call_s: NonNegativeSeconds = 0.0
    """Seconds that a request and its completion travel between controller and engine."""
    contention: Annotated[float, Field(ge=1)] = 1.0
    """How many times longer training and an engine's steps take while both run: above 1 if they
    share cores or memory."""
    controller_s: NonNegativeSeconds = 0.0
    """Seconds of the controller's own work after a publish, in which nothing starts or ends."""

    @property
    def count(self) -> int:
        counts = self.generators, self.trainers
        return max(counts) if self.colocated else sum(counts)


class EngineFailure(Section):
    """An engine that is lost, and optionally replaced."""

    engine: NonNegative
    """Its number, from 0."""
    at_s: NonNegativeSeconds
    """When it fails."""
    back_s: NonNegativeSeconds = 0.0
    """When another one replaces it; 0 is never."""


class Scenario(Section):
    """A simulated run."""

    rollout: RolloutConfig = RolloutConfig()
    """As in a recipe: batch, group, staleness and its rule."""
    work: WorkConfig = WorkConfig()
    """The samples."""
    devices: DeviceConfig = DeviceConfig()
    """The devices."""
    failures: tuple[EngineFailure, ...] = ()
    """Engines that are lost during the run."""
    device_failures: FailureConfig = FailureConfig()
    """Failures of devices in a run of days or weeks (`rollick simulate --days`)."""
    steps: Positive = 10
    """Training steps that are measured."""
    warmup_steps: NonNegative = 3
    """Training steps before them, in which an asynchronous run fills its pipeline."""
    seed: int = 0
    """Determines lengths, latencies and scores."""

    def change(self, **sections: Any) -> Scenario:
        """A copy in which some fields differ: `change(devices={"slots": 8}, seed=1)`."""
        return Scenario.model_validate(_merge(self.model_dump(), sections))


def recipe_scenario(recipe: Recipe) -> Scenario:
    """The scenario of a recipe: batch, staleness, devices, slots, the token limit. A recipe has no
    response lengths: the median is assumed to be a sixteenth of the limit."""
    policy = parse_devices(recipe.devices.policy)
    generators = parse_devices(recipe.devices.generators)
    limit, rl = recipe.max_new_tokens, rl_recipe(recipe)
    drop_no_signal = all(rl.drops_no_signal(name) for name in rl.data.domains)
    return Scenario(
        rollout=rl.rollout.model_copy(update={"drop_no_signal": drop_no_signal}),
        work=WorkConfig(
            lengths=LengthConfig(median=max(1.0, limit / 16), tail=20.0, max_tokens=limit),
            prompt_tokens=max(1, min(128, recipe.infer.max_length - limit)),
        ),
        devices=DeviceConfig(
            generators=len(generators),
            trainers=len(policy),
            colocated=not set(policy).isdisjoint(generators),
            slots=recipe.infer.slots,
        ),
        seed=recipe.run.seed,
    )


def plan_scenario(
    scenario: Scenario,
    load: Path | None = None,
    *,
    lengths: str | None = None,
    failures: Sequence[str] = (),
    steps: int | None = None,
    engines: int | None = None,
    slots: int | None = None,
) -> Scenario:
    """The scenario, overridden by the load file and then by the single values that are given."""
    if load is not None:
        scenario = read_scenario(load, base=scenario)
    overrides = {"generators": engines, "slots": slots}
    devices = {name: value for name, value in overrides.items() if value is not None}
    values: dict[str, Any] = {"devices": devices}
    if steps is not None:
        values["steps"] = steps
    if lengths is not None:
        values["work"] = {"lengths": read_lengths(lengths)}
    if failures:
        values["failures"] = read_failures(failures)
    return build_scenario(values, origin="the command line", base=scenario)


def read_scenario(path: Path, *, base: Scenario) -> Scenario:
    """The scenario of `base`, overridden by a load file."""
    try:
        loaded: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", fix="give a YAML file") from None
    return build_scenario(loaded or {}, origin=str(path), base=base)


def build_scenario(values: Any, *, origin: str, base: Scenario | None = None) -> Scenario:
    """A scenario of `base`, or of the defaults, overridden by `values`."""
    if not isinstance(values, Mapping):
        message = f"{origin} is not a mapping of names to values"
        raise ConfigError(message, fix="see rollick simulate --help")
    merged = _merge((base or Scenario()).model_dump(), values)
    try:
        return Scenario.model_validate(merged)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        message = f"{origin}: {'; '.join(problems)}"
        raise ConfigError(message, fix="correct the names and values") from None


def _merge(base: Mapping[str, Any], values: Mapping[Any, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in values.items():
        default = merged.get(name)
        is_section = isinstance(value, Mapping) and isinstance(default, Mapping)
        merged[name] = _merge(default, value) if is_section else value  # pyright: ignore
    return merged


_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"


def read_lengths(text: str) -> dict[str, Any]:
    """`600,20` (median and tail), or a file with a length in each line: a number, or a JSON object
    with `tokens`."""
    if re.fullmatch(f"{_NUMBER},{_NUMBER}", text):
        median, tail = text.split(",")
        return {"median": float(median), "tail": float(tail), "trace": ()}
    try:
        lines = Path(text).read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        tokens = [int(row["tokens"] if isinstance(row, dict) else row) for row in rows]
        if not tokens:
            raise ValueError("it is empty")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{text} has no lengths: {type(error).__name__}: {error}",
            fix='write median,tail such as 600,20, or name a file of lines like {"tokens": 512}',
        ) from None
    return {"trace": tuple(tokens)}


def read_failures(texts: Sequence[str]) -> tuple[EngineFailure, ...]:
    """`0@300` loses engine 0 at 300 s; `0@300-400` replaces it at 400 s."""
    failures: list[EngineFailure] = []
    for text in texts:
        match = re.fullmatch(rf"([0-9]+)@({_NUMBER})(?:-({_NUMBER}))?", text)
        if match is None:
            fix = "write ENGINE@SECONDS or ENGINE@SECONDS-SECONDS"
            raise ConfigError(f"{text!r} is not a failure", fix=fix)
        engine, at, back = match.groups()
        failures.append(EngineFailure(engine=int(engine), at_s=float(at), back_s=float(back or 0)))
    return tuple(failures)
