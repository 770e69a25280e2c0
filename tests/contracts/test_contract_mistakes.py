"""Regression tests for mistakes that other libraries have made.

Each test computes the expected value by hand or in a second way, and also the value with the
mistake. It checks that the two differ, so that it would catch the mistake. ELSEWHERE lists the
mistakes that tests of other files cover.
"""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from fakes import FakeCodec, FakeEngine
from pydantic import ValidationError

from rollick.algorithms.credit import CreditAssigner
from rollick.algorithms.losses import LossInputs, ValueInputs, value
from rollick.algorithms.objective import build_objective, resolve_aggregation
from rollick.algorithms.score_statistics import RunningStatistics
from rollick.config.names import NAMES
from rollick.config.schema import AlgorithmConfig, InferConfig, Recipe
from rollick.config.schema.losses import ON_BEHAVIOUR_RATIO, ON_OLD_RATIO
from rollick.data.batch import Batch
from rollick.data.collate import collate, token_weights
from rollick.errors import ConfigError
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.pipelines.episodes import Episodes
from rollick.pipelines.evaluate import evaluate_prompts
from rollick.testing.batches import random_batch, recipe_of
from rollick.testing.fakes import group, prompt
from rollick.trainer.local import LocalStrategy
from rollick.trainer.microbatch import loss_inputs, microbatches, pack
from rollick.trainer.parallel.shares import BatchSplit
from rollick.types import (
    NOT_SAMPLED,
    Group,
    Request,
    SampleId,
    Sampling,
    Score,
    ScoredSample,
    StopReason,
    frozen_array,
)
from rollick.workers.learner import LearnerWorker

TESTS = Path(__file__).parents[1]

ELSEWHERE = {
    "running normalisation that reads a wrong key": (
        "algorithms/test_algorithms_shaping.py",
        "test_a_running_state_without_a_key_is_an_error_and_not_a_default",
    ),
    "a loss scale that depends on the size of micro-batches": (
        "contracts/test_contract_losses.py",
        "test_a_loss_that_normalises_inside_its_micro_batch_is_caught",
    ),
    "GAE through padding and observation tokens": (
        "algorithms/test_algorithms_advantages_models.py",
        "test_gae_skips_padding_and_observations",
    ),
    "GiGPO that merges equal states of different tasks": (
        "algorithms/test_algorithms_advantages_turns.py",
        "test_equal_states_of_different_tasks_are_not_compared",
    ),
    "grpo that is plain REINFORCE for conversations": (
        "algorithms/test_algorithms_advantages.py",
        "test_a_conversation_of_several_turns_is_compared_with_its_group_too",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mistake", ELSEWHERE)
def test_the_tests_named_for_other_files_exist(mistake: str):
    file, name = ELSEWHERE[mistake]
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


TOY = prompt("12", domain="toy")


def make_recipe(algorithm: dict[str, Any], **sections: Any) -> Recipe:
    domains = {"toy": {"source": "toy.jsonl", "algorithm": algorithm}}
    return recipe_of(Path("m"), data={"domains": domains}, **sections)


def assign_credit(groups: Sequence[Group], algorithm: dict[str, Any], **streams: Any) -> Batch:
    batch = replace(collate(groups), **streams)
    return CreditAssigner(make_recipe(algorithm), base=None).assign(groups, batch)[0]


def make_loss_inputs(batch: Batch, logprobs_N: Any) -> LossInputs:
    """The loss inputs of a batch as one micro-batch, for a policy with these log-probs."""
    packed = pack(batch, device="cpu", deterministic=False)
    now_T = torch.tensor(logprobs_N[packed.indices_T], dtype=torch.float64, requires_grad=True)
    return loss_inputs(batch, packed, now_T)


def compute_gradient_N(batch: Batch, algorithm: dict[str, Any], logprobs_N: Any) -> Any:
    """d loss / d log-prob of each token of the batch."""
    inputs = make_loss_inputs(batch, logprobs_N)
    build_objective(AlgorithmConfig.model_validate(algorithm))(inputs).total.backward()
    assert inputs.logprobs_T.grad is not None
    actual_N = np.zeros(batch.tokens)
    actual_N[batch.loss_mask_N] = inputs.logprobs_T.grad.numpy()
    return actual_N


async def test_engine_and_learner_both_take_log_probs_after_the_temperature(tiny_folder: Path):
    learner = LocalStrategy(recipe_of(tiny_folder), trainable=False)
    engine = NativeEngine.create(
        InferConfig(slots=2, max_length=32),
        learner.recipe.model,
        device="cpu",
        shared=learner.module,
        stops=StopRules(),
    )
    requested = frozen_array([1, 5, 6], np.int32)
    sampling = Sampling(temperature=0.25, max_tokens=8)
    completion = await engine.generate(Request(SampleId(0, 0), requested, sampling, stream=3))
    await engine.close()
    length = len(requested) + len(completion.token_ids)
    mask_N = np.arange(length) >= len(requested)
    batch = replace(
        random_batch([length], prompt=len(requested)),
        token_ids_N=np.concatenate([requested, completion.token_ids]),
        temperature_B=np.array([0.25]),
    )
    scaled_logprobs_N = learner.logprobs(batch)
    unscaled_logprobs_N = learner.logprobs(replace(batch, temperature_B=np.array([1.0])))
    np.testing.assert_allclose(scaled_logprobs_N[mask_N], completion.logprobs, atol=1e-4)
    assert np.abs(unscaled_logprobs_N[mask_N] - completion.logprobs).max() > 0.1


def test_running_statistics_are_read_from_where_they_are_written():
    """With a wrong key, mean and std would be 0 and 1, or those of the batch alone."""
    shaping = {"mean": "running", "std": "running"}
    credit = CreditAssigner(make_recipe({"advantage": "reinforce", "shaping": shaping}), base=None)
    for scores in ([0.0, 4.0], [6.0, 10.0]):
        groups = [group(scores, of=TOY)]
        batch, _ = credit.assign(groups, collate(groups))
    mean, std = 5.0, sqrt((25 + 1 + 1 + 25) / 3)  # of 0, 4, 6, 10
    assert batch.scores_B is not None
    right, unnormalised, batch_normalised = (10 - mean) / std, 10.0, (10 - 8) / sqrt(8)
    assert batch.scores_B[1] == pytest.approx(right, rel=1e-5)
    assert batch.scores_B[1] != pytest.approx(unnormalised, rel=0.1)
    assert batch.scores_B[1] != pytest.approx(batch_normalised, rel=0.1)
    [saved_state] = credit.state()["running"]
    assert RunningStatistics.from_state(saved_state) == RunningStatistics(4, 5.0, 52.0)


def test_a_groups_deviation_without_its_mean_divides_the_scores_of_that_group():
    groups = [group([0, 2], uid=0, of=TOY), group([1, 2, 3], uid=1, of=TOY)]
    batch = assign_credit(groups, {"advantage": "reinforce", "shaping": {"std": "group"}})
    right = [0, 2 / sqrt(2), 1, 2, 3]
    assert batch.scores_B is not None
    assert batch.scores_B.shape == (5,)
    np.testing.assert_allclose(batch.scores_B, right, rtol=1e-5)
    batch_normalised = np.array([0, 2, 1, 2, 3]) / np.std([0, 2, 1, 2, 3], ddof=1)
    assert np.abs(batch_normalised - right).max() > 0.1


def test_a_token_that_is_filtered_out_is_in_neither_sum_nor_mean():
    groups = [group([1, 0], of=TOY, texts=["xyz", "uv"])]
    mask_N = collate(groups).loss_mask_N
    old_N = np.where(mask_N, -1.0, 0.0)
    old_N[np.flatnonzero(mask_N)[1]] = 4.0  # far from mu: icepop drops it
    algorithm = {"loss": "reinforce", "correction": "icepop"}
    batch = assign_credit(groups, algorithm, old_logprobs_N=old_N)
    actual = compute_gradient_N(batch, algorithm, batch.logprobs_N)[mask_N]
    right = np.array([-0.5, 0, -0.5, 0.5, 0.5]) / 4
    np.testing.assert_allclose(actual, right)
    counted_in_mean, counted_in_both = right * 4 / 5, np.array([-0.5, -0.5, -0.5, 0.5, 0.5]) / 5
    for mistake in (counted_in_mean, counted_in_both):
        assert np.abs(actual - mistake).max() > 0.01


def test_observations_are_in_neither_sum_nor_mean():
    batch = random_batch([6, 8], prompt=2)
    mask_N = batch.loss_mask_N.copy()
    mask_N[[3, 9, 10]] = False
    batch = replace(batch, loss_mask_N=mask_N, weights_N=np.zeros(batch.tokens))
    weights_N = token_weights(batch, resolve_aggregation("token_mean"), max_tokens=8)
    assert weights_N[mask_N].tolist() == [1 / 7] * 7
    assert not weights_N[~mask_N].any()
    unmasked_weight = 1 / batch.tokens
    assert weights_N.max() != pytest.approx(unmasked_weight)


@pytest.mark.parametrize("aggregation", sorted(NAMES["aggregations"]))
def test_the_scale_of_the_loss_does_not_depend_on_the_size_of_the_batch(aggregation: str):
    """If a batch holds every group twice, each copy of a token has half of the gradient."""
    scores, texts = [1, 0, 3], ["x", "yz", "uvw"]
    single = [group(scores, uid=0, of=TOY, texts=texts)]
    doubled = [*single, group(scores, uid=1, of=TOY, texts=texts)]
    algorithm = {"loss": "reinforce", "aggregation": aggregation}
    actual = [
        compute_gradient_N(batch, algorithm, batch.logprobs_N)
        for batch in (assign_credit(single, algorithm), assign_credit(doubled, algorithm))
    ]
    by_copy = actual[1].reshape(2, -1)
    np.testing.assert_allclose(by_copy.sum(0), actual[0], rtol=1e-12)
    summed = 2 * actual[0]
    assert not np.allclose(by_copy.sum(0), summed)


@pytest.mark.parametrize("aggregation", ["sequence_mean_token_mean", "prompt_mean"])
def test_length_weights_are_those_of_the_batch_and_not_of_the_micro_batch(aggregation: str):
    algorithm = {"loss": "reinforce", "aggregation": aggregation}
    groups = [
        group([1, 0], uid=0, of=TOY, texts=["x", "uvwxyz"]),
        group([0, 1], uid=1, of=TOY, texts=["uv", "xyz"]),
    ]
    batch = assign_credit(groups, algorithm)
    full = compute_gradient_N(batch, algorithm, batch.logprobs_N)
    parts = [batch.take([0, 1, 2]), batch.take([3])]  # in order, to concatenate gradients

    def join_gradients(micro_batches: Sequence[Batch]) -> Any:
        return np.concatenate(
            [compute_gradient_N(part, algorithm, part.logprobs_N) for part in micro_batches]
        )

    np.testing.assert_allclose(join_gradients(parts), full, rtol=1e-12)
    function = resolve_aggregation(aggregation)
    locally_weighted = [
        replace(part, weights_N=token_weights(part, function, max_tokens=256) / len(parts))
        for part in parts
    ]
    assert np.abs(join_gradients(locally_weighted) - full).max() > 0.01


@pytest.mark.parametrize(("temperature", "expected"), [(None, 0.0), (0.6, 0.6)])
async def test_validation_is_greedy_unless_its_own_settings_differ(
    temperature: float | None, expected: float
):
    recipe = recipe_of(
        Path("m"),
        sampling={"temperature": 1.3, "max_tokens": 5},
        evaluate={} if temperature is None else {"sampling": {"temperature": temperature}},
    )
    engine = FakeEngine()

    async def score(sample: Any) -> Score:
        return Score(1.0)

    scoring = SimpleNamespace(score_held_out=score, held_out=recipe.data.domains, rewards=None)

    async def report_alive(timeout_s: float) -> bool:
        return True

    view = SimpleNamespace(count_samples=lambda *counts: None)
    generators = SimpleNamespace(alive=[engine], wait_for_engine=report_alive)
    run: Any = SimpleNamespace(
        recipe=recipe,
        roles=SimpleNamespace(generators=generators),
        state=SimpleNamespace(weights_lock=asyncio.Lock()),
        episodes=Episodes(cast("Any", FakeCodec()), None, None, max_length=64, seed=0),
        scoring=scoring,
        telemetry=SimpleNamespace(view=view),
        status=SimpleNamespace(follow=lambda rollout, rewards: nullcontext()),
    )
    prompts = [prompt(uid=f"none/{number}", domain="none") for number in range(2)]
    await evaluate_prompts(run, prompts)
    requested = {request.sampling for request in engine.requests}
    assert requested == {Sampling(temperature=expected, max_tokens=5)}
    assert expected != recipe.sampling.temperature


SEEDS = """
from rollick.config.schema import DataConfig
from rollick.data.prompts import PromptStream
from rollick.episodes.base import random_stream
from rollick.types import SampleId, stable_hash
domains = {name: {"source": f"object:{name}"} for name in "ab"}
data = DataConfig.model_validate({"domains": domains})
rows = [{"prompt": str(n)} for n in range(9)]
stream = PromptStream.open(data, objects={"a": rows, "b": rows}, base=None, seed=4)
print(hash("salt"))
print(stable_hash("x", 1), [random_stream(7, "train", SampleId(2, n)) for n in range(3)])
print([stream.next().uid for _ in range(24)])
"""


def test_ids_orders_and_random_streams_are_the_same_in_every_process():
    actual: list[list[str]] = []
    for salt in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", SEEDS],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        actual.append(run.stdout.splitlines())
    assert actual[0][1:] == actual[1][1:]
    assert actual[0][0] != actual[1][0], "Python's own hash has the same salt in both"


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_no_sample_is_copied_to_make_a_batch_divisible(ranks: int):
    batch = random_batch([4, 9, 5, 6, 7], seed=1)
    parts = [
        part.take(row_indices)
        for part in (batch.take(rows) for rows in BatchSplit().plan(batch, ranks=ranks))
        for row_indices in microbatches(part, tokens=12, by_uid=False)
    ]
    assert sorted(uid for part in parts for uid in part.uids) == sorted(batch.uids)
    assert sum(part.weights_N.sum() for part in parts) == pytest.approx(1)
    missing = -batch.rows % ranks
    padded = batch.take([*range(batch.rows), *(n % 5 for n in range(missing))])
    assert padded.weights_N.sum() > 1.05, "a copy weighs what its sample does"


def test_a_sample_cannot_be_in_a_batch_twice():
    groups = [group([1, 0], of=TOY)]
    with pytest.raises(AssertionError, match="in the batch twice"):
        collate([*groups, *groups])


@pytest.mark.parametrize("samples", [4, 12])
def test_the_schedule_ends_with_the_run_whatever_samples_and_minibatches_a_step_has(
    samples: int, tiny_folder: Path
):
    recipe = recipe_of(
        tiny_folder,
        run={"steps": 4},
        train={
            "optimizer": {"lr": 1e-3},
            "schedule": {"shape": "linear"},
            "minibatches": 2,
            "epochs": 2,
        },
    )
    worker = LearnerWorker(LocalStrategy(recipe), build_objective(recipe.algorithms), recipe)
    batches = [random_batch([4] * samples, seed=seed) for seed in range(4)]
    shares = [BatchSplit.of(recipe).shares(batch, ranks=1)[0] for batch in batches]
    rates = [worker.train(share).lr for share in shares]
    # Sixteen optimizer steps; the batches end at steps 4, 8, 12 and 16.
    assert rates == pytest.approx([1e-3 * (1 - step / 16) for step in (4, 8, 12, 16)], abs=1e-12)
    four_times_too_fast = [1e-3 * max(0.0, 1 - 4 * step / 16) for step in (4, 8, 12, 16)]
    assert max(abs(a - b) for a, b in zip(rates, four_times_too_fast, strict=True)) > 1e-4


def make_stale_batch(algorithm: dict[str, Any]) -> Batch:
    """A batch sampled by another policy mu. The current policy equals the old policy, as with one
    optimizer step per batch."""
    groups = [group([1, 0], uid=n, of=TOY, texts=["xyz", "uv"]) for n in range(4)]
    plain = collate(groups)
    current_logprobs_N = np.where(plain.loss_mask_N, -1.0, 0.0)
    gap_N = np.random.default_rng(0).normal(0, 1.5, plain.tokens)
    mu_N = np.where(plain.loss_mask_N, np.minimum(current_logprobs_N + gap_N, -0.01), 0)
    return assign_credit(groups, algorithm, logprobs_N=mu_N, old_logprobs_N=current_logprobs_N)


@pytest.mark.parametrize(
    ("loss", "correction"),
    [
        *((loss, "bypass") for loss in sorted(ON_BEHAVIOUR_RATIO | ON_OLD_RATIO)),
        *((loss, "none") for loss in sorted(ON_BEHAVIOUR_RATIO)),
    ],
)
def test_a_trust_region_sees_the_staleness_of_a_batch_that_makes_one_step(
    loss: str, correction: str
):
    """With the ratio pi / pi_old, which is 1 here, the loss would be that of an on-policy batch."""
    algorithm = {"loss": loss, "correction": correction}
    batch = make_stale_batch(algorithm)
    assert batch.old_logprobs_N is not None
    current_logprobs_N = batch.old_logprobs_N
    on_policy = compute_gradient_N(
        replace(batch, logprobs_N=current_logprobs_N), algorithm, current_logprobs_N
    )
    actual = compute_gradient_N(batch, algorithm, current_logprobs_N)
    assert np.abs(actual - on_policy).max() > 0.01


@pytest.mark.parametrize("loss", sorted(ON_OLD_RATIO))
def test_on_the_old_policys_ratio_one_step_a_batch_has_no_trust_region(loss: str):
    """This shows the mistake itself: nothing is clipped, whatever mu is."""
    algorithm = {"loss": loss, "correction": "none"}
    batch = make_stale_batch(algorithm)
    assert batch.old_logprobs_N is not None
    current_logprobs_N = batch.old_logprobs_N
    on_policy = compute_gradient_N(
        replace(batch, logprobs_N=current_logprobs_N), algorithm, current_logprobs_N
    )
    assert compute_gradient_N(batch, algorithm, current_logprobs_N).tolist() == on_policy.tolist()


MASK = np.array([0, 0, 1, 1, 0, 1, 1], np.bool_)
"""A prompt of two tokens, two turns, an observation between them."""


def make_varied_groups() -> list[Group]:
    """Groups with turns, states, several rewards, two lengths, truncated and failed members."""
    random = np.random.default_rng(1)
    groups: list[Group] = []
    for uid, size in enumerate((3, 4, 3)):
        texts = ["23450"[: 5 - index % 2] for index in range(size)]
        plain = group([0.0] * size, uid=uid, of=TOY, texts=texts)
        members: list[ScoredSample] = []
        for index, member in enumerate(plain.members):
            mask = MASK[: member.sample.length]
            good = min(index, 1)  # the first of each group has a score of 0
            parts = {"right": float(good), "style": good * float(random.random())}
            total = parts["right"] + parts["style"]
            score = Score(
                total, parts=parts, turn_rewards=(0.25 * total * random.random(), 0.5 * total)
            )
            sample = replace(
                member.sample,
                loss_mask=mask,
                versions=np.where(mask, random.integers(0, 3, len(mask)), NOT_SAMPLED),
                stop=StopReason.LENGTH if index == 1 else StopReason.STOP,
                states=("start", f"at {index % 2}"),
            )
            members.append(replace(member, sample=sample, score=score))
        groups.append(replace(plain, members=tuple(members)))
    failed = replace(groups[0].members[2], score=Score.failed("scripted"))
    groups[0] = replace(groups[0], members=(*groups[0].members[:2], failed))
    return groups


def run_algorithm(algorithm: dict[str, Any]) -> list[Any]:
    """Run an algorithm on a batch in which every branch occurs. Returns credit, gradients, metrics
    and the coefficients of the next step."""
    recipe = make_recipe(algorithm, sampling={"max_tokens": 6})
    groups, credit = make_varied_groups(), CreditAssigner(recipe, base=None)
    plain, random = (
        collate(groups, select_members=credit.trained_members, version=3),
        np.random.default_rng(2),
    )
    mask_N = plain.loss_mask_N

    def draw_values_N(size: float) -> Any:
        values_N = np.minimum(-1.5 + size * random.normal(size=plain.tokens), -0.05)
        return np.where(mask_N, values_N, 0.0)

    top_NK = np.log(random.dirichlet(np.ones(8), plain.tokens)[:, :4])
    student_NK = np.log(random.dirichlet(np.ones(8), plain.tokens)[:, :4])
    annotated = replace(
        plain,
        logprobs_N=draw_values_N(0.8),
        old_logprobs_N=draw_values_N(0.8),
        reference_logprobs_N=draw_values_N(0.8),
        teacher_logprobs_N=draw_values_N(0.8),
        values_N=draw_values_N(1.0) + 1.5,
        last_values_B=random.normal(size=plain.rows),
        teacher_top_NK=top_NK,
    )
    batch, means = credit.assign(groups, annotated)
    packed = pack(batch, device="cpu", deterministic=False)
    leaves = [
        torch.tensor(values[packed.indices_T], dtype=torch.float64, requires_grad=True)
        for values in (draw_values_N(0.8), np.abs(draw_values_N(0.3)), student_NK)
    ]
    inputs = loss_inputs(batch, packed, leaves[0], entropy_T=leaves[1], student_TK=leaves[2])
    loss = build_objective(recipe.algorithms)(inputs)
    loss.total.backward()
    credit.update_kl_coefficients(batch.rows, means | {"kl": 0.2, "reward_kl": 0.2})
    streams = [batch.advantages_N, batch.weights_N, batch.kl_weights_N, batch.entropy_weights_N]
    return [
        batch.uids,
        *(None if values is None else values.tolist() for values in streams),
        *(None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves),
        {name: float(total) for name, total in loss.sums.items()},
        means,
        credit.state(),
    ]


PARTS = [
    (kind, name)
    for kind, names in (
        ("advantage", NAMES["advantages"]),
        ("loss", NAMES["losses"]),
        ("correction", NAMES["corrections"]),
    )
    for name in names
]


def get_section(kind: str, name: str) -> Any:
    return getattr(AlgorithmConfig.model_validate({kind: name}), kind)


OPTIONS = [
    *(
        (kind, name, field)
        for kind, name in PARTS
        for field in type(get_section(kind, name)).model_fields
    ),
    *(("kl", "", field) for field in type(AlgorithmConfig().kl).model_fields),
    *(("shaping", "", field) for field in type(AlgorithmConfig().shaping).model_fields),
    *(("", "", field) for field in ("aggregation", "entropy", "weight")),
]
"""Every hyper-parameter of every part: (kind, part, field)."""

REQUIRED_OPTIONS: dict[tuple[str, str, str], dict[str, Any]] = {
    ("loss", "distillation", "skew"): {"divergence": "skewed"},
    ("loss", "distillation", "head"): {"divergence": "adaptive"},
    ("advantage", "reinforce", "epsilon"): {"whiten": True},
    ("kl", "", "target"): {"coefficient": 0.1, "controller": "adaptive"},
    ("kl", "", "horizon"): {"coefficient": 0.1, "controller": "adaptive"},
    ("shaping", "", "length_buffer"): {"length_limit": 4},
    ("shaping", "", "length_weight"): {"length_limit": 4},
}
"""Other settings that an option needs to have an effect."""

OTHER_VALUES: dict[tuple[str, str], list[Any]] = {
    ("weights", "gdpo"): [{"right": 1.0, "style": 5.0}],
    ("difficulty", ""): [(0.0, 0.9)],
    ("length_limit", ""): [4],
    ("aggregation", ""): [name for name in NAMES["aggregations"] if name != "token_mean"],
}
"""Other values of options that are neither numbers nor choices."""


def list_other_values(field: str, name: str, section: Any) -> list[Any]:
    if (field, name) in OTHER_VALUES:
        return OTHER_VALUES[field, name]
    now, choices = getattr(section, field), get_args(type(section).model_fields[field].annotation)
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, str):
        return [choice for choice in choices if choice != now]
    return [now / 100, now / 10, now / 2, 2 * now, 10 * now, 100 * now, 0.01, 0.3, 1.0, 1.5]


@pytest.mark.parametrize(("kind", "name", "field"), OPTIONS)
def test_every_option_can_be_set_in_a_recipe_and_changes_what_is_computed(
    kind: str, name: str, field: str
):
    if field == "name":
        assert getattr(get_section(kind, name), field) == name
        return
    required = REQUIRED_OPTIONS.get(
        (kind, name, field), {"coefficient": 0.1} if kind == "kl" else {}
    )

    def algorithm(**option: Any) -> dict[str, Any]:
        if not kind:
            return {"loss": "ppo", **option}
        other_parts: dict[str, Any] = {"loss": "ppo"} if kind in ("correction", "kl") else {}
        named = {"name": name} if name else {}
        return {**other_parts, kind: {**named, **required, **option}}

    config = AlgorithmConfig.model_validate(algorithm())
    section = getattr(config, kind) if kind else config
    before = run_algorithm(algorithm())
    assert run_algorithm(algorithm()) == before, "something is random, or not a number"
    for other in list_other_values(field, name, section):
        try:
            changed = run_algorithm(algorithm(**{field: other}))
        except (ValidationError, ConfigError):  # The value is invalid.
            continue
        if changed != before:
            return
    pytest.fail(f"no other value of {kind}.{field} of {name!r} changes anything")


def test_the_options_of_a_critics_loss_can_be_set_in_a_recipe_and_change_it():
    recipe = recipe_of(Path("m"), critic={"loss": {"clip": 0.5}})
    values_T = torch.tensor([1.0, 2.0])
    inputs = ValueInputs(values_T, torch.zeros(2), torch.ones(2), torch.ones(2))
    default = recipe_of(Path("m")).critic.loss
    assert type(default).model_fields.keys() == {"name", "clip"}
    actual = [value(inputs, loss).loss_T.tolist() for loss in (default, recipe.critic.loss)]
    assert actual[0] != actual[1]
