"""Builders of the shared types: prompts, samples and groups, without a model or torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollick.types import (
    NOT_SAMPLED,
    Annotations,
    Group,
    PolicyVersion,
    Prompt,
    Sample,
    SampleId,
    Score,
    ScoredSample,
    StopReason,
    Turn,
    frozen_array,
)


def prompt(text: str = "1+1=", *, uid: str = "toy/0", domain: str = "toy", **row: Any) -> Prompt:
    """A prompt of one plain-text turn; further keywords are columns of its row."""
    return Prompt(uid=uid, domain=domain, turns=(Turn("text", text),), row=row)


def sample(
    text: str = "2",
    *,
    uid: tuple[int, int] = (0, 0),
    of: Prompt | None = None,
    version: int = 0,
    logprob: float = -1.0,
    stop: StopReason = StopReason.STOP,
) -> Sample:
    """A sample with the response `text`: one token per character, sampled by `version`."""
    source = of or prompt()
    before = len(source.text)
    ids = frozen_array([ord(character) for character in source.text + text], np.int32)
    sampled = np.arange(len(ids)) >= before
    return Sample(
        uid=SampleId(*uid),
        prompt=source,
        token_ids=ids,
        logprobs=frozen_array(np.where(sampled, logprob, 0.0), np.float32),
        versions=frozen_array(np.where(sampled, version, NOT_SAMPLED), np.int32),
        loss_mask=frozen_array(sampled, np.bool_),
        temperature=1.0,
        stop=stop,
        text=text,
    )


def group(
    scores: Sequence[float | None],
    *,
    uid: int = 0,
    of: Prompt | None = None,
    start_version: int = 0,
    texts: Sequence[str] | None = None,
) -> Group:
    """A group with these scores; None is a failed score. `start_version` sampled all tokens."""
    source = of or prompt()
    responses = texts or ["2"] * len(scores)
    members = tuple(
        ScoredSample(
            sample(text, uid=(uid, index), of=source, version=start_version),
            Score.failed("scripted") if value is None else Score(float(value)),
        )
        for index, (text, value) in enumerate(zip(responses, scores, strict=True))
    )
    return Group(uid, source, members, PolicyVersion(start_version))


def annotated(group: Group, *annotations: Annotations) -> Group:
    """The group with these annotations of its members."""
    pairs = zip(group.members, annotations, strict=True)
    return replace(group, members=tuple(replace(m, annotations=a) for m, a in pairs))
