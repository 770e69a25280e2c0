"""Distillation from given completions: be like a teacher at each of their tokens.

A wiring of the supervised step. The teacher says its likeliest tokens at each position, and the
loss (distillation) is a divergence from it there. To distil from samples of the policy itself, use
the RL step with the advantage opd or the loss distillation.
"""

from __future__ import annotations

from rollick.config.load import LoadedRecipe
from rollick.pipelines.base import RunObjects, RunResult
from rollick.pipelines.supervised import one_answer, run_supervised


async def run_distill(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> RunResult:
    """Train to the end (or to a signal)."""
    return await run_supervised(loaded, one_answer, objects=objects, resume=resume)
