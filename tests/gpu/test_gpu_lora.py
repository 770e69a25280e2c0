"""LoRA on a GPU: an engine with captured graphs samples from the published merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("peft")

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.cluster.devices import HostSpec
from rollick.cluster.worker import HostContext
from rollick.config.devices import parse_devices
from rollick.config.schema import Recipe
from rollick.config.schema.losses import PpoLoss
from rollick.infer.native.engine import NativeEngine
from rollick.models.loading.fingerprint import fingerprint
from rollick.testing.batches import completions_to_batch, random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.types import PolicyVersion, Request, SampleId, Sampling
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.plan import Route
from rollick.workers.generator import GeneratorWorker, create
from rollick.workers.learner import LearnerWorker

pytestmark = pytest.mark.gpu

DIRECT = Route("direct", (0,), adapters_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), hidden=256)


def compute_loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def make_workers(recipe: Recipe, *, beside: bool) -> tuple[LearnerWorker, GeneratorWorker]:
    """A learner and a generator. The generator shares the learner's parameters if `beside`, else it
    has its own model."""
    learner = LearnerWorker(LocalStrategy(recipe, device="cuda"), compute_loss, recipe)
    [device] = parse_devices("0")
    roles: dict[Any, Any] = {"policy": learner} if beside else {}
    context = HostContext(HostSpec(0, device, {"generators": 0}), roles, "cuda", 4)
    return learner, create(context, 0, recipe)


async def publish(learner: LearnerWorker, generator: GeneratorWorker, version: int) -> None:
    manifest = learner.offer_weights(PolicyVersion(version), DIRECT)
    await generator.receive(manifest)
    await generator.commit(PolicyVersion(version))
    learner.release_weights(PublishOutcome(True))


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("dtype", "near"), [("float32", 2e-3), ("bfloat16", 0.2)])
async def test_an_engine_samples_from_the_published_summed_weights(
    folder: Path, dtype: str, near: float, beside: bool
) -> None:
    recipe = recipe_of(
        folder,
        model={"path": str(folder), "dtype": dtype},
        train={"lora": {"rank": 8}, "optimizer": {"lr": 1e-2}},
        infer={"slots": 4, "max_length": 64},
        devices={"policy": "0", "generators": "0"},
    )
    learner, generator = make_workers(recipe, beside=beside)
    engine = generator.engine
    assert isinstance(engine, NativeEngine)
    sampling = Sampling(temperature=1.0, max_tokens=24)
    try:
        for version in (1, 2):
            learner.strategy.forward_backward(random_batch([32] * 4, seed=version), compute_loss)
            learner.strategy.step()
            addresses = [parameter.data_ptr() for parameter in engine.module.parameters()]
            await publish(learner, generator, version)
            assert [parameter.data_ptr() for parameter in engine.module.parameters()] == addresses
            assert fingerprint(list(engine.module.named_parameters())) == learner.fingerprint()
            prompt = np.arange(4, 12, dtype=np.int32)
            request = Request(SampleId(version, 0), prompt, sampling, stream=version)
            batch = completions_to_batch([request], [await engine.generate(request)])
            mask = batch.loss_mask_N
            difference = learner.logprobs(batch)[mask] - batch.logprobs_N[mask]
            assert np.abs(difference).max() < near
    finally:
        await generator.close()
        learner.close()
