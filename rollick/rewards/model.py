"""The reward `model`: what the recipe's reward model says, a frozen model on the device map.

A run asks the model where it is (pipelines/reward_model.py). This function stands for it in the
table of names; whoever calls it has no run and so no model.
"""

from __future__ import annotations

from rollick.errors import RewardError


def model(completion: str) -> float:
    """Refused: only a run has a reward model."""
    raise RewardError(
        "the reward model is asked in a run, and this is none",
        fix="use it in a recipe with reward_model.path",
    )
