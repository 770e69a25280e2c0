"""AdamW over float32 masters, which writes the parameters in place at fixed addresses.

A float32 (or wider) parameter is its own master. A bfloat16 or float16 parameter has a float32
copy that gathers updates too small for it; after each step the rounded copy is written back. Also
here: the learning rate of each step, clipping, and refusing gradients that are not finite.

    backward -> accumulate (gradients to the masters) -> step (clip, AdamW, write back)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import cos, pi

import torch
from torch import nn

from rollick.config.schema import OptimizerConfig, ScheduleConfig
from rollick.errors import CheckpointError
from rollick.train.strategy import OptimReport

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of each parameter, by its own names."""

TotalNorm = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""The norm of all gradients, by the names of their parameters."""


def learning_rate(step: int, *, peak: float, schedule: ScheduleConfig, total: int) -> float:
    """Of optimizer step number `step`, counted from 1, of `total`.

    The warm-up's last step is the first at the peak; step `total` is at `final` times the peak.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.shape == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    fall = done if schedule.shape == "linear" else (1 - cos(pi * done)) / 2
    return peak * (1 - (1 - schedule.final) * fall)


class MasterAdamW:
    """The optimizer of a set of named parameters. `steps` counts updates; skips do not count."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        optimizer: OptimizerConfig,
        *,
        schedule: ScheduleConfig,
        total_steps: int,
        total_norm: TotalNorm | None = None,
    ) -> None:
        """`total_norm` is for parameters of which this process has a part only."""
        self._total_norm = total_norm or _total_norm
        self.config = optimizer
        self.schedule = schedule
        self.total_steps = total_steps
        self.steps = 0
        self.parameters = dict(named)
        self.masters = {name: _master_of(value) for name, value in self.parameters.items()}
        self.adamw = torch.optim.AdamW(
            _decay_groups(self.masters.values(), optimizer.weight_decay),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )

    @property
    def next_lr(self) -> float:
        return learning_rate(
            self.steps + 1, peak=self.config.lr, schedule=self.schedule, total=self.total_steps
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
        """One update; or none, and no progress of the schedule, if the gradient is not finite."""
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
        """Round the masters into the parameters, where they are not the same tensor."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name, live: what a checkpoint holds and what sleep moves."""
        held = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for moment, value in self.adamw.state.get(master, {}).items():
                held[f"{moment}.{name}"] = value
        return held

    def gradients(self) -> dict[str, torch.Tensor]:
        """What has been accumulated since the last step, live."""
        held = {f"gradient.{name}": value.grad for name, value in self.parameters.items()}
        held |= {f"master_gradient.{name}": value.grad for name, value in self.masters.items()}
        return {name: value for name, value in held.items() if value is not None}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, torch.Tensor], *, steps: int) -> None:
        """Take what `tensors` gave, bit for bit, and the count of updates."""
        self._demand_match(saved)
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

    def _demand_match(self, saved: Mapping[str, torch.Tensor]) -> None:
        wanted = {f"master.{name}": master.shape for name, master in self.masters.items()}
        given = {name: value.shape for name, value in saved.items() if name.startswith("master.")}
        wrong = sorted(
            name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name)
        )
        if wrong:
            raise CheckpointError(
                f"the saved optimizer state is of another model: {len(wrong)} parameters differ, "
                f"such as {wrong[0]!r} ({wanted.get(wrong[0])} here, {given.get(wrong[0])} saved)",
                fix="resume with the model that the run was started with",
            )


def _total_norm(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.utils.get_total_norm(list(gradients.values())) if gradients else torch.zeros(())


def _master_of(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().requires_grad_()


def _decay_groups(
    masters: Iterable[torch.Tensor], weight_decay: float
) -> list[dict[str, list[torch.Tensor] | float]]:
    """Matrices decay; vectors (norms, biases) do not: shrinking a scale is no regularisation."""
    every = list(masters)
    return [
        {"params": [m for m in every if m.ndim >= 2], "weight_decay": weight_decay},
        {"params": [m for m in every if m.ndim < 2], "weight_decay": 0.0},
    ]
