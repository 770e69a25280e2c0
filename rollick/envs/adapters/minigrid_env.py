"""Adapter for MiniGrid: the mission and the agent's view as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollick.envs.adapters.gymnasium_env import GymEnv
from rollick.envs.formats import Format
from rollick.errors import MissingExtra

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
NOT_LISTED = frozenset({"unseen", "empty", "floor", "wall", "agent"})


def minigrid_env(
    *,
    id: str = "MiniGrid-Empty-5x5-v0",
    make: Mapping[str, Any] | None = None,
    style: Format = "answer",
    max_steps: int = 200,
) -> GymEnv:
    try:
        import minigrid  # noqa: F401  # pyright: ignore[reportUnusedImport] - registers its ids
    except ImportError:
        raise MissingExtra.of("minigrid", "envs") from None
    return GymEnv(
        id=id, make=make, actions=ACTIONS, style=style, max_steps=max_steps, describe=describe
    )


def describe(env: Any, observation: Any) -> str:
    """The mission, the carried object, the cell ahead, and the position of each visible object."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    states = {number: name for name, number in STATE_TO_IDX.items()}
    view = observation["image"]
    width, height = view.shape[:2]
    visible: list[str] = []
    for row in range(height - 1, -1, -1):
        for column in range(width):
            kind, colour, state = (int(value) for value in view[column, row])
            name = IDX_TO_OBJECT[kind]
            if name in NOT_LISTED:
                continue
            door_state = f"{states[state]} " if name == "door" else ""
            position = _position(column - width // 2, height - 1 - row)
            visible.append(f"{door_state}{IDX_TO_COLOR[colour]} {name} {position}")
    ahead = IDX_TO_OBJECT[int(view[width // 2, height - 2][0])]
    carried = f"{env.carrying.color} {env.carrying.type}" if env.carrying else "nothing"
    return (
        f"Mission: {observation['mission']}.\n"
        f"You carry {carried}. Right in front of you: {ahead}.\n"
        f"You see: {'; '.join(visible) or 'nothing but floor and walls'}."
    )


def _position(right: int, ahead: int) -> str:
    side = f"{abs(right)} to the {'right' if right > 0 else 'left'}" if right else ""
    front = f"{ahead} ahead" if ahead else ""
    return " and ".join(part for part in (front, side) if part) or "here"
