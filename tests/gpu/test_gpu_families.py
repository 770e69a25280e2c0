"""The native engine on a GPU computes a family exactly, or refuses it at load.

`python tests/family_verdicts.py --device cuda` writes the results into docs/models.md's table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from family_verdicts import judge_engine, save_family
from tiny_families import FAMILIES

from rollick.config.schema import ModelConfig
from rollick.models.loading.load import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact_or_refused_at_load_on_a_gpu(family: str, tmp_path: Path):
    folder = save_family(family, tmp_path)
    reference = load_model(ModelConfig(path=str(folder)), device="cpu", attention="eager")
    verdict = judge_engine(folder, reference, device="cuda")
    assert verdict.result in ("exact", "refused"), verdict
