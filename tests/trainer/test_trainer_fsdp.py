"""The sharded strategy on real ranks over gloo: on every mesh, its results are those of the local
strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from family_verdicts import save_family
from ranks import Ranks, all_logprobs, own_part
from tiny_mixture import save_tiny_mixture, widen_norms
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollick.algorithms.losses import LossInputs, gspo, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema import Recipe
from rollick.config.schema.losses import GspoLoss, PpoLoss
from rollick.data.batch import Batch
from rollick.errors import CheckpointError, ConfigError, ModelError
from rollick.models.loading.fingerprint import fingerprint
from rollick.models.loading.load import silence_transformers
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny, tiny_tokenizer
from rollick.trainer.fsdp import FsdpStrategy
from rollick.trainer.local import LocalStrategy
from rollick.trainer.parallel.checkpoint import export_state
from rollick.trainer.parallel.shard import gather_full_tensors, shard_like
from rollick.trainer.strategy import LossReport

LENGTHS = [7, 12, 7, 3, 9, 12, 5]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


def mark_slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


DTYPES = [torch.float64, mark_slow(torch.float32)]
"""float64 checks the math to 1e-10. float32 is checked to 1e-6, on two meshes by default and on all
meshes in slow tests."""

RanksFactory = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("dense"), hidden=64, heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixture(tmp_path_factory.mktemp("mixture"), hidden=32, heads=8, kv_heads=4)


class Outcome(NamedTuple):
    logprobs_N: Any
    report: LossReport
    gradients: dict[str, torch.Tensor]


def token_loss(inputs: LossInputs) -> Loss:
    """PPO, plus terms for the entropy and the log-probs of teacher tokens if the batch has them."""
    loss = weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))
    total = loss.total
    if inputs.entropy_T is not None:
        assert inputs.entropy_weights_T is not None
        total = total - (inputs.entropy_weights_T * inputs.entropy_T).sum()
    if inputs.student_TK is not None:
        total = total - (inputs.weights_T[:, None] * inputs.student_TK).sum() / 10
    return Loss(total, loss.sums)


def sequence_loss(inputs: LossInputs) -> Loss:
    """GSPO: one ratio per sample, so its tokens depend on each other."""
    return weighted_loss(inputs, gspo(inputs, GspoLoss()))


LOSSES = (token_loss, sequence_loss)


def make_recipe(folder: Path, parallel: Mapping[str, Any] | None = None, **train: Any) -> Recipe:
    strategy = {} if parallel is None else {"strategy": "fsdp", "parallel": dict(parallel)}
    return recipe_of(folder, train={"optimizer": {"lr": 1e-2}, **strategy, **train})


def share_prefixes(batch: Batch, *, prompt: int = 4) -> Batch:
    """Overwrite the first tokens, so that the samples of a group share a prefix."""
    token_ids_N = batch.token_ids_N.copy()
    offsets = batch.offsets_B1
    shared = np.arange(4, 4 + prompt)
    for b, length in enumerate(batch.lengths_B):
        shared_length = min(prompt, int(length) - 1)
        token_ids_N[offsets[b] : offsets[b] + shared_length] = (
            shared[:shared_length] + batch.group_B[b]
        )
    mask_N = np.concatenate([np.arange(n) >= min(prompt, n - 1) for n in batch.lengths_B])
    weights_N = np.where(mask_N, 1 / mask_N.sum(), 0)
    return replace(batch, token_ids_N=token_ids_N, loss_mask_N=mask_N, weights_N=weights_N)


def add_entropy_and_teacher(batch: Batch) -> Batch:
    """Add entropy weights and two teacher tokens per position to the batch."""
    ids_NK = np.stack([batch.token_ids_N, batch.token_ids_N + 1], axis=1)
    return replace(batch, entropy_weights_N=batch.weights_N / 10, teacher_ids_NK=ids_NK)


def set_logprobs_near(batch: Batch, logprobs_N: Any) -> Batch:
    """Set behaviour log-probs near the policy's. A clipped sample ratio would have no gradient."""
    noise_N = np.random.default_rng(1).normal(scale=0.01, size=batch.tokens)
    return replace(batch, logprobs_N=(logprobs_N + noise_N).astype(np.float32))


def run_local(recipe: Recipe, batch: Batch, dtype: torch.dtype) -> list[Outcome]:
    """The results of the local strategy, one per loss."""
    strategy = LocalStrategy(recipe)
    if dtype is torch.float64:
        module: Any = strategy.module.double()
        module.set_experts_implementation("eager")
        widen_norms(module)
    actual: list[Outcome] = []
    for loss in LOSSES:
        report = strategy.forward_backward(batch, loss)
        named = strategy.module.named_parameters()
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        actual.append(Outcome(strategy.logprobs(batch), report, gradients))
        strategy.optimizer.drop_gradients()
    return actual


def run_sharded(recipe: Recipe, batch: Batch, dtype: torch.dtype) -> list[Outcome]:
    """The results of the sharded strategy on this rank, one per loss."""
    strategy = FsdpStrategy(recipe, dtype=dtype)
    if dtype is torch.float64:
        widen_norms(strategy.model)
    actual: list[Outcome] = []
    for loss in LOSSES:
        report = strategy.forward_backward(own_part(strategy, batch)[0], loss)
        gradients = gather_gradients(strategy)
        actual.append(Outcome(all_logprobs(strategy, batch), report, gradients))
        strategy.sharded_optimizer.drop_gradients()
    return actual


def gather_gradients(strategy: FsdpStrategy) -> dict[str, torch.Tensor]:
    """The full accumulated gradients. A collective."""
    gradients_by_name = {
        name: strategy.sharded_optimizer.gradient(name)
        for name in strategy.sharded_optimizer.parameters
    }
    named = [
        (name, shard_like(strategy.sharded_optimizer.parameters[name], gradient))
        for name, gradient in gradients_by_name.items()
        if gradient is not None
    ]
    return dict(gather_full_tensors(named, strategy.precision.master))


def relative_distance(
    computed: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> float:
    """The relative distance between two full gradients."""
    assert computed.keys() == reference.keys()
    size = sum(value.double().square().sum() for value in reference.values()) ** 0.5
    error = sum((computed[n] - reference[n]).double().square().sum() for n in reference) ** 0.5
    return float(error / size)


def assert_outcomes_equal(
    computed: list[Outcome], reference: list[Outcome], dtype: torch.dtype
) -> None:
    limit = TOLERANCE[dtype]
    for outcome, expected in zip(computed, reference, strict=True):
        np.testing.assert_allclose(outcome.logprobs_N, expected.logprobs_N, rtol=0, atol=2e-6)
        assert outcome.report.tokens == expected.report.tokens
        assert outcome.report.loss == pytest.approx(expected.report.loss, rel=limit, abs=limit)
        assert outcome.report.sums.keys() == expected.report.sums.keys()
        for name, value in expected.report.sums.items():
            assert outcome.report.sums[name] == pytest.approx(value, rel=1e-5, abs=1e-5)
        # A difference of two float32 probabilities has the rounding errors of both.
        assert outcome.report.maxima == pytest.approx(expected.report.maxima, rel=1e-5, abs=1e-7)
        assert relative_distance(outcome.gradients, expected.gradients) < limit


@cache
def run_reference(
    folder: Path, dtype: torch.dtype, train: tuple[tuple[str, Any], ...]
) -> tuple[Batch, list[Outcome]]:
    """The batch and the local results that every mesh is compared with, computed once."""
    batch = add_entropy_and_teacher(share_prefixes(random_batch(LENGTHS)))
    plain = make_recipe(folder, **dict(train))
    batch = set_logprobs_near(batch, LocalStrategy(plain).logprobs(batch))
    return batch, run_local(plain, batch, dtype)


def compare_with_local(
    ranks: Ranks, folder: Path, parallel: Mapping[str, Any], dtype: torch.dtype, **train: Any
) -> None:
    batch, expected = run_reference(folder, dtype, tuple(train.items()))
    for result in ranks.run(run_sharded, make_recipe(folder, parallel, **train), batch, dtype):
        assert_outcomes_equal(result, expected, dtype)


@pytest.mark.parametrize(
    ("count", "parallel"),
    [
        (2, {"data": 2}),
        (2, {"tensor": 2}),
        (2, {"context": 2}),
        (4, {"data": 4}),
        (4, {"data": 2, "tensor": 2}),
        (4, {"data": 2, "context": 2}),
        (4, {"tensor": 2, "context": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradient_are_those_of_one_rank(
    ranks: RanksFactory, dense: Path, count: int, parallel: dict[str, int], dtype: torch.dtype
):
    compare_with_local(ranks(count), dense, parallel, dtype)


@pytest.mark.parametrize(
    ("count", "parallel"),
    [
        (2, {"expert": 2}),
        (2, {"tensor": 2}),
        (4, {"data": 2, "expert": 2}),
        (4, {"expert": 2, "context": 2}),
        (4, {"expert": 2, "tensor": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mixture_of_experts_learns_the_same_wherever_its_experts_are(
    ranks: RanksFactory, mixture: Path, count: int, parallel: dict[str, int], dtype: torch.dtype
):
    """Queries and keys have norms; each rank of `tensor` has a part of their gradients.

    Routers compute in float32. The gradient of a shared prefix is rounded once, that of separate
    prefixes once per sample. In float64 this exceeds the tolerance, so prefixes are not shared.
    """
    compare_with_local(ranks(count), mixture, parallel, dtype, share_prefix=dtype is torch.float32)


@pytest.mark.parametrize("parallel", [{"data": 2}, {"expert": 2}], ids=str)
def test_in_float32_they_are_equal_up_to_rounding(
    ranks: RanksFactory, mixture: Path, parallel: dict[str, int]
):
    compare_with_local(ranks(2), mixture, parallel, torch.float32)


@pytest.mark.parametrize("lengths", [[6], [40, 3, 3, 3, 3]], ids=str)
@pytest.mark.parametrize("parallel", [{"data": 4}, {"data": 2, "context": 2}], ids=str)
def test_ranks_may_have_unequal_parts_of_a_batch_or_none(
    ranks: RanksFactory, dense: Path, lengths: list[int], parallel: dict[str, int]
):
    recipe = make_recipe(dense, tokens_per_microbatch=8)
    batch = random_batch(lengths)
    batch = set_logprobs_near(batch, LocalStrategy(recipe).logprobs(batch))
    expected = run_local(recipe, batch, torch.float64)
    cut = make_recipe(dense, parallel, tokens_per_microbatch=8)
    for result in ranks(4).run(run_sharded, cut, batch, torch.float64):
        assert_outcomes_equal(result, expected, torch.float64)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"context": 2}], ids=str)
def test_layers_that_are_computed_again_give_the_same(
    ranks: RanksFactory, dense: Path, parallel: dict[str, Any]
):
    compare_with_local(ranks(2), dense, {**parallel, "recompute": True}, torch.float64)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "computed again"])
def test_offloaded_parameters_give_the_same(ranks: RanksFactory, dense: Path, recompute: bool):
    """On a CPU the parameters do not move, but torch's offloading code runs."""
    parallel = {"data": 2, "offload": True, "recompute": recompute}
    compare_with_local(ranks(2), dense, parallel, torch.float64)


def test_experts_that_are_computed_again_are_counted_once(ranks: RanksFactory, mixture: Path):
    parallel = {"expert": 2, "recompute": True}
    options: dict[str, Any] = {"expert_balance": 0.1, "share_prefix": False}
    compare_with_local(ranks(2), mixture, parallel, torch.float64, **options)


@pytest.mark.parametrize("parallel", [{"context": 2, "data": 2}, mark_slow({"data": 4})], ids=str)
def test_windows_and_samples_of_many_lengths_are_cut_anywhere(
    ranks: RanksFactory, tmp_path_factory: pytest.TempPathFactory, parallel: dict[str, int]
):
    folder = save_windowed_model(tmp_path_factory.mktemp("windowed"))
    compare_with_local(ranks(4), folder, parallel, torch.float64)


def save_windowed_model(folder: Path) -> Path:
    """Each token sees four tokens in the first layer, all in the second."""
    save_tiny(folder, hidden=32, heads=8, kv_heads=4)
    config = Qwen3Config(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        layer_types=["sliding_attention", "full_attention"],
    )
    torch.manual_seed(0)
    with silence_transformers():
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "parallel", [{"data": 2, "expert": 2}, mark_slow({"data": 2, "context": 2})], ids=str
)
def test_the_loss_that_balances_experts_uses_the_counts_of_the_full_batch(
    ranks: RanksFactory, mixture: Path, parallel: dict[str, int]
):
    options: dict[str, Any] = {"expert_balance": 0.5, "share_prefix": False}
    batch = share_prefixes(random_batch(LENGTHS))
    plain = make_recipe(mixture, **options)
    batch = set_logprobs_near(batch, LocalStrategy(plain).logprobs(batch))
    expected = run_local(plain, batch, torch.float64)
    report = expected[0].report
    balance = report.sums["expert_balance"] / report.tokens
    assert balance == pytest.approx(2, rel=0.5)  # experts per row, if all are chosen equally often
    for tokens in (10_000, 15):
        cut = {**options, "tokens_per_microbatch": tokens}
        assert_outcomes_equal(
            run_local(make_recipe(mixture, **cut), batch, torch.float64), expected, torch.float64
        )
        recipe = make_recipe(mixture, parallel, **cut)
        for result in ranks(4).run(run_sharded, recipe, batch, torch.float64):
            assert_outcomes_equal(result, expected, torch.float64)


class StepResult(NamedTuple):
    grad_norm: float
    weights: dict[str, torch.Tensor]
    masters: set[torch.dtype]


def take_steps(recipe: Recipe, count: int) -> StepResult:
    """Take `count` steps with the sharded strategy."""
    strategy = FsdpStrategy(recipe)
    norm = 0.0
    for seed in range(count):
        strategy.forward_backward(
            own_part(strategy, random_batch(LENGTHS, seed=seed))[0], token_loss
        )
        norm = strategy.step().grad_norm
    weights = dict(strategy.weights())
    masters = {master.dtype for master in strategy.optimizer.masters.values()}
    return StepResult(norm, weights, masters)


@pytest.mark.parametrize(
    ("count", "parallel"), [(2, {"tensor": 2}), (4, {"data": 2, "context": 2})], ids=str
)
def test_steps_clip_by_the_norm_of_the_full_gradient(
    ranks: RanksFactory, dense: Path, count: int, parallel: dict[str, int]
):
    tight = {"optimizer": {"lr": 1e-3, "grad_clip": 0.05, "weight_decay": 0.1}}
    local = LocalStrategy(make_recipe(dense, **tight))
    norm = 0.0
    for seed in range(3):
        local.forward_backward(random_batch(LENGTHS, seed=seed), token_loss)
        norm = local.step().grad_norm
    results = ranks(count).run(take_steps, make_recipe(dense, parallel, **tight), 3)
    assert norm > 0.05
    for result in results:
        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
        for name, value in local.weights():
            torch.testing.assert_close(result.weights[name], value, rtol=1e-4, atol=2e-5)
    fingerprints = {fingerprint(result.weights.items()) for result in results}
    assert len(fingerprints) == 1


def test_masters_are_float32_where_the_model_computes_in_bfloat16(ranks: RanksFactory, dense: Path):
    recipe = make_recipe(dense, {"data": 2})
    recipe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})}
    )
    [first, _] = ranks(2).run(take_steps, recipe, 2)
    assert first.masters == {torch.float32}
    assert {value.dtype for value in first.weights.values()} == {torch.bfloat16}
    [exact, _] = ranks(2).run(take_steps, make_recipe(dense, {"data": 2}), 2)
    assert first.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)


def train_and_save(
    recipe: Recipe, load_path: Path | None, save_path: Path | None, seed: int
) -> float:
    """Load a state, take one step and save, if given a path. Returns the loss of a fixed batch."""
    strategy = FsdpStrategy(recipe)
    if load_path is not None:
        strategy.load(load_path)
    losses = [
        strategy.forward_backward(
            own_part(strategy, random_batch(LENGTHS, seed=99))[0], token_loss
        ).loss
    ]
    strategy.sharded_optimizer.drop_gradients()
    if save_path is not None:
        strategy.forward_backward(
            own_part(strategy, random_batch(LENGTHS, seed=seed))[0], token_loss
        )
        assert not strategy.step().skipped
        losses.append(
            strategy.forward_backward(
                own_part(strategy, random_batch(LENGTHS, seed=99))[0], token_loss
            ).loss
        )
        strategy.sharded_optimizer.drop_gradients()
        strategy.save(save_path)
    return losses[-1]


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("dense", {"data": 2}),
        ("mixture", {"expert": 2}),
        mark_slow("dense", {"tensor": 2}),
        mark_slow("dense", {"context": 2}),
    ],
    ids=str,
)
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_two(
    ranks: RanksFactory,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kind: str,
    parallel: dict[str, int],
):
    """Masters, moments and counters are restored: each step is that of an uninterrupted learner."""
    folder: Path = request.getfixturevalue(kind)
    two_ranks, one_rank = make_recipe(folder, parallel), make_recipe(folder, {})
    local = LocalStrategy(make_recipe(folder))
    expected: list[float] = []
    for seed in range(3):
        local.forward_backward(random_batch(LENGTHS, seed=seed), token_loss)
        local.step()
        expected.append(local.forward_backward(random_batch(LENGTHS, seed=99), token_loss).loss)
        local.optimizer.drop_gradients()
    first = ranks(2).run(train_and_save, two_ranks, None, tmp_path / "a", 0)
    on_one_rank = ranks(1).run(train_and_save, one_rank, tmp_path / "a", None, 0)
    assert on_one_rank[0] == pytest.approx(first[0], abs=1e-6)
    second = ranks(1).run(train_and_save, one_rank, tmp_path / "a", tmp_path / "b", 1)
    on_two_ranks = ranks(2).run(train_and_save, two_ranks, tmp_path / "b", None, 0)
    assert on_two_ranks == [pytest.approx(second[0], abs=1e-6)] * 2
    third = ranks(2).run(train_and_save, two_ranks, tmp_path / "b", tmp_path / "c", 2)
    assert [first[0], second[0], third[0]] == pytest.approx(expected, abs=2e-5)


def load_from(recipe: Recipe, path: Path) -> str:
    try:
        FsdpStrategy(recipe).load(path)
    except CheckpointError as error:
        return error.message
    return ""


def test_a_state_of_another_model_or_none_is_refused(
    ranks: RanksFactory, dense: Path, mixture: Path, tmp_path: Path
):
    ranks(2).run(train_and_save, make_recipe(dense, {}), None, tmp_path / "a", 0)
    [refusal_text, _] = ranks(2).run(load_from, make_recipe(mixture, {}), tmp_path / "a")
    assert "another model" in refusal_text
    [refusal_text, _] = ranks(2).run(load_from, make_recipe(mixture, {}), tmp_path / "nothing")
    assert "cannot be read" in refusal_text


def export(recipe: Recipe, out: Path, saved: Path) -> str:
    strategy = FsdpStrategy(recipe)
    strategy.forward_backward(own_part(strategy, random_batch(LENGTHS))[0], token_loss)
    strategy.step()
    strategy.export(out)
    strategy.save(saved)
    return fingerprint(strategy.weights())


@pytest.mark.parametrize("parallel", [mark_slow({"data": 4}), {"expert": 2, "tensor": 2}], ids=str)
def test_an_export_of_a_mixture_loads_in_transformers(
    ranks: RanksFactory, mixture: Path, tmp_path: Path, parallel: dict[str, int]
):
    recipe = make_recipe(mixture, parallel)
    fingerprints = ranks(4).run(export, recipe, tmp_path / "out", tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {fingerprint(plain.named_parameters())} == set(fingerprints)
    export_state(tmp_path / "saved", recipe.model, tmp_path / "later")
    later = AutoModelForCausalLM.from_pretrained(tmp_path / "later")
    assert {fingerprint(later.named_parameters())} == set(fingerprints)
    assert (tmp_path / "later" / "tokenizer.json").is_file()


def catch_refusal(recipe: Recipe) -> str:
    try:
        FsdpStrategy(recipe)
    except (ConfigError, ModelError) as error:
        return f"{error.message}; {error.fix}"
    return ""


def test_sizes_that_cannot_be_divided_are_refused_with_a_fix(
    ranks: RanksFactory, dense: Path, tmp_path: Path
):
    [refusal_text, _] = ranks(2).run(catch_refusal, make_recipe(dense, {"data": 3}))
    assert "= 3 ranks (data, tensor, context, expert), and the policy has 2 devices" in refusal_text
    [refusal_text, _] = ranks(2).run(catch_refusal, make_recipe(dense, {"expert": 2}))
    assert "has no experts to shard; use train.parallel.expert=1" in refusal_text
    odd = save_tiny(tmp_path, hidden=24, heads=3, kv_heads=3)
    [refusal_text, _] = ranks(2).run(catch_refusal, make_recipe(odd, {"tensor": 2}))
    assert "train.parallel.tensor=2 does not divide the model's 3 attention heads" in refusal_text


def test_a_model_that_would_be_wrong_is_refused_on_every_rank(ranks: RanksFactory, tmp_path: Path):
    folder = save_family("phimoe", tmp_path)
    refusals = ranks(2).run(catch_refusal, make_recipe(folder))
    assert all("two sequences in one pack differ from the model's own" in text for text in refusals)


def compute_sharded_logprobs(recipe: Recipe, batch: Batch) -> Any:
    return all_logprobs(FsdpStrategy(recipe), batch)


def test_a_rotary_embedding_that_depends_on_the_length_is_that_of_one_rank(
    ranks: RanksFactory, tmp_path: Path
):
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=8,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=0.5)
    with silence_transformers():
        model.save_pretrained(tmp_path)
    recipe = recipe_of(tmp_path, infer={"max_length": 16}, train={"strategy": "fsdp"})
    batch = random_batch([7, 12, 5])
    expected = LocalStrategy(recipe).logprobs(batch)
    for actual in ranks(2).run(compute_sharded_logprobs, recipe, batch):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
