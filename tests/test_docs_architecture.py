"""The map in docs/architecture.md matches the code."""

from __future__ import annotations

import re
from pathlib import Path

from test_layers import LEVEL_OF

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")


def test_every_file_of_the_reading_order_exists() -> None:
    files = re.findall(r"^\| \d+ \| `(rollick/[^`]+)` \|", PAGE, re.MULTILINE)
    assert 10 <= len(files) <= 20
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_table_of_layers_has_every_package_on_its_level() -> None:
    rows = re.findall(r"^\| (\d+) \| (`(?!rollick/).*?) \| ", PAGE, re.MULTILINE)
    levels = {
        name.removesuffix(".py").rstrip("/"): int(level)
        for level, names in rows
        for name in re.findall(r"`([a-z_./]+)`", names)
    }
    assert levels == LEVEL_OF


def test_every_relative_link_of_the_docs_leads_to_a_file() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert broken == []
