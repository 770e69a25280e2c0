"""The reference pages in docs/ that docs/make_reference.py generates are current."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_generated_reference_pages_are_current() -> None:
    pages = runpy.run_path(str(DOCS / "make_reference.py"))["PAGES"]
    stale = [name for name, write in pages.items() if (DOCS / name).read_text("utf-8") != write()]
    assert stale == [], "run python docs/make_reference.py"


def test_every_metric_has_a_meaning_that_is_a_sentence() -> None:
    from rollick.observe.metric_table import METRICS, RENAMED, is_documented

    assert all(meaning.endswith(".") for _, meaning in METRICS.values())
    assert all(is_documented(name) for name in RENAMED.values())
    assert not any(is_documented(name) for name in RENAMED if not name.startswith("train/"))
