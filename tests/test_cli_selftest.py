"""`rollick selftest`: its checks on two CPU workers, and how it reports failed and skipped ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollick.cli import app
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig
from rollick.errors import ConfigError
from rollick.observe.tables import check_row
from rollick.testing.selftest import Check, choose_devices


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["selftest", *arguments])
    return result.exit_code, result.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_cpu_workers_pass_every_check_but_those_of_a_gpu(tmp_path: Path) -> None:
    code, text = run("--devices", "cpu:0-1", "--json", "--out", str(tmp_path / "selftest.json"))
    report = json.loads(text.splitlines()[-1])
    assert code == 0, report
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert status.pop("offload") == "skip"
    assert set(status) == {
        *("devices", "all-reduce", "weights", "learning"),
        *("engines", "sharding", "shards", "recovery"),
    }
    assert set(status.values()) == {"pass"}
    assert (report["passed"], report["failed"], report["skipped"]) == (8, 0, 1)
    figures = {check["name"]: check["figures"] for check in report["checks"]}
    assert figures["all-reduce"]["gb_per_s"] > 0
    assert figures["weights"].keys() == {"host_gb_per_s", "broadcast_gb_per_s"}
    assert figures["learning"]["score"] > 0.6
    assert figures["sharding"]["layouts"] == 3
    assert 0 < figures["recovery"]["recovery_s"] < 60
    assert json.loads((tmp_path / "selftest.json").read_text()) == report


def test_a_cluster_that_does_not_answer_is_a_failed_check_and_exit_code_1() -> None:
    code, text = run("--devices", "cpu:0-1", "--address", "127.0.0.1:9", "--json")
    report = json.loads(text.splitlines()[-1])
    assert code == 1
    [check] = report["checks"]
    assert check["status"] == "fail"
    assert "no Ray cluster answers at 127.0.0.1:9" in check["detail"]
    assert check["fix"]


def test_devices_of_two_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="CPU workers and GPUs"):
        choose_devices(None, "0,cpu:1", None)


def test_a_recipe_gives_its_devices_and_its_cluster(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    recipe.write_text(
        "model: {path: tiny}\n"
        "data: {domains: {a: {source: rows.jsonl, rewards: [exact_match]}}}\n"
        "devices: {policy: 'cpu:1', generators: 'cpu:1-2'}\n"
        "cluster: {place_timeout_s: 7}\n"
    )
    devices, cluster = choose_devices(recipe, None, "auto")
    assert list(devices) == list(parse_devices("cpu:1-2"))
    assert cluster == ClusterConfig(place_timeout_s=7, address="auto")


def test_a_check_that_did_not_pass_shows_what_to_do() -> None:
    passed = check_row(Check("devices", "pass", "2 on 1 machine", fix="", seconds=1.25))
    assert passed.plain == "devices     pass    1.2 s  2 on 1 machine"
    failed = check_row(Check("weights", "fail", "a byte differs", fix="publish again"))
    assert failed.plain.splitlines()[1].strip() == "publish again"
