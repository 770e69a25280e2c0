"""Whether published weights fit a model: every parameter (a tied one once), in its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rollick.errors import WeightError


def check_fit(
    given: Sequence[tuple[str, Tensor]], targets: Mapping[str, Any], *, whole: bool = True
) -> None:
    """Raise WeightError unless `given` fits the parameters (under all names of tied ones), and
    covers them, unless it is a part only."""
    unknown = [name for name, _ in given if name not in targets]
    covered = {id(targets[name]) for name, _ in given if name in targets}
    missing = [name for name, target in targets.items() if whole and id(target) not in covered]
    misshapen = [
        f"{name} {tuple(tensor.shape)} instead of {tuple(targets[name].shape)}"
        for name, tensor in given
        if name in targets and tensor.shape != targets[name].shape
    ]
    if unknown or missing or misshapen:
        raise WeightError(
            f"the weights do not fit the model: unknown {unknown[:3]}, missing {missing[:3]}, "
            f"misshapen {misshapen[:3]}",
            fix="publish the parameters of the same model, under their Hugging Face names",
        )
