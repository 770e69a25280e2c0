"""`rollick reward test`: one reward on a few rows, in a reward process as in a run.

rows of a source (or the reward's examples) -> samples -> RewardPool -> scores and times
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rollick.config.names import is_reference
from rollick.config.schema import DomainConfig, RewardSpec
from rollick.data.sources import read_rows
from rollick.errors import DataError, RewardError
from rollick.rewards.examples import COMPLETION, EXAMPLES
from rollick.rewards.pool import RewardPool
from rollick.types import Prompt, Row, Sample, SampleId, Score, StopReason, Turn, frozen_array


@dataclass(frozen=True, slots=True)
class Tried:
    """A completion and what the reward said of it."""

    completion: str
    score: Score

    def to_json(self) -> dict[str, Any]:
        score = self.score
        return {
            "completion": self.completion,
            "value": score.value if score.ok else None,
            "parts": dict(score.parts),
            "status": score.status.value,
            "detail": score.detail,
            "seconds": score.seconds,
            "version": score.version,
            "isolation": score.isolation,
            "figures": dict(score.figures),
        }


async def try_reward(
    spec: RewardSpec, rows: Sequence[Row], *, completion: str, timeout_s: float, base: Path
) -> list[Tried]:
    """Score the rows' completions one after another. RewardError if it cannot be loaded."""
    tried: list[Tried] = []
    pool = RewardPool.open({spec.name: spec.name}, processes=1, timeout_s=timeout_s, base=base)
    async with pool as opened:
        for number, row in enumerate(rows):
            sample = sample_of_row(row, number, completion=completion)
            tried.append(Tried(sample.text, await opened.score(sample, [spec])))
    return tried


def rows_to_try(reward: str, source: str | None, *, limit: int, base: Path) -> list[Row]:
    """The first rows of the source, or the examples of a built-in reward."""
    if source is None:
        if reward in EXAMPLES:
            return list(EXAMPLES[reward])[:limit]
        kind = "your own reward" if is_reference(reward) else f"the reward {reward!r}"
        raise DataError(
            f"there are no rows to try {kind} on",
            fix="name a file of rows with a column completion, such as rows.jsonl",
        )
    config = DomainConfig(source=source, limit=limit)
    rows = list(islice(read_rows(config, base=base, objects={}), limit))
    for raw in rows:
        if raw.problem or not isinstance(raw.value, Mapping):
            raise DataError(
                f"{raw.place}: {raw.problem or 'not a row with columns'}", fix="correct the row"
            )
    return [raw.value for raw in rows]


def sample_of_row(row: Row, number: int, *, completion: str = COMPLETION) -> Sample:
    """A sample whose completion is a column of the row. Its tokens are its words."""
    if completion not in row:
        raise RewardError(
            f"row {number + 1} has no column {completion!r} with a completion; it has "
            f"{', '.join(map(str, row)) or 'none'}",
            fix="name the column with --completion",
        )
    text, asked = str(row[completion]), row.get("prompt", "")
    turns = (Turn("user", asked if isinstance(asked, str) else ""),)
    of = Prompt(f"rows/{number}", "rows", turns, {k: v for k, v in row.items() if k != completion})
    words = np.arange(len(text.split()))
    return Sample(
        uid=SampleId(number, 0),
        prompt=of,
        token_ids=frozen_array(words, np.int32),
        logprobs=frozen_array(np.zeros(len(words)), np.float32),
        versions=frozen_array(np.zeros(len(words)), np.int32),
        loss_mask=frozen_array(np.ones(len(words)), np.bool_),
        temperature=1.0,
        stop=StopReason.STOP,
        text=text,
    )


def read_options(said: Sequence[str]) -> dict[str, Any]:
    """`k=v` options of the command line; a value that is no JSON is text."""
    options: dict[str, Any] = {}
    for option in said:
        name, sign, value = option.partition("=")
        if not sign or not name.isidentifier():
            raise RewardError(f"the option {option!r} is not of the form name=value")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
