"""Agentic RL: samples that play environments, turn by turn. A wiring of the RL step.

    task (seed) -> group of episodes -> score of each, by turn -> the RL step of rl.py

What a sample does is its domain's (episodes.py): domains with an environment and domains with
prompts and rewards may be mixed by share. All else (scheduler, staleness, spare samples, drops,
checkpoints, validation) is that of any other run.
"""

from __future__ import annotations

from rollick.config.load import LoadedRecipe
from rollick.pipelines.base import RunObjects, RunResult
from rollick.pipelines.rlvr import run_rlvr


async def run_agentic(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> RunResult:
    """Train to the end (or to a signal); returns where the run is and its last metrics."""
    return await run_rlvr(loaded, objects=objects, resume=resume)
