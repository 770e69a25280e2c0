"""The sharded strategy on real ranks over gloo: the same numbers as the local one, however the
ranks divide the work."""

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


def slowly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


DTYPES = [torch.float64, slowly(torch.float32)]
"""What is equal to 1e-10 is right; that float32 rounds by no more than 1e-6 is seen in two meshes,
and in all of them where there is time."""

RanksOf = Callable[[int], Ranks]


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
    """With what a batch asks for besides: entropy, and log-probs of a teacher's tokens."""
    loss = weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))
    total = loss.total
    if inputs.entropy_T is not None:
        assert inputs.entropy_weights_T is not None
        total = total - (inputs.entropy_weights_T * inputs.entropy_T).sum()
    if inputs.student_TK is not None:
        total = total - (inputs.weights_T[:, None] * inputs.student_TK).sum() / 10
    return Loss(total, loss.sums)


def sequence_loss(inputs: LossInputs) -> Loss:
    """One ratio for each sample, so its tokens depend on each other."""
    return weighted_loss(inputs, gspo(inputs, GspoLoss()))


LOSSES = (token_loss, sequence_loss)


def recipe_with(folder: Path, parallel: Mapping[str, Any] | None = None, **train: Any) -> Recipe:
    strategy = {} if parallel is None else {"strategy": "fsdp", "parallel": dict(parallel)}
    return recipe_of(folder, train={"optimizer": {"lr": 1e-2}, **strategy, **train})


def grouped(batch: Batch, *, prompt: int = 4) -> Batch:
    """The same with samples of a group that share a prefix."""
    token_ids_N = batch.token_ids_N.copy()
    offsets = batch.offsets_B1
    shared = np.arange(4, 4 + prompt)
    for b, length in enumerate(batch.lengths_B):
        most = min(prompt, int(length) - 1)
        token_ids_N[offsets[b] : offsets[b] + most] = shared[:most] + batch.group_B[b]
    mask_N = np.concatenate([np.arange(n) >= min(prompt, n - 1) for n in batch.lengths_B])
    weights_N = np.where(mask_N, 1 / mask_N.sum(), 0)
    return replace(batch, token_ids_N=token_ids_N, loss_mask_N=mask_N, weights_N=weights_N)


def asking_for_more(batch: Batch) -> Batch:
    """Weights of the entropy, and two tokens of a teacher at each position."""
    ids_NK = np.stack([batch.token_ids_N, batch.token_ids_N + 1], axis=1)
    return replace(batch, entropy_weights_N=batch.weights_N / 10, teacher_ids_NK=ids_NK)


def near_the_policy(batch: Batch, logprobs_N: Any) -> Batch:
    """Drawn by a policy close by: else the ratio of a sample is clipped, with no gradient."""
    noise_N = np.random.default_rng(1).normal(scale=0.01, size=batch.tokens)
    return replace(batch, logprobs_N=(logprobs_N + noise_N).astype(np.float32))


def full_run(recipe: Recipe, batch: Batch, dtype: torch.dtype) -> list[Outcome]:
    """What the local strategy says."""
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


def sharded(recipe: Recipe, batch: Batch, dtype: torch.dtype) -> list[Outcome]:
    """What this rank of the sharded strategy says."""
    strategy = FsdpStrategy(recipe, dtype=dtype)
    if dtype is torch.float64:
        widen_norms(strategy.model)
    actual: list[Outcome] = []
    for loss in LOSSES:
        report = strategy.forward_backward(own_part(strategy, batch)[0], loss)
        gradients = gathered_gradients(strategy)
        actual.append(Outcome(all_logprobs(strategy, batch), report, gradients))
        strategy.sharded_optimizer.drop_gradients()
    return actual


def gathered_gradients(strategy: FsdpStrategy) -> dict[str, torch.Tensor]:
    """The full accumulated gradients. A collective."""
    of = {
        name: strategy.sharded_optimizer.gradient(name)
        for name in strategy.sharded_optimizer.parameters
    }
    named = [
        (name, shard_like(strategy.sharded_optimizer.parameters[name], gradient))
        for name, gradient in of.items()
        if gradient is not None
    ]
    return dict(gather_full_tensors(named, strategy.precision.master))


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Relative, of the full gradient."""
    assert ours.keys() == theirs.keys()
    size = sum(value.double().square().sum() for value in theirs.values()) ** 0.5
    error = sum((ours[n] - theirs[n]).double().square().sum() for n in theirs) ** 0.5
    return float(error / size)


def assert_equal(ours: list[Outcome], theirs: list[Outcome], dtype: torch.dtype) -> None:
    limit = TOLERANCE[dtype]
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.logprobs_N, expected.logprobs_N, rtol=0, atol=2e-6)
        assert mine.report.tokens == expected.report.tokens
        assert mine.report.loss == pytest.approx(expected.report.loss, rel=limit, abs=limit)
        assert mine.report.sums.keys() == expected.report.sums.keys()
        for name, value in expected.report.sums.items():
            assert mine.report.sums[name] == pytest.approx(value, rel=1e-5, abs=1e-5)
        # A difference of two probabilities in float32: it has their rounding, not its own.
        assert mine.report.maxima == pytest.approx(expected.report.maxima, rel=1e-5, abs=1e-7)
        assert distance(mine.gradients, expected.gradients) < limit


@cache
def on_one_rank(
    folder: Path, dtype: torch.dtype, train: tuple[tuple[str, Any], ...]
) -> tuple[Batch, list[Outcome]]:
    """What every mesh is compared with, computed once."""
    batch = asking_for_more(grouped(random_batch(LENGTHS)))
    plain = recipe_with(folder, **dict(train))
    batch = near_the_policy(batch, LocalStrategy(plain).logprobs(batch))
    return batch, full_run(plain, batch, dtype)


def compare(
    ranks: Ranks, folder: Path, parallel: Mapping[str, Any], dtype: torch.dtype, **train: Any
) -> None:
    batch, expected = on_one_rank(folder, dtype, tuple(train.items()))
    for answer in ranks.run(sharded, recipe_with(folder, parallel, **train), batch, dtype):
        assert_equal(answer, expected, dtype)


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
    ranks: RanksOf, dense: Path, count: int, parallel: dict[str, int], dtype: torch.dtype
):
    compare(ranks(count), dense, parallel, dtype)


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
    ranks: RanksOf, mixture: Path, count: int, parallel: dict[str, int], dtype: torch.dtype
):
    """Its queries and keys have norms, whose gradients ranks of `tensor` have in parts.

    Its routers go through float32: of a beginning that is computed once and not twice, the gradient
    is rounded once, which shows in float64.
    """
    compare(ranks(count), mixture, parallel, dtype, share_prefix=dtype is torch.float32)


@pytest.mark.parametrize("parallel", [{"data": 2}, {"expert": 2}], ids=str)
def test_in_float32_they_are_equal_up_to_rounding(
    ranks: RanksOf, mixture: Path, parallel: dict[str, int]
):
    compare(ranks(2), mixture, parallel, torch.float32)


@pytest.mark.parametrize("lengths", [[6], [40, 3, 3, 3, 3]], ids=str)
@pytest.mark.parametrize("parallel", [{"data": 4}, {"data": 2, "context": 2}], ids=str)
def test_ranks_may_have_unequal_parts_of_a_batch_or_none(
    ranks: RanksOf, dense: Path, lengths: list[int], parallel: dict[str, int]
):
    recipe = recipe_with(dense, tokens_per_microbatch=8)
    batch = random_batch(lengths)
    batch = near_the_policy(batch, LocalStrategy(recipe).logprobs(batch))
    expected = full_run(recipe, batch, torch.float64)
    cut = recipe_with(dense, parallel, tokens_per_microbatch=8)
    for answer in ranks(4).run(sharded, cut, batch, torch.float64):
        assert_equal(answer, expected, torch.float64)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"context": 2}], ids=str)
def test_layers_that_are_computed_again_give_the_same(
    ranks: RanksOf, dense: Path, parallel: dict[str, Any]
):
    compare(ranks(2), dense, {**parallel, "recompute": True}, torch.float64)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "computed again"])
def test_offloaded_parameters_give_the_same(ranks: RanksOf, dense: Path, recompute: bool):
    """On a CPU they are where they were; the way through torch's offloading is taken all the
    same."""
    parallel = {"data": 2, "offload": True, "recompute": recompute}
    compare(ranks(2), dense, parallel, torch.float64)


def test_experts_that_are_computed_again_are_counted_once(ranks: RanksOf, mixture: Path):
    parallel = {"expert": 2, "recompute": True}
    options: dict[str, Any] = {"expert_balance": 0.1, "share_prefix": False}
    compare(ranks(2), mixture, parallel, torch.float64, **options)


@pytest.mark.parametrize("parallel", [{"context": 2, "data": 2}, slowly({"data": 4})], ids=str)
def test_windows_and_samples_of_many_lengths_are_cut_anywhere(
    ranks: RanksOf, tmp_path_factory: pytest.TempPathFactory, parallel: dict[str, int]
):
    folder = windowed_model(tmp_path_factory.mktemp("windowed"))
    compare(ranks(4), folder, parallel, torch.float64)


def windowed_model(folder: Path) -> Path:
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
    "parallel", [{"data": 2, "expert": 2}, slowly({"data": 2, "context": 2})], ids=str
)
def test_the_loss_that_balances_experts_uses_the_counts_of_the_full_batch(
    ranks: RanksOf, mixture: Path, parallel: dict[str, int]
):
    options: dict[str, Any] = {"expert_balance": 0.5, "share_prefix": False}
    batch = grouped(random_batch(LENGTHS))
    plain = recipe_with(mixture, **options)
    batch = near_the_policy(batch, LocalStrategy(plain).logprobs(batch))
    expected = full_run(plain, batch, torch.float64)
    report = expected[0].report
    shown = report.sums["expert_balance"] / report.tokens
    assert shown == pytest.approx(
        2, rel=0.5
    )  # the experts of a row, if all were chosen equally often
    for tokens in (10_000, 15):
        cut = {**options, "tokens_per_microbatch": tokens}
        assert_equal(
            full_run(recipe_with(mixture, **cut), batch, torch.float64), expected, torch.float64
        )
        recipe = recipe_with(mixture, parallel, **cut)
        for answer in ranks(4).run(sharded, recipe, batch, torch.float64):
            assert_equal(answer, expected, torch.float64)


class Stepped(NamedTuple):
    grad_norm: float
    weights: dict[str, torch.Tensor]
    masters: set[torch.dtype]


def steps(recipe: Recipe, count: int) -> Stepped:
    """Some steps of the sharded strategy; weights travel from the first rank only."""
    strategy = FsdpStrategy(recipe)
    norm = 0.0
    for seed in range(count):
        strategy.forward_backward(
            own_part(strategy, random_batch(LENGTHS, seed=seed))[0], token_loss
        )
        norm = strategy.step().grad_norm
    weights = dict(strategy.weights())
    masters = {master.dtype for master in strategy.optimizer.masters.values()}
    return Stepped(norm, weights, masters)


@pytest.mark.parametrize(
    ("count", "parallel"), [(2, {"tensor": 2}), (4, {"data": 2, "context": 2})], ids=str
)
def test_steps_clip_by_the_norm_of_the_full_gradient(
    ranks: RanksOf, dense: Path, count: int, parallel: dict[str, int]
):
    tight = {"optimizer": {"lr": 1e-3, "grad_clip": 0.05, "weight_decay": 0.1}}
    local = LocalStrategy(recipe_with(dense, **tight))
    norm = 0.0
    for seed in range(3):
        local.forward_backward(random_batch(LENGTHS, seed=seed), token_loss)
        norm = local.step().grad_norm
    answers = ranks(count).run(steps, recipe_with(dense, parallel, **tight), 3)
    assert norm > 0.05
    for answer in answers:
        assert answer.grad_norm == pytest.approx(norm, rel=1e-4)
        for name, value in local.weights():
            torch.testing.assert_close(answer.weights[name], value, rtol=1e-4, atol=2e-5)
    prints = {fingerprint(answer.weights.items()) for answer in answers}
    assert len(prints) == 1


def test_masters_are_float32_where_the_model_computes_in_bfloat16(ranks: RanksOf, dense: Path):
    recipe = recipe_with(dense, {"data": 2})
    recipe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})}
    )
    [first, _] = ranks(2).run(steps, recipe, 2)
    assert first.masters == {torch.float32}
    assert {value.dtype for value in first.weights.values()} == {torch.bfloat16}
    [exact, _] = ranks(2).run(steps, recipe_with(dense, {"data": 2}), 2)
    assert first.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)


def train_and_save(recipe: Recipe, read: Path | None, written: Path | None, seed: int) -> float:
    """Load, take one step, save; the loss of another batch afterwards."""
    strategy = FsdpStrategy(recipe)
    if read is not None:
        strategy.load(read)
    losses = [
        strategy.forward_backward(
            own_part(strategy, random_batch(LENGTHS, seed=99))[0], token_loss
        ).loss
    ]
    strategy.sharded_optimizer.drop_gradients()
    if written is not None:
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
        strategy.save(written)
    return losses[-1]


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("dense", {"data": 2}),
        ("mixture", {"expert": 2}),
        slowly("dense", {"tensor": 2}),
        slowly("dense", {"context": 2}),
    ],
    ids=str,
)
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_two(
    ranks: RanksOf,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kind: str,
    parallel: dict[str, int],
):
    """Masters, moments and counters: each step is that of a learner that was never moved."""
    folder: Path = request.getfixturevalue(kind)
    two, alone = recipe_with(folder, parallel), recipe_with(folder, {})
    local = LocalStrategy(recipe_with(folder))
    expected: list[float] = []
    for seed in range(3):
        local.forward_backward(random_batch(LENGTHS, seed=seed), token_loss)
        local.step()
        expected.append(local.forward_backward(random_batch(LENGTHS, seed=99), token_loss).loss)
        local.optimizer.drop_gradients()
    first = ranks(2).run(train_and_save, two, None, tmp_path / "a", 0)
    moved = ranks(1).run(train_and_save, alone, tmp_path / "a", None, 0)
    assert moved[0] == pytest.approx(first[0], abs=1e-6)
    second = ranks(1).run(train_and_save, alone, tmp_path / "a", tmp_path / "b", 1)
    back = ranks(2).run(train_and_save, two, tmp_path / "b", None, 0)
    assert back == [pytest.approx(second[0], abs=1e-6)] * 2
    third = ranks(2).run(train_and_save, two, tmp_path / "b", tmp_path / "c", 2)
    assert [first[0], second[0], third[0]] == pytest.approx(expected, abs=2e-5)


def load_from(recipe: Recipe, path: Path) -> str:
    try:
        FsdpStrategy(recipe).load(path)
    except CheckpointError as error:
        return error.message
    return ""


def test_a_state_of_another_model_or_none_is_refused(
    ranks: RanksOf, dense: Path, mixture: Path, tmp_path: Path
):
    ranks(2).run(train_and_save, recipe_with(dense, {}), None, tmp_path / "a", 0)
    [refusal_text, _] = ranks(2).run(load_from, recipe_with(mixture, {}), tmp_path / "a")
    assert "another model" in refusal_text
    [refusal_text, _] = ranks(2).run(load_from, recipe_with(mixture, {}), tmp_path / "nothing")
    assert "cannot be read" in refusal_text


def export(recipe: Recipe, out: Path, saved: Path) -> str:
    strategy = FsdpStrategy(recipe)
    strategy.forward_backward(own_part(strategy, random_batch(LENGTHS))[0], token_loss)
    strategy.step()
    strategy.export(out)
    strategy.save(saved)
    return fingerprint(strategy.weights())


@pytest.mark.parametrize("parallel", [slowly({"data": 4}), {"expert": 2, "tensor": 2}], ids=str)
def test_an_export_of_a_mixture_loads_in_transformers(
    ranks: RanksOf, mixture: Path, tmp_path: Path, parallel: dict[str, int]
):
    recipe = recipe_with(mixture, parallel)
    prints = ranks(4).run(export, recipe, tmp_path / "out", tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {fingerprint(plain.named_parameters())} == set(prints)
    export_state(tmp_path / "saved", recipe.model, tmp_path / "later")
    later = AutoModelForCausalLM.from_pretrained(tmp_path / "later")
    assert {fingerprint(later.named_parameters())} == set(prints)
    assert (tmp_path / "later" / "tokenizer.json").is_file()


def refusal(recipe: Recipe) -> str:
    try:
        FsdpStrategy(recipe)
    except (ConfigError, ModelError) as error:
        return f"{error.message}; {error.fix}"
    return ""


def test_sizes_that_cannot_be_divided_are_refused_with_a_fix(
    ranks: RanksOf, dense: Path, tmp_path: Path
):
    [refusal_text, _] = ranks(2).run(refusal, recipe_with(dense, {"data": 3}))
    assert "= 3 ranks (data, tensor, context, expert), and the policy has 2 devices" in refusal_text
    [refusal_text, _] = ranks(2).run(refusal, recipe_with(dense, {"expert": 2}))
    assert "has no experts to shard; use train.parallel.expert=1" in refusal_text
    odd = save_tiny(tmp_path, hidden=24, heads=3, kv_heads=3)
    [refusal_text, _] = ranks(2).run(refusal, recipe_with(odd, {"tensor": 2}))
    assert "train.parallel.tensor=2 does not divide the model's 3 attention heads" in refusal_text


def test_a_model_that_would_be_wrong_is_refused_on_every_rank(ranks: RanksOf, tmp_path: Path):
    folder = save_family("phimoe", tmp_path)
    refused = ranks(2).run(refusal, recipe_with(folder))
    assert all("two sequences in one pack differ from the model's own" in one for one in refused)


def sharded_logprobs(recipe: Recipe, batch: Batch) -> Any:
    return all_logprobs(FsdpStrategy(recipe), batch)


def test_a_rotary_embedding_that_depends_on_the_length_is_that_of_one_rank(
    ranks: RanksOf, tmp_path: Path
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
    for actual in ranks(2).run(sharded_logprobs, recipe, batch):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
