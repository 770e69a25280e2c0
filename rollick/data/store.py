"""Groups and batches on disk: replay dumps, checkpoints, and rows for samples.jsonl.

One .npz file each: arrays as they are, everything else as JSON text in the entry `json`. Nothing
is ever pickled or unpickled. A round trip is exact, but for row values that JSON does not know:
those become text, and `stringified` in the file (and a warning) says which.
"""

from __future__ import annotations

import json
import logging
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from rollick.data.batch import Batch
from rollick.errors import DataError
from rollick.types import (
    NOT_SAMPLED,
    Group,
    Played,
    PolicyVersion,
    Prompt,
    Sample,
    SampleId,
    Score,
    ScoredSample,
    ScoreStatus,
    StopReason,
    Turn,
    frozen_array,
)

Array = npt.NDArray[Any]
Kind = Literal["groups", "batch"]

FORMAT = 1
TOKEN_FIELDS = ("token_ids", "logprobs", "versions", "loss_mask")

log = logging.getLogger(__name__)


def save_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write groups to one file, prompts and scores included."""
    samples = [sample for group in groups for sample in group.samples]
    prompts = _prompt_table(groups)
    places = {id(prompt): place for place, prompt in enumerate(prompts)}
    about = {
        "prompts": [_prompt_to_json(prompt) for prompt in prompts],
        "groups": [
            {
                "uid": group.uid,
                "prompt": places[id(group.prompt)],
                "started": group.started,
                "members": [_member_to_json(member, places) for member in group.members],
            }
            for group in groups
        ],
    }
    arrays = {name: _concatenated(getattr(s, name) for s in samples) for name in TOKEN_FIELDS}
    kept = [s.kept_cache for s in samples if s.kept_cache is not None]
    arrays["kept_cache"] = np.concatenate([*kept, np.empty(0, np.bool_)])
    _write(path, "groups", arrays=arrays, about=about)


def load_groups(path: Path) -> list[Group]:
    """Read what `save_groups` wrote. Samples of one prompt share the Prompt again."""
    arrays, about = _read(path, "groups")
    prompts = [_prompt_from_json(entry) for entry in about["prompts"]]
    groups: list[Group] = []
    start = kept = 0
    for entry in about["groups"]:
        members: list[ScoredSample] = []
        for member in entry["members"]:
            stop = start + member["length"]
            tokens = {
                name: frozen_array(arrays[name][start:stop], member["dtypes"][name])
                for name in TOKEN_FIELDS
            }
            if member["kept_cache"]:
                flags = arrays["kept_cache"][kept : kept + member["length"]]
                tokens["kept_cache"] = frozen_array(flags, np.bool_)
                kept += member["length"]
            members.append(_member_from_json(member, tokens, prompts))
            start = stop
        version = PolicyVersion(entry["started"])
        groups.append(Group(entry["uid"], prompts[entry["prompt"]], tuple(members), version))
    return groups


def save_batch(path: Path, batch: Batch) -> None:
    """Write a batch to one file."""
    arrays = {
        spec.name: getattr(batch, spec.name)
        for spec in fields(Batch)
        if isinstance(getattr(batch, spec.name), np.ndarray)
    }
    about = {"uids": [list(uid) for uid in batch.uids], "version": int(batch.version)}
    _write(path, "batch", arrays=arrays, about=about)


def load_batch(path: Path) -> Batch:
    """Read what `save_batch` wrote."""
    arrays, about = _read(path, "batch")
    uids = tuple(SampleId(*uid) for uid in about["uids"])
    return Batch(uids=uids, version=about["version"], **arrays)


def samples_to_rows(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """One JSON-able row a sample, for people to read; a score that failed is null, not a number."""
    return [_sample_to_row(group, member) for group in groups for member in group.members]


def _sample_to_row(group: Group, member: ScoredSample) -> dict[str, Any]:
    sample, score = member.sample, member.score
    drawn = sample.versions[sample.versions != NOT_SAMPLED]
    row = {
        "sample": str(sample.uid),
        "prompt_uid": group.prompt.uid,
        "domain": group.prompt.domain,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "score": _finite(score.value),
        "parts": {name: _finite(value) for name, value in score.parts.items()},
        "status": score.status.value,
        "detail": score.detail,
        "version": score.version,
        "isolation": score.isolation,
        "stop": sample.stop.value,
        "tokens": sample.length,
        "response_tokens": len(drawn),
        "versions": [int(drawn.min()), int(drawn.max())] if len(drawn) else [],
    }
    return row if sample.played is None else row | {"played": _played_to_row(sample.played)}


def _played_to_row(played: Played) -> dict[str, Any]:
    """What `rollick env show` plays again."""
    return {
        "environment": played.environment,
        "options": dict(played.options),
        "seed": played.seed,
        "replies": list(played.replies),
        "rewards": list(played.rewards),
        "success": played.success,
        "summaries": [[before, text] for before, text in played.summaries],
    }


def _finite(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def _prompt_table(groups: Iterable[Group]) -> list[Prompt]:
    """Every Prompt object once, in order of appearance."""
    known: dict[int, Prompt] = {}
    for group in groups:
        for prompt in (group.prompt, *(sample.prompt for sample in group.samples)):
            known.setdefault(id(prompt), prompt)
    return list(known.values())


def _prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    stringified: list[str] = []
    row = {
        name: _as_json(value, place=name, stringified=stringified)
        for name, value in prompt.row.items()
    }
    if stringified:
        log.warning(
            "row of prompt %s: %s saved as text, JSON has no such type",
            prompt.uid,
            ", ".join(stringified),
        )
    return {
        "uid": prompt.uid,
        "domain": prompt.domain,
        "turns": [[turn.role, turn.content] for turn in prompt.turns],
        "row": row,
        "stringified": stringified,
    }


def _prompt_from_json(entry: Mapping[str, Any]) -> Prompt:
    turns = tuple(Turn(role, content) for role, content in entry["turns"])
    return Prompt(uid=entry["uid"], domain=entry["domain"], turns=turns, row=entry["row"])


def _as_json(value: Any, *, place: str, stringified: list[str]) -> Any:
    """The value itself where JSON gives it back equal; otherwise text, noted by its place."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [
            _as_json(item, place=f"{place}[{number}]", stringified=stringified)
            for number, item in enumerate(cast("list[Any]", value))
        ]
    if type(value) is dict and all(type(key) is str for key in cast("dict[Any, Any]", value)):
        return {
            key: _as_json(item, place=f"{place}.{key}", stringified=stringified)
            for key, item in cast("dict[str, Any]", value).items()
        }
    stringified.append(place)
    return str(value)


def _member_to_json(member: ScoredSample, places: Mapping[int, int]) -> dict[str, Any]:
    sample, score = member.sample, member.score
    return {
        "uid": list(sample.uid),
        "prompt": places[id(sample.prompt)],
        "length": sample.length,
        "kept_cache": sample.kept_cache is not None,
        "dtypes": {name: getattr(sample, name).dtype.str for name in TOKEN_FIELDS},
        "temperature": float(sample.temperature),
        "stop": sample.stop.value,
        "text": sample.text,
        "states": list(sample.states),
        "breaks": list(sample.breaks),
        "score": {
            "value": float(score.value),
            "parts": {name: float(value) for name, value in score.parts.items()},
            "status": score.status.value,
            "detail": score.detail,
            "seconds": float(score.seconds),
            "turns": [float(value) for value in score.turns],
            "version": score.version,
            "isolation": score.isolation,
            "figures": {name: float(value) for name, value in score.figures.items()},
        },
    }


def _member_from_json(
    entry: Mapping[str, Any], tokens: Mapping[str, Array], prompts: Sequence[Prompt]
) -> ScoredSample:
    sample = Sample(
        uid=SampleId(*entry["uid"]),
        prompt=prompts[entry["prompt"]],
        temperature=entry["temperature"],
        stop=StopReason(entry["stop"]),
        text=entry["text"],
        states=tuple(entry["states"]),
        played=None,
        breaks=tuple(entry["breaks"]),
        **tokens,
    )
    said: dict[str, Any] = entry["score"]
    status, turns = ScoreStatus(said.pop("status")), tuple(said.pop("turns"))
    return ScoredSample(sample, Score(status=status, turns=turns, **said))


def _concatenated(arrays: Iterable[Array]) -> Array:
    """All in one; a dtype wide enough for every one of them, so that casting back is exact."""
    known = list(arrays)
    return np.concatenate(known) if known else np.empty(0, np.int32)


def _write(path: Path, kind: Kind, *, arrays: Mapping[str, Array], about: Any) -> None:
    text = json.dumps({"format": FORMAT, "kind": kind, **about})
    entry = np.frombuffer(text.encode(), dtype=np.uint8)
    # An open file, because savez would put .npz behind a name without it.
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, json=entry, **arrays)


def _read(path: Path, kind: Kind) -> tuple[dict[str, Array], dict[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("json").tobytes())
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(
            f"{path} cannot be read as saved {kind}: {error}", fix="the file is damaged; save again"
        ) from error
    if (about.get("format"), about.get("kind")) != (FORMAT, kind):
        raise DataError(
            f"{path} holds {about.get('kind')} in format {about.get('format')}, "
            f"expected {kind} in format {FORMAT}",
            fix="use the file that was saved for this, with the version that saved it",
        )
    return arrays, about
