"""Model text on a terminal: control characters are shown as symbols and have no effect."""

import io
import subprocess
import sys
import time

from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollick.observe.tables import reward_table
from rollick.observe.terminal import SafeConsole, escape_controls

ATTACK = "a\x1b[2J\x1b]0;owned\x07b\x9b31mc\u202ed\re"


def test_control_characters_become_symbols_and_other_text_stays():
    output = escape_controls(ATTACK)
    assert output == "a␛[2J␛]0;owned␇b\ufffd31mc\ufffdd␍e"
    assert escape_controls("line\n\tünïcode 漢字 🎲") == "line\n\tünïcode 漢字 🎲"


def test_a_console_writes_its_own_colours_and_escapes_sequences_of_a_model():
    stream = io.StringIO()
    console = SafeConsole(file=stream, force_terminal=True, color_system="standard", width=200)
    table = Table("name")
    table.add_row(Text(ATTACK, style="red"))
    console.print(table, ATTACK)
    assert "\x1b[31m" in stream.getvalue()
    for sequence in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\u202e", "\r"):
        assert sequence not in stream.getvalue()


def test_the_live_view_still_moves_the_cursor():
    stream = io.StringIO()
    console = SafeConsole(file=stream, force_terminal=True, width=80)
    with Live(Text(ATTACK), console=console, auto_refresh=False) as live:
        live.update(Text("two\nlines"), refresh=True)
        live.update(Text("three"), refresh=True)
    assert "\x1b[1A" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()


def test_the_table_of_rewards_shows_completions_and_details_without_controls():
    entry = {"completion": ATTACK, "value": 1.0, "parts": {}, "metrics": {}, "seconds": 0.1}
    stream = io.StringIO()
    console = SafeConsole(file=stream, width=300)
    console.print(reward_table([entry | {"status": "ok", "isolation": "", "detail": ATTACK}]))
    assert stream.getvalue().count("␛[2J") == 2
    assert "\x1b" not in stream.getvalue()


def test_a_log_message_on_a_terminal_has_no_control_characters():
    code = """
import logging, sys
from rollick.cli.runs import log_to_stderr
log_to_stderr()
try:
    raise ValueError(sys.argv[1])
except ValueError as error:
    logging.getLogger("rollick.rewards").exception("a reward failed: %s", error)
"""
    command = [sys.executable, "-c", code, ATTACK]
    output = subprocess.run(command, capture_output=True, check=True).stderr.decode()
    assert output.count("␛[2J") == 2
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(output)


def test_long_texts_are_cleaned_quickly():
    started_at = time.perf_counter()
    escape_controls("\x1b" * 1_000_000)
    assert time.perf_counter() - started_at < 5
