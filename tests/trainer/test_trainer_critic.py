"""The local critic: values, gradients, saved state and offloading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_mixture import widen_norms
from transformers import AutoModelForCausalLM

from rollick.algorithms.losses import ValueInputs, value
from rollick.algorithms.objective import Loss
from rollick.config.schema.losses import ValueLoss
from rollick.data.batch import Batch
from rollick.errors import CheckpointError, ConfigError
from rollick.testing.batches import random_batch, recipe_of
from rollick.testing.tiny import save_tiny
from rollick.trainer.critic import LocalCritic
from rollick.trainer.trainable_model import OffloadedTensors

LENGTHS = [7, 12, 7, 3, 9, 12]
CLIP = 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)


def make_critic(folder: Path, **sections: dict[str, Any]) -> LocalCritic:
    sections.setdefault("critic", {"optimizer": {"lr": 1e-2}})
    return LocalCritic(recipe_of(folder, algorithm={"preset": "ppo"}, **sections))


def make_annotated_batch(lengths: list[int], *, seed: int = 0) -> Batch:
    """A batch whose trained tokens have old values and returns."""
    batch = random_batch(lengths, seed=seed)
    random = np.random.default_rng(seed + 1)
    return replace(
        batch,
        values_N=np.where(batch.loss_mask_N, random.normal(size=batch.tokens), 0),
        returns_N=np.where(batch.loss_mask_N, random.normal(size=batch.tokens), 0),
    )


def share_prompt(batch: Batch, *, tokens: int) -> Batch:
    """The batch as one group, whose samples begin with the same tokens."""
    token_ids_N = batch.token_ids_N.copy()
    for start in batch.offsets_B1[:-1]:
        token_ids_N[start : start + tokens] = token_ids_N[:tokens]
    return replace(batch, token_ids_N=token_ids_N, group_B=np.zeros_like(batch.group_B))


def value_loss(inputs: ValueInputs) -> Loss:
    actual = value(inputs, ValueLoss(clip=CLIP))
    return Loss((inputs.weights_T * actual.loss_T).sum(), actual.sums)


def compute_gradient(critic: LocalCritic, *batches: Batch) -> torch.Tensor:
    critic.optimizer.drop_gradients()
    for batch in batches:
        critic.forward_backward(batch, value_loss)
    every = [p.grad.flatten() for p in critic.module.parameters() if p.grad is not None]
    return torch.cat(every)


def relative_error(gradient: torch.Tensor, reference: torch.Tensor) -> float:
    return ((gradient - reference).norm() / reference.norm()).item()


def test_the_gradient_is_that_of_a_plain_transformers_model_with_a_value_row(folder: Path):
    critic = make_critic(folder)
    critic.module.double()
    batch = make_annotated_batch(LENGTHS)
    gradient = compute_gradient(critic, batch)

    plain = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    row = critic.module.head.weight.detach().clone()[0].requires_grad_()
    offset = critic.module.head.bias.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for b, start in enumerate(batch.offsets_B1[:-1]):
        span = slice(start, start + batch.lengths_B[b])
        ids = torch.as_tensor(batch.token_ids_N[span]).long()
        before = (plain.model(ids[None]).last_hidden_state[0, :-1] @ row) + offset
        old = torch.as_tensor(batch.values_N[span])[1:]
        returns = torch.as_tensor(batch.returns_N[span])[1:]
        clipped = old + (before - old).clamp(-CLIP, CLIP)
        worse = torch.maximum((before - returns) ** 2, (clipped - returns) ** 2)
        total += (0.5 * worse * torch.as_tensor(batch.weights_N[span])[1:]).sum()
    total.backward()
    reference = [p.grad.flatten() for p in plain.model.parameters()] + [row.grad, offset.grad]
    assert relative_error(gradient, torch.cat(reference)) < 1e-10


def test_the_gradient_does_not_depend_on_split_packing_order_or_shared_prompts(folder: Path):
    batch = share_prompt(make_annotated_batch(LENGTHS), tokens=2)
    plain = make_critic(folder, train={"share_prefix": False})
    plain.module.double()
    widen_norms(plain.module)
    expected = compute_gradient(plain, batch)
    assert relative_error(compute_gradient(plain, batch.take([5, 0, 3, 1, 4, 2])), expected) < 1e-10
    assert (
        relative_error(
            compute_gradient(plain, batch.take([0, 3]), batch.take([1, 2, 4, 5])), expected
        )
        < 1e-10
    )
    for sections in (
        {"train": {"tokens_per_microbatch": 1}},
        {"train": {"tokens_per_microbatch": 25}},
        {"run": {"deterministic": True}},
        {},
    ):
        other = make_critic(folder, **sections)
        other.module.double()
        widen_norms(other.module)
        assert relative_error(compute_gradient(other, batch), expected) < 1e-10


@pytest.mark.parametrize("share", [True, False], ids=["shared", "each by itself"])
def test_a_value_is_of_what_comes_before_the_token(folder: Path, share: bool):
    critic = make_critic(folder, train={"share_prefix": share})
    batch = share_prompt(random_batch(LENGTHS), tokens=2)
    values = critic.values(batch)
    assert values.values_N.dtype == values.last_values_B.dtype == np.float32
    assert not values.values_N[~batch.loss_mask_N].any()
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    head = critic.module.head
    for b, start in enumerate(batch.offsets_B1[:-1]):
        span = slice(start, start + batch.lengths_B[b])
        with torch.no_grad():
            ids = torch.as_tensor(batch.token_ids_N[span]).long()
            every = head(plain.model(ids[None]).last_hidden_state[0])[:, 0].numpy()
        np.testing.assert_allclose(values.values_N[span][2:], every[1:-1], atol=1e-6)
        np.testing.assert_allclose(values.last_values_B[b], every[-1], atol=1e-6)


def test_a_value_does_not_depend_on_the_sampled_token(folder: Path):
    critic, batch = make_critic(folder), random_batch([6])
    other = batch.token_ids_N.copy()
    other[4] = 4 + (other[4] - 3) % 50
    before = critic.values(batch).values_N
    after = critic.values(replace(batch, token_ids_N=other)).values_N
    assert np.array_equal(before[:5], after[:5])
    assert before[5] != after[5]


def test_tokens_outside_the_mask_and_samples_without_any_have_the_value_zero(folder: Path):
    batch = random_batch([6, 5])
    mask_N = batch.loss_mask_N.copy()
    mask_N[6:] = False
    values = make_critic(folder).values(replace(batch, loss_mask_N=mask_N))
    assert np.count_nonzero(values.values_N) == 4
    assert values.last_values_B[0] != 0
    assert values.last_values_B[1] == 0


def test_values_start_near_zero_and_follow_from_the_seed_alone(folder: Path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = make_critic(folder)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    same, other = make_critic(folder), make_critic(folder, run={"seed": 1})
    assert torch.equal(one.module.head.weight, same.module.head.weight)
    assert not torch.equal(one.module.head.weight, other.module.head.weight)
    assert one.module.head.bias.item() == 0
    spread = np.abs(one.values(random_batch(LENGTHS)).values_N).max()
    assert 0 < spread < 0.05


def test_the_value_head_is_float32_over_a_body_of_any_dtype(folder: Path):
    model = {"path": str(folder), "dtype": "bfloat16"}
    critic = make_critic(folder, critic={"model": model})
    assert {p.dtype for p in critic.module.decoder.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in critic.module.head.parameters()} == {torch.float32}


def test_a_critic_may_have_its_own_base_model(folder: Path, tmp_path: Path):
    small = save_tiny(tmp_path, hidden=16, layers=1)
    critic = make_critic(folder, critic={"model": {"path": str(small)}})
    assert critic.module.head.in_features == 16
    assert critic.values(random_batch([5])).values_N.shape == (5,)


def test_values_move_towards_their_returns(folder: Path):
    critic, batch = make_critic(folder), make_annotated_batch(LENGTHS)
    errors: list[float] = []
    for _ in range(30):
        now_N = critic.values(batch).values_N
        report = critic.forward_backward(replace(batch, values_N=now_N), value_loss)
        errors.append(report.sums["value_error"] / report.tokens)
        assert not critic.step().skipped
    assert report.tokens == sum(LENGTHS) - 2 * len(LENGTHS)
    assert errors[-1] < 0.1 * errors[0]


def test_the_schedule_of_the_critic_includes_the_critics_warm_up_steps(folder: Path):
    train = {"schedule": {"shape": "linear"}, "minibatches": 2, "epochs": 2}
    critic = make_critic(
        folder,
        run={"steps": 4},
        train=train,
        critic={"optimizer": {"lr": 16.0}, "warmup_steps": 1},
    )
    assert critic.optimizer.total_steps == 16
    assert critic.optimizer.next_lr == pytest.approx(15.0)
    assert critic.recipe.optimizer_steps == 12


def test_a_return_that_is_not_a_number_is_skipped_and_nothing_is_written(folder: Path):
    critic, batch = make_critic(folder), make_annotated_batch([6, 6])
    before = critic.values(batch).values_N
    bad = np.where(batch.loss_mask_N, np.nan, batch.returns_N)
    critic.forward_backward(replace(batch, returns_N=bad), value_loss)
    assert critic.step().skipped
    assert np.array_equal(critic.values(batch).values_N, before)
    critic.forward_backward(batch, value_loss)
    assert not critic.step().skipped
    assert not np.array_equal(critic.values(batch).values_N, before)


def test_numbers_outside_the_mask_cannot_poison_the_gradient(folder: Path):
    critic, batch = make_critic(folder), make_annotated_batch([6, 6])
    expected = compute_gradient(critic, batch)
    poison = np.where(batch.loss_mask_N, batch.returns_N, np.nan)
    assert torch.equal(compute_gradient(critic, replace(batch, returns_N=poison)), expected)


def test_a_batch_without_returns_is_refused(folder: Path):
    with pytest.raises(ConfigError, match="no values and returns"):
        make_critic(folder).forward_backward(random_batch([5]), value_loss)


def test_deterministic_values_do_not_depend_on_neighbours_or_micro_batches(folder: Path):
    batch = random_batch(LENGTHS)
    critic = make_critic(folder, run={"deterministic": True})
    every = critic.values(batch)
    split_values = make_critic(
        folder, run={"deterministic": True}, train={"tokens_per_microbatch": 1}
    ).values(batch)
    assert np.array_equal(every.values_N, split_values.values_N)
    assert np.array_equal(every.last_values_B, split_values.last_values_B)
    for b in range(batch.rows):
        own = critic.values(batch.take([b]))
        span = slice(batch.offsets_B1[b], batch.offsets_B1[b + 1])
        assert np.array_equal(own.values_N, every.values_N[span])
        assert own.last_values_B[0] == every.last_values_B[b]


def test_deterministic_training_does_not_depend_on_the_order_of_the_batch(folder: Path):
    batch = make_annotated_batch(LENGTHS)
    actual: list[np.ndarray[Any, Any]] = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        critic = make_critic(folder, run={"deterministic": True})
        critic.forward_backward(batch.take(order), value_loss)
        critic.step()
        actual.append(critic.values(batch).values_N)
    assert np.array_equal(actual[0], actual[1])


def test_a_restored_critic_continues_like_the_saved_one(folder: Path, tmp_path: Path):
    critic = make_critic(folder)

    def train(trained: LocalCritic, seed: int) -> None:
        trained.forward_backward(make_annotated_batch(LENGTHS, seed=seed), value_loss)
        trained.step()

    train(critic, 0)
    critic.save(tmp_path)
    restored = make_critic(folder)
    restored.load(tmp_path)
    train(critic, 1)
    train(restored, 1)
    batch = random_batch(LENGTHS)
    assert np.array_equal(critic.values(batch).values_N, restored.values(batch).values_N)


def test_its_files_hold_the_decoder_and_the_row_and_no_head_over_the_vocabulary(
    folder: Path, tmp_path: Path
):
    make_critic(folder).save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"critic.safetensors", "critic.json"}
    with safe_open(tmp_path / "critic.safetensors", "pt") as saved:
        names = set(saved.keys())
    assert {"master.head.weight", "master.decoder.embed_tokens.weight"} <= names
    assert not any("lm_head" in name or name.startswith("rng") for name in names)


def test_a_folder_without_a_critic_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="the critic's state in"):
        make_critic(folder).load(tmp_path)


def test_a_sleeping_role_is_saved_too(folder: Path, tmp_path: Path):
    critic, batch = make_critic(folder), make_annotated_batch(LENGTHS)
    critic.forward_backward(batch, value_loss)
    critic.step()
    before = critic.values(batch).values_N
    critic.save(tmp_path / "awake")
    # On a CPU `sleep` does nothing. On a GPU it does this.
    critic._offloaded.move_to_host(critic.optimizer.tensors())
    assert critic.module.head.weight.untyped_storage().size() == 0
    critic.save(tmp_path / "asleep")
    critic.wake()
    for name in ("critic.safetensors", "critic.json"):
        assert (tmp_path / "awake" / name).read_bytes() == (tmp_path / "asleep" / name).read_bytes()
    assert np.array_equal(critic.values(batch).values_N, before)


def test_offloaded_tensors_free_their_memory_and_are_restored_with_all_views():
    one, two = torch.arange(4.0), torch.arange(3.0)
    view, stays = one.view(2, 2), torch.ones(2)
    offloaded = OffloadedTensors()
    offloaded.move_to_host({"one": one, "view": view, "two": two, "stays": stays}, keep=[stays])
    assert offloaded
    assert offloaded.copies.keys() == {"one", "two"}
    assert [t.untyped_storage().size() for t in (one, two)] == [0, 0]
    assert stays.tolist() == [1, 1]
    offloaded.restore_from_host()
    assert not offloaded
    assert (view.tolist(), two.tolist()) == ([[0, 1], [2, 3]], [0, 1, 2])
