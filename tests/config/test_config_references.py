"""References such as `file.py:name` are checked without an import, except by a deep check."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollick.config.load import check_recipe, load_recipe
from rollick.config.references import read_reference
from rollick.errors import ConfigError

USER_MODULE = """\
import functools
from math import *
raise SystemExit("this file must not be run")

def plain(completion, answer): ...
async def waits(completion, *, tolerance=0, **rest): ...
@functools.cache
def decorated(completion): ...
def by_position(a, b=1, /, c=2): ...
class Thing: ...
assigned = functools.partial(plain, answer="2")
if True:
    def inside_if(): ...
try:
    from os import path as imported
except ImportError:
    def imported(): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USER_MODULE.replace("from math import *\n", ""))
    (tmp_path / "star.py").write_text("from math import *\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("plain", "function"),
        ("waits", "function"),
        ("decorated", "function"),
        ("inside_if", "function"),
        ("Thing", "class"),
        ("assigned", "other"),
        ("functools", "other"),
    ],
)
def test_a_name_is_found_without_running_the_file(folder: Path, name: str, kind: str) -> None:
    assert read_reference(f"mine.py:{name}", folder).kind == kind


def test_a_star_import_may_hold_any_name(folder: Path) -> None:
    assert read_reference("star.py:sin", folder).kind == "other"


def test_parameters_are_read_from_the_text(folder: Path) -> None:
    waits = read_reference("mine.py:waits", folder).parameters
    assert waits is not None
    assert (waits.names, waits.has_kwargs) == (("completion", "tolerance"), True)
    by_position = read_reference("mine.py:by_position", folder).parameters
    assert by_position is not None
    assert (by_position.required_positional_only, by_position.names) == (("a",), ("c",))
    assert read_reference("mine.py:decorated", folder).parameters is None


def test_a_module_of_a_package_is_found_without_importing_it(folder: Path) -> None:
    assert read_reference("rollick.config.devices:parse_devices", folder).kind == "function"
    assert read_reference("rollick.errors:ConfigError", folder).kind == "class"
    assert read_reference("math:sin", folder).kind == "other"


def test_a_missing_name_gets_a_message_with_the_existing_ones(folder: Path) -> None:
    (folder / "small.py").write_text("def one(): ...\ndef _two(): ...\n")
    with pytest.raises(ConfigError) as caught:
        read_reference("small.py:absent", folder)
    assert caught.value.message == "small.py does not define 'absent'"
    assert caught.value.fix == "it defines: one"


RECIPE = """\
model: {path: tiny}
data: {domains: {sums: {source: sums.jsonl, rewards: ['mine.py:reward']}}}
"""


@pytest.mark.slow
def test_only_a_deep_check_imports(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "mine.py").write_text("import no_such_module\ndef reward(completion): ...\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    loaded = load_recipe(tmp_path / "recipe.yaml")
    assert check_recipe(loaded) == []
    actual = [str(problem) for problem in check_recipe(loaded, deep=True)]
    expected = (
        f"{tmp_path}/recipe.yaml:2:55: data.domains.sums.rewards.0: importing mine.py:reward "
        "failed: ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert expected in actual
