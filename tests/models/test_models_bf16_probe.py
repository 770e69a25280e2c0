"""A child process tests whether bfloat16 works, once per boot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollick.models.bf16_probe import LIMITED_ISA, cache_folder, probe_bf16, safe_environment

CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLICK_CACHE", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)


def test_a_probe_that_dies_of_an_illegal_instruction_is_a_no_and_is_cached():
    assert probe_bf16(trial=CRASH) is False
    assert probe_bf16(trial="pass") is False


def test_a_probe_that_succeeds_is_a_yes_and_is_cached():
    assert probe_bf16(trial="pass") is True
    assert probe_bf16(trial=CRASH) is True


def test_where_bfloat16_crashes_workers_get_a_setting_with_a_log_message(
    caplog: pytest.LogCaptureFixture,
):
    probe_bf16(trial=CRASH)
    assert safe_environment() == LIMITED_ISA
    assert "bfloat16 products crash on this CPU" in caplog.text


def test_where_bfloat16_works_nothing_is_set(caplog: pytest.LogCaptureFixture):
    probe_bf16(trial="pass")
    assert safe_environment() == {}
    assert not caplog.text


def test_a_setting_of_the_users_own_is_kept(monkeypatch: pytest.MonkeyPatch):
    probe_bf16(trial=CRASH)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert safe_environment() == {}


def test_the_cache_folder_follows_the_environment(tmp_path: Path):
    assert cache_folder() == tmp_path


def test_bfloat16_works_here_as_the_probe_reports():
    code = (
        "import sys, os\n"
        "from rollick.models.bf16_probe import safe_environment\n"
        "os.environ.update(safe_environment())\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "a = torch.ones(256, 256, dtype=torch.bfloat16)\n"
        "assert (a @ a)[0, 0].item() == 256\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
