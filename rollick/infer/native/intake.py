"""How a native engine's module takes new weights: all of them, or none.

A plain stream is staged, compared with the expected fingerprint, and only then written. Verified
weights need no stage; if they last, the module's parameters become views of that very memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollick.errors import WeightError
from rollick.infer.engine import VerifiedWeights, WeightStream
from rollick.infer.fit import check_fit
from rollick.models.fingerprint import SHARES, fingerprint
from rollick.types import Fingerprint, PolicyVersion


def take_weights(
    module: nn.Module,
    weights: WeightStream,
    *,
    version: PolicyVersion,
    expected: Fingerprint | None,
    adopt: bool,
) -> Fingerprint:
    """Write the weights into the module and return their fingerprint; on any error it is as it was.

    With `adopt`, lasting memory is not copied: parameters move to other addresses.
    """
    verified = weights if isinstance(weights, VerifiedWeights) else None
    pairs, found = _stage(weights)
    if expected is not None and found != expected:
        raise WeightError(
            f"the weights of version {version} have fingerprint {found}, not {expected}; the "
            "engine still serves the version before",
            fix="publish again; if it repeats, the transfer damages the tensors",
        )
    targets = dict(module.named_parameters(remove_duplicate=False))
    check_fit(pairs, targets, whole=verified is None or verified.base is None)
    keeps = adopt and verified is not None and verified.lasting
    with torch.no_grad():
        _copy([(targets[n], t) for n, t in pairs if not _moves(targets[n], t, adopt=keeps)])
    return found


def _moves(target: nn.Parameter, tensor: Tensor, *, adopt: bool) -> bool:
    """Adopt the memory, or leave memory that was adopted, which belongs to others. False if the
    parameter stays where it is and must be written."""
    parameter: Any = target
    if adopt and tensor.dtype == target.dtype and tensor.device == target.device:
        parameter.data, parameter.is_adopted = tensor, True
        return True
    if getattr(parameter, "is_adopted", False):
        parameter.data, parameter.is_adopted = tensor.to(target, copy=True), False
        return True
    return False


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write each tensor into its target. On the CPU our own threads do it: torch's wait for each
    other after every tensor, which takes long where other processes want the cores too."""
    plain = [pair for pair in pairs if _is_plain(*pair)]
    for target, tensor in pairs:
        if not _is_plain(target, tensor):
            target.copy_(tensor)
    threads = torch.get_num_threads()
    shares = min(SHARES * threads, len(plain))
    if shares:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_copy_each, [plain[first::shares] for first in range(shares)]))


def _is_plain(target: Tensor, tensor: Tensor) -> bool:
    on_cpu = target.device.type == "cpu" and tensor.device.type == "cpu"
    whole = target.is_contiguous() and tensor.is_contiguous()
    return on_cpu and whole and target.dtype == tensor.dtype


def _copy_each(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for pair in pairs:
        written, read = (part.detach().reshape(-1).view(torch.uint8).numpy() for part in pair)
        np.copyto(written, read)


def _stage(weights: WeightStream) -> tuple[Sequence[tuple[str, Tensor]], Fingerprint]:
    if isinstance(weights, VerifiedWeights):
        return weights.pairs, weights.fingerprint
    # Copies, because a stream may reuse its buffers from one tensor to the next.
    staged = [(name, tensor.detach().clone()) for name, tensor in weights]
    return staged, fingerprint(staged)
