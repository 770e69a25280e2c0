"""A sandbox for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollick.sandbox.local import LocalSandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[LocalSandbox]:
    with LocalSandbox() as local_sandbox:
        yield local_sandbox
