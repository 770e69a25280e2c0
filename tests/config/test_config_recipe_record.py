"""The record of a recipe in a run's folder: which names it converts, and which files it copies."""

from pathlib import Path

import pytest

from rollick.config.load import recipe_from_dict
from rollick.config.recipe_record import record_recipe, recorded_name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("base/agent.py", "base/rewards.py", "elsewhere/rewards.py", "base/tools/x.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import tools.x, json\ndef score(completion, kind=None): return 0.0\n")
    (tmp_path / "base/json.py").write_text("# Hidden by the standard library.\n")
    (tmp_path / "base/rows.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_code_gets_a_name_in_the_run_and_data_an_absolute_one(folder: Path) -> None:
    rewards = ["rewards.py:score", f"{folder}/elsewhere/rewards.py:score"]
    options = {"name": "../elsewhere/rewards.py:score", "options": {"kind": "rewards.py:score"}}
    agent = {"source": "rows.jsonl", "agent": "agent.py", "rewards": [*rewards, "exact_match"]}
    recipe = {
        "pipeline": "agentic",
        "model": {"path": "base"},
        "data": {
            "domains": {"a": agent, "b": {**agent, "source": "hub:rows"}},
            "validation": {"c": {"source": "rows.jsonl", "rewards": [options]}},
        },
    }
    loaded = recipe_from_dict(recipe, base_dir=folder / "base")
    record = record_recipe(loaded, folder / "run")
    domains, validation = record.values["data"]["domains"], record.values["data"]["validation"]
    absolute = f"code/root{folder}/elsewhere/rewards.py"
    assert [reward["name"] for reward in domains["a"]["rewards"]] == [
        "code/rewards.py:score",
        f"{absolute}:score",
        "exact_match",
    ]
    assert (domains["a"]["agent"], domains["b"]["source"]) == ("code/agent.py", "hub:rows")
    assert domains["a"]["source"] == str(folder / "base/rows.jsonl")
    assert record.values["model"]["path"] == str(folder / "base")
    [reward] = validation["c"]["rewards"]
    assert reward["name"] == "code/__/elsewhere/rewards.py:score"
    assert reward["options"] == {"kind": "rewards.py:score"}
    assert set(record.files) == {
        "code/agent.py",
        "code/rewards.py",
        "code/tools/x.py",
        "code/__/elsewhere/rewards.py",
        absolute,
    }
    record.write(folder / "run")
    for name in ("rewards.py:score", "../elsewhere/rewards.py:score"):
        assert recorded_name(name, folder / "run") != name
    for name in ("frozen_lake", "missing.py:Env", "package.module:Env"):
        assert recorded_name(name, folder / "run") == name
