"""How fast a rank computes, without waiting for the others.

The ranks of a sharded model wait for each other in every layer, so all of them take as long as the
slowest. A fixed product of matrices, which no other rank takes part in, tells which one that is.
"""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": (256, 24), "cuda": (2048, 24)}
"""Rows of the matrices and number of products, by kind of device: some milliseconds."""


def measure_seconds(device: str) -> float:
    """The time of the products on this device."""
    is_cuda = device.startswith("cuda")
    size, count = SIZES["cuda" if is_cuda else "cpu"]
    matrix = torch.full((size, size), 1 / size, device=device)
    product = matrix @ matrix  # Loads the kernel.
    if is_cuda:
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(count):
        product = matrix @ product
    if is_cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
