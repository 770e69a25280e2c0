"""DPO: prefer the better of two given answers, more than the model that the run starts from does.

A wiring of the supervised step. `train.batch_size` counts pairs; the reference (a frozen copy of
the start model) says its log-probs of both answers, and the loss (dpo or ipo) compares.
"""

from __future__ import annotations

from rollick.config.load import LoadedRecipe
from rollick.data.prompts import PromptStream
from rollick.pipelines.base import RunObjects, RunResult
from rollick.pipelines.supervised import run_supervised


async def run_dpo(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> RunResult:
    """Train to the end (or to a signal)."""
    return await run_supervised(loaded, PromptStream.pair_of, objects=objects, resume=resume)
