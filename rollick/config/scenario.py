"""What a simulation is told: the work, the devices, the faults. Read from YAML, checked, frozen.

Owns the words of a load file (`rollick simulate --load FILE`, benchmarks/scheduler_load.yaml) and
how a recipe, such a file and single values become one. Does not run anything: rollout/simulate.py
does.
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
from rollick.config.schema import Recipe, RolloutConfig
from rollick.config.section import NonNegative, Positive, Section, Share
from rollick.errors import ConfigError, DataError

NonNegativeSeconds = Annotated[float, Field(ge=0)]


class LengthConfig(Section):
    """Tokens of one turn: log-normal, or drawn from a recorded trace."""

    median: Annotated[float, Field(gt=0)] = 600.0
    """Of a turn's tokens."""
    tail: Annotated[float, Field(ge=1)] = 20.0
    """The 99.9th percentile, as a multiple of the median."""
    max_tokens: Positive = 16384
    """A turn that would be longer ends here."""
    prompt_share: Share = 0.0
    """Part of the spread that the samples of one prompt have in common."""
    trace: tuple[Positive, ...] = ()
    """Recorded lengths, each as likely as the others; they replace median and tail."""


class LatencyConfig(Section):
    """Seconds that something outside of the engines takes: log-normal, or constant (tail 1)."""

    median_s: NonNegativeSeconds = 0.0
    """Half of them take longer."""
    tail: Annotated[float, Field(ge=1)] = 1.0
    """The 99.9th percentile, as a multiple of the median."""
    max_s: NonNegativeSeconds = 0.0
    """A time-out: none takes longer. 0 is no limit."""
    trace: tuple[NonNegativeSeconds, ...] = ()
    """Recorded seconds, each as likely as the others; they replace median and tail."""


class WorkConfig(Section):
    """What there is to do, whoever does it."""

    lengths: LengthConfig = LengthConfig()
    """Tokens of a turn."""
    prompt_tokens: Positive = 128
    """Tokens of each prompt; the samples of a group share them."""
    prompts: NonNegative = 0
    """Prompts of the dataset: group n has prompt n modulo this. 0 is a new one each time."""
    seen_before: NonNegative = 0
    """Samples of each prompt that the length predictor has seen in earlier epochs."""
    turns: Positive = 1
    """Turns of an episode at the least."""
    most_turns: NonNegative = 0
    """Turns at the most, all numbers between alike; 0 is as many as `turns`."""
    observation_tokens: NonNegative = 0
    """Tokens that the environment adds after a turn."""
    environment: LatencyConfig = LatencyConfig()
    """Seconds in the environment after each turn but the last."""
    reward: LatencyConfig = LatencyConfig()
    """Seconds to score a sample."""
    flat: Share = 0.0
    """Part of the groups whose samples all score alike, so that they carry no signal."""
    failed_scores: Share = 0.0
    """Part of the samples that cannot be scored."""


class StepTimeConfig(Section):
    """Seconds of an engine's step, linear in what it has to do; see rollout.workload.StepTime."""

    base_s: NonNegativeSeconds = 0.020
    """Of any step."""
    per_sequence_s: NonNegativeSeconds = 2e-5
    """For each sequence in the batch."""
    per_kv_token_s: NonNegativeSeconds = 2e-8
    """For each token in the cache."""
    per_prefill_token_s: NonNegativeSeconds = 2e-5
    """For each token that is prefilled."""
    prefill_base_s: NonNegativeSeconds = 0.0
    """For a step that prefills anything."""
    padded: bool = False
    """Whether every sequence counts with as many cached tokens as the longest one has."""


class DeviceConfig(Section):
    """Who does it. One engine on each generating device."""

    generators: Positive = 1
    """Devices that generate."""
    trainers: Positive = 1
    """Devices that train: the time of a batch is divided by their number."""
    colocated: bool = False
    """Whether these are the same devices, as far as the smaller number goes: an engine on a device
    that trains pauses meanwhile."""
    slots: Positive = 64
    """Sequences that an engine decodes at once."""
    kv_tokens: NonNegative = 0
    """Tokens that an engine's cache holds; 0 is no limit."""
    speeds: tuple[Annotated[float, Field(gt=0)], ...] = (1.0,)
    """Speeds of the engines, repeated as often as needed: [1, 0.5] makes every second one slow."""
    step_time: StepTimeConfig = StepTimeConfig()
    """The model of an engine's step."""
    train_base_s: NonNegativeSeconds = 0.0
    """Seconds of a training step that do not depend on its tokens."""
    train_token_s: NonNegativeSeconds = 0.0
    """Device-seconds to train on one token."""
    transfer_s: NonNegativeSeconds = 0.0
    """Seconds in which new weights are on their way to the engines, which go on meanwhile."""
    publish_s: NonNegativeSeconds = 0.0
    """Seconds in which engines take new weights, and pause."""
    call_s: NonNegativeSeconds = 0.0
    """Seconds that a request and its answer are on the way between controller and engine."""
    contention: Annotated[float, Field(ge=1)] = 1.0
    """How many times longer training and an engine's steps take while both go on: above 1 where
    they share cores or memory."""
    controller_s: NonNegativeSeconds = 0.0
    """Seconds of the controller's own work after a publish, in which nothing starts or ends."""

    @property
    def count(self) -> int:
        both = self.generators, self.trainers
        return max(both) if self.colocated else sum(both)


class Failure(Section):
    """An engine that is lost, and perhaps comes back."""

    engine: NonNegative
    """Which: 0 is the first."""
    at_s: NonNegativeSeconds
    """When it fails."""
    back_s: NonNegativeSeconds = 0.0
    """When another one takes its place; 0 is never."""


class Scenario(Section):
    """A whole simulated run."""

    rollout: RolloutConfig = RolloutConfig()
    """As in a recipe: batch, group, staleness and its rule."""
    work: WorkConfig = WorkConfig()
    """What there is to do."""
    devices: DeviceConfig = DeviceConfig()
    """Who does it."""
    failures: tuple[Failure, ...] = ()
    """Engines that are lost on the way."""
    steps: Positive = 10
    """Training steps that are measured."""
    warmup_steps: NonNegative = 3
    """Training steps before them: an asynchronous run first fills its pipeline."""
    seed: int = 0
    """Lengths, latencies and scores follow from it."""

    def change(self, **sections: Any) -> Scenario:
        """A copy in which some fields differ: `change(devices={"slots": 8}, seed=1)`."""
        plain = self.model_dump()
        for name, value in sections.items():
            nested = isinstance(value, Mapping) and isinstance(plain[name], Mapping)
            plain[name] = {**plain[name], **value} if nested else value
        return Scenario.model_validate(plain)


def scenario_of_recipe(recipe: Recipe) -> Scenario:
    """What a recipe says of a run: batch, staleness, devices, slots, the token limit. How long
    answers are it does not say: half of them end within a sixteenth of the limit."""
    policy = parse_devices(recipe.devices.policy)
    generators = parse_devices(recipe.devices.generators)
    drawn = [recipe.sampling_of(name).max_tokens for name in recipe.data.domains]
    limit = max(drawn, default=recipe.sampling.max_tokens)
    return Scenario(
        rollout=recipe.rollout,
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
    """What the scenario says, then the load file, then single values where they are given."""
    if load is not None:
        scenario = read_scenario(load, base=scenario)
    said: dict[str, Any] = {"devices": {}, "work": {}}
    if steps is not None:
        said["steps"] = steps
    if engines is not None:
        said["devices"]["generators"] = engines
    if slots is not None:
        said["devices"]["slots"] = slots
    if lengths is not None:
        said["work"]["lengths"] = read_lengths(lengths)
    if failures:
        said["failures"] = [failure.model_dump() for failure in read_failures(failures)]
    return scenario_of(said, origin="the command line", base=scenario)


def read_scenario(path: Path, *, base: Scenario | None = None) -> Scenario:
    """A load file over the defaults, or over `base`."""
    try:
        loaded: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", fix="give a YAML file") from None
    return scenario_of(loaded or {}, origin=str(path), base=base)


def scenario_of(said: Any, *, origin: str, base: Scenario | None = None) -> Scenario:
    """What was said, over `base`."""
    if not isinstance(said, Mapping):
        raise ConfigError(f"{origin} is no mapping of names to values", fix="see rollick simulate")
    plain = _merged((base or Scenario()).model_dump(), said)
    try:
        return Scenario.model_validate(plain)
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in found['loc'])}: {found['msg']}"
            for found in error.errors()
        ]
        raise ConfigError(
            f"{origin}: {'; '.join(problems)}", fix="mend the names and values"
        ) from None


def _merged(under: Mapping[str, Any], over: Mapping[Any, Any]) -> dict[str, Any]:
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[name] = _merged(below, value) if both else value  # pyright: ignore
    return merged


def read_lengths(text: str) -> dict[str, Any]:
    """`600,20` (median and tail), or a file with a length in each line: a number, or a JSON object
    with `tokens`."""
    if re.fullmatch(r"[0-9.]+,[0-9.]+", text):
        median, tail = text.split(",")
        return {"median": float(median), "tail": float(tail), "trace": ()}
    try:
        lines = Path(text).read_text(encoding="utf-8").split("\n")
        found = [json.loads(line) for line in lines if line.strip()]
        tokens = [int(row["tokens"] if isinstance(row, dict) else row) for row in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{text} gives no lengths: {type(error).__name__}: {error}",
            fix='write median,tail such as 600,20, or name a file of lines like {"tokens": 512}',
        ) from None
    return {"trace": tuple(tokens)}


def read_failures(texts: Sequence[str]) -> tuple[Failure, ...]:
    """`0@300` loses engine 0 at 300 s; `0@300-400` gets another in its place at 400 s."""
    failures: list[Failure] = []
    for text in texts:
        found = re.fullmatch(r"([0-9]+)@([0-9.]+)(?:-([0-9.]+))?", text)
        if found is None:
            raise ConfigError(
                f"{text!r} is no failure", fix="write ENGINE@SECONDS or ENGINE@SECONDS-SECONDS"
            )
        engine, at_s, back_s = found.groups()
        failures.append(Failure(engine=int(engine), at_s=float(at_s), back_s=float(back_s or 0)))
    return tuple(failures)
