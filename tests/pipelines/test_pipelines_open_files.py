"""The limit of open files: raised when a run starts, and named when it is reached."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rollick.cluster.machine import MAX_OPEN_FILES
from rollick.config.load import LoadedRecipe
from rollick.errors import OpenFilesExhausted
from rollick.pipelines import run as run_module
from rollick.pipelines.run import run_recipe

LIMITS = """
import resource
from rollick.cluster.machine import raise_open_files_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
raise_open_files_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    child = subprocess.run(
        [sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True
    )
    assert child.stdout == "(300, 300)\n"


@pytest.mark.parametrize(("code", "limit"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "sysctl")])
def test_a_run_without_free_file_descriptors_names_the_limit_and_can_be_retried(
    toy: Callable[..., LoadedRecipe], monkeypatch: pytest.MonkeyPatch, code: int, limit: str
) -> None:
    async def exhaust(*args: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(run_module, "resolve", lambda *names: exhaust)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with pytest.raises(OpenFilesExhausted, match=limit) as raised:
            run_recipe(toy())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], MAX_OPEN_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert raised.value.exit_code == 69
