"""Decode steps that were launched and whose tokens the host has not read yet.

Owns the way back from the device: a copy into page-locked memory behind each step, and an event
to wait for. The host reads a step while the next one runs, so the device never waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """One launched step."""

    version: int
    """The policy that draws."""
    rows: npt.NDArray[np.intp]
    """Rows that draw a token, if they have not ended before."""
    epochs: npt.NDArray[np.int64]
    """Tells whether a row is still the same sequence when the tokens arrive."""
    drawn: Tensor
    arrived: Any

    @classmethod
    def start(
        cls,
        drawn: Tensor,
        *,
        version: int,
        rows: npt.NDArray[np.intp],
        epochs: npt.NDArray[np.int64],
    ) -> Flight:
        """Behind all work launched so far, `drawn` [2, R] travels to the host."""
        if not drawn.is_cuda:
            return cls(version, rows, epochs, drawn.clone(), None)
        host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
        host.copy_(drawn, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(version, rows, epochs, host, arrived)

    def wait(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Tokens and log-probs of `rows`."""
        if self.arrived is not None:
            self.arrived.synchronize()
        both = self.drawn.numpy()
        return both[0, self.rows], both[1].view(np.float32)[self.rows]
