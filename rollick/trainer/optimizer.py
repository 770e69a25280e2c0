"""AdamW over float32 masters, which updates the parameters in place.

A float32 (or wider) parameter is its own master. A bfloat16 or float16 parameter has a float32
copy that accumulates updates too small for it; each step writes the rounded copy back.

    backward -> accumulate (gradients to the masters) -> step (clip, AdamW, write back)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import cos, pi

import torch
from torch import Tensor, nn

from rollick.config.schema import OptimizerConfig, ScheduleConfig
from rollick.errors import CheckpointError, ConfigError
from rollick.trainer.strategy import OptimReport

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of each parameter, by torch's names."""

TotalNorm = Callable[[Mapping[str, Tensor]], Tensor]
"""Computes the norm of all gradients, by parameter name; for shards, over all ranks."""


def learning_rate(step: int, *, peak: float, schedule: ScheduleConfig, total: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of `total`.

    The warm-up's last step is the first at the peak; step `total` is at `final` times the peak.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.shape == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    decay = progress if schedule.shape == "linear" else (1 - cos(pi * progress)) / 2
    return peak * (1 - (1 - schedule.final) * decay)


class MasterAdamW:
    """The optimizer of a set of named parameters. `steps` counts updates; skips do not count."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        optimizer: OptimizerConfig,
        *,
        peak_lr: float,
        schedule: ScheduleConfig,
        total_steps: int,
        total_norm: TotalNorm | None = None,
    ) -> None:
        self._total_norm = total_norm or _total_norm
        self.config = optimizer
        self.peak_lr = peak_lr
        self.schedule = schedule
        self.total_steps = total_steps
        self.steps = 0
        self.parameters = dict(named)
        self.masters = {name: _master_of(value) for name, value in self.parameters.items()}
        matrices = [master for master in self.masters.values() if master.ndim >= 2]
        vectors = [master for master in self.masters.values() if master.ndim < 2]
        self.adamw = torch.optim.AdamW(
            # Weight decay applies to matrices, not to vectors (norms, biases).
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            weight_decay=optimizer.weight_decay,
            lr=peak_lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )

    @property
    def next_lr(self) -> float:
        return learning_rate(
            self.steps + 1, peak=self.peak_lr, schedule=self.schedule, total=self.total_steps
        )

    def accumulate(self) -> None:
        """Add the gradients of low-precision parameters to their masters', in float32."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def step(self) -> OptimReport:
        """Apply one update. Skips it, and the schedule, if the gradient is not finite."""
        lr = self.next_lr
        norm = self._total_norm({n: m.grad for n, m in self.masters.items() if m.grad is not None})
        if not torch.isfinite(norm):
            self.drop_gradients()
            return OptimReport(grad_norm=norm.item(), lr=lr, skipped=True)
        nn.utils.clip_grads_with_norm_(self.masters.values(), self.config.grad_clip, norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.drop_gradients()
        self.write_parameters()
        self.steps += 1
        return OptimReport(grad_norm=norm.item(), lr=lr)

    def drop_gradients(self) -> None:
        for tensor in [*self.masters.values(), *self.parameters.values()]:
            tensor.grad = None

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Copy the masters, rounded, into parameters that are not their own master."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def tensors(self) -> dict[str, Tensor]:
        """Live masters and moments by name, for checkpoints and offloading."""
        tensors = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            moments = self.adamw.state.get(master, {})
            tensors |= {f"{moment}.{name}": value for moment, value in moments.items()}
        return tensors

    def gradients(self) -> dict[str, Tensor]:
        """Live gradients accumulated since the last step."""
        gradients = {f"gradient.{name}": value.grad for name, value in self.parameters.items()}
        gradients |= {f"master_gradient.{name}": value.grad for name, value in self.masters.items()}
        return {name: value for name, value in gradients.items() if value is not None}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor], *, steps: int) -> None:
        """Restore the tensors of `tensors` exactly, and the number of updates."""
        check_same_model(
            {f"master.{name}": master.shape for name, master in self.masters.items()},
            {name: value.shape for name, value in saved.items() if name.startswith("master.")},
        )
        self.adamw.state.clear()
        for name, master in self.masters.items():
            master.copy_(saved[f"master.{name}"])
            if f"step.{name}" in saved:
                self.adamw.state[master] = {
                    moment: saved[f"{moment}.{name}"].to(master.device, copy=True)
                    for moment in MOMENTS
                }
        self.write_parameters()
        self.drop_gradients()
        self.steps = steps


def check_gradient_dtype(dtype: torch.dtype) -> None:
    """Raises for float16: gradients of a large batch would underflow, because losses are not
    scaled."""
    if dtype is torch.float16:
        raise ConfigError(
            "a model in float16 cannot be trained: its gradients would underflow to zero",
            fix="set model.dtype=bfloat16 or float32",
        )


def check_same_model(
    expected: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]]
) -> None:
    """Raises unless the saved shapes, by name, are those of this model."""
    names = expected.keys() | saved.keys()
    if mismatched := sorted(name for name in names if expected.get(name) != saved.get(name)):
        current_shape, saved_shape = expected.get(mismatched[0]), saved.get(mismatched[0])
        raise CheckpointError(
            f"the saved optimizer state is from another model: {len(mismatched)} parameters "
            f"differ, such as {mismatched[0]!r} ({current_shape} here, {saved_shape} saved)",
            fix="resume with the model that the run started with",
        )


def _total_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    return nn.utils.get_total_norm(list(gradients.values())) if gradients else torch.zeros(())


def _master_of(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().requires_grad_()
