"""Credit assignment: advantage, weights and algorithm of each token of a batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_mixture import widen_norms

from rollick.algorithms.credit import CreditAssigner
from rollick.algorithms.objective import build_objective
from rollick.config.schema import Recipe, parse_recipe
from rollick.data.batch import Batch
from rollick.data.collate import collate
from rollick.observe.metric_table import METRICS
from rollick.testing.fakes import group, prompt
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.types import Group, SampleId, StopReason

A, B = prompt("12+", domain="a"), prompt("3*45", domain="b")  # three and four prompt tokens


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_recipe(
    a: dict[str, Any], b: dict[str, Any] | None = None, *, model: str = "m", **sections: Any
) -> Recipe:
    """A recipe of domain "a" and, if given, domain "b", with one algorithm each."""
    algorithms = {"a": a} if b is None else {"a": a, "b": b}
    domains = {
        name: {"source": f"{name}.jsonl", "algorithm": algorithm}
        for name, algorithm in algorithms.items()
    }
    return parse_recipe({"model": {"path": model}, "data": {"domains": domains}, **sections})


def make_assigner(
    a: dict[str, Any], b: dict[str, Any] | None = None, **sections: Any
) -> CreditAssigner:
    return CreditAssigner(make_recipe(a, b, **sections), base=None)


def collate_batch(groups: Sequence[Group], assigner: CreditAssigner, **streams: Any) -> Batch:
    """Collate as the pipeline does. A stream is one number, or a value for each trained token."""
    batch = collate(groups, select_members=assigner.trained_members)
    given: dict[str, Any] = {}
    for name, values in streams.items():
        stream_N = np.zeros(batch.tokens)
        stream_N[batch.loss_mask_N] = values
        given[name] = stream_N
    return replace(batch, **given)


def select_trained(batch: Batch, values_N: Any) -> list[float]:
    """The values of the trained tokens; asserts that all others are 0."""
    assert values_N is not None
    assert not np.any(values_N[~batch.loss_mask_N])
    return values_N[batch.loss_mask_N].tolist()


def truncate_member(of: Group, index: int) -> Group:
    """The group with one truncated member."""
    members = list(of.members)
    sample = replace(members[index].sample, stop=StopReason.LENGTH)
    members[index] = replace(members[index], sample=sample)
    return replace(of, members=tuple(members))


def test_segments_of_a_sample_share_its_credit():
    assigner = make_assigner({"advantage": "dr_grpo", "aggregation": "token_mean"})
    full = group([1, 0], texts=["wxyz", "v"], of=A)
    segmented = replace(
        full.members[0], sample=replace(full.members[0].sample, segment_starts=(5,))
    )
    groups = [replace(full, members=(segmented, full.members[1]))]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner))
    assert batch.lengths_B.tolist() == [5, 2, 4]
    # The first token of the second segment has no context and is not trained.
    assert select_trained(batch, batch.advantages_N) == [0.5, 0.5, 0.5, -0.5]
    assert select_trained(batch, batch.weights_N) == [0.25] * 4
    assert batch.scores_B is not None
    assert batch.scores_B.tolist() == [1, 1, 0]


def test_two_domains_have_their_own_advantages_denominators_and_factors():
    assigner = make_assigner(
        {"advantage": "dr_grpo", "aggregation": "token_mean"},
        {
            "advantage": "grpo",
            "loss": "ppo",
            "aggregation": "sequence_mean_token_mean",
            "weight": 3,
        },
    )
    groups = [
        group([1, 0], uid=0, of=A, texts=["x", "yz"]),
        group([0, 2], uid=1, of=B, texts=["p", "qr"]),
        group([4, 2], uid=2, of=A, texts=["u", "v"]),
    ]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner))
    normalised = 1 / (sqrt(2) + 1e-6)
    assert select_trained(batch, batch.advantages_N) == pytest.approx(
        [0.5, -0.5, -0.5, -normalised, normalised, normalised, 1, -1]
    )
    # "a": five tokens of 1/5; "b": two samples of 1/2, divided by their tokens, times 3
    assert select_trained(batch, batch.weights_N) == pytest.approx(
        [1 / 5, 1 / 5, 1 / 5, 3 / 2, 3 / 4, 3 / 4, 1 / 5, 1 / 5]
    )
    assert batch.component_N is not None
    component_B = batch.component_N[batch.offsets_B1[:-1]]
    assert component_B.tolist() == [0, 0, 1, 1, 0, 0]
    assert batch.component_N.tolist() == np.repeat(component_B, batch.lengths_B).tolist()
    assert batch.scores_B is not None
    assert batch.scores_B.tolist() == [1, 0, 0, 2, 4, 2]


def test_streams_that_no_algorithm_needs_are_absent():
    assigner = make_assigner({})
    groups = [group([1, 0], of=A)]
    batch, means = assigner.assign(groups, collate_batch(groups, assigner))
    assert batch.kl_weights_N is None
    assert batch.entropy_weights_N is None
    assert batch.returns_N is None
    assert means == {}
    assert assigner.metrics == {}


def test_domains_of_one_algorithm_are_one_component_with_one_denominator():
    assigner = make_assigner({"loss": "ppo"}, {"loss": "ppo"})
    groups = [group([1, 0], uid=0, of=A), group([1, 0], uid=1, of=B, texts=["xyz", "x"])]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner))
    assert select_trained(batch, batch.weights_N) == pytest.approx([1 / 6] * 6)
    assert batch.component_N is not None
    assert not batch.component_N.any()


DROPS: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "icepop": (
        {"name": "icepop"},
        [-1, -1 + log(10), -1, -1, -1, -1],  # one token is ten times likelier: dropped
        [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5],
    ),
    "geometric": (
        {"name": "geometric", "low": 0.9, "high": 1.1},
        [-1.3, -1, -1, -1.3, -0.7, -1],  # means of ln w: -0.1 and 0; ln 0.9 is -0.105
        [1 / 6] * 6,
    ),
    "geometric, tighter": (
        {"name": "geometric", "low": 0.95, "high": 1.05},
        [-1.3, -1, -1, -1.3, -0.7, -1],
        [0, 0, 0, 1 / 3, 1 / 3, 1 / 3],
    ),
    "k3": (
        {"name": "k3", "max_kl": 0.01},
        [-1, -1, -1.1, -1.3, -0.7, -1],  # mean k3: 0.0016, and 0.03 where the signs would cancel
        [1 / 3, 1 / 3, 1 / 3, 0, 0, 0],
    ),
    "opsm": (
        {"name": "opsm", "delta": 0.1},
        [-2, -1, -1, -2, -1, -1],  # both fell by 1/3 nat; only the second has A < 0
        [1 / 3, 1 / 3, 1 / 3, 0, 0, 0],
    ),
}


@pytest.mark.parametrize("case", DROPS)
def test_dropped_tokens_leave_the_policys_denominator_and_stay_in_that_of_kl_and_entropy(case: str):
    correction, old, weights = DROPS[case]
    assigner = make_assigner(
        {
            "loss": "ppo",
            "correction": correction,
            "kl": {"coefficient": 0.6},
            "entropy": 0.3,
            "weight": 2,
        }
    )
    groups = [group([1, 0], of=A, texts=["xyz", "uvw"])]
    annotated = collate_batch(groups, assigner, old_logprobs_N=old, reference_logprobs_N=-1)
    batch, means = assigner.assign(groups, annotated)
    assert select_trained(batch, batch.weights_N) == pytest.approx(
        [2 * weight for weight in weights]
    )
    assert select_trained(batch, batch.kl_weights_N) == pytest.approx([2 * 0.6 / 6] * 6)
    assert select_trained(batch, batch.entropy_weights_N) == pytest.approx([2 * 0.3 / 6] * 6)
    assert means["dropped_share"] == pytest.approx(weights.count(0) / 6)
    assert {f"train/mean/{name}" for name in means} <= METRICS.keys()


def test_a_truncated_weight_is_a_factor_of_its_token_and_changes_no_denominator():
    assigner = make_assigner({"loss": "ppo", "correction": "token_tis"})
    groups = [group([1, 0], of=A, texts=["xy", "z"])]
    old = [-1 + log(1.5), -1 + log(9), -1 - log(4)]
    batch, means = assigner.assign(groups, collate_batch(groups, assigner, old_logprobs_N=old))
    assert select_trained(batch, batch.weights_N) == pytest.approx([1.5 / 3, 2 / 3, 0.25 / 3])
    assert means["correction_weight"] == pytest.approx((1.5 + 2 + 0.25) / 3)
    # k3 of x = 1.5, 9, 1/4
    expected = sum(x - 1 - log(x) for x in (1.5, 9, 0.25)) / 3
    assert means["engine_kl"] == pytest.approx(expected)


def test_tokens_that_are_dropped_in_one_domain_change_nothing_in_the_other():
    icepop = {"loss": "ppo", "correction": "icepop"}
    groups = [group([1, 0], uid=0, of=A), group([1, 0], uid=1, of=B)]
    weights: list[list[float]] = []
    for old in ([-1, -1, -1, -1], [9, -1, -1, -1]):
        assigner = make_assigner(icepop, {"loss": "ppo", "correction": "token_tis"})
        batch, _ = assigner.assign(groups, collate_batch(groups, assigner, old_logprobs_N=old))
        weights.append(select_trained(batch, batch.weights_N))
    assert weights[0] == pytest.approx([0.5] * 4)
    assert weights[1] == pytest.approx([0, 1, 0.5, 0.5])


MIXTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two presets": ({"preset": "dr_grpo"}, {"preset": "gspo"}),
    "with KL, entropy and corrections": (
        {"kl": {"coefficient": 0.1}, "entropy": 0.05, "aggregation": "fixed_length"},
        {
            "advantage": "reinforce++",
            "loss": "ppo",
            "correction": {"name": "icepop", "low": 0.9, "high": 1.1},
            "aggregation": "sequence_mean_token_mean",
            "kl": {"coefficient": 0.3, "place": "reward"},
            "weight": 0.5,
        },
    ),
    "a critic beside groups": (
        {"advantage": "gae", "loss": "ppo", "aggregation": "sequence_mean_token_sum"},
        {"advantage": "rloo", "loss": "topr", "aggregation": "prompt_mean", "weight": 2},
    ),
    "running statistics of each": (
        {"advantage": "reinforce", "loss": "reinforce", "shaping": {"mean": "running"}},
        {"loss": "cispo", "shaping": {"mean": "batch", "std": "running"}},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), hidden=16)


def make_annotated_batch(groups: Sequence[Group]) -> Batch:
    batch = collate(groups)
    random = np.random.default_rng(3)

    def perturb_logprobs(size: float) -> Any:
        return batch.logprobs_N + np.where(
            batch.loss_mask_N, random.normal(0, size, batch.tokens), 0
        )

    return replace(
        batch,
        logprobs_N=perturb_logprobs(0.3) - 3.0 * batch.loss_mask_N,
        old_logprobs_N=perturb_logprobs(0.3) - 3.0 * batch.loss_mask_N,
        reference_logprobs_N=perturb_logprobs(0.3) - 3.0 * batch.loss_mask_N,
        values_N=np.where(batch.loss_mask_N, random.normal(size=batch.tokens), 0.0),
        last_values_B=random.normal(size=batch.rows),
    )


def compute_gradient(strategy: LocalStrategy, algorithms: Any, batch: Batch) -> torch.Tensor:
    strategy.module.zero_grad()
    strategy.forward_backward(batch, build_objective(algorithms))
    return torch.cat([p.grad.flatten() for p in strategy.module.parameters() if p.grad is not None])


@pytest.mark.parametrize("case", MIXTURES)
def test_a_mixed_batch_has_the_gradients_of_its_domains_alone_added_up(case: str, folder: Path):
    a, b = MIXTURES[case]
    groups = [
        group([1, 0, 0.5], uid=0, of=A, texts=["3", "45", "678"]),
        group([0, 2], uid=1, of=B, texts=["01", "2345"]),
        group([3, 1], uid=2, of=A, texts=["9", "80"]),
        group([1, 1.5, 0], uid=3, of=B, texts=["6", "7", "89"]),
    ]
    full = make_annotated_batch(groups)
    both = make_recipe(a, b, model=str(folder))
    strategy = LocalStrategy(both)
    strategy.module.double()
    widen_norms(strategy.module)
    credited, _ = CreditAssigner(both, base=None).assign(groups, full)
    mixed = compute_gradient(strategy, both.algorithms, credited)

    summed = torch.zeros_like(mixed)
    for name, algorithm in (("a", a), ("b", b)):
        own = [of for of in groups if of.prompt.domain == name]
        row_indices = [n for n, uid in enumerate(full.uids) if uid.group in {of.uid for of in own}]
        alone = make_recipe(algorithm) if name == "a" else _make_recipe_of_b(algorithm)
        part, _ = CreditAssigner(alone, base=None).assign(own, full.take(row_indices))
        summed += compute_gradient(strategy, alone.algorithms, part)
    assert summed.norm() > 0
    assert (mixed - summed).norm() / summed.norm() <= 1e-10


def _make_recipe_of_b(algorithm: dict[str, Any]) -> Recipe:
    domains = {"b": {"source": "b.jsonl", "algorithm": algorithm}}
    return parse_recipe({"model": {"path": "m"}, "data": {"domains": domains}})


def make_old_and_policy(correction: str) -> tuple[list[float], list[float]]:
    """Old log-probs, and the policy log-probs of the KL in the reward: mu under bypass."""
    old = [-0.5, -1.5, -2.0, -1.0, -0.75, -1.25]
    return old, ([-1.0] * 6 if correction == "bypass" else old)


REFERENCE = [-0.9, -1.0, -2.5, -0.5, -1.75, -1.25]
KL_LENGTHS, KL_SCORES = [1, 2, 3], [1.0, 0.0, 0.5]


def assign_with_reward_kl(advantage: Any, correction: str) -> tuple[list[float], dict[str, float]]:
    assigner = make_assigner(
        {
            "advantage": advantage,
            "loss": "ppo",
            "correction": correction,
            "kl": {"coefficient": 0.2, "place": "reward"},
        }
    )
    groups = [group(KL_SCORES, of=A, texts=["x", "yz", "uvw"])]
    old, _ = make_old_and_policy(correction)
    streams: dict[str, Any] = {"reference_logprobs_N": REFERENCE}
    if correction != "bypass":
        streams["old_logprobs_N"] = old
    batch, means = assigner.assign(groups, collate_batch(groups, assigner, **streams))
    assert batch.kl_weights_N is None, "it is in the reward, and not in the loss as well"
    return select_trained(batch, batch.advantages_N), means


@pytest.mark.parametrize("correction", ["bypass", "none"])
def test_a_kl_in_the_reward_is_taken_from_the_score_where_a_sample_has_one_advantage(
    correction: str,
):
    _, policy = make_old_and_policy(correction)
    rewards: list[float] = []
    position = 0
    for length, score in zip(KL_LENGTHS, KL_SCORES, strict=True):
        for _ in range(length):
            score -= 0.2 * (policy[position] - REFERENCE[position])
            position += 1
        rewards.append(score)
    mean = sum(rewards) / 3
    expected = [
        reward - mean for reward, n in zip(rewards, KL_LENGTHS, strict=True) for _ in range(n)
    ]
    actual, means = assign_with_reward_kl("dr_grpo", correction)
    assert actual == pytest.approx(expected)
    k1 = sum(p - r for p, r in zip(policy, REFERENCE, strict=True))
    assert means["reward_kl"] == pytest.approx(k1 / 6)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("correction", ["bypass", "none"])
def test_a_kl_in_the_reward_is_taken_from_its_own_token_where_tokens_have_returns(
    correction: str, gamma: float
):
    _, policy = make_old_and_policy(correction)
    returns: list[float] = []
    position = 0
    for length, score in zip(KL_LENGTHS, KL_SCORES, strict=True):
        own = [-0.2 * (policy[position + n] - REFERENCE[position + n]) for n in range(length)]
        own[-1] += score
        position += length
        for first in range(length):
            later = own[first:]
            returns.append(sum(gamma**n * reward for n, reward in enumerate(later)))
    mean = sum(returns) / 6
    std = sqrt(sum((value - mean) ** 2 for value in returns) / 5)
    expected = [(value - mean) / (std + 1e-6) for value in returns]
    actual, _ = assign_with_reward_kl({"name": "reinforce++", "gamma": gamma}, correction)
    assert actual == pytest.approx(expected)


STATEFUL: dict[str, Any] = {
    "shaping": {"mean": "running", "std": "running"},
    "advantage": "reinforce",
    "loss": "ppo",
    "kl": {"coefficient": 0.1, "controller": "adaptive", "target": 0.05, "horizon": 10},
}


def assign(assigner: CreditAssigner, scores: Sequence[float], *, uid: int = 0) -> Batch:
    groups = [group(scores, uid=uid, of=A)]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner, reference_logprobs_N=-1))
    return batch


def test_running_statistics_are_of_every_score_so_far_and_of_this_batch():
    assigner = make_assigner({"shaping": {"mean": "running"}, "advantage": "reinforce"})
    assert assign(assigner, [1, 3]).advantages_N[-1] == 3 - 2
    assert assign(assigner, [8, 4]).advantages_N[-1] == 4 - (1 + 3 + 8 + 4) / 4


def test_running_statistics_and_coefficients_continue_only_after_a_restore():
    first = make_assigner(STATEFUL)
    assign(first, [1, 0, 4])
    first.update_kl_coefficients(3, {"kl": 1.0})
    saved_state = json.loads(json.dumps(first.state()))
    resumed, fresh = make_assigner(STATEFUL), make_assigner(STATEFUL)
    resumed.restore(saved_state)
    expected = assign(first, [2, 0], uid=1)
    actual, other = assign(resumed, [2, 0], uid=1), assign(fresh, [2, 0], uid=1)
    for name in ("advantages_N", "weights_N", "kl_weights_N", "scores_B"):
        assert getattr(actual, name).tolist() == getattr(expected, name).tolist(), name
    assert other.advantages_N.tolist() != expected.advantages_N.tolist()
    assert other.kl_weights_N is not None
    assert expected.kl_weights_N is not None
    assert other.kl_weights_N.max() < expected.kl_weights_N.max()
    assert resumed.state() == first.state()
    with pytest.raises(KeyError):
        fresh.restore({"kl_coefficients": [0.1]})


@pytest.mark.parametrize(
    ("observed", "factor"),
    [(0.05, 1.0), (0.055, 1 + 0.1 * 5 / 10), (1.0, 1 + 0.2 * 5 / 10), (0.0, 1 - 0.2 * 5 / 10)],
)
def test_an_adaptive_coefficient_rises_above_its_target_and_falls_below(
    observed: float, factor: float
):
    assigner = make_assigner(STATEFUL)
    before = assign(assigner, [1, 0])
    assigner.update_kl_coefficients(5, {"kl": observed})
    after = assign(assigner, [1, 0])
    assert after.kl_weights_N is not None
    assert before.kl_weights_N is not None
    np.testing.assert_allclose(after.kl_weights_N, factor * before.kl_weights_N)
    assert after.weights_N.tolist() == before.weights_N.tolist()
    assert assigner.metrics == {"train/kl_coefficient": pytest.approx(0.1 * factor)}


def test_a_fixed_coefficient_stays_whatever_the_kl():
    assigner = make_assigner({"kl": {"coefficient": 0.1}})
    before = assign(assigner, [1, 0])
    assigner.update_kl_coefficients(5, {"kl": 9.0})
    after = assign(assigner, [1, 0])
    assert after.kl_weights_N is not None
    assert before.kl_weights_N is not None
    assert after.kl_weights_N.tolist() == before.kl_weights_N.tolist()


def test_a_coefficient_in_the_reward_adapts_to_the_kl_that_was_in_the_reward():
    kl_config = {**STATEFUL["kl"], "place": "reward"}
    assigner = make_assigner({"kl": kl_config})
    assign(assigner, [1, 0])
    assigner.update_kl_coefficients(5, {"kl": 9.0, "reward_kl": 0.0})
    assert assigner.metrics == {"train/kl_coefficient": pytest.approx(0.1 * 0.9)}


def test_each_domain_adapts_to_the_kl_of_its_own_tokens():
    """The learner reports the mean over all tokens; domain "b" has no KL and 3 times the tokens."""
    assigner = make_assigner(STATEFUL, {"loss": "cispo"})
    groups = [
        group([1, 0], uid=0, of=A, texts=["x", "y"]),
        group([1, 0], uid=1, of=B, texts=["xyz", "uvw"]),
    ]
    assigner.assign(groups, collate_batch(groups, assigner, reference_logprobs_N=-1))
    assigner.update_kl_coefficients(5, {"kl": 0.05 / 4})
    assert assigner.metrics == {"train/kl_coefficient": pytest.approx(0.1)}


def test_the_coefficient_of_a_domain_without_a_sample_in_the_batch_stays():
    assigner = make_assigner(STATEFUL, {"loss": "cispo", "kl": {"coefficient": 0.2}})
    groups = [group([1, 0], of=B)]
    assigner.assign(groups, collate_batch(groups, assigner, reference_logprobs_N=-1))
    assigner.update_kl_coefficients(5, {"kl": 9.0})
    assert assigner.metrics == {"train/kl_coefficient": pytest.approx(0.1)}


def test_only_groups_of_a_suitable_difficulty_are_trained_on_each_domain_by_its_own():
    assigner = make_assigner({"shaping": {"difficulty": [0.2, 0.8]}}, {})
    groups = [
        group([1, 1, 1, 0], uid=0, of=A),
        group([1, 1, 1, 1], uid=1, of=A),
        group([0, 0, None, 0], uid=2, of=A),
        group([1, 1, 1, 1], uid=3, of=B),
    ]
    assert [assigner.trained_members(of) for of in groups] == [
        [True] * 4,
        [False] * 4,
        [False] * 4,
        [True] * 4,
    ]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner))
    assert sorted({uid.group for uid in batch.uids}) == [0, 3]
    assert select_trained(batch, batch.weights_N) == pytest.approx([0.25] * 8)


def test_truncated_samples_are_masked_only_if_configured():
    groups = [truncate_member(group([1, 0, 0], of=A), 2)]
    keeps, drops = make_assigner({}), make_assigner({}, rollout={"drop_truncated": True})
    assert keeps.trained_members(groups[0]) == [True, True, True]
    assert drops.trained_members(groups[0]) == [True, True, False]
    batch, _ = drops.assign(groups, collate_batch(groups, drops))
    assert batch.uids == (SampleId(0, 0), SampleId(0, 1))
    assert select_trained(batch, batch.weights_N) == [0.5, 0.5]


def test_the_score_of_a_sample_that_is_not_in_the_batch_still_counts_in_its_groups_mean():
    """A truncated sample has a score and is part of the baseline of the others."""
    assigner = make_assigner({}, rollout={"drop_truncated": True})
    groups = [truncate_member(group([1, 0, 0.5], of=A), 2)]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner))
    assert select_trained(batch, batch.advantages_N) == [0.5, -0.5]
    groups = [truncate_member(group([1, 0, 5], of=A), 2)]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner))
    assert select_trained(batch, batch.advantages_N) == [-1, -2]


def test_where_advantages_look_at_tokens_a_sample_that_is_not_in_the_batch_is_left_out():
    """A truncated sample has no log-probs of other models."""
    algorithm = {"kl": {"coefficient": 0.2, "place": "reward"}}
    assigner = make_assigner(algorithm, rollout={"drop_truncated": True})
    groups = [truncate_member(group([1, 0, 5], of=A), 2)]
    batch, means = assigner.assign(
        groups, collate_batch(groups, assigner, reference_logprobs_N=[-1, -2])
    )
    # k1 is 0 and 1: rewards of 1 and -0.2
    assert select_trained(batch, batch.advantages_N) == pytest.approx([0.6, -0.6])
    assert means["reward_kl"] == 0.5


@pytest.mark.parametrize("advantage", ["dr_grpo", "reinforce++", "lite_ppo", "step_return"])
def test_a_failed_score_enters_no_statistic(advantage: str):
    assigners = [
        make_assigner({"advantage": advantage, "shaping": {"mean": "running"}}) for _ in "12"
    ]
    with_failed = [group([1, None, 0], of=A, texts=["x", "yyyy", "zz"])]
    without = [replace(with_failed[0], members=with_failed[0].members[::2])]
    actual, expected = (
        assigner.assign(groups, collate_batch(groups, assigner))[0]
        for assigner, groups in zip(assigners, (with_failed, without), strict=True)
    )
    assert actual.uids == expected.uids
    for name in ("advantages_N", "weights_N", "scores_B"):
        assert getattr(actual, name).tolist() == getattr(expected, name).tolist(), name
    assert assigners[0].state() == assigners[1].state()


GAE: dict[str, Any] = {"name": "gae", "gamma": 1.0, "lam": 1.0, "whiten": False}


def test_gae_gives_advantages_and_the_returns_that_the_critic_is_to_meet():
    assigner = make_assigner({"advantage": GAE, "loss": "ppo"}, {"loss": "cispo"})
    groups = [
        group([1, 0], uid=0, of=A, texts=["xy", "z"]),
        group([1, 0], uid=1, of=B, texts=["u", "v"]),
    ]
    values = [0.5, 0.25, -1.0, 7.0, 7.0]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner, values_N=values))
    assert select_trained(batch, batch.advantages_N) == pytest.approx([0.5, 0.75, 1.0, 0.5, -0.5])
    assert select_trained(batch, batch.returns_N) == pytest.approx([1, 1, 0, 0, 0])


@pytest.mark.parametrize(("bootstraps", "last_return"), [(False, 1.0), (True, 1.0 + 0.5 * 8)])
def test_the_value_after_a_truncated_sample_counts_if_configured(
    bootstraps: bool, last_return: float
):
    gae = {**GAE, "gamma": 0.5, "bootstrap_truncated": bootstraps}
    assigner = make_assigner({"advantage": gae, "loss": "ppo"})
    groups = [truncate_member(group([1, 1], of=A, texts=["xy", "z"]), 0)]
    annotated = collate_batch(groups, assigner, values_N=[0.5, 0.25, 0.5])
    annotated = replace(annotated, last_values_B=np.array([8.0, 8.0]))
    batch, _ = assigner.assign(groups, annotated)
    # the second sample terminated: nothing comes after it
    assert select_trained(batch, batch.returns_N) == pytest.approx(
        [0.5 * last_return, last_return, 1]
    )


def test_on_policy_distillation_compares_the_teacher_with_the_policy_of_the_step():
    assigner = make_assigner({"advantage": {"name": "opd", "limit": 2.0}, "loss": "reinforce"})
    groups = [group([0, 0], of=A, texts=["xy", "z"])]
    batch, _ = assigner.assign(
        groups, collate_batch(groups, assigner, teacher_logprobs_N=[-0.5, -9, -2])
    )
    assert select_trained(batch, batch.advantages_N) == pytest.approx([0.5, -2.0, -1.0])
    with_old_logprobs = collate_batch(
        groups, assigner, teacher_logprobs_N=[-0.5, -2, -2], old_logprobs_N=-2
    )
    batch, _ = assigner.assign(groups, with_old_logprobs)
    assert select_trained(batch, batch.advantages_N) == pytest.approx([1.5, 0, 0])


def test_the_length_penalty_is_in_the_score_before_it_is_compared():
    shaping = {"length_limit": "max_tokens", "length_buffer": 0.5}
    assigner = make_assigner({"shaping": shaping}, sampling={"max_tokens": 4})
    groups = [group([1, 1], of=A, texts=["x", "uvw"])]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner))
    assert batch.scores_B is not None
    assert batch.scores_B.tolist() == [1, 0.5]  # three tokens: half way from two to four
    assert select_trained(batch, batch.advantages_N) == [0.25, -0.25, -0.25, -0.25]


def test_a_users_own_parts_are_found_beside_the_recipe(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def best(groups, options):\n"
        "    return [[m.score.value - max(g.scores) for m in g.members] for g in groups]\n"
        "def flat(counts_B, group_B, *, max_tokens):\n"
        "    return np.full(len(counts_B), 1 / max_tokens)\n"
    )
    own = make_recipe({"advantage": "mine.py:best", "aggregation": "mine.py:flat"})
    assigner = CreditAssigner(own, base=tmp_path)
    groups = [group([1, 0.25], of=A)]
    batch, _ = assigner.assign(groups, collate_batch(groups, assigner))
    assert select_trained(batch, batch.advantages_N) == [0, -0.75]
    assert select_trained(batch, batch.weights_N) == [1 / 256] * 2


@pytest.mark.parametrize(
    "order", [lambda groups: groups[::-1], lambda groups: groups[1:] + groups[:1]]
)
def test_credit_does_not_depend_on_the_order_of_the_groups(
    order: Callable[[list[Group]], list[Group]],
):
    groups = [
        group([exp(n), n / 3, n], uid=n, of=A if n % 2 else B, texts=["x", "yz", "u"])
        for n in range(4)
    ]
    actual = [
        assigner.assign(given, collate_batch(given, assigner))[0]
        for given in (groups, order(groups))
        for assigner in [make_assigner({"advantage": "lite_ppo"}, {"advantage": "reinforce++"})]
    ]
    np.testing.assert_allclose(actual[0].advantages_N, actual[1].advantages_N, rtol=1e-12)
    assert actual[0].weights_N.tolist() == actual[1].weights_N.tolist()
