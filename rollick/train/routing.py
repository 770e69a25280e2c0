"""The loss that spreads rows over the experts of a mixture, the same for any split of a batch.

Of each layer: E * sum over experts of (share of rows that chose it) * (mean probability of it).
It is top_k where all experts are chosen equally often, and more where they are not (Switch
Transformer, arXiv 2101.03961; there with one choice for each row). Choices have no gradient, so
with the counts of the *whole* batch known it is a plain sum over rows, and any micro-batches and
ranks give the same gradient. Counted are the rows that predict trained tokens: these are the same
however a batch is packed.

Legend: L layers with experts, E experts, n rows.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from rollick.errors import ModelError


class Routing(NamedTuple):
    """Of some rows: how often each expert was chosen, and the sum of its probabilities."""

    counts_LE: torch.Tensor
    sums_LE: torch.Tensor
    """With a gradient."""


class RouterLog:
    """Listens to the routers of a model while it is recording."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self._logits: list[torch.Tensor] | None = None
        self._top_k = int(getattr(config, "num_experts_per_tok", None) or 0)
        routers = _routers(model)
        if not routers or not self._top_k:
            raise ModelError(
                f"train.expert_balance is set, and {type(model).__name__} has no experts",
                fix="remove train.expert_balance",
            )
        for router, index in routers:
            router.register_forward_hook(self._hook(index))

    @contextmanager
    def recording(self) -> Generator[None]:
        """Inside, one forward is listened to; a layer that is computed again later is not."""
        self._logits = []
        yield
        self._ended, self._logits = self._logits, None

    def of_rows(self, rows: torch.Tensor) -> Routing:
        """What the routers said of these rows in the forward that was recorded."""
        chances = [logits[rows].softmax(-1) for logits in self._ended]
        self._ended = []
        with torch.no_grad():
            chosen = [chance.topk(self._top_k, dim=-1).indices.flatten() for chance in chances]
            experts = chances[0].shape[-1]
            counts = [torch.bincount(each, minlength=experts) for each in chosen]
        dtype = chances[0].dtype
        return Routing(torch.stack(counts).to(dtype), torch.stack([c.sum(0) for c in chances]))

    def _hook(self, index: int) -> Any:
        def listen(_: nn.Module, __: Any, output: Any) -> None:
            if self._logits is not None:
                logits = output[index] if isinstance(output, tuple) else output
                self._logits.append(logits.flatten(0, -2))

        return listen


def balance_loss(routing: Routing, *, counts_LE: torch.Tensor, rows: int) -> torch.Tensor:
    """What these rows add to the loss of a batch of `rows` rows with these counts."""
    layers, experts = counts_LE.shape
    shares_LE = counts_LE / max(rows, 1)
    return experts / layers * (shares_LE * routing.sums_LE).sum() / max(rows, 1)


def _routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Routers and where in their output the logits are: the model says which of its modules."""
    recorders: Any = getattr(model.base_model, "_can_record_outputs", None) or {}
    found: list[tuple[nn.Module, int]] = []
    for recorder in _as_list(recorders.get("router_logits")):
        kind = getattr(recorder, "target_class", recorder)
        index = int(getattr(recorder, "index", 0))
        found += [(part, index) for part in model.modules() if isinstance(part, kind)]
    return found


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
