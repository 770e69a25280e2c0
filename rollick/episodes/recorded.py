"""Episodes recorded by a run: find one, run it again, describe it.

    samples.jsonl, validation.jsonl -> row -> same environment, seed and replies -> EpisodeTrace

An environment depends only on its seed and the replies, so a row holds a complete episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollick.config.recipe_record import recorded_name
from rollick.envs.base import find_env, make_env
from rollick.episodes.in_process import EpisodeTrace, run_episode
from rollick.errors import DataError, EnvError
from rollick.observe.row_file import read_rows

RecordedRow = Mapping[str, Any]


def find_episode(run: Path, *, sample: str, step: int | None, training: bool) -> RecordedRow:
    """The newest recorded episode with this sample id and step."""
    path = run / ("samples.jsonl" if training else "validation.jsonl")
    if not path.is_file():
        raise DataError(f"{path} does not exist", fix="give a run's folder; see also --training")
    for row in reversed(list(read_rows(path))):
        if "played" in row:
            text = f"{path} was written by an older version: its rows have the key 'played'"
            raise DataError(text, fix="rename the key to 'episode'")
        matches = sample in ("", row["sample"]) and step in (None, row.get("step"))
        if matches and "episode" in row:
            return row
    if not sample and step is None:
        fix = "give a run with an environment; samples of other runs are text in this file"
        raise DataError(f"{path} has no episode of an environment", fix=fix)
    raise DataError(f"{path} has no such episode", fix="look at its rows for sample and step")


def rerun_episode(
    episode: Mapping[str, Any], *, base: Path, pictures: bool = False
) -> EpisodeTrace:
    """Run an episode with its recorded seed and replies. `base`: the run's folder with the code."""
    name: str = episode["environment"]
    replies: Iterator[str] = iter(episode["replies"])
    make = find_env(recorded_name(name, base), base=base)
    env = make_env(make, episode["options"], name=name)
    seed: int = episode["seed"]
    trace = run_episode(env, seed, lambda env, random: next(replies, None), pictures=pictures)
    rewards = [response.reward for response in trace.responses[1:]]
    # Empty if the environment failed in the run: the sample then has a status instead of rewards.
    recorded = episode["rewards"]
    if recorded and not trace.error and rewards != recorded[: len(rewards)]:
        text = f"{name} gave the rewards {recorded} when recorded and gives {rewards} now"
        raise EnvError(text, fix="the environment has changed, or is not determined by its seed")
    return trace


def describe_episode(row: RecordedRow, trace: EpisodeTrace) -> str:
    episode = row["episode"]
    lines = [f"{row['sample']} of {episode['environment']}, seed {episode['seed']}"]
    summaries: list[tuple[int, str]] = episode.get("summaries", [])
    for number, response in enumerate(trace.responses):
        if number:
            lines.append(f"> {trace.actions[number - 1]}    (reward {response.reward:g})")
        lines.append(response.text)
        lines += [f"~ {text}" for before, text in summaries if before == number]
    if trace.error:
        lines.append(f"failed: {trace.error}")
    outcome = "solved" if episode["success"] else "not solved"
    return "\n".join([*lines, f"{outcome}, score {row['score']}"])
