"""Every test here runs on a CUDA device, in full float32 unless it asks for less."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _full_float32() -> Iterator[None]:
    """Skip where there is no CUDA device; TF32 off, so that a GPU and a CPU can be compared."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
