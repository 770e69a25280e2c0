"""Episodes that a run has written down: found, played again, and told.

    samples.jsonl, validation.jsonl -> row -> the same environment, seed and replies -> Episode

An environment is a function of its seed and of what it hears, so a row is the whole episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from rollick.envs.base import TextEnv, find_env, make_env
from rollick.envs.play import Episode, play_episode
from rollick.errors import DataError, EnvError

Row = Mapping[str, Any]


def find_episode(run: Path, *, sample: str, step: int | None, training: bool) -> Row:
    """The newest recorded episode that fits."""
    name = "samples.jsonl" if training else "validation.jsonl"
    path = run / name
    if not path.is_file():
        raise DataError(f"{path} does not exist", fix="give a run's folder; see also --training")
    for line in reversed(path.read_text(encoding="utf-8").splitlines()):
        row: dict[str, Any] = json.loads(line)
        fits = sample in ("", row["sample"]) and step in (None, row.get("step"))
        if fits and "played" in row:
            return row
    raise DataError(f"{path} has no such episode", fix="look at its rows for sample and step")


def play_again(played: Row, *, base: Path, pictures: bool = False) -> Episode:
    """The same environment, seed and replies. `base`: where an environment's file is."""
    name: str = played["environment"]
    replies = iter(played["replies"])

    def next_reply(env: TextEnv, random: Random) -> str | None:
        return next(replies, None)

    env = make_env(find_env(name, base=base), played["options"], name=name)
    episode = play_episode(env, played["seed"], next_reply, pictures=pictures)
    rewards = [moment.reward for moment in episode.moments[1:]]
    before = played["rewards"]
    if not episode.error and rewards != before[: len(rewards)]:
        raise EnvError(
            f"{name} paid {before} when the episode was recorded and pays {rewards} now",
            fix="the environment has changed, or does not follow from its seed",
        )
    return episode


def describe(row: Row, episode: Episode) -> str:
    """All turns, one after another."""
    played = row["played"]
    lines = [f"{row['sample']} of {played['environment']}, seed {played['seed']}"]
    summaries: list[tuple[int, str]] = played.get("summaries", [])
    for number, moment in enumerate(episode.moments):
        if number:
            lines.append(f"> {episode.actions[number - 1]}    (reward {moment.reward:g})")
        lines.append(moment.text)
        lines += [f"~ {text}" for before, text in summaries if before == number]
    if episode.error:
        lines.append(f"it failed: {episode.error}")
    outcome = "solved" if played["success"] else "not solved"
    return "\n".join([*lines, f"{outcome}, score {row['score']}"])
