"""Write docs/algorithms/: one page per preset and part.

    python docs/make_algorithms.py                     pages, from text, schema and curves
    python docs/make_algorithms.py --measure           measures the curves (minutes) and draws them
    python docs/make_algorithms.py --measure losses/   only pages whose path starts with losses/

    algorithms/text.yaml (prose, formulas) --+
    rollick.config (options, names) ---------+--> algorithms/**/*.md
    results/algorithms_toy.json (curves) ----+

To change a generated page, change the text, the schema or the docstring, and run this again.
your_own.md is written by hand. measure_algorithms.py measures and draws.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Any, get_args

import yaml
from option_tables import option_row

from rollick.config.names import NAMES, load_reference
from rollick.config.presets import PRESETS
from rollick.config.schema import (
    PromptSelectionConfig,
    RetireConfig,
    RlvrDomain,
    RolloutConfig,
    advantages,
    corrections,
    losses,
)
from rollick.config.schema.advantages import ShapingConfig
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.losses import KlConfig, ValueLoss
from rollick.config.schema.section import Section

HERE = Path(__file__).parent
PAGES = HERE / "algorithms"
CURVES = HERE / "results" / "algorithms_toy.json"
LAST = 5

KINDS: Mapping[str, str] = {
    "presets": "preset",
    "advantages": "advantage",
    "losses": "loss",
    "corrections": "correction",
    "aggregations": "aggregation",
}
"""Kinds with one page per name, and their singular."""

TOPICS = ("shaping", "kl", "entropy", "selection", "mixing")
OF_TOPIC = {
    "shapings": "shaping.md",
    "kl_forms": "kl.md",
    "kl_controllers": "kl.md",
    "selections": "selection.md",
    "divergences": "losses/distillation.md",
    "value_losses": "losses/value.md",
    "bonuses": "entropy.md",
}
"""Kinds whose names share one page."""

SAME_AS = {"segment_return": "step_return"}
"""Aliases."""


def page_of(kind: str, name: str) -> str:
    """The page of a name, relative to docs/algorithms."""
    if kind in OF_TOPIC:
        return OF_TOPIC[kind]
    return f"{kind}/{SAME_AS.get(name, name).replace('++', '_pp')}.md"


def picture_of(page: str) -> str:
    """The picture of a page, relative to docs/algorithms."""
    return f"pictures/{page.removesuffix('.md').replace('/', '-')}.png"


def sections() -> dict[tuple[str, str], type[Section]]:
    """The options of each advantage, loss and correction, by kind and name."""
    entry: dict[tuple[str, str], type[Section]] = {}
    modules = {"advantages": advantages, "losses": losses, "corrections": corrections}
    for kind, module in modules.items():
        for part in vars(module).values():
            if isinstance(part, type) and issubclass(part, Section) and "name" in part.model_fields:
                for name in get_args(part.model_fields["name"].annotation):
                    entry[kind, name] = part
    return entry


SECTIONS = sections()


def option_rows(section: type[Section], prefix: str, only: Sequence[str] = ()) -> Iterator[str]:
    """Table rows: option, values, default, meaning."""
    for key in section.model_fields:
        if key != "name" and (not only or key in only):
            yield option_row(section, key, prefix)


def options_table(parts: Sequence[tuple[type[Section], str, Sequence[str]]]) -> str:
    rows = [row for section, prefix, only in parts for row in option_rows(section, prefix, only)]
    if not rows:
        return "No options."
    return "\n".join(["| option | values | default | meaning |", "|---|---|---|---|", *rows])


def first_paragraph(thing: Any) -> str:
    return " ".join((getdoc(thing) or "").split("\n\n")[0].split())


def function_line(target: str, page: str) -> str:
    """A link to a function, and the first paragraph of its docstring."""
    module, _, name = target.partition(":")
    source = "../" * (page.count("/") + 2) + module.replace(".", "/") + ".py"
    about = first_paragraph(load_reference(target)).replace("*", "\\*")
    return f"[`{module}:{name}`]({source})  \n{about}"


@dataclass(frozen=True, slots=True)
class Page:
    """The contents of a page."""

    path: str
    title: str
    text: Mapping[str, Any]
    formula: str
    functions: Sequence[str]
    options: str
    recipe: str
    setting: str
    """How the curve was measured."""

    def write(self, curves: Mapping[str, Any]) -> str:
        text = self.text
        parts = [
            f"# {self.title}",
            " ".join(text["what"].split()),
            f"## Formula\n\n{self.formula}",
            "## Function\n\n" + "\n\n".join(function_line(f, self.path) for f in self.functions),
            f"## Options\n\n{self.options}",
            f"## Recipe\n\n```yaml\n{self.recipe.strip()}\n```",
            f"## Measured\n\n{self._measured(curves)}",
            "## Pitfalls\n\n" + "\n".join(f"- {each}" for each in text["pitfalls"]),
        ]
        if text.get("papers"):
            parts.append("## Paper\n\n" + "\n".join(f"- {linked(each)}" for each in text["papers"]))
        up = "../" * self.path.count("/")
        parts.append(f"[All algorithms]({up}README.md) · [Your own]({up}your_own.md)")
        return "\n\n".join(parts) + "\n"

    def _measured(self, curves: Mapping[str, Any]) -> str:
        up = "../" * self.path.count("/")
        picture = f"![curves of the toy]({up}{picture_of(self.path)})"
        entry = curves.get(self.path)
        rows = [] if entry is None else list(figure_rows(entry))
        about = f"{self.setting} The toy is described in the [README]({up}README.md#the-toy)."
        return "\n\n".join([about, picture, "\n".join(rows)]).strip()


def figure_rows(entry: Mapping[str, Any]) -> Iterator[str]:
    """A table of the first and last values of each curve."""
    yield f"| {entry['y']} | first step | last {LAST} of all steps |"
    yield "|---|---|---|"
    for label, values in entry["lines"].items():
        last = sum(values[-LAST:]) / len(values[-LAST:])
        yield f"| {label} | {values[0]:.2f} | {last:.2f} of {len(values)} |"


def linked(paper: str) -> str:
    """arXiv numbers and addresses as links."""
    words = paper.split()
    if "arXiv" in words:
        number = words[words.index("arXiv") + 1]
        return paper.replace(f"arXiv {number}", f"[arXiv {number}](https://arxiv.org/abs/{number})")
    return f"<{paper}>" if paper.startswith("http") else paper


def display(*formulas: str) -> str:
    return "\n\n".join(f"$$\n{formula.strip()}\n$$" for formula in formulas)


GIVEN_ANSWERS = {
    "sft": ("sft", "completion: answer", ""),
    "dpo": ("dpo", "chosen: good, rejected: bad", ""),
    "ipo": ("dpo", "chosen: good, rejected: bad", ""),
    "distillation": ("distill", "completion: answer", "teacher: {path: my_teacher, top_k: 32}"),
}
"""Losses on given answers: pipeline, columns, and further lines of the recipe."""


def recipe_of(kind: str, name: str) -> str:
    """The lines of a recipe that use a part with its default options."""
    word = KINDS[kind]
    if (kind, name) == ("losses", "value"):
        return "algorithm: ppo\ncritic:\n  loss: {name: value, clip: 0.2}"
    part = SECTIONS.get((kind, name))
    options = part().model_dump(mode="json") if part else {}
    options |= {"name": name}
    short = name if len(options) <= 1 else _flow(options)
    lines = f"algorithm:\n  {word}: {short}"
    if name in GIVEN_ANSWERS and kind == "losses":
        pipeline, columns, more = GIVEN_ANSWERS[name]
        data = f"data:\n  domains:\n    mine: {{source: mine.jsonl, {columns}}}"
        # Pipeline sft has one loss, which its recipe does not name.
        chosen = [] if name == "sft" else [lines]
        return "\n".join([f"pipeline: {pipeline}", data, *chosen, more]).strip()
    if kind == "corrections" and name != "bypass":
        return f"{lines}\n  loss: ppo"
    if name == "opd":
        return f"{lines}\nteacher: {{path: my_teacher}}"
    return lines


def _flow(options: Mapping[str, Any]) -> str:
    """A mapping on one line."""
    return yaml.safe_dump(
        dict(options), default_flow_style=True, sort_keys=False, width=1e9
    ).strip()


SETTING = {
    "presets": "The preset without changes.",
    "advantages": "With the loss `ppo`, a mean over tokens, and μ for the old policy.",
    "losses": "With the advantage `grpo`, a mean over tokens, and μ for the old policy.",
    "corrections": "With the advantage `grpo`, the loss `ppo`, staleness 2 and two mini-batches.",
    "aggregations": "With the advantage `grpo` and the loss `ppo`.",
}
SETTING_OF = {
    "presets/ppo": "The preset; the critic has the policy's learning rate.",
    "presets/dapo": "The preset, with a limit of 20 tokens instead of 4.",
    "advantages/gae": "As in the preset `ppo`.",
    "advantages/opd": (
        "The teacher knows the task, and no reward is used; the control has an untrained teacher."
    ),
    "losses/raft": "With the advantage `reinforce`: only scores matter.",
    "losses/raft++": "With the advantage `reinforce`: only scores matter.",
    "losses/sft": "Pipeline `sft`, on right and on wrong answers; scores of sampled answers.",
    "losses/dpo": "Pipeline `dpo`, on pairs and on swapped pairs; scores of sampled answers.",
    "losses/ipo": "Pipeline `dpo`, on pairs and on swapped pairs; scores of sampled answers.",
    "losses/distillation": (
        "Pipeline `distill`, with a teacher that knows the task. Each divergence is divided by "
        "its first value."
    ),
    "losses/value": "The critic of the preset `ppo`, with true and with shuffled scores.",
    "corrections/geometric": "As the other corrections, with low 0.5 and high 2.",
    "corrections/k3": "As the other corrections, with max_kl 0.5.",
}


def part_pages(text: Mapping[str, Any]) -> Iterator[Page]:
    """Pages of advantages, losses, corrections and aggregations."""
    for kind in ("advantages", "losses", "corrections", "aggregations"):
        for name, own in text[kind].items():
            is_value = (kind, name) == ("losses", "value")
            target = NAMES["value_losses"]["value"] if is_value else NAMES[kind][name]
            functions = [target]
            if name == "distillation":
                functions += NAMES["divergences"].values()
            section = ValueLoss if is_value else SECTIONS.get((kind, name))
            prefix = "critic.loss." if is_value else f"algorithm.{KINDS[kind]}."
            table = options_table([(section, prefix, ())] if section else [])
            yield Page(
                path=page_of(kind, name),
                title=f"`{name}` ({'critic loss' if is_value else KINDS[kind]})",
                text=own,
                formula=display(own["formula"]),
                functions=functions,
                options=table,
                recipe=recipe_of(kind, name),
                setting=SETTING_OF.get(f"{kind}/{name}", SETTING[kind]),
            )


def preset_pages(text: Mapping[str, Any]) -> Iterator[Page]:
    for name, preset in PRESETS.items():
        own, settings = text["presets"][name], preset.settings
        loss, advantage = preset.loss["name"], preset.advantage
        stands_for = yaml.safe_dump({"algorithm": settings}, sort_keys=False)
        yield Page(
            path=page_of("presets", name),
            title=f"{own['title']} (preset `{name}`)",
            text={**own, "papers": [f"{own['paper']}, arXiv {preset.paper}"]},
            formula="The advantage, and the loss of a token:\n\n"
            + display(text["advantages"][advantage]["formula"], text["losses"][loss]["formula"]),
            functions=[
                NAMES["advantages"][advantage],
                NAMES["losses"][loss],
                NAMES["aggregations"][preset.aggregation],
            ],
            options=_preset_table(settings),
            recipe=f"algorithm: {name}\n\n# which stands for:\n" + _commented(stands_for),
            setting=SETTING_OF.get(f"presets/{name}", SETTING["presets"]),
        )


def _commented(lines: str) -> str:
    return "\n".join(f"# {line}" for line in lines.splitlines())


def _preset_table(settings: Mapping[str, Any]) -> str:
    rows = ["| part | setting | its other options |", "|---|---|---|"]
    kinds = {"advantage": "advantages", "loss": "losses", "correction": "corrections"}
    for key, value in settings.items():
        options = {"name": value} if isinstance(value, str) else value
        name = options.get("name")
        others = ", ".join(f"{k} {v}" for k, v in options.items() if k != "name")
        page = "shaping.md" if name is None else page_of(kinds.get(key, "aggregations"), name)
        setting = " with ".join(each for each in (f"`{name}`" if name else "", others) if each)
        rows.append(f"| {key} | {setting} | [{name or key}](../{page}) |")
    after = "\n\nOverride parts in the recipe: `algorithm: {preset: NAME, loss: {…}}`."
    return "\n".join(rows) + after.replace("NAME", "…")


TOPIC_OPTIONS: Mapping[str, Sequence[tuple[type[Section], str, Sequence[str]]]] = {
    "shaping": (
        (ShapingConfig, "algorithm.shaping.", ()),
        (RolloutConfig, "rollout.", ("drop_truncated",)),
    ),
    "kl": ((KlConfig, "algorithm.kl.", ()),),
    "entropy": ((AlgorithmConfig, "algorithm.", ("entropy",)),),
    "selection": (
        (RolloutConfig, "rollout.", ("drop_no_signal", "min_spread", "max_drops_per_step")),
        (PromptSelectionConfig, "data.selection.", ()),
        (RetireConfig, "data.selection.retire.", ()),
        (ShapingConfig, "algorithm.shaping.", ("difficulty",)),
    ),
    "mixing": (
        (RlvrDomain, "data.domains.X.", ("algorithm", "share")),
        (AlgorithmConfig, "algorithm.", ("weight",)),
    ),
}
TOPIC_FUNCTIONS: Mapping[str, Sequence[str]] = {
    "shaping": tuple(dict.fromkeys(NAMES["shapings"].values())),
    "kl": (*NAMES["kl_forms"].values(), *NAMES["kl_controllers"].values()),
    "entropy": tuple(NAMES["bonuses"].values()),
    "selection": tuple(NAMES["selections"].values()),
    "mixing": (
        "rollick.algorithms.objective:build_objective",
        "rollick.algorithms.credit:CreditAssigner",
    ),
}
TOPIC_RECIPES: Mapping[str, str] = {
    "shaping": "algorithm:\n  shaping: {mean: running, std: running, clip: 5.0}",
    "kl": "algorithm:\n  kl: {coefficient: 0.001, form: k3, controller: adaptive, target: 0.05}",
    "entropy": "algorithm:\n  entropy: 0.001",
    "selection": (
        "rollout: {drop_no_signal: true}\n"
        "data:\n  selection: {near_half_window: 64, retire: {pass_rate: 0.9, min_tries: 16}}"
    ),
    "mixing": (
        "data:\n  domains:\n    maths: {source: mine.jsonl, rewards: [last_number]}\n"
        "    style:\n      source: mine.jsonl\n      rewards: [contains]\n"
        "      algorithm: {preset: cispo, weight: 0.5}\nalgorithm: grpo"
    ),
}
TOPIC_SETTING: Mapping[str, str] = {
    "shaping": "The advantage `reinforce`, which uses scores unchanged, with the loss `ppo`.",
    "kl": "The preset `dppo` with a KL to the untrained start model, which slows learning.",
    "entropy": "The preset `dppo`.",
    "selection": "The preset `dppo`; the score is that of the selected groups.",
    "mixing": "Two domains with the same task, one with `grpo`, the other with `cispo`.",
}


def topic_pages(text: Mapping[str, Any]) -> Iterator[Page]:
    for name in TOPICS:
        own = text["topics"][name]
        yield Page(
            path=f"{name}.md",
            title=own["title"],
            text=own,
            formula=display(own["formula"]),
            functions=TOPIC_FUNCTIONS[name],
            options=options_table(TOPIC_OPTIONS[name]),
            recipe=TOPIC_RECIPES[name],
            setting=TOPIC_SETTING[name],
        )


def about_part(kind: str, name: str) -> str:
    """One line on a part, from its docstring."""
    if kind == "presets":
        return PRESETS[name].about
    part = SECTIONS.get((kind, name)) or load_reference(NAMES[kind][name])
    # A section of several parts has a line for each: `rloo: score minus the mean of ...`
    lines = [line for line in (getdoc(part) or "").splitlines() if line.startswith(f"{name}: ")]
    about = lines[0].removeprefix(f"{name}: ") if lines else first_paragraph(part)
    about = about[:1].upper() + about[1:] if lines else about
    return about.replace("|", "\\|").replace("*", "\\*")


def readme(text: Mapping[str, Any]) -> str:
    own = text["readme"]
    papers = ["| preset | paper | in one line | recipe |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        paper = linked(f"{text['presets'][name]['paper']}, arXiv {preset.paper}")
        page = page_of("presets", name)
        papers.append(f"| [{name}]({page}) | {paper} | {preset.about} | `algorithm: {name}` |")
    parts = [
        "# Algorithms",
        own["intro"],
        "## Which one\n\n" + "\n".join(f"- {line}" for line in own["choose"]),
        "## From paper to recipe\n\n" + "\n".join(papers),
        "![curves of all presets](pictures/presets.png)",
        f"## The toy\n\n{own['toy']} `python docs/make_algorithms.py --measure` measures again.",
        f"## Notation\n\n{own['notation']}",
        "## All parts\n\n" + "\n\n".join(_parts_tables(text)),
        "Write your own part, next to the recipe or in a package: [your_own.md](your_own.md).",
    ]
    return "\n\n".join(parts) + "\n"


def _parts_tables(text: Mapping[str, Any]) -> Iterator[str]:
    kinds = [kind for kind in KINDS if kind != "presets"] + list(OF_TOPIC)
    for kind in kinds:
        title = kind.replace("_", " ").capitalize().replace("Kl ", "KL ")
        rows = [f"**{title}**", "", "| name | |", "|---|---|"]
        for name in NAMES[kind]:
            rows.append(f"| [{name}]({page_of(kind, name)}) | {about_part(kind, name)} |")
        yield "\n".join(rows)
    topics = ["**Further topics**", "", "| page | |", "|---|---|"]
    for name in TOPICS:
        what = text["topics"][name]["what"].split(". ")[0].replace("|", "\\|").rstrip(".")
        topics.append(f"| [{text['topics'][name]['title']}]({name}.md) | {what}. |")
    yield "\n".join(topics)


def all_pages() -> dict[str, str]:
    """Every generated page, by its path relative to docs/algorithms."""
    text = yaml.safe_load((PAGES / "text.yaml").read_text("utf-8"))
    curves = json.loads(CURVES.read_text("utf-8")) if CURVES.exists() else {}
    pages = [*preset_pages(text), *part_pages(text), *topic_pages(text)]
    return {"README.md": readme(text)} | {page.path: page.write(curves) for page in pages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", nargs="?", const="", metavar="BEGINNING")
    parser.add_argument(
        "--draw", action="store_true", help="draw the pictures from the recorded curves"
    )
    options = parser.parse_args()
    if options.measure is not None or options.draw:
        import measure_algorithms

        if options.measure is not None:
            measure_algorithms.measure(CURVES, beginning=options.measure)
        measure_algorithms.draw_all(json.loads(CURVES.read_text("utf-8")), PAGES)
    for path, content in all_pages().items():
        (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / path).write_text(content, "utf-8")


if __name__ == "__main__":
    main()
