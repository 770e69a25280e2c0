"""What every loss promises: its gradient does not depend on how a batch is cut, packed or spread.

For each loss and aggregation, with KL and entropy, beside another algorithm in the same batch: the
gradient of a whole model is the same, to 1e-10 in float64, for any micro-batches, any order of
samples in them, 1, 2 or 3 ranks whose gradients are summed, rows that fill up a pack, and with
what a group's samples begin with computed once or for each of them. A new loss or aggregation
joins by its name in the table.
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
BESIDE = {"aggregation": "sequence_mean_token_sum", "kl": {"coefficient": 0.05, "form": "k2"}}
LEARNER_OLD = {"correction": "none", "kl": {"coefficient": 0.1}, "entropy": 0.02}


@dataclass(frozen=True)
class Cut:
    """How a strategy cuts and packs what it is given."""

    pairs: bool = False
    share_prefix: bool = False
    tokens: int = 10_000
    deterministic: bool = False


StrategyOf = Callable[[Cut], LocalStrategy]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def strategy_of(tmp_path_factory: pytest.TempPathFactory) -> StrategyOf:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), hidden=16, layers=1)

    @cache
    def build(cut: Cut) -> LocalStrategy:
        recipe: Recipe = recipe_of(
            folder,
            pipeline="dpo" if cut.pairs else "rlvr",
            run={"deterministic": cut.deterministic},
            train={"share_prefix": cut.share_prefix, "tokens_per_microbatch": cut.tokens},
        )
        strategy = LocalStrategy(recipe)
        strategy.module.double()
        widen_norms(strategy.module)
        return strategy

    return build


def gradient(
    strategy: LocalStrategy, loss: LossFn, parts: Sequence[Batch]
) -> tuple[torch.Tensor, list[LossReport]]:
    """Summed over the parts: those of ranks, or of one rank."""
    strategy.module.zero_grad()
    reports = [strategy.forward_backward(part, loss) for part in parts if part.rows]
    every = [p.grad.flatten() for p in strategy.module.parameters() if p.grad is not None]
    return torch.cat(every).clone(), reports


def near(logprobs_N: Any, mask_N: Any, random: np.random.Generator) -> Any:
    """Other log-probs, by about 0.2, so that every branch of every loss occurs."""
    return np.where(mask_N, np.minimum(logprobs_N + 0.2 * random.normal(size=len(mask_N)), -0.1), 0)


def samples(strategy: LocalStrategy, *, pairs: bool) -> Batch:
    """Members of a group share a prefix; the middle of each answer is an observation, where nothing
    is known (-inf). All that a loss may look at is there."""
    random = np.random.default_rng(5)
    batch = random_batch(LENGTHS, prompt=PROMPT, seed=2)
    ids_N, mask_N = batch.token_ids_N.copy(), batch.loss_mask_N.copy()
    starts = batch.offsets_B1[:-1]
    for b in range(1, len(LENGTHS), 2):
        ids_N[starts[b] : starts[b] + PROMPT] = ids_N[starts[b - 1] : starts[b - 1] + PROMPT]
    mask_N[starts + PROMPT + 1] = False
    batch = replace(batch, token_ids_N=ids_N, loss_mask_N=mask_N)
    now_N = strategy.logprobs(batch).astype(np.float64)
    advantages_B = np.where(np.arange(len(LENGTHS)) % 2, -1.0, 1.0)
    if not pairs:
        advantages_B = advantages_B * random.uniform(0.5, 2.0, len(LENGTHS))
    top = np.sort(random.dirichlet(np.full(20, 0.3), batch.tokens), axis=1)[:, -TOP:]
    return replace(
        batch,
        temperature_B=batch.temperature_B.astype(np.float64),
        logprobs_N=np.where(mask_N, near(now_N, mask_N, random), -np.inf),
        versions_N=np.where(mask_N, random.integers(0, 3, batch.tokens), NOT_SAMPLED),
        version=3,
        old_logprobs_N=near(now_N, mask_N, random),
        reference_logprobs_N=near(now_N, mask_N, random),
        advantages_N=np.repeat(advantages_B, batch.lengths_B),
        scores_B=advantages_B + 0.1,
        teacher_ids_NK=np.argsort(random.random((batch.tokens, 60)))[:, :TOP].astype(np.int32),
        teacher_top_NK=np.log(top),
    )


def credited(batch: Batch, algorithms: Sequence[AlgorithmConfig]) -> Batch:
    """With the weights of two components: the last group is for the second algorithm."""
    component_B = (batch.group_B == batch.group_B.max()).astype(np.int8)
    component_N = np.repeat(component_B, batch.lengths_B)
    weights = np.zeros((3, batch.tokens))
    for number, algorithm in enumerate(algorithms):
        aggregation = resolve_aggregation(algorithm.aggregation)
        own_N = token_weights(
            batch, aggregation, max_tokens=MAX_TOKENS, among_N=component_N == number
        )
        weights += np.outer([1, algorithm.kl.coefficient, algorithm.entropy], own_N)
    return replace(
        batch,
        component_N=component_N,
        weights_N=weights[0],
        kl_weights_N=weights[1],
        entropy_weights_N=weights[2],
    )


def spreads(batch: Batch, *, pairs: bool) -> Iterator[tuple[str, Cut, list[Batch]]]:
    """Ways to compute one batch: (name, how each rank cuts it, what each rank gets)."""

    def ranks(count: int) -> list[Batch]:
        plan = BatchSplit(keep_groups=pairs).plan(batch, ranks=count)
        return [batch.take(rows) for rows in plan]

    shuffled = batch.take([5, 2, 7, 0, 3, 6, 1, 4])
    yield "other order", Cut(pairs), [shuffled]
    yield "shared beginnings", Cut(pairs, share_prefix=True), [shuffled]
    yield "smallest micro-batches", Cut(pairs, tokens=1), [batch]
    yield "uneven micro-batches", Cut(pairs, tokens=20), [shuffled]
    yield "shared and cut", Cut(pairs, share_prefix=True, tokens=16), [batch]
    yield "filled up to whole tiles", Cut(pairs, tokens=20, deterministic=True), [shuffled]
    yield "two ranks", Cut(pairs), ranks(2)
    yield "three ranks, shared and cut", Cut(pairs, share_prefix=True, tokens=16), ranks(3)
    yield "five ranks, some of them idle", Cut(pairs), ranks(5)


def assert_invariant(
    strategy_of: StrategyOf, objective: LossFn, batch: Batch, *, pairs: bool
) -> torch.Tensor:
    complete_one, [report] = gradient(strategy_of(Cut(pairs)), objective, [batch])
    assert torch.isfinite(complete_one).all()
    for name, cut, parts in spreads(batch, pairs=pairs):
        actual, reports = gradient(strategy_of(cut), objective, parts)
        assert (actual - complete_one).norm() / complete_one.norm() <= 1e-10, name
        assert sum(part.loss for part in reports) == pytest.approx(report.loss, rel=1e-9), name
        for metric, value in report.sums.items():
            total = sum(part.sums.get(metric, 0.0) for part in reports)
            assert total == pytest.approx(value, rel=1e-9, abs=1e-9), (name, metric)
    return complete_one


@pytest.mark.parametrize("aggregation", sorted(NAMES["aggregations"]))
@pytest.mark.parametrize("loss", sorted(NAMES["losses"]))
def test_the_gradient_is_the_same_however_a_batch_is_spread(
    strategy_of: StrategyOf, loss: str, aggregation: str
):
    wide = {"clip_low": 0.1, "clip_high": 0.1} if loss in ("gspo", "segment") else {}
    tested = {"loss": {"name": loss, **wide}, "aggregation": aggregation, **LEARNER_OLD}
    algorithms = [AlgorithmConfig.model_validate(each) for each in (tested, BESIDE)]
    objective, pairs = build_objective(algorithms), loss in PAIRWISE
    strategy = strategy_of(Cut(pairs))
    batch = credited(samples(strategy, pairs=pairs), algorithms)
    complete_one = assert_invariant(strategy_of, objective, batch, pairs=pairs)

    others_N = np.where(batch.component_N == 0, 0.0, batch.weights_N)
    rest, _ = gradient(strategy, objective, [replace(batch, weights_N=others_N)])
    assert (complete_one - rest).norm() / complete_one.norm() > 0.01, (
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
    strategy_of: StrategyOf, loss: str, correction: dict[str, Any]
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
    plain, random = collate(groups, version=2), np.random.default_rng(0)
    now_N = strategy_of(Cut()).logprobs(plain).astype(np.float64)
    annotated = replace(
        plain,
        logprobs_N=near(now_N, plain.loss_mask_N, random),
        old_logprobs_N=near(now_N, plain.loss_mask_N, random),
    )
    batch, _ = CreditAssigner(recipe, base=None).assign(groups, annotated)
    assert_invariant(strategy_of, build_objective(recipe.algorithms), batch, pairs=False)


def test_a_loss_that_normalises_inside_its_micro_batch_is_caught(
    strategy_of: StrategyOf, tmp_path: Path
):
    (tmp_path / "bad.py").write_text(
        "from rollick.algorithms.losses import TokenLoss\n"
        "def mean(inputs, options):\n"
        "    return TokenLoss(-inputs.logprobs_T / len(inputs.logprobs_T))\n"
    )
    bad = AlgorithmConfig.model_validate({"loss": "bad.py:mean"})
    objective = build_objective([bad, AlgorithmConfig()], base=tmp_path)
    batch = credited(samples(strategy_of(Cut()), pairs=False), [bad, AlgorithmConfig()])
    with pytest.raises(AssertionError, match="smallest micro-batches"):
        assert_invariant(strategy_of, objective, batch, pairs=False)


@pytest.mark.parametrize("loss", sorted(PAIRWISE))
def test_a_pair_cut_in_two_is_caught(strategy_of: StrategyOf, loss: str):
    algorithms = [AlgorithmConfig.model_validate({"loss": loss}), AlgorithmConfig()]
    batch = credited(samples(strategy_of(Cut(pairs=True)), pairs=True), algorithms)
    with pytest.raises(AssertionError, match="smallest micro-batches"):
        assert_invariant(strategy_of, build_objective(algorithms), batch, pairs=False)


def two_turns(batch: Batch) -> Batch:
    """The middle token of each sample is an observation."""
    middle_N = batch.offsets_B1[:-1] + batch.lengths_B // 2 + 1
    mask_N = batch.loss_mask_N.copy()
    mask_N[middle_N] = False
    return replace(batch, loss_mask_N=mask_N)


def test_turns_are_runs_of_trained_tokens(strategy_of: StrategyOf):
    seen: list[LossInputs] = []

    def spy(inputs: LossInputs) -> Any:
        seen.append(inputs)
        return build_objective(AlgorithmConfig())(inputs)

    strategy_of(Cut()).forward_backward(two_turns(random_batch([6, 7])), spy)
    [inputs] = seen
    assert inputs.turn_T is not None
    # trained: 2, 3, (4), 5 of six tokens; 2, 3, (4), 5, 6 of seven; the longest sample is first
    assert inputs.turn_T.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert inputs.sequence_T.tolist() == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("loss", sorted(NAMES["losses"]))
def test_tokens_outside_of_the_mask_change_nothing(strategy_of: StrategyOf, loss: str):
    pairs = loss in PAIRWISE
    tested = AlgorithmConfig.model_validate({"loss": loss, **LEARNER_OLD})
    algorithms = [tested, AlgorithmConfig.model_validate(BESIDE)]
    strategy, objective = strategy_of(Cut(pairs, share_prefix=True)), build_objective(algorithms)
    batch = credited(samples(strategy, pairs=pairs), algorithms)
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

    def poisoned(name: str) -> Any:
        values = getattr(batch, name).copy()
        values[~batch.loss_mask_N] = np.nan
        return values

    noisy = replace(batch, **{name: poisoned(name) for name in streams})
    clean, _ = gradient(strategy, objective, [batch])
    actual, _ = gradient(strategy, objective, [noisy])
    assert torch.isfinite(clean).all()
    assert torch.equal(actual, clean)
