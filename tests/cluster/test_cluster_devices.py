import json
from pathlib import Path

import pytest

from rollick.cluster.devices import (
    DeviceMap,
    Phase,
    RoleRank,
    describe_plan,
    numbers_to_ranges,
    plan_phases,
    plan_residency,
)
from rollick.config.devices import Device, parse_devices
from rollick.config.schema import Recipe, parse_recipe
from rollick.errors import PlacementError
from rollick.testing.batches import ANSWERS

GENERATE = Phase("generate", ("generators",))
ANNOTATE = Phase("annotate", ("reference",))
TRAIN = Phase("train", ("policy",))
PUBLISH = Phase("publish", ("policy", "generators"))


def make_recipe(**sections) -> Recipe:
    pipeline = sections.get("pipeline", "rlvr")
    domain = {"source": "sums.jsonl", **ANSWERS.get(pipeline, {})}
    data = {"domains": {"sums": domain}, **sections.pop("data", {})}
    if pipeline == "distill":
        sections["teacher"] = {"path": "t"}
    return parse_recipe({"model": {"path": "m"}, "data": data, **sections})


def make_device_map(**roles: str) -> DeviceMap:
    return DeviceMap({role: parse_devices(text) for role, text in roles.items()})  # type: ignore


VALIDATION = {"validation": {"sums": {"source": "held_out.jsonl"}}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {"policy": "cpu", "generators": "cpu"}),
        ({"algorithm": {"kl": {"coefficient": 0.1}}}, {"reference": "cpu"}),
        (
            {"algorithm": {"kl": {"coefficient": 0.1}}, "devices": {"policy": "3"}},
            {"policy": "3", "reference": "3"},
        ),
        (
            {"algorithm": {"kl": {"coefficient": 0.1}}, "devices": {"reference": "cpu:4"}},
            {"reference": "cpu:4"},
        ),
        ({"devices": {"reference": "cpu:4"}}, {"reference": None}),
        ({"algorithm": {"advantage": "gae"}}, {"critic": "cpu", "teacher": None}),
        (
            {"algorithm": {"advantage": "gae"}, "devices": {"policy": "3", "critic": "4"}},
            {"policy": "3", "critic": "4", "reference": None},
        ),
        ({"algorithm": {"advantage": "opd"}, "devices": {"policy": "3"}}, {"teacher": "3"}),
        ({"algorithm": {"loss": "distillation"}}, {"teacher": "cpu", "critic": None}),
        ({"pipeline": "distill"}, {"teacher": "cpu", "generators": None}),
        ({"pipeline": "dpo"}, {"reference": "cpu", "generators": None}),
        ({"pipeline": "sft"}, {"policy": "cpu", "generators": None}),
        ({"pipeline": "sft", "data": VALIDATION}, {"policy": "cpu", "generators": "cpu"}),
    ],
)
def test_a_recipe_gets_the_roles_that_it_needs_and_no_others(sections, expected):
    roles = DeviceMap.of(make_recipe(**sections)).roles
    for role, text in expected.items():
        assert roles.get(role) == (None if text is None else parse_devices(text))


def test_the_algorithm_of_one_domain_is_enough_for_a_role():
    domains = {
        "sums": {"source": "sums.jsonl"},
        "chat": {"source": "chat.jsonl", "algorithm": {"advantage": "gae"}},
    }
    both = make_recipe(data={"domains": domains})
    assert DeviceMap.of(both).roles["critic"] == parse_devices("cpu")
    assert "train_critic" in [phase.name for phase in plan_phases(both)]


def test_there_is_one_host_for_each_distinct_device_in_the_order_of_devices():
    hosts = make_device_map(policy="1", generators="0-2", reference="cpu").hosts()
    assert [(h.index, str(h.device), dict(h.roles)) for h in hosts] == [
        (0, "cpu:0", {"reference": 0}),
        (1, "cuda:0", {"generators": 0}),
        (2, "cuda:1", {"policy": 0, "generators": 1}),
        (3, "cuda:2", {"generators": 2}),
    ]
    assert str(hosts[2]) == "host 2 (cuda:1: policy 0, generators 1)"


def test_a_map_has_the_host_of_a_rank_and_the_roles_beside_it():
    devices = make_device_map(policy="1", generators="2,1")
    assert devices.ranks("generators") == 2
    assert devices.ranks("critic") == 0
    assert devices.host_of("generators", 0).device == Device("cuda", 2)
    assert [devices.shares_weights(rank) for rank in (0, 1)] == [False, True]


def test_a_rank_that_does_not_exist_is_named():
    with pytest.raises(PlacementError, match="rank 2 does not exist: the device map has 2"):
        make_device_map(generators="0-1").host_of("generators", 2)


@pytest.mark.parametrize(
    ("sections", "phases"),
    [
        ({}, "generate:generators train:policy publish:policy,generators"),
        (
            {
                "algorithm": {"correction": "none", "kl": {"coefficient": 0.1}},
                "train": {"minibatches": 2},
                "data": VALIDATION,
            },
            "generate:generators annotate:policy,reference train:policy "
            "publish:policy,generators validate:generators",
        ),
        (
            {"algorithm": {"correction": "none", "kl": {"coefficient": 0.1}}},
            "generate:generators annotate:reference train:policy publish:policy,generators",
        ),
        (
            {"algorithm": {"kl": {"coefficient": 0.1}}, "train": {"lora": {}}},
            "generate:generators annotate:policy train:policy publish:policy,generators",
        ),
        (
            {"algorithm": {"kl": {"coefficient": 0.1}}},
            "generate:generators annotate:reference train:policy publish:policy,generators",
        ),
        (
            {"algorithm": {"correction": "token_tis"}},
            "generate:generators annotate:policy train:policy publish:policy,generators",
        ),
        (
            {"algorithm": {"advantage": "gae"}},
            "generate:generators annotate:critic train_critic:critic train:policy "
            "publish:policy,generators",
        ),
        (
            {"algorithm": {"advantage": "opd", "correction": "none"}},
            "generate:generators annotate:policy,teacher train:policy publish:policy,generators",
        ),
        ({"pipeline": "sft"}, "train:policy"),
        ({"pipeline": "dpo"}, "annotate:reference train:policy"),
        ({"pipeline": "distill"}, "annotate:teacher train:policy"),
        (
            {"pipeline": "sft", "data": VALIDATION},
            "train:policy publish:policy,generators validate:generators",
        ),
    ],
)
def test_the_phases_of_a_step_follow_from_the_recipe(sections, phases):
    actual = plan_phases(make_recipe(**sections))
    assert " ".join(f"{phase.name}:{','.join(phase.uses)}" for phase in actual) == phases


@pytest.mark.parametrize(
    ("roles", "phase", "paused"),
    [
        ({"policy": "cpu", "generators": "cpu"}, GENERATE, ()),
        ({"policy": "cpu", "generators": "cpu"}, TRAIN, (0,)),
        ({"policy": "cpu", "generators": "cpu"}, PUBLISH, (0,)),
        ({"policy": "0", "generators": "1-2"}, TRAIN, ()),
        ({"policy": "0", "generators": "1-2"}, PUBLISH, ()),
        ({"policy": "1", "generators": "0-2"}, TRAIN, (1,)),
        ({"policy": "0", "generators": "1-2", "reference": "2"}, ANNOTATE, (1,)),
        ({"policy": "0", "generators": "1-2", "reference": "2"}, TRAIN, ()),
        ({"policy": "0"}, TRAIN, ()),
    ],
)
def test_a_generator_pauses_when_another_role_works_on_its_device(roles, phase, paused):
    (plan,) = plan_residency(make_device_map(**roles), [phase])
    assert plan.pauses == paused


def plan_sleeping_roles(roles: dict[str, str], *, max_staleness: float) -> dict[str, str]:
    phases = [GENERATE, ANNOTATE, TRAIN, PUBLISH]
    plans = plan_residency(make_device_map(**roles), phases, max_staleness=max_staleness)
    return {plan.phase.name: ", ".join(map(str, plan.sleeps)) for plan in plans}


def test_a_sleeping_policy_sleeps_in_phases_that_do_not_use_it():
    roles = make_device_map(policy="0", generators="0")
    phases = [GENERATE, TRAIN, PUBLISH]
    plans = plan_residency(roles, phases, policy_sleeps=True)
    asleep = {plan.phase.name for plan in plans if RoleRank("policy", 0) in plan.sleeps}
    assert asleep == {"generate"}
    separate = make_device_map(policy="0", generators="1")
    assert not any(plan.sleeps for plan in plan_residency(separate, phases, policy_sleeps=True))


def test_on_one_gpu_roles_take_turns_with_the_memory():
    roles = {"policy": "0", "generators": "0", "reference": "0"}
    assert plan_sleeping_roles(roles, max_staleness=0) == {
        "generate": "reference 0",
        "annotate": "generators 0",
        "train": "generators 0, reference 0",
        "publish": "reference 0",
    }


def test_a_cache_with_unfinished_samples_is_never_dropped():
    roles = {"policy": "0", "generators": "0-1"}
    assert set(plan_sleeping_roles(roles, max_staleness=1).values()) == {""}
    assert plan_sleeping_roles(roles, max_staleness=0)["train"] == "generators 0"


@pytest.mark.parametrize(
    "roles",
    [
        {"policy": "cpu", "generators": "cpu", "reference": "cpu"},
        {"policy": "0", "generators": "1", "reference": "2"},
    ],
)
def test_nothing_sleeps_on_a_cpu_or_alone_on_a_gpu(roles):
    assert set(plan_sleeping_roles(roles, max_staleness=0).values()) == {""}


def test_the_description_shows_hosts_phases_and_timeline():
    text = describe_plan(
        make_recipe(
            devices={"policy": "0", "generators": "0-1"},
            algorithm={"kl": {"coefficient": 0.1}},
        )
    )
    assert text.splitlines() == [
        "host  device  roles",
        "0     cuda:0  policy 0, generators 0, reference 0",
        "1     cuda:1  generators 1",
        "",
        "phase     uses                pauses        sleeps",
        "generate  generators          -             reference 0",
        "annotate  reference           generators 0  generators 0",
        "train     policy              generators 0  generators 0, reference 0",
        "publish   policy, generators  generators 0  reference 0",
        "",
        "weights   generators 0: the policy's own; generators 1: a copy, sent at each publish",
        "timeline  sequential: generate, then train; the newest policy samples everything",
    ]


def test_equal_hosts_and_ranks_share_a_line():
    text = describe_plan(
        make_recipe(
            devices={"policy": "0-7", "generators": "4-7", "reference": "0-7"},
            algorithm={"kl": {"coefficient": 0.1}},
            train={"strategy": "fsdp"},
        )
    )
    assert text.splitlines()[:3] == [
        "host  device    roles",
        "0-3   cuda:0-3  policy 0-3, reference 0-3",
        "4-7   cuda:4-7  policy 4-7, generators 0-3, reference 4-7",
    ]
    assert "train     policy              generators 0-3  generators 0-3, reference 0-7" in text
    hosts, phases, notes = (table.splitlines() for table in text.split("\n\n"))
    assert max(map(len, hosts + phases)) <= 80
    assert notes[:2] == [
        "policy     8 ranks divide samples (data 8)",
        "reference  8 ranks divide samples (data 8)",
    ]


def test_device_numbers_are_printed_as_ranges():
    assert numbers_to_ranges([0, 1, 2, 6, 8, 9]) == "0-2,6,8-9"


def test_the_description_lists_what_ranks_divide_and_the_sizes_that_the_model_allows(
    tmp_path: Path,
):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "num_experts": 6}))
    text = describe_plan(
        make_recipe(
            model={"path": str(tmp_path)},
            devices={"policy": "0-7", "generators": "8"},
            train={"strategy": "fsdp", "parallel": {"tensor": 2, "expert": 2}},
        )
    )
    assert text.splitlines()[-4:-2] == [
        "policy    8 ranks divide samples (data 2); the matrices of layers (tensor 2); experts, "
        "with separate samples (expert 2)",
        "model     tensor may be 1, 2 or 4 (8 heads, 4 key-value heads, intermediate size 96); "
        "data and context any number; expert 1, 2, 3 or 6 (6 experts)",
    ]
    single_rank = describe_plan(make_recipe(devices={"policy": "0"}, train={"strategy": "fsdp"}))
    assert "policy    1 rank, not sharded" in single_rank


@pytest.mark.parametrize(
    ("sections", "timeline"),
    [
        ({"rollout": {"max_staleness": 1}}, "sequential: the generators pause"),
        (
            {"rollout": {"max_staleness": 1}, "devices": {"policy": "0", "generators": "1-2"}},
            "overlap: generation continues while the policy trains; samples are at most 1",
        ),
        (
            {"rollout": {"max_staleness": 1.5}, "devices": {"policy": "0", "generators": "0-1"}},
            "partial overlap: generators 1 continue while the policy trains, others pause",
        ),
        ({"devices": {"policy": "0", "generators": "1"}}, "sequential: generate, then train"),
        ({"pipeline": "sft"}, "the policy trains; generators"),
    ],
)
def test_the_timeline_shows_whether_generation_overlaps_training(sections, timeline):
    last = describe_plan(make_recipe(**sections)).splitlines()[-1]
    assert last.startswith(f"timeline  {timeline}")
