"""Invalid recipes and the exact error messages for them.

The cases are in bad_recipes.txt, in the format of the terminal output.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

from rollick.config.load import load_recipe
from rollick.config.names import NAMES
from rollick.config.schema import RlvrRecipe
from rollick.errors import ConfigError

TABLE = Path(__file__).parent / "bad_recipes.txt"
MODEL = "model: {path: tiny}\n"
DATA = "data: {domains: {sums: {source: sums.jsonl, rewards: [exact_match]}}}\n"
USER_MODULE = """\
def loss(inputs, options): ...
def advantage(groups, options): ...
def reward(completion, answer, tolerance=0): ...
def by_position(completion, /): ...
class Thing: ...
"""


MODELS = {
    "dense": {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96},
    "mixture": {"num_attention_heads": 8, "num_experts": 6},
}


def read_cases() -> list[tuple[str, list[str]]]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    blocks = [list(block) for has_text, block in groupby(lines, key=bool) if has_text]
    return [
        (
            "\n".join(line[2:] for line in block if line.startswith("| ")) + "\n",
            [_insert_names(line) for line in block if not line.startswith("| ")],
        )
        for block in blocks
    ]


def _insert_names(line: str) -> str:
    for kind, table in NAMES.items():
        line = line.replace(f"<{kind}>", ", ".join(table))
    return line.replace("<recipe>", ", ".join(RlvrRecipe.model_fields))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text(USER_MODULE)
    (tmp_path / "broken.py").write_text("def loss(:\n")
    for name, sizes in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("text", "messages"), read_cases(), ids=lambda part: str(part)[:60])
def test_a_wrong_recipe_gets_these_messages(text: str, messages: list[str], folder: Path) -> None:
    model = "" if "model:" in text else MODEL
    data = "" if "data:" in text else DATA
    is_section = not text.startswith("-")
    (folder / "recipe.yaml").write_text(text + model + data if is_section else text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("recipe.yaml"))
    count = f"{len(messages)} problem{'s' if len(messages) > 1 else ''}"
    expected = [f"recipe.yaml has {count}:", *(f"  {message}" for message in messages)]
    assert str(caught.value).splitlines() == expected


def test_the_table_has_all_its_cases() -> None:
    assert len(read_cases()) >= 110


def test_the_text_around_the_cases_is_right(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(MODEL + DATA)
    assert load_recipe(Path("recipe.yaml")).recipe.model.path == "tiny"
