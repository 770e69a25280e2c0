"""Measure the curves of docs/algorithms/ on a toy, and draw them. make_algorithms.py runs this.

    plans: page -> lines -> Run -- learn, imitate --> results/algorithms_toy.json --> pictures

Runs that several pages ask for are made once. Results are written after every page, so that an
interrupted measurement goes on with `--measure BEGINNING`.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from make_algorithms import page_of, picture_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from rollick.commands.export import export_run
from rollick.config.names import NAMES
from rollick.config.presets import PRESETS
from rollick.config.schema.losses import PAIRWISE, SUPERVISED, WITHOUT_TRUST_REGION
from rollick.testing.learning import (
    FAST_OPTIMIZER,
    PRESET_SETTINGS,
    Curve,
    imitate,
    learn,
    settings_of,
)
from rollick.testing.tiny import save_tiny

SCORE = "mean score"
SHUFFLED = "shuffled"
COLOURS = ("#0b6fb8", "#d1600f", "#2a8f43", "#8a4fb0", "#b8860b", "#111111", "#d6336c", "#17a2b8")
CONTROL = "#999999"


@dataclass(frozen=True, slots=True)
class Run:
    """One curve: what is run, and which of its figures is drawn (empty: the score)."""

    algorithm: str | Mapping[str, Any] = field(default_factory=dict[str, Any])
    staleness: int = 0
    shuffled: bool = False
    pipeline: str = "rlvr"
    metric: str = ""
    relative: bool = False
    """As a part of the first value."""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> str:
        parts = [self.algorithm, self.staleness, self.shuffled, self.pipeline, dict(self.more)]
        return json.dumps(parts, sort_keys=True, default=str)

    def values(self) -> list[float]:
        curve = measured(self.key, self._start)
        entries = curve.values_of(self.metric) if self.metric else curve.scores
        scale = entries[0] if self.relative else 1.0
        return [round(value / scale, 3) for value in entries]

    def _start(self) -> Curve:
        more = dict(self.more)
        with TemporaryDirectory() as folder:
            if self.pipeline == "rlvr":
                ages = {"staleness": self.staleness, "shuffled": self.shuffled}
                return learn(self.algorithm, Path(folder), **ages, **more)
            if self.algorithm:
                more["algorithm"] = self.algorithm
            return imitate(self.pipeline, Path(folder), wrong=self.shuffled, **more)


KEPT = TemporaryDirectory()
_DONE: dict[str, Curve] = {}


def measured(key: str, start: Callable[[], Curve]) -> Curve:
    """The curve of these settings, measured once."""
    if key not in _DONE:
        begun = time.perf_counter()
        _DONE[key] = start()
        sys.stderr.write(f"  {time.perf_counter() - begun:5.1f} s  {key[:110]}\n")
    return _DONE[key]


@cache
def teachers() -> tuple[Path, Path]:
    """A model that was taught the toy's task, and one that was not."""
    # Kept until this process ends: every run that distils reads it.
    folder = Path(KEPT.name)
    imitate("sft", folder, steps=60)
    taught = export_run(folder / "runs" / "run", folder / "taught")
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "max_length": 32}
    return taught, save_tiny(folder / "untaught", seed=9, alphabet="abcd", **sizes)


def true_and_shuffled(
    algorithm: str | Mapping[str, Any], *, stale: Sequence[int] = (0, 2), **more: Any
) -> dict[str, Run]:
    """Lines with true and with shuffled scores, at each staleness."""
    return {
        f"staleness {staleness}" + (f", {SHUFFLED}" if shuffled else ""): Run(
            algorithm, staleness, shuffled, more=more
        )
        for staleness in stale
        for shuffled in (False, True)
    }


def preset_lines(name: str) -> dict[str, Run]:
    stale = (0,) if PRESETS[name].loss["name"] in WITHOUT_TRUST_REGION else (0, 2)
    lines: dict[str, Run] = {}
    for staleness in stale:
        more = settings_of(name, staleness=staleness)
        lines |= true_and_shuffled(name, stale=(staleness,), **more)
    return lines


def advantage_lines(name: str) -> dict[str, Run]:
    if name == "opd":
        taught, untaught = ({"teacher": {"path": str(each)}} for each in teachers())
        algorithm, steps = {"advantage": "opd"}, {"steps": 60}
        return {
            "score": Run(algorithm, more=taught | steps),
            "score, untaught teacher (control)": Run(algorithm, more=untaught | steps),
            "KL to the teacher, of its start": Run(
                algorithm, metric="train/mean/teacher_kl", relative=True, more=taught | steps
            ),
        }
    return true_and_shuffled(
        {"advantage": name, "loss": "ppo"}, **(PRESET_SETTINGS["ppo"] if name == "gae" else {})
    )


def loss_lines(name: str) -> dict[str, Run]:
    if name == "value":
        error = "critic/mean/value_error"
        return {
            "true scores": Run("ppo", metric=error, more=PRESET_SETTINGS["ppo"]),
            "shuffled": Run("ppo", shuffled=True, metric=error, more=PRESET_SETTINGS["ppo"]),
        }
    if name == "distillation":
        return dict(_divergences())
    if name in SUPERVISED:
        return _given_answers(name)
    advantage = "reinforce" if name.startswith("raft") else "grpo"
    stale = (0,) if name in WITHOUT_TRUST_REGION else (0, 2)
    slow = {"steps": 60} if name in ("gspo", "segment") else {}
    return true_and_shuffled({"advantage": advantage, "loss": name}, stale=stale, **slow)


def _given_answers(name: str) -> dict[str, Run]:
    pipeline, more = "dpo" if name in PAIRWISE else "sft", {"steps": 40}
    algorithm = {"loss": name} if name in PAIRWISE else {}
    lines = {
        "right answers": Run(algorithm, pipeline=pipeline, more=more),
        "wrong answers (control)": Run(algorithm, 0, True, pipeline, more=more),
    }
    if name in PAIRWISE:
        lines["pairs preferred as labelled"] = Run(
            algorithm, pipeline=pipeline, metric="train/mean/preference_accuracy", more=more
        )
    return lines


def _divergences() -> Iterator[tuple[str, Run]]:
    taught, untaught = teachers()

    def run(name: str, teacher: Path, metric: str = "") -> Run:
        return Run(
            {"loss": {"name": "distillation", "divergence": name}},
            pipeline="distill",
            metric=metric,
            relative=bool(metric),
            more={"teacher": {"path": str(teacher), "top_k": 4}, "steps": 40},
        )

    for name in NAMES["divergences"]:
        yield name, run(name, taught, "train/mean/divergence")
    yield "score (forward)", run("forward", taught)
    yield "score, untaught teacher (control)", run("forward", untaught)


def correction_lines(name: str) -> dict[str, Run]:
    # The defaults of these two are for the mismatch of engine and learner, not for age.
    wide = {"geometric": {"low": 0.5, "high": 2.0}, "k3": {"max_kl": 0.5}}
    algorithm = {
        "advantage": "grpo",
        "loss": "ppo",
        "correction": {"name": name, **wide.get(name, {})},
    }
    train = {"optimizer": FAST_OPTIMIZER, "minibatches": 2}
    return true_and_shuffled(algorithm, stale=(2,), train=train)


def aggregation_lines(name: str) -> dict[str, Run]:
    return true_and_shuffled({"advantage": "grpo", "loss": "ppo", "aggregation": name})


def topic_lines() -> dict[str, dict[str, Run]]:
    plain = {"advantage": "reinforce", "loss": "ppo"}
    batch = {**plain, "shaping": {"mean": "batch", "std": "batch"}}
    running = {**plain, "shaping": {"mean": "running", "std": "running", "clip": 5.0}}
    toys = "rollick.testing.toys"
    rows = {"source": f"{toys}:echo_rows", "rewards": [f"{toys}:echoes"]}
    two = {"one": rows, "two": {**rows, "algorithm": "cispo"}}
    one = {"domains": {"letters": rows}}

    def near(**selection: Any) -> dict[str, Any]:
        return {"data": {**one, "selection": selection}}

    return {
        "shaping.md": {
            "no shaping": Run(plain),
            "mean and std of the batch": Run(batch),
            "running mean and std": Run(running),
            "running, shuffled": Run(running, shuffled=True),
        },
        "kl.md": {
            "no KL": Run("dppo"),
            "k3 in the loss, 0.1": Run(_with_kl(coefficient=0.1)),
            "k2 in the loss, 0.1": Run(_with_kl(coefficient=0.1, form="k2")),
            "in the reward, 0.1": Run(_with_kl(coefficient=0.1, place="reward")),
            "k3, adaptive to 0.05": Run(
                _with_kl(coefficient=0.1, controller="adaptive", horizon=200)
            ),
            "k3, shuffled": Run(_with_kl(coefficient=0.1), shuffled=True),
        },
        "entropy.md": {
            **{f"bonus {c:g}": Run({"preset": "dppo", "entropy": c}) for c in (0.0, 0.01, 0.1, 1)},
            "bonus 0.01, shuffled": Run({"preset": "dppo", "entropy": 0.01}, shuffled=True),
        },
        "selection.md": {
            "all prompts alike": Run("dppo"),
            "near_half": Run("dppo", more=near(near_half_window=4, decay=0.5)),
            "retirement at 0.9": Run(
                "dppo", more=near(retire={"pass_rate": 0.9, "min_tries": 16}, decay=0.5)
            ),
            "near_half, shuffled": Run(
                "dppo", shuffled=True, more=near(near_half_window=4, decay=0.5)
            ),
        },
        "mixing.md": true_and_shuffled("grpo", data={"domains": two}),
    }


def _with_kl(**kl: Any) -> dict[str, Any]:
    return {"preset": "dppo", "kl": kl}


def plans() -> Iterator[tuple[str, str, Callable[[], dict[str, Run]]]]:
    """Page, what is on its y axis, and its lines."""
    makers: Mapping[str, Callable[[str], dict[str, Run]]] = {
        "presets": preset_lines,
        "advantages": advantage_lines,
        "losses": loss_lines,
        "corrections": correction_lines,
        "aggregations": aggregation_lines,
    }
    for kind, lines_of in makers.items():
        names = [*NAMES[kind], *(["value"] if kind == "losses" else [])]
        for page, name in {page_of(kind, name): name for name in reversed(names)}.items():
            yield page, _axis(page), lambda lines_of=lines_of, name=name: lines_of(name)
    for page, lines in topic_lines().items():
        yield page, SCORE, lambda lines=lines: lines


def _axis(page: str) -> str:
    return {
        "losses/value.md": "squared error of the value",
        "losses/distillation.md": "part of the first divergence; score",
        "losses/dpo.md": "mean score; share of pairs",
        "losses/ipo.md": "mean score; share of pairs",
        "advantages/opd.md": "mean score; part of the first KL",
    }.get(page, SCORE)


def measure(results: Path, *, beginning: str) -> None:
    """Run what the pages that begin so ask for; the rest stays as it was recorded."""
    entries = json.loads(results.read_text("utf-8")) if results.exists() else {}
    for page, axis, lines in plans():
        if page.startswith(beginning):
            sys.stderr.write(f"{page}\n")
            measured_lines = {label: run.values() for label, run in lines().items()}
            entries[page] = {"y": axis, "lines": measured_lines}
            ordered = {key: entries[key] for key in sorted(entries)}
            results.write_text(_one_curve_a_line(ordered), "utf-8")


def _one_curve_a_line(entries: Mapping[str, Any]) -> str:
    blocks: list[str] = []
    for page, entry in entries.items():
        lines = ",\n".join(
            f"      {json.dumps(label)}: {json.dumps(values, separators=(',', ':'))}"
            for label, values in entry["lines"].items()
        )
        blocks.append(
            f'  {json.dumps(page)}: {{\n    "y": {json.dumps(entry["y"])},\n'
            f'    "lines": {{\n{lines}\n    }}\n  }}'
        )
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def draw_all(entries: Mapping[str, Any], pages: Path) -> None:
    """A picture for each page, and one with the curves of all presets."""
    (pages / "pictures").mkdir(exist_ok=True)
    for page, entry in entries.items():
        figure = Figure(figsize=(4.8, 2.8), dpi=100, layout="constrained")
        axes = figure.subplots()
        _draw(axes, entry)
        _save(figure, pages / picture_of(page))
    _draw_presets(entries, pages / "pictures" / "presets.png")


def _is_control(label: str) -> bool:
    return SHUFFLED in label or "control" in label


def _draw(axes: Axes, entry: Mapping[str, Any]) -> None:
    colours = iter(COLOURS * 2)
    for label, values in entry["lines"].items():
        steps = range(1, len(values) + 1)
        if _is_control(label):
            style = ":" if "2" in label else "--"
            axes.plot(steps, values, style, color=CONTROL, linewidth=1.2, label=label)
        else:
            axes.plot(steps, values, color=next(colours), linewidth=1.4, label=label)
    _frame(axes, entry["y"])
    top = max(max(values) for values in entry["lines"].values())
    axes.set_ylim(0, 1.02 if "score" in entry["y"] else 1.1 * top)
    axes.legend(fontsize=6.5, framealpha=0.8)


def _frame(axes: Axes, y: str) -> None:
    axes.set_xlabel("step (8 prompts x 8 samples)" if y == SCORE else "step", fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def _draw_presets(entries: Mapping[str, Any], path: Path) -> None:
    figure = Figure(figsize=(7.2, 4.0), dpi=100, layout="constrained")
    axes = figure.subplots()
    styles = ("-", "--", ":")
    for number, name in enumerate(PRESETS):
        entry = entries.get(page_of("presets", name))
        if entry is None:
            continue
        values = entry["lines"]["staleness 0"]
        colour, style = COLOURS[number % 5], styles[number // 5]
        axes.plot(range(1, len(values) + 1), values, style, color=colour, lw=1.2, label=name)
        control = entry["lines"][f"staleness 0, {SHUFFLED}"]
        label = "shuffled scores, each" if number == 0 else None
        axes.plot(range(1, len(control) + 1), control, color=CONTROL, lw=0.5, label=label)
    _frame(axes, SCORE)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=7, ncols=2, loc="center right", framealpha=0.8)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """As a PNG of few colours: a third of the size."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    Image.open(drawn).convert("RGB").quantize(160).save(path, optimize=True)
