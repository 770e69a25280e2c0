"""The reward `model`, computed by a run in its own process (pipelines/reward_model.py).

This function is its entry in the table of names, for code outside a run.
"""

from __future__ import annotations

from rollick.errors import RewardError


def model(completion: str) -> float:
    fix = "use it in a recipe with reward_model.path"
    raise RewardError("the reward `model` works only in a run", fix=fix)
