"""Staging and checking of new weights, before an engine changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rollick.errors import WeightError
from rollick.infer.engine import WeightStream
from rollick.models.loading.fingerprint import fingerprint
from rollick.types import Fingerprint, PolicyVersion


def stage_weights(
    weights: WeightStream, *, device: str | None = None
) -> tuple[tuple[tuple[str, Tensor], ...], Fingerprint]:
    """Copies the weights, because a stream may reuse its buffers; moves them to `device` if it is
    set. Returns the copies and their fingerprint."""
    staged: tuple[tuple[str, Tensor], ...] = tuple(
        (name, tensor.detach().to(device or tensor.device, copy=True)) for name, tensor in weights
    )
    return staged, fingerprint(staged)


def check_fingerprint(
    actual: Fingerprint, expected: Fingerprint | None, *, version: PolicyVersion
) -> None:
    if expected is not None and actual != expected:
        raise WeightError(
            f"the weights of version {version} have fingerprint {actual}, not {expected}; the "
            "engine still serves its previous version",
            fix="publish again; if it repeats, the transfer damages the tensors",
        )


def check_shapes(
    weights: Sequence[tuple[str, Tensor]], targets: Mapping[str, Any], *, partial: bool = False
) -> None:
    """Raises WeightError unless the weights match the parameters, and cover them unless `partial`.
    `targets` has tied parameters under all their names; `weights` may have them once."""
    unknown = [name for name, _ in weights if name not in targets]
    covered = {id(targets[name]) for name, _ in weights if name in targets}
    missing = [
        name for name, target in targets.items() if not partial and id(target) not in covered
    ]
    wrong_shapes = [
        f"{name} {tuple(tensor.shape)} instead of {tuple(targets[name].shape)}"
        for name, tensor in weights
        if name in targets and tensor.shape != targets[name].shape
    ]
    if unknown or missing or wrong_shapes:
        raise WeightError(
            f"the weights do not fit the model: unknown {unknown[:3]}, missing {missing[:3]}, "
            f"wrong shapes {wrong_shapes[:3]}",
            fix="publish the parameters of the same model, under their Hugging Face names",
        )
