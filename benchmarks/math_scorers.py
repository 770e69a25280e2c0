"""Math scorers on templates of right and wrong answers: false negatives and false positives.

    python benchmarks/math_scorers.py --json [--verl ../verl] [--roll ../ROLL] [--errors held_out]
    python benchmarks/math_scorers.py --gsm8k train.jsonl
    python benchmarks/math_scorers.py --speed

Every template of math_templates.yaml is filled with each of its numbers, and every scorer judges
every text. False negatives are the share of right texts that score 0, false positives the share of
wrong texts that score 1; both are given for the templates that are used in development, for those
that were new when they were first scored (all other parts), and for all.
math-verify is installed with rollick's extra `rewards`; `--verl` and `--roll` are checkouts of verl
and ROLL.
`--errors PART` prints the templates that rollick's scorer gets wrong. `--others` scores the texts
of math_texts.jsonl.xz instead: six sets by authors who had not seen the scorer, 1,044 templates in
all with 30 draws of numbers each. `--gsm8k` scores the first 1,000 solutions of GSM8K without their
`####` line, and again with the answer in the last line raised by one. `--speed` measures text
rewards on hostile texts of 20,000 characters.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import logging
import lzma
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

TEMPLATES = Path(__file__).with_name("math_templates.yaml")
TEXTS = Path(__file__).with_name("math_texts.jsonl.xz")
PARTS = (
    "development",
    "held_out",
    "last",
    "fresh",
    "newest",
    "unseen_a",
    "unseen_b",
    "unseen_c",
    "unseen_d",
    "unseen_e",
    "unseen_f",
    "unseen_g",
)
Scorer = Callable[[str, str], bool]
"""Whether a completion gives this answer."""


@dataclass(frozen=True, slots=True)
class Case:
    part: str
    right: bool
    template: str
    text: str
    answer: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--verl", type=Path, help="a checkout of verl")
    parser.add_argument("--roll", type=Path, help="a checkout of ROLL")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--errors", choices=PARTS, help="print rollick's errors in this part")
    parser.add_argument("--others", action="store_true", help="score the sets of other authors")
    parser.add_argument("--gsm8k", type=Path, help="a file of GSM8K, such as train.jsonl")
    parser.add_argument("--speed", action="store_true", help="measure seconds on hostile texts")
    options = parser.parse_args()
    if options.speed:
        figures: dict[str, Any] = measure_speed()
    elif options.others or options.gsm8k:
        texts = read_solutions(options.gsm8k) if options.gsm8k else read_texts()
        scorers = load_scorers(options.verl, options.roll)
        figures = {name: judge_sets(scorer, texts) for name, scorer in scorers.items()}
    else:
        cases = [case for case in read_cases() if case.part in options.parts]
        scorers = load_scorers(options.verl, options.roll)
        figures = {name: judge(scorer, cases) for name, scorer in scorers.items()}
        if options.errors:
            print_errors(scorers["rollick"], cases, options.errors)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<24}{value}")


def read_texts() -> list[Case]:
    """The texts of other authors; `part` is the number of the set."""
    with lzma.open(TEXTS, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        Case(str(row["set"]), row["right"], str(row["template"]), row["text"], row["answer"])
        for row in rows
    ]


def read_solutions(path: Path, limit: int = 1000) -> list[Case]:
    """Solutions of GSM8K without the marked answer; wrong ones end with another number."""
    cases: list[Case] = []
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(limit), strict=False)]
    for row in rows:
        solution, _, answer = re.sub(r"<<[^>]*>>", "", row["answer"]).rpartition("####")
        solution, answer = solution.strip(), answer.strip()
        cases.append(Case("gsm8k", True, "", solution, answer))
        lines, _, last = solution.rpartition("\n")
        other = str(Decimal(answer.replace(",", "")) + 1)
        number = rf"(?<![\d.,]){re.escape(answer)}(?!\d|[.,]\d)"
        if re.search(number, last):
            text = f"{lines}\n{re.sub(number, other, last)}"
            cases.append(Case("gsm8k", False, "", text, answer))
    return cases


def judge_sets(scorer: Scorer, cases: list[Case]) -> dict[str, Any]:
    """Percentages of false negatives and false positives, by set."""
    wrong, total = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    for case in cases:
        total[case.part, case.right] += 1
        wrong[case.part, case.right] += is_right(scorer, case) != case.right
    names = {True: "false_negatives_percent", False: "false_positives_percent"}
    percent = {key: round(100 * wrong[key] / total[key], 2) for key in total}
    sets = sorted({part for part, _ in total})
    return {part: {name: percent[part, right] for right, name in names.items()} for part in sets}


def read_cases() -> Iterator[Case]:
    content = yaml.safe_load(TEMPLATES.read_text("utf-8"))
    for kind in ("right", "wrong"):
        parts = [("development", entry) for entry in content["second"][kind]]
        parts += [(PARTS[index % 2], entry) for index, entry in enumerate(content[kind])]
        parts += [(name, entry) for name in PARTS[2:] for entry in content[name][kind]]
        for part, entry in parts:
            template = entry if isinstance(entry, dict) else {"text": entry, "answer": "<n>"}
            for number in content["numbers"]:
                text, answer = (fill(template[key], number) for key in ("text", "answer"))
                yield Case(part, kind == "right", template["text"], text, answer)


def fill(template: str, number: str) -> str:
    value = Decimal(number)
    grouped = f"{value:,}"
    values = {
        "n": number,
        "w": str(value + 3),
        "v": str(2 * value + 1),
        "n,": grouped,
        "n,.00": f"{value:,.2f}",
        "n{,}": grouped.replace(",", "{,}"),
        "n thin": grouped.replace(",", "\\,"),
        "n.0": number if "." in number else f"{number}.0",
        "n.00": f"{value:.2f}",
        "10n": f"{10 * value:f}",
        "n+1": str(value + 1),
        "n-1": str(value - 1),
    }
    for name, shown in values.items():
        template = template.replace(f"<{name}>", shown)
    return template


def load_scorers(verl: Path | None, roll: Path | None) -> dict[str, Scorer]:
    from math_verify import parse, verify

    from rollick.rewards.math import math_answer

    def math_verify_score(text: str, answer: str) -> bool:
        return bool(verify(parse(f"${answer}$"), parse(text)))

    logging.disable(logging.WARNING)
    scorers: dict[str, Scorer] = {
        "rollick": lambda text, answer: math_answer(text, answer).value == 1.0,
        "math-verify": math_verify_score,
    }
    if verl is not None:
        scorers |= load_verl(verl)
    if roll is not None:
        scorers["roll"] = load_roll(roll)
    return scorers


def load_verl(root: Path) -> dict[str, Scorer]:
    """verl's scorers for GSM8K (strict and flexible), MATH and DAPO."""
    folder = root / "verl" / "utils" / "reward_score"
    modules: dict[str, Any] = {}
    for name in ("gsm8k", "math_reward", "math_dapo"):
        spec = importlib.util.spec_from_file_location(f"verl_{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])

    def gsm8k(text: str, answer: str, method: str) -> bool:
        return modules["gsm8k"].compute_score(text, answer, method=method) == 1.0

    def math(text: str, answer: str) -> bool:
        with redirect_stdout(StringIO()):  # it prints its exceptions
            return modules["math_reward"].compute_score(text, answer) == 1.0

    return {
        "verl gsm8k strict": partial(gsm8k, method="strict"),
        "verl gsm8k flexible": partial(gsm8k, method="flexible"),
        "verl math": math,
        "verl dapo": lambda t, a: bool(modules["math_dapo"].compute_score(t, a)["acc"]),
    }


def load_roll(root: Path) -> Scorer:
    """The scoring functions of ROLL's math worker, without the worker and what it imports."""
    path = root / "roll" / "pipeline" / "rlvr" / "rewards" / "math_rule_reward_worker.py"
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    from math_verify import parse, verify

    names: dict[str, Any] = {"parse": parse, "verify": verify, "Optional": None, "str": str}
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree.body.insert(0, ast.fix_missing_locations(future))
    exec(compile(tree, str(path), "exec"), names)

    def score(text: str, answer: str) -> bool:
        results: list[tuple[bool, str, str]] = []
        # ROLL reads what follows the thinking or the last empty line of a reply.
        names["_hf_verify_math_sample"](f"\n\n{text}", f"${answer}$", results, "")
        return bool(results[0][0])

    return score


def judge(scorer: Scorer, cases: list[Case]) -> dict[str, Any]:
    totals: Counter[tuple[str, bool]] = Counter()
    errors: Counter[tuple[str, bool]] = Counter()
    begun = time.perf_counter()
    for case in cases:
        wrong_verdict = is_right(scorer, case) != case.right
        for part in (case.part, "all"):
            totals[part, case.right] += 1
            errors[part, case.right] += wrong_verdict
    seconds = time.perf_counter() - begun
    names = {True: "false_negatives", False: "false_positives"}
    return {
        part: {
            f"{names[right]}_percent": round(
                100 * errors[part, right] / max(totals[part, right], 1), 2
            )
            for right in names
        }
        for part in (*PARTS, "all")
    } | {"texts": len(cases), "ms_per_text": round(1000 * seconds / len(cases), 3)}


def is_right(scorer: Scorer, case: Case) -> bool:
    try:
        return scorer(case.text, case.answer)
    except Exception:
        return False  # as these libraries' trainers do


def print_errors(scorer: Scorer, cases: list[Case], part: str) -> None:
    failed: dict[tuple[bool, str], list[str]] = {}
    for case in cases:
        if case.part == part and is_right(scorer, case) != case.right:
            failed.setdefault((case.right, case.template), []).append(case.answer)
    for (right, template), answers in failed.items():
        kind = "false negative" if right else "false positive"
        print(f"{kind}  {len(answers):>2}  {template!r}  {answers[:4]}", file=sys.stderr)


def measure_speed(length: int = 20_000) -> dict[str, Any]:
    """For each reward: CPU seconds on the slowest hostile text, and its name."""
    from rollick.rewards import text as rewards
    from rollick.rewards.instructions import split_sentences
    from rollick.rewards.knights_knaves import knights_knaves
    from rollick.rewards.math import math_answer
    from rollick.testing.hostile_texts import hostile_texts, mixed_texts

    calls: dict[str, Callable[[str], Any]] = {
        "math": lambda text: math_answer(text, "4", repetition_weight=0.1),
        "math, expression": lambda text: math_answer(text, "\\frac{x}{2}"),
        "multiple_choice": lambda text: rewards.multiple_choice(text, "A", ["red", "blue two"]),
        "last_number": lambda text: rewards.last_number(text, "4"),
        "f1": lambda text: rewards.f1(text, "a b c"),
        "json_schema": lambda text: rewards.json_schema(text, {"type": "object"}),
        "language": lambda text: rewards.language(text, "de"),
        "knights_knaves": lambda text: knights_knaves(text, ["Zoey", "Ian"], [True, False]),
        "tags": rewards.tags,
        "repetition": rewards.repetition,
        "instructions, sentences": split_sentences,
    }
    figures: dict[str, Any] = {}
    for name, call in calls.items():
        call("warm up 4")
        seconds: dict[str, float] = {}
        for kind, text in (hostile_texts(length) | mixed_texts(length)).items():
            begun = time.process_time()
            call(text)
            seconds[kind] = time.process_time() - begun
        slowest = max(seconds, key=lambda kind: seconds[kind])
        figures[name] = {"cpu_s": round(seconds[slowest], 3), "text": slowest}
    return figures


if __name__ == "__main__":
    main()
