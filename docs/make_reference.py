"""Write the reference pages that follow from the code: python docs/make_reference.py.

    rollick/observe/metric_table.py --> metrics.md

Do not edit these pages; a test checks that they are current.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rollick.observe.metric_table import METRICS, RENAMED

DOCS = Path(__file__).parent

AREAS: Mapping[str, str] = {
    "score": "Scores",
    "reward": "Rewards",
    "reward_hacking": "Signs of reward hacking",
    "rollout": "Rollout",
    "env": "Environments",
    "controller": "Controller",
    "train": "Training",
    "critic": "Critic",
    "eval": "Validation",
    "time": "Time",
    "speed": "Speed",
    "memory": "Memory",
    "data": "Data",
    "version": "Version",
}
"""The first part of a metric's name, and the heading of its table."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. A `|` in a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def metrics_page() -> str:
    """docs/metrics.md: every metric by area, with its unit and meaning."""
    page = (
        "# Metrics\n\n"
        "Every step of a run appends one row of these metrics to `metrics.jsonl` in the run's "
        "folder, and sends it\nto the sinks in `observe.sinks`. Read the file with "
        "`rollick.observe.metrics.read_metrics`:\n\n"
        "```python\n"
        "from pathlib import Path\n"
        "from rollick.observe.metrics import read_metrics\n\n"
        'rows = read_metrics(Path("runs/my_run/metrics.jsonl"))\n'
        'print([row.get("score/mean") for row in rows])\n'
        "```\n\n"
        "A `*` stands for the rest of a name, such as a domain or a reward. A metric that is not "
        "defined in a step\n(a mean over no samples, for example) is not in its row.\n"
    )
    for area, names in groupby(METRICS, key=lambda name: name.partition("/")[0]):
        rows = [(f"`{name}`", *METRICS[name]) for name in names]
        page += f"\n## {AREAS[area]}\n\n{table(('metric', 'unit', 'meaning'), rows)}"
    renamed = [(f"`{old}`", f"`{new}`") for old, new in RENAMED.items()]
    page += (
        "\n## Renamed metrics\n\n`read_metrics` translates the old names in older files.\n\n"
        f"{table(('old', 'new'), renamed)}"
    )
    return page


PAGES: Mapping[str, Callable[[], str]] = {"metrics.md": metrics_page}
"""The generated pages, relative to docs/."""


if __name__ == "__main__":
    for name, write in PAGES.items():
        (DOCS / name).write_text(write(), "utf-8")
