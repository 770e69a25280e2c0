"""Contract tests that every loss must pass: its gradient does not depend on how a batch is split.

Each loss and aggregation runs with KL and entropy, next to another algorithm in the same batch. The
gradient of a full model must be equal to 1e-10 in float64 for any micro-batches, any order of the
samples, any number of ranks whose gradients are summed, micro-batches padded to full tiles, and
shared prefixes computed once or per sample. A new loss or aggregation in NAMES is tested
automatically.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_mixture import widen_norms

from rollick.algorithms.credit import CreditAssigner
from rollick.algorithms.losses import LossInputs
from rollick.algorithms.objective import build_objective, resolve_aggregation
from rollick.config.names import NAMES
from rollick.config.schema import AlgorithmConfig, Recipe
from rollick.config.schema.corrections import find_conflict
from rollick.config.schema.losses import PAIRWISE
from rollick.data.batch import Batch
from rollick.data.collate import collate, token_weights
from rollick.errors import ConfigError
from rollick.testing.batches import random_batch, recipe_of
from rollick.testing.fakes import group, prompt
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.trainer.parallel.shares import BatchSplit
from rollick.trainer.strategy import LossFn, LossReport
from rollick.types import NOT_SAMPLED

LENGTHS = [7, 11, 8, 6, 9, 10, 5, 8]
"""Four groups of two: three for the loss under test, the last one for another algorithm."""
PROMPT, MAX_TOKENS, TOP = 3, 9, 4
OTHER_ALGORITHM = {
    "aggregation": "sequence_mean_token_sum",
    "kl": {"coefficient": 0.05, "form": "k2"},
}
TESTED_OPTIONS = {"correction": "none", "kl": {"coefficient": 0.1}, "entropy": 0.02}


@dataclass(frozen=True)
class Packing:
    """The settings with which a strategy splits and packs a batch."""

    pairs: bool = False
    share_prefix: bool = False
    tokens: int = 10_000
    deterministic: bool = False


StrategyFactory = Callable[[Packing], LocalStrategy]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def strategy_factory(tmp_path_factory: pytest.TempPathFactory) -> StrategyFactory:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), hidden=16, layers=1)

    @cache
    def build_strategy(packing: Packing) -> LocalStrategy:
        recipe: Recipe = recipe_of(
            folder,
            pipeline="dpo" if packing.pairs else "rlvr",
            run={"deterministic": packing.deterministic},
            train={"share_prefix": packing.share_prefix, "tokens_per_microbatch": packing.tokens},
        )
        strategy = LocalStrategy(recipe)
        strategy.module.double()
        widen_norms(strategy.module)
        return strategy

    return build_strategy


def compute_gradient(
    strategy: LocalStrategy, loss: LossFn, parts: Sequence[Batch]
) -> tuple[torch.Tensor, list[LossReport]]:
    """The gradient, summed over parts of one rank or of several, and the report of each part."""
    strategy.module.zero_grad()
    reports = [strategy.forward_backward(part, loss) for part in parts if part.rows]
    gradients = [p.grad.flatten() for p in strategy.module.parameters() if p.grad is not None]
    return torch.cat(gradients).clone(), reports


def perturb_logprobs(logprobs_N: Any, mask_N: Any, random: np.random.Generator) -> Any:
    """Shift log-probs by about 0.2, so that every branch of every loss occurs."""
    return np.where(mask_N, np.minimum(logprobs_N + 0.2 * random.normal(size=len(mask_N)), -0.1), 0)


def make_batch(strategy: LocalStrategy, *, pairs: bool) -> Batch:
    """A batch with every input that a loss may read. Members of a group share a prefix. The second
    token of each completion is an observation, with a log-prob of -inf."""
    random = np.random.default_rng(5)
    batch = random_batch(LENGTHS, prompt=PROMPT, seed=2)
    ids_N, mask_N = batch.token_ids_N.copy(), batch.loss_mask_N.copy()
    starts = batch.offsets_B1[:-1]
    for b in range(1, len(LENGTHS), 2):
        ids_N[starts[b] : starts[b] + PROMPT] = ids_N[starts[b - 1] : starts[b - 1] + PROMPT]
    mask_N[starts + PROMPT + 1] = False
    batch = replace(batch, token_ids_N=ids_N, loss_mask_N=mask_N)
    current_logprobs_N = strategy.logprobs(batch).astype(np.float64)
    advantages_B = np.where(np.arange(len(LENGTHS)) % 2, -1.0, 1.0)
    if not pairs:
        advantages_B = advantages_B * random.uniform(0.5, 2.0, len(LENGTHS))
    top_probs = np.sort(random.dirichlet(np.full(20, 0.3), batch.tokens), axis=1)[:, -TOP:]
    return replace(
        batch,
        temperature_B=batch.temperature_B.astype(np.float64),
        logprobs_N=np.where(mask_N, perturb_logprobs(current_logprobs_N, mask_N, random), -np.inf),
        versions_N=np.where(mask_N, random.integers(0, 3, batch.tokens), NOT_SAMPLED),
        version=3,
        old_logprobs_N=perturb_logprobs(current_logprobs_N, mask_N, random),
        reference_logprobs_N=perturb_logprobs(current_logprobs_N, mask_N, random),
        advantages_N=np.repeat(advantages_B, batch.lengths_B),
        scores_B=advantages_B + 0.1,
        teacher_ids_NK=np.argsort(random.random((batch.tokens, 60)))[:, :TOP].astype(np.int32),
        teacher_top_NK=np.log(top_probs),
    )


def add_loss_weights(batch: Batch, algorithms: Sequence[AlgorithmConfig]) -> Batch:
    """Add the loss weights of two components. The second algorithm trains the last group."""
    component_B = (batch.group_B == batch.group_B.max()).astype(np.int8)
    component_N = np.repeat(component_B, batch.lengths_B)
    weights = np.zeros((3, batch.tokens))
    for number, algorithm in enumerate(algorithms):
        aggregation = resolve_aggregation(algorithm.aggregation)
        component_weights_N = token_weights(
            batch, aggregation, max_tokens=MAX_TOKENS, among_N=component_N == number
        )
        weights += np.outer([1, algorithm.kl.coefficient, algorithm.entropy], component_weights_N)
    return replace(
        batch,
        component_N=component_N,
        weights_N=weights[0],
        kl_weights_N=weights[1],
        entropy_weights_N=weights[2],
    )


def iterate_splits(batch: Batch, *, pairs: bool) -> Iterator[tuple[str, Packing, list[Batch]]]:
    """Ways to compute one batch: (name, packing of each rank, batch of each rank)."""

    def ranks(count: int) -> list[Batch]:
        plan = BatchSplit(keep_groups=pairs).plan(batch, ranks=count)
        return [batch.take(rows) for rows in plan]

    shuffled = batch.take([5, 2, 7, 0, 3, 6, 1, 4])
    yield "other order", Packing(pairs), [shuffled]
    yield "shared beginnings", Packing(pairs, share_prefix=True), [shuffled]
    yield "smallest micro-batches", Packing(pairs, tokens=1), [batch]
    yield "uneven micro-batches", Packing(pairs, tokens=20), [shuffled]
    yield "shared and cut", Packing(pairs, share_prefix=True, tokens=16), [batch]
    yield "filled up to whole tiles", Packing(pairs, tokens=20, deterministic=True), [shuffled]
    yield "two ranks", Packing(pairs), ranks(2)
    yield "three ranks, shared and cut", Packing(pairs, share_prefix=True, tokens=16), ranks(3)
    yield "five ranks, some of them idle", Packing(pairs), ranks(5)


def assert_invariant(
    strategy_factory: StrategyFactory, objective: LossFn, batch: Batch, *, pairs: bool
) -> torch.Tensor:
    baseline, [report] = compute_gradient(strategy_factory(Packing(pairs)), objective, [batch])
    assert torch.isfinite(baseline).all()
    for name, packing, parts in iterate_splits(batch, pairs=pairs):
        actual, reports = compute_gradient(strategy_factory(packing), objective, parts)
        assert (actual - baseline).norm() / baseline.norm() <= 1e-10, name
        assert sum(part.loss for part in reports) == pytest.approx(report.loss, rel=1e-9), name
        for metric, value in report.sums.items():
            total = sum(part.sums.get(metric, 0.0) for part in reports)
            assert total == pytest.approx(value, rel=1e-9, abs=1e-9), (name, metric)
    return baseline


@pytest.mark.parametrize("aggregation", sorted(NAMES["aggregations"]))
@pytest.mark.parametrize("loss", sorted(NAMES["losses"]))
def test_the_gradient_is_the_same_however_a_batch_is_spread(
    strategy_factory: StrategyFactory, loss: str, aggregation: str
):
    clip_options = {"clip_low": 0.1, "clip_high": 0.1} if loss in ("gspo", "segment") else {}
    tested = {"loss": {"name": loss, **clip_options}, "aggregation": aggregation, **TESTED_OPTIONS}
    algorithms = [AlgorithmConfig.model_validate(options) for options in (tested, OTHER_ALGORITHM)]
    objective, pairs = build_objective(algorithms), loss in PAIRWISE
    strategy = strategy_factory(Packing(pairs))
    batch = add_loss_weights(make_batch(strategy, pairs=pairs), algorithms)
    baseline = assert_invariant(strategy_factory, objective, batch, pairs=pairs)

    other_weights_N = np.where(batch.component_N == 0, 0.0, batch.weights_N)
    other_gradient, _ = compute_gradient(
        strategy, objective, [replace(batch, weights_N=other_weights_N)]
    )
    assert (baseline - other_gradient).norm() / baseline.norm() > 0.01, (
        "the loss under test hardly counts"
    )


CORRECTIONS: list[dict[str, Any]] = [
    *({"name": name} for name in sorted(NAMES["corrections"])),
    {"name": "geometric", "low": 0.95, "high": 1.05},
    {"name": "k3", "max_kl": 0.02},
    {"name": "opsm", "delta": 0.01},
    {"name": "decoupled", "old": "interpolated"},
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("loss", ["ppo", "reinforce", "dppo_tv"])
def test_corrections_do_not_depend_on_the_spread_either(
    strategy_factory: StrategyFactory, loss: str, correction: dict[str, Any]
):
    algorithm = {"loss": loss, "correction": correction, "entropy": 0.02}
    if find_conflict(loss, correction["name"]):
        with pytest.raises(ConfigError, match=r"algorithm\.correction"):
            build_objective(AlgorithmConfig.model_validate(algorithm))
        return
    domains = {"toy": {"source": "toy.jsonl", "algorithm": algorithm}}
    recipe = recipe_of(Path("m"), data={"domains": domains})
    groups = [
        group([1, 0, 0.25], uid=0, of=prompt("12"), texts=["345", "67", "8"]),
        group([0, 2], uid=1, of=prompt("9+1="), texts=["01", "2345"]),
        group([1, 0, 1], uid=2, of=prompt("3"), texts=["66", "777", "8888"]),
    ]
    collated, random = collate(groups, version=2), np.random.default_rng(0)
    current_logprobs_N = strategy_factory(Packing()).logprobs(collated).astype(np.float64)
    annotated = replace(
        collated,
        logprobs_N=perturb_logprobs(current_logprobs_N, collated.loss_mask_N, random),
        old_logprobs_N=perturb_logprobs(current_logprobs_N, collated.loss_mask_N, random),
    )
    batch, _ = CreditAssigner(recipe, base=None).assign(groups, annotated)
    assert_invariant(strategy_factory, build_objective(recipe.algorithms), batch, pairs=False)


def test_a_loss_that_normalises_inside_its_micro_batch_is_caught(
    strategy_factory: StrategyFactory, tmp_path: Path
):
    (tmp_path / "bad.py").write_text(
        "from rollick.algorithms.losses import TokenLoss\n"
        "def mean(inputs, options):\n"
        "    return TokenLoss(-inputs.logprobs_T / len(inputs.logprobs_T))\n"
    )
    bad = AlgorithmConfig.model_validate({"loss": "bad.py:mean"})
    objective = build_objective([bad, AlgorithmConfig()], base=tmp_path)
    batch = add_loss_weights(
        make_batch(strategy_factory(Packing()), pairs=False), [bad, AlgorithmConfig()]
    )
    with pytest.raises(AssertionError, match="smallest micro-batches"):
        assert_invariant(strategy_factory, objective, batch, pairs=False)


@pytest.mark.parametrize("loss", sorted(PAIRWISE))
def test_a_pair_cut_in_two_is_caught(strategy_factory: StrategyFactory, loss: str):
    algorithms = [AlgorithmConfig.model_validate({"loss": loss}), AlgorithmConfig()]
    batch = add_loss_weights(
        make_batch(strategy_factory(Packing(pairs=True)), pairs=True), algorithms
    )
    with pytest.raises(AssertionError, match="smallest micro-batches"):
        assert_invariant(strategy_factory, build_objective(algorithms), batch, pairs=False)


def split_into_turns(batch: Batch) -> Batch:
    """Make a token near the middle of each sample an observation."""
    middle_N = batch.offsets_B1[:-1] + batch.lengths_B // 2 + 1
    mask_N = batch.loss_mask_N.copy()
    mask_N[middle_N] = False
    return replace(batch, loss_mask_N=mask_N)


def test_turns_are_runs_of_trained_tokens(strategy_factory: StrategyFactory):
    recorded: list[LossInputs] = []

    def record_inputs(inputs: LossInputs) -> Any:
        recorded.append(inputs)
        return build_objective(AlgorithmConfig())(inputs)

    strategy_factory(Packing()).forward_backward(
        split_into_turns(random_batch([6, 7])), record_inputs
    )
    [inputs] = recorded
    assert inputs.turn_T is not None
    # Of six tokens, 2, 3 and 5 are trained; of seven, 2, 3, 5 and 6. The longest sample is first.
    assert inputs.turn_T.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert inputs.sequence_T.tolist() == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("loss", sorted(NAMES["losses"]))
def test_tokens_outside_of_the_mask_change_nothing(strategy_factory: StrategyFactory, loss: str):
    pairs = loss in PAIRWISE
    tested = AlgorithmConfig.model_validate({"loss": loss, **TESTED_OPTIONS})
    algorithms = [tested, AlgorithmConfig.model_validate(OTHER_ALGORITHM)]
    strategy, objective = (
        strategy_factory(Packing(pairs, share_prefix=True)),
        build_objective(algorithms),
    )
    batch = add_loss_weights(make_batch(strategy, pairs=pairs), algorithms)
    streams = [
        "logprobs_N",
        "old_logprobs_N",
        "reference_logprobs_N",
        "advantages_N",
        "weights_N",
        "kl_weights_N",
        "entropy_weights_N",
        "teacher_top_NK",
    ]

    def poison_stream(name: str) -> Any:
        values = getattr(batch, name).copy()
        values[~batch.loss_mask_N] = np.nan
        return values

    noisy = replace(batch, **{name: poison_stream(name) for name in streams})
    clean, _ = compute_gradient(strategy, objective, [batch])
    actual, _ = compute_gradient(strategy, objective, [noisy])
    assert torch.isfinite(clean).all()
    assert torch.equal(actual, clean)
