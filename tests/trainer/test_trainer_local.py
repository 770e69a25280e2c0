"""The local strategy: gradients, inputs of the loss, saved state and exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollick.algorithms.losses import LossInputs, dppo_tv, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema.losses import DppoTvLoss, PpoLoss
from rollick.data.batch import Batch
from rollick.errors import CheckpointError, ConfigError, ModelError
from rollick.models.attention.varlen import PackedLayout
from rollick.models.loading.fingerprint import fingerprint
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.types import NOT_SAMPLED, SampleId

LENGTHS = [7, 12, 7, 3, 9, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)


def make_strategy(folder: Path, **sections: dict[str, Any]) -> LocalStrategy:
    sections.setdefault("train", {"optimizer": {"lr": 1e-3}})
    return LocalStrategy(recipe_of(folder, **sections))


def policy_loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def compute_gradient(strategy: LocalStrategy, *batches: Batch) -> torch.Tensor:
    strategy.optimizer.drop_gradients()
    for batch in batches:
        strategy.forward_backward(batch, policy_loss)
    every = [p.grad.flatten() for p in strategy.module.parameters() if p.grad is not None]
    return torch.cat(every)


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    return ((actual - reference).norm() / reference.norm()).item()


def test_the_gradient_does_not_depend_on_split_packing_or_order(folder: Path):
    """In float64, where rounding is far below the tolerance."""
    full = make_strategy(folder)
    full.module.double()
    batch = random_batch(LENGTHS)
    expected = compute_gradient(full, batch)
    assert relative_error(compute_gradient(full, batch.take([5, 0, 3, 1, 4, 2])), expected) < 1e-10
    assert (
        relative_error(
            compute_gradient(full, batch.take([0, 3]), batch.take([1, 2, 4, 5])), expected
        )
        < 1e-10
    )
    for tokens, chunk in [(1, 1), (13, 3), (25, 2048)]:
        train = {"tokens_per_microbatch": tokens, "logprob_chunk_tokens": chunk}
        split = make_strategy(folder, train=train)
        split.module.double()
        assert relative_error(compute_gradient(split, batch), expected) < 1e-10
    tiled = make_strategy(folder, run={"deterministic": True})
    tiled.module.double()
    assert relative_error(compute_gradient(tiled, batch), expected) < 1e-10


def test_the_gradient_is_that_of_a_plain_transformers_model(folder: Path):
    strategy = make_strategy(folder)
    strategy.module.double()
    batch = random_batch(LENGTHS)
    actual = compute_gradient(strategy, batch)

    plain = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    total = torch.zeros((), dtype=torch.float64)
    for b, start in enumerate(batch.offsets_B1[:-1]):
        cut = slice(start, start + batch.lengths_B[b])
        ids = torch.as_tensor(batch.token_ids_N[cut]).long()
        logits = plain(ids[None]).logits[0, :-1] / float(batch.temperature_B[b])
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        behaviour = torch.as_tensor(batch.logprobs_N[cut])[1:].double()
        advantages = torch.as_tensor(batch.advantages_N[cut])[1:].double()
        ratio = (logprobs - behaviour).exp()
        terms = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        total -= (terms * torch.as_tensor(batch.weights_N[cut])[1:]).sum()
    total.backward()
    reference = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert relative_error(actual, reference) < 1e-10


def test_a_pad_token_that_ends_sequences_gets_the_same_gradient_on_every_path(tmp_path: Path):
    folder = save_tiny(tmp_path / "tiny", hidden=32)
    config = json.loads((folder / "config.json").read_text())
    config["pad_token_id"] = config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    batch = random_batch(LENGTHS)
    ids = np.array(batch.token_ids_N)
    ids[batch.offsets_B1[:-1] + 1] = config["eos_token_id"]
    batch = replace(batch, token_ids_N=ids)

    def compute_row_grad(**sections: dict[str, Any]) -> torch.Tensor:
        strategy = make_strategy(folder, **sections)
        compute_gradient(strategy, batch)
        embedding: Any = strategy.module.get_submodule("model.embed_tokens")
        return embedding.weight.grad[config["eos_token_id"]]

    fused_path, module_path = compute_row_grad(), compute_row_grad(run={"deterministic": True})
    assert fused_path.norm() > 0
    assert relative_error(module_path, fused_path) < 1e-4


def test_at_the_first_step_the_ratio_to_the_own_log_probs_is_one(folder: Path):
    seen: list[torch.Tensor] = []

    def record(inputs: LossInputs) -> Loss:
        seen.append((inputs.logprobs_T - inputs.old_T).exp())
        return policy_loss(inputs)

    strategy = make_strategy(folder, algorithm={"correction": "none"})
    batch = random_batch(LENGTHS)
    strategy.forward_backward(replace(batch, old_logprobs_N=strategy.logprobs(batch)), record)
    torch.testing.assert_close(torch.cat(seen), torch.ones(38), rtol=0, atol=1e-6)


def test_on_its_own_log_probs_a_policy_has_no_mismatch(folder: Path):
    strategy = make_strategy(folder)
    batch = random_batch(LENGTHS)
    report = strategy.forward_backward(
        replace(batch, logprobs_N=strategy.logprobs(batch)),
        lambda inputs: weighted_loss(inputs, dppo_tv(inputs, DppoTvLoss())),
    )
    assert report.sums["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert report.maxima["probability_change"] == pytest.approx(0, abs=1e-6)
    assert report.sums["clip_share"] == 0


def test_a_small_mismatch_keeps_its_digits(folder: Path):
    """k3 of a log-ratio d is about d^2 / 2, which would be lost in a float32 sum of 1 + d."""
    strategy = make_strategy(folder)
    strategy.module.double()
    batch = random_batch([6])
    own_N = strategy.logprobs(batch)
    strategy.module.float()
    report = strategy.forward_backward(replace(batch, logprobs_N=own_N - 1e-3), policy_loss)
    assert report.sums["mismatch_kl"] / report.tokens == pytest.approx(5e-7, rel=0.01)


def test_a_model_with_other_layers_than_attention_is_refused(folder: Path, tmp_path: Path):
    """The state of such layers would carry over from one packed sequence to the next."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen3_next", "layer_types": ["full_attention", "linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"layers of type \['linear_attention'\]"):
        make_strategy(tmp_path)


def test_a_model_in_float16_computes_log_probs_and_is_not_trained(folder: Path):
    """Without loss scaling, gradients of a large batch underflow."""
    strategy = make_strategy(folder, model={"path": str(folder), "dtype": "float16"})
    batch = random_batch([6])
    assert np.isfinite(strategy.logprobs(batch)).all()
    with pytest.raises(ConfigError, match=r"float16 cannot be trained.*bfloat16 or float32"):
        strategy.forward_backward(batch, policy_loss)


def test_without_an_old_policy_the_behaviour_policy_replaces_it(folder: Path):
    seen: list[LossInputs] = []

    def record(inputs: LossInputs) -> Loss:
        seen.append(inputs)
        return policy_loss(inputs)

    strategy = make_strategy(folder, algorithm={"correction": "bypass"})
    batch = random_batch([5, 5])
    strategy.forward_backward(batch, record)
    strategy.forward_backward(replace(batch, old_logprobs_N=batch.logprobs_N - 1), record)
    assert torch.equal(seen[0].old_T, seen[0].behaviour_T)
    torch.testing.assert_close(seen[1].old_T, seen[1].behaviour_T - 1)
    assert seen[0].reference_T is None
    assert seen[0].sequence_T.tolist() == [0, 0, 0, 1, 1, 1]


def test_the_report_sums_over_all_micro_batches(folder: Path):
    batch = random_batch(LENGTHS)
    reports = [
        make_strategy(folder, train={"tokens_per_microbatch": tokens}).forward_backward(
            batch, policy_loss
        )
        for tokens in (10_000, 10)
    ]
    assert reports[0].tokens == reports[1].tokens == sum(LENGTHS) - 2 * len(LENGTHS)
    assert {"entropy", "mismatch_kl", "clip_share"} <= reports[0].sums.keys()
    for name, value in reports[0].sums.items():
        assert reports[1].sums[name] == pytest.approx(value, rel=1e-5, abs=1e-5)
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-5)
    assert reports[1].maxima["probability_change"] == pytest.approx(
        reports[0].maxima["probability_change"]
    )


def test_the_loss_sees_every_stream_that_the_batch_carries_of_its_counted_tokens(folder: Path):
    seen: list[LossInputs] = []

    def record(inputs: LossInputs) -> Loss:
        seen.append(inputs)
        return policy_loss(inputs)

    strategy = make_strategy(folder)
    batch = random_batch([4, 5], prompt=3)  # counted: tokens 3; 7, 8
    numbers_N = np.arange(batch.tokens, dtype=np.float64)
    ids_NK = (np.arange(2 * batch.tokens, dtype=np.int32) % 60).reshape(-1, 2)
    strategy.forward_backward(
        replace(
            batch,
            group_B=np.array([7, 3], np.int32),
            version=5,
            versions_N=np.where(batch.loss_mask_N, 2, NOT_SAMPLED).astype(np.int32),
            scores_B=np.array([0.25, -1.0]),
            component_N=np.repeat(np.array([1, 0], np.int8), batch.lengths_B),
            reference_logprobs_N=-numbers_N,
            kl_weights_N=numbers_N + 10,
            entropy_weights_N=numbers_N + 20,
            teacher_ids_NK=ids_NK,
            teacher_top_NK=np.stack([-numbers_N, -numbers_N - 1], axis=1),
        ),
        record,
    )
    [inputs] = seen  # the longer sample is first
    assert inputs.reference_T is not None
    assert inputs.reference_T.tolist() == [-7, -8, -3]
    assert inputs.teacher_TK is not None
    assert inputs.teacher_TK.tolist() == [[-7, -8], [-8, -9], [-3, -4]]
    assert inputs.student_TK is not None
    assert inputs.student_TK.shape == (3, 2)
    assert inputs.student_TK.requires_grad
    assert inputs.entropy_T is not None
    assert inputs.entropy_T.requires_grad
    expected_inputs = {
        "scores_T": [-1, -1, 0.25],
        "pair_T": [0, 0, 1],
        "age_T": [3, 3, 3],
        "component_T": [0, 0, 1],
        "kl_weights_T": [17, 18, 13],
        "entropy_weights_T": [27, 28, 23],
    }
    assert {name: getattr(inputs, name).tolist() for name in expected_inputs} == expected_inputs


def test_the_students_log_probs_of_the_teachers_tokens_are_those_of_the_tokens_themselves(
    folder: Path,
):
    """If the teacher's most likely token is the sampled one, both log-probs are equal."""
    seen: list[LossInputs] = []

    def record(inputs: LossInputs) -> Loss:
        seen.append(inputs)
        return policy_loss(inputs)

    strategy = make_strategy(folder)
    batch = random_batch([6, 7])
    strategy.forward_backward(
        replace(batch, teacher_ids_NK=batch.token_ids_N[:, None].copy()), record
    )
    [inputs] = seen
    assert inputs.student_TK is not None
    torch.testing.assert_close(inputs.student_TK[:, 0], inputs.logprobs_T, rtol=0, atol=1e-6)


def test_a_batch_without_an_entropy_term_gives_the_loss_no_entropy(folder: Path):
    """The graph of the entropy over the full vocabulary is not kept."""
    seen: list[LossInputs] = []

    def record(inputs: LossInputs) -> Loss:
        seen.append(inputs)
        return policy_loss(inputs)

    make_strategy(folder).forward_backward(random_batch([5]), record)
    assert seen[0].entropy_T is None
    assert seen[0].student_TK is None


@pytest.mark.parametrize(("pipeline", "parts"), [("dpo", [2, 2]), ("sft", [1, 1, 1, 1])])
def test_only_a_loss_of_pairs_keeps_pairs_in_one_micro_batch(
    folder: Path, pipeline: str, parts: list[int]
):
    recipe = recipe_of(folder, pipeline=pipeline, train={"tokens_per_microbatch": 6})
    strategy = LocalStrategy(recipe)
    cut = strategy.microbatches(random_batch([4, 5, 6, 7]))
    assert [len(part) for part in cut] == parts


def test_tokens_that_were_not_sampled_have_no_mismatch(folder: Path):
    """In supervised training the completions come from a file, so there is no behaviour policy."""
    batch = random_batch([6])
    batch = replace(batch, versions_N=np.full_like(batch.versions_N, NOT_SAMPLED))
    report = make_strategy(folder).forward_backward(batch, policy_loss)
    assert "mismatch_kl" not in report.sums
    assert report.maxima == {}


def test_a_batch_with_an_empty_mask_trains_nothing(folder: Path):
    strategy = make_strategy(folder)
    before = fingerprint(strategy.weights())
    batch = random_batch([4, 4])
    empty = replace(batch, loss_mask_N=np.zeros_like(batch.loss_mask_N))
    report = strategy.forward_backward(empty, policy_loss)
    assert (report.loss, report.tokens) == (0.0, 0)
    assert not strategy.step().skipped
    assert fingerprint(strategy.weights()) == before
    assert not strategy.logprobs(empty).any()


def test_masked_tokens_cannot_poison_the_gradient(folder: Path):
    strategy = make_strategy(folder)
    batch = random_batch([6, 6])
    expected = compute_gradient(strategy, batch)
    poison = np.where(batch.loss_mask_N, batch.advantages_N, np.nan).astype(np.float32)
    assert torch.equal(compute_gradient(strategy, replace(batch, advantages_N=poison)), expected)


def test_a_loss_that_is_not_a_number_is_skipped_and_nothing_is_written(folder: Path):
    strategy = make_strategy(folder)
    batch = random_batch([6, 6])
    before = fingerprint(strategy.weights())
    bad = replace(batch, advantages_N=np.full_like(batch.advantages_N, np.nan))
    strategy.forward_backward(bad, policy_loss)
    assert strategy.step().skipped
    assert fingerprint(strategy.weights()) == before
    strategy.forward_backward(batch, policy_loss)
    assert not strategy.step().skipped
    assert fingerprint(strategy.weights()) != before


def test_a_step_on_a_positive_advantage_makes_the_tokens_more_likely(folder: Path):
    strategy = make_strategy(folder)
    batch = random_batch(LENGTHS)
    batch = replace(batch, advantages_N=np.ones_like(batch.advantages_N))
    before = strategy.logprobs(batch)
    for _ in range(3):
        fresh = replace(batch, old_logprobs_N=strategy.logprobs(batch))
        strategy.forward_backward(fresh, policy_loss)
        strategy.step()
    assert strategy.logprobs(batch)[batch.loss_mask_N].mean() > before[batch.loss_mask_N].mean()


def test_the_schedule_spans_the_runs_optimizer_steps(folder: Path):
    train = {
        "optimizer": {"lr": 8.0},
        "schedule": {"shape": "linear"},
        "minibatches": 2,
        "epochs": 2,
    }
    strategy = make_strategy(folder, run={"steps": 2}, train=train)
    assert strategy.optimizer.total_steps == 8
    assert strategy.optimizer.next_lr == pytest.approx(7.0)


def train_once(strategy: LocalStrategy, seed: int) -> None:
    strategy.forward_backward(random_batch(LENGTHS, seed=seed), policy_loss)
    assert not strategy.step().skipped


def test_deterministic_training_does_not_depend_on_the_order_of_the_batch(folder: Path):
    batch = random_batch(LENGTHS)
    fingerprints: set[str] = set()
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        strategy = make_strategy(folder, run={"deterministic": True})
        strategy.forward_backward(batch.take(order), policy_loss)
        strategy.step()
        fingerprints.add(fingerprint(strategy.weights()))
    assert len(fingerprints) == 1


def test_deterministic_log_probs_do_not_depend_on_neighbours_or_micro_batches(folder: Path):
    batch = random_batch(LENGTHS)
    strategy = make_strategy(folder, run={"deterministic": True})
    every = strategy.logprobs(batch)
    split_logprobs = make_strategy(
        folder, run={"deterministic": True}, train={"tokens_per_microbatch": 1}
    ).logprobs(batch)
    assert np.array_equal(every, split_logprobs)
    for b in range(batch.rows):
        own = every[batch.offsets_B1[b] : batch.offsets_B1[b + 1]]
        assert np.array_equal(strategy.logprobs(batch.take([b])), own)


def test_saved_state_is_files_without_pickle(folder: Path, tmp_path: Path):
    strategy = make_strategy(folder)
    train_once(strategy, 0)
    strategy.save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"learner.safetensors", "learner.json"}
    assert json.loads((tmp_path / "learner.json").read_text()) == {"steps": 1}


def test_a_state_cut_short_is_refused(folder: Path, tmp_path: Path):
    strategy = make_strategy(folder)
    strategy.save(tmp_path)
    file = tmp_path / "learner.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cannot be read"):
        strategy.load(tmp_path)


def test_loading_restores_the_random_state(folder: Path, tmp_path: Path):
    strategy = make_strategy(folder)
    strategy.save(tmp_path)
    expected = torch.rand(3)
    strategy.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_greedy_tokens_of_an_export_in_transformers_are_those_of_the_learner(
    folder: Path, tmp_path: Path
):
    strategy = make_strategy(folder, train={"optimizer": {"lr": 0.02}})
    for seed in range(3):
        train_once(strategy, seed)
    strategy.export(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt_ids = torch.tensor([tokenizer.encode("1+2=")])
    generated = plain.generate(prompt_ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
    layout = PackedLayout.of([len(generated)])
    with torch.no_grad():
        actual = strategy.module(
            input_ids=generated[None],
            position_ids=layout.position_ids_N[None],
            use_cache=False,
            layout=layout,
        ).logits[0]
    assert actual.argmax(-1)[3:-1].tolist() == generated[4:].tolist()
    assert fingerprint(plain.named_parameters()) == fingerprint(strategy.weights())


def test_a_frozen_scorer_gives_log_probs_and_refuses_to_train(folder: Path):
    scorer = LocalStrategy(recipe_of(folder), trainable=False)
    batch = random_batch([5])
    assert np.array_equal(scorer.logprobs(batch), make_strategy(folder).logprobs(batch))
    assert not any(p.requires_grad for p in scorer.module.parameters())
    with pytest.raises(ModelError, match="frozen"):
        scorer.forward_backward(batch, policy_loss)
    with pytest.raises(ModelError, match="frozen"):
        scorer.step()


def test_ids_alone_decide_the_micro_batches_of_a_deterministic_run(folder: Path):
    train = {"tokens_per_microbatch": 15}
    strategy = make_strategy(folder, run={"deterministic": True}, train=train)
    batch = random_batch(LENGTHS)

    def cut(of: Batch) -> list[list[SampleId]]:
        return [[of.uids[b] for b in part] for part in strategy.microbatches(of)]

    assert cut(batch.take([4, 2, 0, 5, 1, 3])) == cut(batch)
    assert [len(part) for part in cut(batch)] == [1, 1, 2, 1, 1]
