"""All tests here need a CUDA device. float32 products do not use TF32, unless a test allows it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _full_float32() -> Iterator[None]:
    """Skip the test without a CUDA device. Disable TF32, to compare results of GPU and CPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
