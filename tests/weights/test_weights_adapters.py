"""Publishes of adapters: only the adapters are sent, and the engine merges them exactly."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import WorkerGroup, open_group
from rollick.cluster.worker import HostContext, RoleSpec
from rollick.config.schema import ClusterConfig, Recipe, WeightsConfig
from rollick.config.schema.losses import PpoLoss
from rollick.errors import EngineCorrupt, EngineError, WeightError
from rollick.infer.engine import Capability, VerifiedWeights
from rollick.infer.native.engine import NativeEngine
from rollick.models.loading.fingerprint import fingerprint
from rollick.roles.handles import Roles
from rollick.roles.publisher import Publisher
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.types import PolicyVersion
from rollick.workers import generator
from rollick.workers.generator import GeneratorWorker
from rollick.workers.learner import LearnerWorker

LENGTHS = [5, 9, 5, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)


def recipe(folder: Path, *, generators: str, dtype: str = "float32", **weights: Any) -> Recipe:
    return recipe_of(
        folder,
        model={"path": str(folder), "dtype": dtype},
        train={"lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}, "optimizer": {"lr": 1e-2}},
        devices={"generators": generators},
        infer={"slots": 2, "max_length": 32},
        weights=weights,
    )


def loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


class LiveRoles:
    """The workers of a group in this process."""

    learner: LearnerWorker
    generator: GeneratorWorker


def make_learner(
    context: HostContext, rank: int, recipe: Recipe, roles: LiveRoles
) -> LearnerWorker:
    roles.learner = LearnerWorker(LocalStrategy(recipe), loss, recipe)
    return roles.learner


def make_generator(
    context: HostContext, rank: int, recipe: Recipe, roles: LiveRoles
) -> GeneratorWorker:
    roles.generator = generator.create(context, rank, recipe)
    return roles.generator


@asynccontextmanager
async def open_test_group(
    recipe: Recipe, roles: LiveRoles, *, other: Recipe | None = None
) -> AsyncGenerator[tuple[WorkerGroup, Publisher]]:
    specs = [
        RoleSpec("policy", f"{__name__}:make_learner", (recipe, roles)),
        RoleSpec("generators", f"{__name__}:make_generator", (other or recipe, roles)),
    ]
    cluster = ClusterConfig(backend="inline", call_timeout_s=60)
    async with open_group(DeviceMap.of(recipe), specs, cluster=cluster, threads=1) as group:
        yield group, Publisher(Roles(group), recipe.weights)


def train(roles: LiveRoles, seed: int) -> None:
    roles.learner.strategy.forward_backward(random_batch(LENGTHS, seed=seed), loss)
    assert not roles.learner.strategy.step().skipped


def get_engine(roles: LiveRoles) -> NativeEngine:
    engine = roles.generator.engine
    assert isinstance(engine, NativeEngine)
    return engine


def fingerprint_engine(roles: LiveRoles) -> str:
    return fingerprint(list(get_engine(roles).module.named_parameters()))


ADAPTER_ELEMENTS = 2 * 2 * 4 * (32 + 32)
"""Layers, targets, and rank, times rows plus columns."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("generators", "channel"), [("cpu", "direct"), ("cpu:1", "direct"), ("cpu:1", "host")]
)
async def test_an_engine_adds_the_adapters_and_has_the_learners_summed_weights(
    folder: Path, generators: str, channel: str, dtype: str
) -> None:
    """On the learner's device, the engine shares the weights without adapters; elsewhere, none."""
    roles = LiveRoles()
    loaded = recipe(folder, generators=generators, dtype=dtype, channel=channel)
    async with open_test_group(loaded, roles) as (_, publisher):
        initial = fingerprint_engine(roles)
        assert initial == roles.learner.fingerprint()
        for version in (1, 2):
            train(roles, version)
            assert fingerprint_engine(roles) != roles.learner.fingerprint()
            await publisher.publish(PolicyVersion(version))
            assert fingerprint_engine(roles) == roles.learner.fingerprint() != initial
            assert roles.generator.engine.load().version == version
        assert publisher.transferred_bytes == ADAPTER_ELEMENTS * (4 if dtype == "float32" else 2)


async def test_an_engine_in_the_learners_process_owns_only_the_summed_weights(folder: Path) -> None:
    roles = LiveRoles()
    async with open_test_group(recipe(folder, generators="cpu"), roles) as (_, publisher):
        await publisher.publish(PolicyVersion(1))
        learner_storages = {
            p.untyped_storage().data_ptr() for p in roles.learner.strategy.module.parameters()
        }
        engine_only = [
            name
            for name, p in get_engine(roles).module.named_parameters()
            if p.untyped_storage().data_ptr() not in learner_storages
        ]
        assert engine_only == [
            f"model.layers.{n}.self_attn.{t}.weight" for n in (0, 1) for t in ("q_proj", "o_proj")
        ]
        assert Capability.SHARED_WEIGHTS not in roles.generator.engine.capabilities
        with pytest.raises(EngineError, match="the engine shares the learner's parameters"):
            await roles.generator.engine.update([], PolicyVersion(2))


async def test_an_engine_of_another_model_gets_full_weights_with_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roles = LiveRoles()
    loaded = recipe(folder, generators="cpu:1", channel="host")
    other = recipe(save_tiny(tmp_path, hidden=32, seed=5), generators="cpu:1")
    async with open_test_group(loaded, roles, other=other) as (_, publisher):
        for version in (1, 2):
            train(roles, version)
            with caplog.at_level(logging.WARNING, "rollick"):
                await publisher.publish(PolicyVersion(version))
            assert fingerprint_engine(roles) == roles.learner.fingerprint()
        assert "sending all weights instead of adapters" in caplog.text
        assert publisher.transferred_bytes > ADAPTER_ELEMENTS * 4


async def test_adapters_that_do_not_fit_change_nothing(folder: Path) -> None:
    roles = LiveRoles()
    async with open_test_group(recipe(folder, generators="cpu:1"), roles) as (_, publisher):
        train(roles, 0)
        await publisher.publish(PolicyVersion(1))
        before, engine = fingerprint_engine(roles), get_engine(roles)
        layer = "model.layers.0.self_attn.q_proj"
        good = [
            (f"{layer}.lora_A.weight", torch.ones(4, 32)),
            (f"{layer}.lora_B.weight", torch.ones(32, 4)),
        ]
        for pairs in (
            [*good, ("model.layers.9.self_attn.q_proj.lora_A.weight", torch.ones(4, 32))],
            [*good, ("model.norm.weight", torch.ones(32))],
            good[:1],
            [good[0], (good[1][0], torch.ones(32, 5))],
        ):
            weights = VerifiedWeights(tuple(pairs), "x", base_fingerprint="y", adapter_scale=1.0)
            with pytest.raises(WeightError, match="do not fit the model"):
                await engine.update(weights, PolicyVersion(2))
            assert fingerprint_engine(roles) == before
        assert engine.load().version == 1


async def test_without_its_adapter_a_weight_is_that_of_the_model_again(folder: Path) -> None:
    roles = LiveRoles()
    async with open_test_group(recipe(folder, generators="cpu:1"), roles) as (_, publisher):
        initial = fingerprint_engine(roles)
        train(roles, 0)
        await publisher.publish(PolicyVersion(1))
        assert fingerprint_engine(roles) != initial
        no_adapters = VerifiedWeights((), "x", base_fingerprint="y", adapter_scale=1.0)
        await get_engine(roles).update(no_adapters, PolicyVersion(2))
        assert fingerprint_engine(roles) == initial
        assert get_engine(roles).fingerprint() == initial


@pytest.mark.parametrize("part", ["merged", "kept for merging"])
async def test_a_flipped_byte_is_found_in_merged_weights_and_in_their_base(
    folder: Path, part: str
) -> None:
    roles = LiveRoles()
    async with open_test_group(recipe(folder, generators="cpu:1"), roles) as (_, publisher):
        train(roles, 0)
        await publisher.publish(PolicyVersion(1))
        engine = get_engine(roles)
        await engine.check_weights()
        name, base = next(iter(engine.weights._base.items()))
        weight = (
            base if part == "kept for merging" else dict(engine.module.named_parameters())[name]
        )
        weight.detach().view(torch.uint8).view(-1)[3] ^= 0x40
        with pytest.raises(EngineCorrupt, match="its memory was damaged"):
            await engine.check_weights()


def test_a_plan_sends_adapters_only_where_all_of_a_channel_can_add_them() -> None:
    from rollick.config.devices import parse_devices
    from rollick.weights.plan import ProcessLocation, plan_publish

    devices = DeviceMap({"policy": parse_devices("cpu"), "generators": parse_devices("cpu:1-2")})
    learner = ProcessLocation("m", 0, trains_adapters=True)
    able = ProcessLocation("m", 1, merges_adapters=True)
    unable, plain = ProcessLocation("m", 2), ProcessLocation("m", 0)
    config = WeightsConfig(changes_only=True)

    def route(learner: ProcessLocation, *locations: ProcessLocation) -> tuple[bool, bool]:
        by_rank = dict(enumerate(locations))
        plan = plan_publish(devices, learner=learner, generators=by_rank, config=config)
        [actual] = plan.routes()
        return actual.adapters_only, actual.send_delta

    assert route(learner, able, able) == (True, False)
    assert route(learner, able, unable) == (False, True)
    assert route(plain, able, able) == (False, True)
