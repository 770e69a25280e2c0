"""Back end of `rollick reward test`: scores a few rows in a reward process, as a run does.

rows of a source (or the reward's examples) -> samples -> RewardPool -> scores
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rollick.config.names import is_reference
from rollick.config.schema import Domain, RewardSpec
from rollick.data.sources import read_rows
from rollick.errors import DataError, RewardError
from rollick.rewards.examples import COMPLETION, EXAMPLES
from rollick.rewards.pool import RewardPool
from rollick.types import Prompt, Row, Sample, SampleId, ScoreStatus, StopReason, Turn, frozen_array


async def score_rows(
    spec: RewardSpec, rows: Sequence[Row], *, completion: str, timeout_s: float, base: Path
) -> list[dict[str, Any]]:
    """Score the rows one after another: each completion with its score, as JSON. Raises RewardError
    if the reward cannot be loaded."""
    scored: list[dict[str, Any]] = []
    pool = RewardPool.open({spec.name: spec.name}, processes=1, timeout_s=timeout_s, base=base)
    async with pool as opened:
        for number, row in enumerate(rows):
            sample = sample_of_row(row, number, completion=completion)
            score = asdict(await opened.score(sample, [spec]))
            del score["turn_rewards"]
            value = score["value"] if score["status"] is ScoreStatus.OK else None
            scored.append({"completion": sample.text, **score, "value": value})
    return scored


def read_test_rows(reward: str, source: str | None, *, limit: int, base: Path) -> list[Row]:
    """The first rows of the source, or the examples of a built-in reward."""
    if source is None:
        if reward in EXAMPLES:
            return list(EXAMPLES[reward])[:limit]
        subject = "your own reward" if is_reference(reward) else f"the reward {reward!r}"
        fix = "name a file of rows with a column completion, such as rows.jsonl"
        raise DataError(f"there are no rows to test {subject} on", fix=fix)
    config = Domain(source=source, limit=limit)
    rows = list(islice(read_rows(config, base=base, objects={}), limit))
    for raw in rows:
        if raw.problem or not isinstance(raw.value, Mapping):
            problem = raw.problem or "not a row with columns"
            raise DataError(f"{raw.location}: {problem}", fix="correct the row")
    return [raw.value for raw in rows]


def sample_of_row(row: Row, number: int, *, completion: str = COMPLETION) -> Sample:
    """A sample with the completion of a column; each word counts as a token."""
    if completion not in row:
        message = f"row {number + 1} has no column {completion!r} with a completion; it has "
        message += ", ".join(map(str, row)) or "none"
        raise RewardError(message, fix="name the column with --completion")
    text, question = str(row[completion]), row.get("prompt", "")
    turns = (Turn("user", question if isinstance(question, str) else ""),)
    columns = {name: value for name, value in row.items() if name != completion}
    words = np.arange(len(text.split()))
    return Sample(
        uid=SampleId(number, 0),
        prompt=Prompt(f"rows/{number}", "rows", turns, columns),
        token_ids=frozen_array(words, np.int32),
        logprobs=frozen_array(np.zeros(len(words)), np.float32),
        versions=frozen_array(np.zeros(len(words)), np.int32),
        loss_mask=frozen_array(np.ones(len(words)), np.bool_),
        temperature=1.0,
        stop=StopReason.STOP,
        text=text,
    )
