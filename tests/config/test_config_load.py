"""Loading: overrides, interpolation, extends, error locations, YAML scalars, round trip."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollick.config.load import LoadedRecipe, dump_recipe, load_recipe, recipe_from_dict
from rollick.config.schema import parse_recipe
from rollick.config.schema.losses import DppoTvLoss, PpoLoss
from rollick.config.schema.section import CustomPart
from rollick.errors import ConfigError

MINIMAL_RECIPE = """\
model: {path: tiny}
data:
  domains:
    sums:
      source: sums.jsonl
      rewards: [exact_match]
"""


def make_recipe(**sections: Any) -> dict[str, Any]:
    domain = {"source": "object:rows", "rewards": ["exact_match"]}
    return {"model": {"path": "tiny"}, "data": {"domains": {"sums": domain}}, **sections}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def load(folder: Path, text: str, *overrides: str) -> LoadedRecipe:
    (folder / "recipe.yaml").write_text(text + ("" if "model:" in text else MINIMAL_RECIPE))
    return load_recipe(folder / "recipe.yaml", overrides)


def find_problems(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    lines = str(caught.value).replace(f"{folder}/", "").splitlines()
    return [line.strip() for line in lines[1:]]


def test_a_recipe_knows_its_folder_and_its_full_text(folder: Path) -> None:
    loaded = load(folder, "run: {steps: 7}\n")
    assert loaded.base_dir == folder
    assert loaded.recipe.run.steps == 7
    assert "group_size: 8" in dump_recipe(loaded.recipe)


def test_a_relative_path_gives_an_absolute_base(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder, "")
    monkeypatch.chdir(folder)
    assert load_recipe(Path("recipe.yaml")).base_dir == folder


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("run.steps=5", "run.steps", 5),
        ("train.optimizer.lr=1e-4", "train.optimizer.lr", 1e-4),
        ("run.deterministic=true", "run.deterministic", True),
        ("run.name=a=b", "run.name", "a=b"),
        ("run.name='3'", "run.name", "3"),
        ("sampling.stop=[END, '\\n']", "sampling.stop", ("END", "\\n")),
        ("devices.policy=0", "devices.policy", "0"),
        ("model.tokenizer=", "model.tokenizer", None),
        ("data.domains.sums.rewards.0.weight=2", "data.domains.sums.rewards", None),
        ("algorithm.loss=ppo", "algorithm.loss", PpoLoss()),
        ("algorithm.loss.delta=0.1", "algorithm.loss", DppoTvLoss(delta=0.1)),
        ("algorithm.loss={name: ppo, clip_low: 0.1}", "algorithm.loss", PpoLoss(clip_low=0.1)),
        ("run={steps: 3}", "run.steps", 3),
    ],
)
def test_an_override_sets_a_value(folder: Path, override: str, path: str, value: object) -> None:
    actual: Any = load(folder, "", override).recipe
    for part in path.split("."):
        actual = actual[part] if isinstance(actual, dict) else getattr(actual, part)
    if path.endswith("rewards"):
        assert (actual[0].name, actual[0].weight) == ("exact_match", 2)
    else:
        assert actual == value
        assert type(actual) is type(value)


def test_a_later_override_wins_over_an_earlier_one_and_the_file(folder: Path) -> None:
    loaded = load(folder, "run: {steps: 1}\n", "run.steps=2", "run.steps=3")
    assert loaded.recipe.run.steps == 3


def test_an_override_replaces_a_section_and_leaves_its_neighbours(folder: Path) -> None:
    text = "run: {steps: 3, seed: 4}\nrollout: {group_size: 2}\n"
    recipe = load(folder, text, "run={seed: 5}").recipe
    assert (recipe.run.steps, recipe.run.seed, recipe.rollout.group_size) == (100, 5, 2)


def test_options_of_a_named_part_can_be_overridden(folder: Path) -> None:
    recipe = load(folder, "algorithm: {loss: ppo}\n", "algorithm.loss.clip_low=0.1").recipe
    assert recipe.algorithm.loss == PpoLoss(clip_low=0.1)


def test_naming_another_part_drops_the_options_of_the_one_before(folder: Path) -> None:
    text = "algorithm: {loss: {name: dppo_tv, delta: 0.1}}\n"
    for override in ("algorithm.loss=ppo", "algorithm.loss.name=ppo"):
        assert load(folder, text, override).recipe.algorithm.loss == PpoLoss()
    same = load(folder, text, "algorithm.loss.name=dppo_tv").recipe
    assert same.algorithm.loss == DppoTvLoss(delta=0.1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.stepz=3", "run.stepz: unknown key 'stepz'; did you mean 'steps'?"),
        ("run.steps=many", "run.steps: must be a whole number, but is 'many'"),
        ("run", "is not of the form a.b=c"),
        ("=3", "is not of the form a.b=c"),
        ("run..steps=3", "is not of the form a.b=c"),
        ("+run.steps=3", "is not of the form a.b=c"),
        ("run.name=[", "the value '[' is not valid YAML"),
        ("model.path.x=3", "model.path: is 'tiny', so it has no key 'x'"),
        (
            "data.domains.sums.rewards.1.weight=2",
            "data.domains.sums.rewards: has no element '1'; it has 1, counted from 0",
        ),
        (
            "data.domains.sums.rewards.first=2",
            "data.domains.sums.rewards: has no element 'first'; it has 1, counted from 0",
        ),
        (
            "rollout.group_size=1",
            "rollout.group_size: advantage dr_grpo compares the samples of a group, and a group "
            "of 1 has nothing to compare; use 2 or more",
        ),
    ],
)
def test_a_wrong_override_is_named_as_the_location(
    folder: Path, override: str, message: str
) -> None:
    assert find_problems(folder, "", override) == [f"override {override}: {message}"]


def test_interpolation_takes_values_from_the_recipe_and_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLICK_TEST_STEPS", "12")
    text = "run: {name: 'sums-${rollout.group_size}', steps: '${oc.env:ROLLICK_TEST_STEPS}'}\n"
    run = load(folder, text + "rollout: {group_size: 4}\n", "rollout.group_size=6").recipe.run
    assert (run.name, run.steps) == ("sums-6", 12)


def test_interpolation_takes_whole_sections(folder: Path) -> None:
    text = MINIMAL_RECIPE + "  validation: ${data.domains}\n"
    data = load(folder, text).recipe.data
    assert data.validation["sums"].rewards == data.domains["sums"].rewards != ()


def test_interpolation_keeps_the_options_beside_a_name(folder: Path) -> None:
    text = "algorithm: {loss: {name: '${run.name}', clip_low: 0.1}}\nrun: {name: ppo}\n"
    assert load(folder, text).recipe.algorithm.loss == PpoLoss(clip_low=0.1)


def test_a_dollar_brace_can_be_escaped_and_survives_the_dump(folder: Path) -> None:
    loaded = load(folder, "run: {name: 'a\\${b}'}\n")
    assert loaded.recipe.run.name == "a${b}"
    assert load(folder, dump_recipe(loaded.recipe)).recipe == loaded.recipe


def test_every_problem_comes_at_once_in_the_order_of_the_file(folder: Path) -> None:
    text = """\
rollout:
  group_sise: 4
  max_staleness: -1
evaluate: {samples: 4}
data:
  domains:
    sums: {source: nowhere.jsonl, rewards: [exact_mach]}
    more: {source: sums.jsonl, rewards: [exact_match], shair: 2}
model: {path: tiny}
"""
    actual = find_problems(folder, text, "run.steps=0")
    assert [line.split(": ")[1] for line in actual] == [
        "rollout.group_sise",
        "rollout.max_staleness",
        "evaluate.samples",
        "data.domains.sums.source",
        "data.domains.sums.rewards.0",
        "data.domains.more.shair",
        "run.steps",
    ]
    assert actual[0].startswith("recipe.yaml:2:3: ")
    assert actual[-1].startswith("override run.steps=0: ")


def test_one_mistake_is_one_problem(folder: Path) -> None:
    """A misspelt key is not reported again as a missing key."""
    text = "model: {path: tiny}\ndata: {domains: {sums: {source: sums.jsonl, rewrads: [x]}}}\n"
    assert len(find_problems(folder, text)) == 1


def test_extends_merges_a_recipe_into_another(folder: Path) -> None:
    (folder / "base.yaml").write_text(
        MINIMAL_RECIPE + "run: {steps: 3, seed: 4}\nsampling: {stop: [a]}\n"
    )
    (folder / "recipe.yaml").write_text(
        "extends: base.yaml\nrun: {steps: 5}\nsampling: {stop: [b, c]}\n"
    )
    recipe = load_recipe(folder / "recipe.yaml").recipe
    assert (recipe.run.steps, recipe.run.seed, recipe.sampling.stop) == (5, 4, ("b", "c"))


def test_extends_works_through_several_files_and_folders(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "a.yaml").write_text(MINIMAL_RECIPE + "run: {steps: 1, seed: 1, name: a}\n")
    (folder / "deep" / "b.yaml").write_text("extends: a.yaml\nrun: {steps: 2, seed: 2}\n")
    (folder / "recipe.yaml").write_text("extends: deep/b.yaml\nrun: {steps: 3}\n")
    run = load_recipe(folder / "recipe.yaml").recipe.run
    assert (run.name, run.seed, run.steps) == ("a", 2, 3)


def test_extends_replaces_a_part_with_another_name(folder: Path) -> None:
    (folder / "base.yaml").write_text(
        MINIMAL_RECIPE + "algorithm: {loss: {name: dppo_tv, delta: 0.1}}\n"
    )
    for value, expected in (
        ("{loss: ppo}", PpoLoss()),
        ("{loss: {name: ppo, clip_low: 0.1}}", PpoLoss(clip_low=0.1)),
        ("{loss: {max_ratio: 5}}", DppoTvLoss(delta=0.1, max_ratio=5)),
    ):
        (folder / "recipe.yaml").write_text(f"extends: base.yaml\nalgorithm: {value}\n")
        assert load_recipe(folder / "recipe.yaml").recipe.algorithm.loss == expected


def test_a_problem_names_the_file_that_has_the_value(folder: Path) -> None:
    (folder / "base.yaml").write_text(MINIMAL_RECIPE + "run: {stepz: 3}\n")
    assert find_problems(folder, "extends: base.yaml\nrun: {sead: 4}\nmodel: {}\n") == [
        "base.yaml:7:7: run.stepz: unknown key 'stepz'; did you mean 'steps'?",
        "recipe.yaml:2:7: run.sead: unknown key 'sead'; did you mean 'seed'?",
    ]


def test_a_broken_base_causes_no_further_problems(folder: Path) -> None:
    (folder / "base.yaml").write_text("run: [\n")
    actual = find_problems(folder, "extends: base.yaml\nmodel: {pth: x}\n")
    assert [line.split(": ")[0] for line in actual] == [
        "base.yaml:2:1",
        "recipe.yaml:1:10",
        "recipe.yaml:2:9",
    ]


def test_yaml_is_read_as_people_expect(folder: Path) -> None:
    text = """\
run: {name: 12:30, steps: 0x10}
observe: {live: off}
train: {optimizer: {lr: 1e-4, eps: .5e-8}}
sampling: {stop: [yes, 'null', ~x]}
"""
    recipe = load(folder, text).recipe
    assert (recipe.run.name, recipe.run.steps, recipe.observe.live) == ("12:30", 16, "off")
    assert (recipe.train.optimizer.lr, recipe.train.optimizer.eps) == (1e-4, 5e-9)
    assert recipe.sampling.stop == ("yes", "null", "~x")


def test_anchors_and_merge_keys_work(folder: Path) -> None:
    text = """\
model: {path: tiny}
data:
  domains:
    one: &one {source: sums.jsonl, rewards: [exact_match], limit: 3}
    two: {<<: *one, limit: 4}
"""
    domains = load(folder, text).recipe.data.domains
    assert (domains["one"].limit, domains["two"].limit) == (3, 4)
    assert domains["two"].source == "sums.jsonl"


def test_aliases_that_multiply_are_refused(folder: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert find_problems(folder, "\n".join(lines) + "\n") == [
        "recipe.yaml: is not valid YAML: it has more than 5000 values"
    ]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_an_unreadable_file_is_reported(folder: Path, content: bytes | None) -> None:
    if content is not None:
        (folder / "recipe.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"recipe\.yaml: cannot be read"):
        load_recipe(folder / "recipe.yaml")


def test_the_error_of_an_empty_file_names_the_required_keys(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("# nothing\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(folder / "recipe.yaml")
    assert "recipe.yaml:1:1: model: is required; give: the policy's model" in str(caught.value)
    assert "recipe.yaml:1:1: data: is required; give: prompts" in str(caught.value)


def test_a_recipe_from_python_takes_objects_by_name() -> None:
    loaded = recipe_from_dict(make_recipe(), objects={"rows"}, overrides=["run.steps=2"])
    assert loaded.recipe.run.steps == 2
    assert loaded.base_dir == Path.cwd()


def test_a_wrong_recipe_from_python_names_the_call_as_the_location() -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(make_recipe(rollout={"group_sise": 4}), origin="rollick.train(...)")
    assert str(caught.value).splitlines() == [
        "rollick.train(...) has 2 problems:",
        "  rollick.train(...): rollout.group_sise: unknown key 'group_sise'; "
        "did you mean 'group_size'?",
        "  rollick.train(...): data.domains.sums.source: object:rows only works for objects passed "
        "to rollick.train; in a recipe, name your own as file.py:name",
    ]


def test_an_unknown_object_gets_a_message_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"there is no object:rows; there are: object:prompts"):
        recipe_from_dict(make_recipe(), objects={"prompts"})


def test_rules_can_be_skipped_for_an_old_recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(MINIMAL_RECIPE.replace("sums.jsonl", "gone.jsonl"))
    assert load_recipe(folder / "recipe.yaml", check=False).recipe.model.path == "tiny"
    with pytest.raises(ConfigError, match=r"there is no file 'gone.jsonl'"):
        load_recipe(folder / "recipe.yaml")


def test_data_is_found_beside_the_recipe_or_in_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "recipes").mkdir()
    (folder / "recipes" / "recipe.yaml").write_text(MINIMAL_RECIPE)
    with pytest.raises(ConfigError, match=r"there is no file 'sums.jsonl'"):
        load_recipe(folder / "recipes" / "recipe.yaml")
    monkeypatch.chdir(folder)
    assert load_recipe(folder / "recipes" / "recipe.yaml").recipe.data.domains


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | TEXT | st.floats(allow_nan=False)


@settings(derandomize=True, max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=TEXT,
    stop=st.lists(TEXT, max_size=3),
    lr=st.floats(1e-12, 1e3),
    options=st.dictionaries(TEXT, SCALARS.filter(lambda v: v not in (float("inf"), -float("inf")))),
)
def test_any_recipe_survives_being_dumped_and_loaded(
    tmp_path: Path, name: str, stop: list[str], lr: float, options: dict[str, Any]
) -> None:
    recipe = parse_recipe(
        make_recipe(
            run={"name": name},
            sampling={"stop": stop},
            train={"optimizer": {"lr": lr}},
            algorithm={"loss": {"name": "mine.py:loss", "options": options}},
        )
    )
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    reloaded = load_recipe(tmp_path / "again.yaml", check=False).recipe
    assert reloaded == recipe
    assert isinstance(reloaded.algorithm.loss, CustomPart)
    assert isinstance(recipe.algorithm.loss, CustomPart)
    types = {key: type(value) for key, value in recipe.algorithm.loss.options.items()}
    assert {key: type(value) for key, value in reloaded.algorithm.loss.options.items()} == types


def list_paths(section: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    entries = [((*path, key), value) for key, value in section.items()]
    nested = [
        p
        for entry_path, value in entries
        if isinstance(value, dict)
        for p in list_paths(value, entry_path)
    ]
    return [entry_path for entry_path, _ in entries] + nested


COMPLETE = parse_recipe(make_recipe()).model_dump(mode="json")
ANY_VALUES = st.recursive(
    SCALARS | st.sampled_from(["${", "${run.name}", "a:b", "mine.py:x", "object:x", "hub:"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "options", "path", "zzz"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(list_paths(COMPLETE)), ANY_VALUES), min_size=1, max_size=3
    )
)
def test_invalid_values_anywhere_get_a_clear_error(changes: list[tuple[Any, Any]]) -> None:
    data: dict[str, Any] = copy.deepcopy(COMPLETE)
    for path, value in changes:
        target: Any = data
        for part in path[:-1]:
            target = target.get(part) if isinstance(target, dict) else None
        if isinstance(target, dict):
            target[path[-1]] = value
    error_text = ""
    try:
        recipe_from_dict(data, objects={"rows"})
    except ConfigError as error:
        error_text = str(error)
    assert "is invalid: " not in error_text  # The fallback message.
    assert "Input should" not in error_text


EXPANDING_REFERENCES = {
    "texts": "a0: xxxxxxxxxx\n" + "".join(f'a{n + 1}: "{f"${{a{n}}}" * 10}"\n' for n in range(9)),
    "sections": "a0: [1, 2, 3, 4]\n"
    + "".join(f'a{n + 1}: ["${{a{n}}}", "${{a{n}}}", "${{a{n}}}"]\n' for n in range(14)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", EXPANDING_REFERENCES)
def test_interpolations_that_multiply_are_a_problem_within_seconds(tmp_path: Path, kind: str):
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=r"cannot resolve.*(references multiply|grows to)"):
        load(tmp_path, MINIMAL_RECIPE + EXPANDING_REFERENCES[kind])
    assert time.perf_counter() - start < 20


def test_interpolations_that_are_nested_too_deep_are_a_problem(tmp_path: Path):
    text = 'a: "' + "${oc.env:NONE," * 300 + "1" + "}" * 300 + '"\n'
    with pytest.raises(ConfigError, match="cannot resolve"):
        load(tmp_path, MINIMAL_RECIPE + text)


def test_a_recipe_without_an_end_is_a_problem():
    with pytest.raises(ConfigError, match="/dev/zero: cannot be read: it has more than"):
        load_recipe(Path("/dev/zero"))
