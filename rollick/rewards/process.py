"""How a reward, and a sample with what is asked of it, get into a reward process."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence

import cloudpickle

from rollick.children.process import pickled
from rollick.errors import RewardError
from rollick.rewards.child import Call
from rollick.types import RewardFn, Sample


def define_reward(name: str, reward: RewardFn | str) -> str | bytes:
    """How a child gets the reward: a reference stays one; a function is pickled."""
    if isinstance(reward, str):
        return reward
    try:
        return pickled(reward)
    except Exception as error:
        raise RewardError(
            f"the reward {name!r} cannot be sent to another process: {error}",
            fix="keep locks, files and models out of it, or name it as file.py:function",
        ) from error


def pack_job(sample: Sample, calls: Sequence[Call]) -> bytes:
    """Plain pickle is several times faster, but cannot carry classes of the user's script."""
    with contextlib.suppress(Exception):
        payload = pickle.dumps((sample, calls), protocol=5)
        if b"__main__" not in payload:
            return payload
    return cloudpickle.dumps((sample, calls))
