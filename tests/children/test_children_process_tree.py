"""The description of a process's end: its signal, and the kernel's count of memory kills."""

from pathlib import Path

import pytest

from rollick.children import process_tree
from rollick.children.process_tree import count_memory_kills, describe_signal


@pytest.mark.parametrize(
    ("number", "count", "text"),
    [
        (9, 7, "killed by SIGKILL"),
        (9, 8, "killed by SIGKILL, probably out of memory"),
        (11, 8, "killed by SIGSEGV"),
        (40, 8, "killed by signal 40"),
    ],
)
def test_only_a_kill_while_the_kernel_killed_for_memory_is_out_of_memory(
    number: int, count: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_tree, "VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text(f"pgfault 12\noom_kill {count}\n")
    assert describe_signal(number, memory_kills_before=7).partition(":")[0] == text


@pytest.mark.parametrize("content", [None, "", "oom_kill many\n"])
def test_a_kernel_that_does_not_count_is_no_error(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_tree, "VMSTAT", tmp_path / "vmstat")
    if content is not None:
        (tmp_path / "vmstat").write_text(content)
    assert count_memory_kills() == 0
