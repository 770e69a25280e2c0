"""Repeated warnings of a run: the first are shown, the others counted."""

import logging

import pytest

from rollick.observe.log_folding import KINDS_PER_LINE, fold_repeats

LOG = logging.getLogger("rollick")


def test_warnings_that_differ_in_numbers_alone_are_folded_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fold_repeats():
        for step in range(1, 89):
            LOG.warning("version %d was published in %.1f s", step, step / 7)
    lines = caplog.messages
    assert lines[:2] == ["version 1 was published in 0.1 s", "version 2 was published in 0.3 s"]
    assert lines[2] == "version 3 was published in 0.4 s (further messages like this are counted)"
    assert lines[3] == "version 10 was published in 1.4 s (10 messages like this so far)"
    assert lines[4:] == ["84 messages were not shown, the last: version 88 was published in 12.6 s"]


def test_a_line_that_names_another_thing_each_time_is_folded_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = [chr(97 + n % 26) + chr(97 + n // 26) for n in range(50)]
    with fold_repeats():
        for name in names:
            LOG.error("row of prompt %s is unusable\nmore", name)
    assert len(caplog.messages) == KINDS_PER_LINE + 1
    last = "40 messages were not shown, the last: row of prompt xb is unusable"
    assert caplog.messages[-1] == last


def test_different_warnings_and_step_lines_are_all_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="rollick")
    with fold_repeats():
        for step in range(20):
            LOG.info("step %d", step)
        for rule in ("length", "identical", "judge", "held_out"):
            LOG.warning("alarm %s", rule)
    assert len(caplog.messages) == 24


def test_folding_ends_with_the_block(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with fold_repeats():
            LOG.warning("slow")
    for _ in range(5):
        LOG.warning("slow")
    assert caplog.messages == ["slow"] * 7
