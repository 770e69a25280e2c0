"""The weights of a native engine: updates, adapters, and moves between devices.

A plain stream is staged, compared with the expected fingerprint, and then copied into the module.
Verified weights are not staged; if their memory persists, the parameters become views of it.

Adapters are merged into the module. A merge cannot be undone without rounding, so the base weights
that have adapters are kept, and each new version is merged into them. For an engine that shares
the learner's parameters the learner keeps them.

    update(weights)  -> check everything -> module = weights
    update(adapters) -> check everything -> module = base + scale * B A
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollick.errors import EngineCorrupt, WeightError
from rollick.infer.engine import VerifiedWeights, WeightStream
from rollick.infer.weight_checks import check_fingerprint, check_shapes, stage_weights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.decoder.fused_linear import fuse_storage
from rollick.models.loading.adapter import adapted_weights, adapters_of, base_parameters
from rollick.models.loading.fingerprint import SHARES, fingerprint
from rollick.models.loading.load import empty_model, share_parameters
from rollick.types import Fingerprint, PolicyVersion


@dataclass(eq=False)
class EngineWeights:
    """The parameters of an engine's module."""

    module: nn.Module
    device: str = "cpu"
    shared: bool = False
    """Whether the parameters use a learner's storage."""
    learner_base: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Base weights that a learner keeps, unchanged."""
    _base: dict[str, Tensor] = field(default_factory=dict[str, Tensor], init=False)
    """The base weights of the parameters that have adapters merged."""
    _expected: Fingerprint | None = field(default=None, init=False)
    """The fingerprint of `_checked_weights` after the last update. None if the learner changes them
    in place."""

    @classmethod
    def share(cls, learner: nn.Module, *, device: str) -> EngineWeights:
        """Create a module over the learner's storage; weights with adapters are copies."""
        on_gpu, adapted = device.startswith("cuda"), adapted_weights(learner)
        config: Any = learner.config
        if on_gpu:
            fuse_storage(learner)
        module = empty_model(config, attention=CACHED)
        share_parameters(module, learner)
        if adapted and on_gpu:
            fuse_storage(module)
        base = base_parameters(learner)
        kept = {name: value.detach() for name, value in base if name in adapted}
        return cls(module, device=device, shared=True, learner_base=kept)

    @property
    def can_adopt(self) -> bool:
        """Captured CUDA graphs hold the addresses of parameters, so on a GPU these must stay."""
        return not self.shared and self.device.startswith("cpu")

    def accepts(self, weights: WeightStream) -> bool:
        """Shared parameters accept only adapters, which are merged into copies."""
        are_adapters = isinstance(weights, VerifiedWeights) and weights.adapter_scale is not None
        return not self.shared or (bool(self.learner_base) and are_adapters)

    def update(
        self, weights: WeightStream, version: PolicyVersion, expected: Fingerprint | None
    ) -> Fingerprint:
        if isinstance(weights, VerifiedWeights) and weights.adapter_scale is not None:
            self._merge(weights, weights.adapter_scale)
            self.record_fingerprint()
            return weights.fingerprint
        adopt = self.can_adopt
        written = write_weights(self.module, weights, version, expected=expected, adopt=adopt)
        self._base.clear()
        if isinstance(weights, VerifiedWeights) and self._match_exactly(weights):
            self._expected = written
        else:
            self.record_fingerprint()
        return written

    def open_parameters(self, names: Sequence[str]) -> list[Tensor]:
        """The memory of these parameters, for writing. Call `record_fingerprint` afterwards."""
        targets = dict(self.module.named_parameters(remove_duplicate=False))
        if unknown := sorted(set(names) - targets.keys()):
            raise WeightError(
                f"the engine's model has no parameter {unknown[0]}",
                fix="use the policy's model in the engines",
            )
        self._base.clear()
        return [_writable_memory(targets[name]) for name in names]

    def record_fingerprint(self) -> None:
        """Record the fingerprint of the current weights, which `check` expects from now on."""
        if not self.shared or self.learner_base:
            self._expected = fingerprint(self._checked_weights())

    @property
    def are_checked(self) -> bool:
        """False if the learner changes them in place."""
        return self._expected is not None

    def check(self) -> None:
        """Raises EngineCorrupt if the weights have changed since the last update. Only for weights
        that are checked."""
        assert self._expected is not None
        actual = fingerprint(self._checked_weights())
        if actual != self._expected:
            raise EngineCorrupt(
                f"the engine's weights have fingerprint {actual[:12]}, and had "
                f"{self._expected[:12]} after their last update: its memory was damaged",
                fix="check the machine's memory if it happens again",
            )

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of all weights without adapters, tied ones once."""
        kept, parameters = self.learner_base | self._base, self.module.named_parameters()
        return fingerprint([(name, kept.get(name, value.detach())) for name, value in parameters])

    def move(self, device: str) -> None:
        self.module.to(device)
        self._base = {name: weight.to(device) for name, weight in self._base.items()}
        if device.startswith("cuda"):
            fuse_storage(self.module)
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _merge(self, weights: VerifiedWeights, scale: float) -> None:
        """A parameter that had an adapter and has none now gets its base weight back."""
        targets = dict(self.module.named_parameters())
        adapters = adapters_of(weights.pairs, targets)
        with torch.no_grad():
            for name in self._base.keys() - {adapter.name for adapter in adapters}:
                targets[name].copy_(self._base.pop(name))
            for adapter in adapters:
                name, target = adapter.name, targets[adapter.name]
                if name not in self._base:
                    kept = self.learner_base.get(name)
                    self._base[name] = target.detach().clone() if kept is None else kept
                adapter.merged(self._base[name], scale=scale, out=_writable_memory(target))

    def _match_exactly(self, weights: VerifiedWeights) -> bool:
        """Whether these weights, which were just written, are all parameters and kept their dtypes:
        then the parameters have the same fingerprint."""
        targets = dict(self.module.named_parameters())
        copied = [n for n, t in weights.pairs if n in targets and targets[n].dtype == t.dtype]
        return len(copied) == len(weights.pairs) == len(targets)

    def _checked_weights(self) -> list[tuple[str, Tensor]]:
        """The parameters, and the base weights that the engine keeps for merging."""
        parameters = [(name, value.detach()) for name, value in self.module.named_parameters()]
        return parameters + [(f"base.{name}", value) for name, value in self._base.items()]


def write_weights(
    module: nn.Module,
    weights: WeightStream,
    version: PolicyVersion,
    *,
    expected: Fingerprint | None,
    adopt: bool,
) -> Fingerprint:
    """Write the weights into the module and return their fingerprint; on an error nothing changes.
    With `adopt`, parameters become views of persistent memory instead of copies."""
    if not isinstance(weights, VerifiedWeights):
        weights = VerifiedWeights(*stage_weights(weights))
    check_fingerprint(weights.fingerprint, expected, version=version)
    targets = dict(module.named_parameters(remove_duplicate=False))
    check_shapes(weights.pairs, targets, partial=weights.base_fingerprint is not None)
    adopt = adopt and weights.persistent
    with torch.no_grad():
        _copy([(targets[n], t) for n, t in weights if not _replace_memory(targets[n], t, adopt)])
    return weights.fingerprint


def _replace_memory(target: nn.Parameter, tensor: Tensor, adopt: bool) -> bool:
    """Adopt the tensor's memory, or replace adopted memory, which the engine must not write.
    Returns False if the parameter keeps its memory and the caller must write it."""
    parameter: Any = target
    if adopt and tensor.dtype == target.dtype and tensor.device == target.device:
        parameter.data, parameter.is_adopted = tensor, True
        return True
    if getattr(parameter, "is_adopted", False):
        parameter.data, parameter.is_adopted = tensor.to(target, copy=True), False
        return True
    return False


def _writable_memory(target: nn.Parameter) -> Tensor:
    """The parameter's memory for writing; adopted memory is replaced first."""
    parameter: Any = target
    if getattr(parameter, "is_adopted", False):
        parameter.data, parameter.is_adopted = torch.empty_like(target), False
    return parameter.data


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write each tensor into its target. On the CPU it uses a thread pool: torch's threads wait for
    each other after every tensor, which is slow while other processes use the cores."""
    contiguous = [pair for pair in pairs if _is_contiguous_cpu(*pair)]
    for target, tensor in pairs:
        if not _is_contiguous_cpu(target, tensor):
            target.copy_(tensor)
    threads = torch.get_num_threads()
    num_shares = min(SHARES * threads, len(contiguous))
    if num_shares:
        with ThreadPoolExecutor(threads) as pool:
            shares = [contiguous[start::num_shares] for start in range(num_shares)]
            list(pool.map(_copy_bytes, shares))


def _is_contiguous_cpu(target: Tensor, tensor: Tensor) -> bool:
    on_cpu = target.device.type == "cpu" and tensor.device.type == "cpu"
    contiguous = target.is_contiguous() and tensor.is_contiguous()
    return on_cpu and contiguous and target.dtype == tensor.dtype


def _copy_bytes(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for pair in pairs:
        target, source = (tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in pair)
        np.copyto(target, source)
