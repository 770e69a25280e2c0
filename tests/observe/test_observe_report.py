"""The displays of a run: the live view, the curves and the report page."""

import logging
import re
import struct
import zlib
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rollick.observe.goodput import Goodput
from rollick.observe.goodput_report import Reliability
from rollick.observe.live_view import BARS, LiveView, Stopwatch, sparkline
from rollick.observe.report import SampleComparison, draw_curves, summarise_curves, write_report
from rollick.observe.tables import evaluation_table

ROWS = [
    {"step": 1, "score/mean": 0.1, "score/domain/sums": 0.1, "time/train": 0.2, "time/step": 0.5},
    {"step": 2, "score/mean": 0.4, "score/domain/sums": 0.4, "time/train": 0.1, "time/step": 0.4},
    {"step": 3, "score/mean": 0.9, "eval/pass@1": 0.8},
]
ALLOWED = {*"html head meta title style body h1 h2 table tr td th pre img".split()}  # noqa: SIM905
EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>"


class ParsedPage(HTMLParser):
    """The tags of a page with their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def read_png_size(data: bytes) -> tuple[int, int]:
    """Width and height, after checking the signature and the checksum of every chunk."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    kinds, offset = [], 8
    while offset < len(data):
        (length,) = struct.unpack(">I", data[offset : offset + 4])
        chunk = data[offset + 4 : offset + 8 + length]
        assert (
            struct.pack(">I", zlib.crc32(chunk)) == data[offset + 8 + length : offset + 12 + length]
        )
        kinds.append(chunk[:4])
        offset += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    return struct.unpack(">II", data[16:24])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> ParsedPage:
    comparison = SampleComparison(EVIL, EVIL, EVIL, EVIL, before_ok=False, after_ok=True)
    path = write_report(
        tmp_path_factory.mktemp("report") / "report.html",
        [*ROWS, {"step": 4, f"eval/{EVIL}/pass@1": 0.5, "eval/other/pass@1": 0.25}],
        title=f"run {EVIL}",
        facts={"model": EVIL},
        advice={"flat_score": EVIL},
        comparisons=[comparison],
        reliability=Reliability(Goodput()),
    )
    return ParsedPage(path.read_text("utf-8"))


def test_the_page_shows_what_a_model_wrote_as_text_and_nothing_else(page: ParsedPage) -> None:
    assert {tag for tag, _ in page.tags} <= ALLOWED
    assert sum(tag == "img" for tag, _ in page.tags) == 1
    assert page.text.count(EVIL) == 8  # Title twice, a fact, advice, four in the comparison.
    assert not [name for _, attributes in page.tags for name in attributes if name[:2] == "on"]


def test_the_page_forbids_scripts_and_loads_nothing(page: ParsedPage) -> None:
    policies = [a["content"] for t, a in page.tags if a.get("http-equiv")]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    sources = [value for _, a in page.tags for name, value in a.items() if name in ("src", "href")]
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)


def test_the_curves_are_a_real_png(tmp_path: Path) -> None:
    path = draw_curves(ROWS, tmp_path / "curves.png", title="toy")
    assert read_png_size(path.read_bytes()) == (1100, 440)


def test_a_run_without_any_step_has_a_picture_too(tmp_path: Path) -> None:
    path = draw_curves([], tmp_path / "curves.png", title="empty")
    assert read_png_size(path.read_bytes()) == (1100, 440)


def test_the_results_are_first_best_and_last_with_the_held_out_first() -> None:
    rows = [*ROWS, {"step": 4, "score/mean": 0.6, "eval/pass@1": 0.7, "eval/sums/pass@1": 0.7}]
    # The curves of a single domain would repeat those of all domains.
    assert summarise_curves(rows) == {
        "held-out: all": {"first": 0.8, "best": 0.8, "last": 0.7},
        "training: all": {"first": 0.1, "best": 0.9, "last": 0.6},
    }
    two_domains = [*rows, {"step": 5, "score/domain/words": 0.2}]
    assert list(summarise_curves(two_domains))[2:] == [
        "training: all",
        "training: sums",
        "training: words",
    ]
    supervised = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 0.5}]
    assert summarise_curves(supervised) == {"loss": {"first": 2.0, "best": 0.5, "last": 0.5}}


@pytest.mark.parametrize("title", [r"$\frac$", "a_b^{c"])
def test_a_title_is_never_read_as_a_formula(tmp_path: Path, title: str) -> None:
    rows = [{"step": 1, f"score/domain/{title}": 0.5, "score/domain/b": 0.5}]
    assert draw_curves(rows, tmp_path / "curves.png", title=title).is_file()


def test_a_sparkline_runs_from_the_lowest_to_the_highest_block() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BARS
    assert sparkline([5, -5]) == BARS[-1] + BARS[0]


def test_a_sparkline_shows_the_newest_values() -> None:
    assert sparkline([9, 0, 1], width=2) == BARS[0] + BARS[-1]


@pytest.mark.parametrize(("values", "line"), [([], ""), ([3.0], BARS[0]), ([2, 2], BARS[0] * 2)])
def test_a_sparkline_of_nothing_or_of_equals_is_flat(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_a_sparkline_skips_numbers_that_are_not_finite() -> None:
    assert sparkline([0.0, float("nan"), 1.0, float("inf")]) == BARS[0] + BARS[-1]


def test_off_a_terminal_each_step_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rollick")
    output = StringIO()
    console = Console(file=output)
    with LiveView("toy", 2, mode="auto", console=console, clock=lambda: 0.0) as view:
        view.set_role_activity("policy", "train")
        view.finish_step(1, {"score/mean": 0.25, "train/loss": -0.5, "time/step": 2.0})
        view.finish_step(2, {"score/mean": 0.5})
    assert [record.getMessage() for record in caplog.records] == [
        "step 1/2  score 0.25  loss -0.5  s 2",
        "step 2/2  score 0.5",
    ]
    assert output.getvalue() == ""


def test_on_a_terminal_each_role_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rollick")
    output = StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    with LiveView("toy", 2, mode="auto", console=console) as view:
        view.set_role_activity("policy", "train")
        view.set_role_activity("generators", "-")
        view.begin_phase("generate")
        view.count_samples("generate", 3, 8)
        view.finish_step(1, {"score/mean": 0.25})
        view.live.refresh()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert re.search(r"policy +train", plain)
    assert re.search(r"generators +-", plain)
    assert "1/2" in plain
    assert "score 0.25" in plain
    assert re.search(r"samples +3/8", plain)
    assert re.search(r"time left +0 s", plain)
    assert caplog.records == []


def test_off_means_off_on_a_terminal_too() -> None:
    output = StringIO()
    with LiveView("toy", 2, mode="off", console=Console(file=output, force_terminal=True)) as view:
        view.finish_step(1, {})
    assert output.getvalue() == ""


def test_a_stopwatch_sums_the_parts_of_a_phase_and_starts_over() -> None:
    watch = Stopwatch()
    watch.add("train", 1.0)
    watch.add("train", 0.5)
    watch.add("publish", 0.25)
    times = watch.finish()
    assert (times["time/train"], times["time/publish"]) == (1.5, 0.25)
    assert list(watch.finish()) == ["time/step"]


def test_the_table_has_a_row_for_each_domain_and_leaves_holes_empty() -> None:
    console = Console(file=StringIO(), width=80)
    console.print(evaluation_table({"sums": {"pass@1": 0.5}, "all": {"pass@1": 0.25, "low": 0.1}}))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    cells = [re.findall(r"[\w.@]+", line) for line in output.splitlines()]
    assert ["domain", "pass@1", "low"] in cells
    assert ["sums", "0.5"] in cells
    assert ["all", "0.25", "0.1"] in cells


def test_on_a_narrow_terminal_no_figure_is_cut_short() -> None:
    console = Console(file=StringIO(), width=40)
    row = {f"figure {n}": 0.1234 for n in range(6)}
    console.print(evaluation_table({"sums": row}))
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("title", [r"$\frac$", "$", r"costs $5 or $\undefined{6}$", "a_{b}^{"])
def test_a_title_or_a_domain_with_dollar_signs_is_drawn_as_text(tmp_path: Path, title: str):
    rows = [{"step": n, "score/mean": 0.1 * n, f"score/domain/{title}": 0.2 * n} for n in (1, 2)]
    picture = draw_curves(rows, tmp_path / "curves.png", title=title)
    assert picture.stat().st_size > 1000
