"""AdamW over master weights: torch's results, no lost updates, no step on a non-finite gradient."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch
from torch import nn

from rollick.config.schema import OptimizerConfig, ScheduleConfig
from rollick.errors import CheckpointError
from rollick.trainer.optimizer import MasterAdamW, learning_rate


def make_optimizer(
    named: dict[str, nn.Parameter],
    *,
    schedule: ScheduleConfig | None = None,
    lr: float = 0.1,
    **options: float,
) -> MasterAdamW:
    return MasterAdamW(
        named.items(),
        OptimizerConfig.model_validate(options),
        peak_lr=lr,
        schedule=schedule or ScheduleConfig(),
        total_steps=6,
    )


def test_the_schedules_by_hand():
    def list_rates(**schedule: object) -> list[float]:
        options = ScheduleConfig.model_validate(schedule)
        return [
            pytest.approx(learning_rate(s, peak=8.0, schedule=options, total=6))
            for s in range(1, 8)
        ]

    assert list_rates() == [8, 8, 8, 8, 8, 8, 8]
    assert list_rates(warmup_steps=4) == [2, 4, 6, 8, 8, 8, 8]
    assert list_rates(shape="linear", warmup_steps=2) == [4, 8, 6, 4, 2, 0, 0]
    assert list_rates(shape="linear", warmup_steps=2, final=0.5) == [4, 8, 7, 6, 5, 4, 4]
    assert list_rates(shape="cosine", warmup_steps=4, final=0.25) == [2, 4, 6, 8, 5, 2, 2]


def test_float32_parameters_move_as_with_torchs_adamw():
    torch.manual_seed(0)
    matrix, vector = torch.randn(3, 4), torch.randn(4)
    parameters = {"m": nn.Parameter(matrix.clone()), "v": nn.Parameter(vector.clone())}
    torch_parameters = [nn.Parameter(matrix.clone()), nn.Parameter(vector.clone())]
    optimizer = make_optimizer(parameters, weight_decay=0.3, grad_clip=1.5)
    reference = torch.optim.AdamW(
        [
            {"params": torch_parameters[:1], "weight_decay": 0.3},
            {"params": torch_parameters[1:], "weight_decay": 0.0},
        ],
        lr=0.1,
    )
    for _ in range(5):
        gradients = [torch.randn(3, 4), torch.randn(4)]
        for own_parameter, torch_parameter, gradient in zip(
            parameters.values(), torch_parameters, gradients, strict=True
        ):
            own_parameter.grad, torch_parameter.grad = gradient.clone(), gradient.clone()
        norm = nn.utils.clip_grad_norm_(torch_parameters, 1.5)
        reference.step()
        assert optimizer.step().grad_norm == pytest.approx(norm.item())
    torch.testing.assert_close(list(parameters.values()), torch_parameters)


def test_a_float32_parameter_is_its_own_master_and_keeps_its_address():
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer({"p": parameter})
    address = parameter.data_ptr()
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert optimizer.masters["p"] is parameter
    assert parameter.data_ptr() == address
    torch.testing.assert_close(parameter.data, torch.full((2, 2), 0.9))


def test_masters_gather_updates_that_bfloat16_alone_would_lose():
    """Just below 1, the spacing of bfloat16 is 1/256, so an update of 1/2000 is rounded away."""
    parameter = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    address = parameter.data_ptr()
    optimizer = make_optimizer({"p": parameter}, lr=1 / 2000)
    bf16_parameter = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    torch_adamw = torch.optim.AdamW([bf16_parameter], lr=1 / 2000, weight_decay=0.0)
    for _ in range(40):
        parameter.grad = torch.ones_like(parameter)
        bf16_parameter.grad = torch.ones_like(bf16_parameter)
        optimizer.accumulate()
        optimizer.step()
        torch_adamw.step()
    assert bf16_parameter.item() == 1.0
    assert optimizer.masters["p"].item() == pytest.approx(0.98)
    assert parameter.item() == pytest.approx(0.98, abs=1 / 512)
    assert parameter.data_ptr() == address


def test_gradients_of_low_precision_parameters_add_up_in_float32():
    """256 + 1 is 256 in bfloat16."""
    parameter = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = make_optimizer({"p": parameter})
    for gradient in (256.0, 1.0, 1.0):
        parameter.grad = torch.full((1, 1), gradient, dtype=torch.bfloat16)
        optimizer.accumulate()
    assert optimizer.masters["p"].grad.item() == 258.0
    assert parameter.grad is None


@pytest.mark.parametrize("bad", [nan, inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_does_not_advance_the_schedule(
    bad: float,
):
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer({"p": parameter}, schedule=ScheduleConfig(warmup_steps=4))
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.tensors().items()}
    parameter.grad = torch.tensor([[1.0, bad], [1.0, 1.0]])
    report = optimizer.step()
    assert report.skipped
    assert isnan(report.grad_norm) or report.grad_norm == inf
    assert report.lr == pytest.approx(0.05)
    assert parameter.grad is None
    assert optimizer.steps == 1
    for name, value in optimizer.tensors().items():
        assert torch.equal(value, before[name])
    parameter.grad = torch.ones(2, 2)
    assert optimizer.step().lr == pytest.approx(0.05)


def test_a_step_without_any_gradient_moves_nothing():
    parameter = nn.Parameter(torch.ones(2, 2))
    report = make_optimizer({"p": parameter}, weight_decay=0.5).step()
    assert (report.grad_norm, report.skipped) == (0.0, False)
    assert torch.equal(parameter.data, torch.ones(2, 2))


def test_state_of_another_model_is_refused_with_both_shapes():
    small = make_optimizer({"p": nn.Parameter(torch.ones(2, 2))})
    large = make_optimizer({"p": nn.Parameter(torch.ones(3, 2))})
    with pytest.raises(CheckpointError, match=r"master\.p.*3, 2.*2, 2"):
        large.restore(small.tensors(), steps=1)
