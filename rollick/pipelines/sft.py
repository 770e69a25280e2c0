"""SFT: imitate given completions. A wiring of the supervised step."""

from __future__ import annotations

from rollick.config.load import LoadedRecipe
from rollick.pipelines.base import RunObjects, RunResult
from rollick.pipelines.supervised import one_answer, run_supervised


async def run_sft(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> RunResult:
    """Train to the end (or to a signal)."""
    return await run_supervised(loaded, one_answer, objects=objects, resume=resume)
