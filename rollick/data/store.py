"""Saves and loads groups and batches (checkpoints, replay), and writes rows of samples.jsonl.

One .npz file each: arrays, and everything else as JSON in the entry `json`. Nothing is pickled. A
round trip is exact except for row values that JSON cannot hold: these become text, listed in the
file under `stringified` and in a warning.
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
FileKind = Literal["groups", "batch"]

FORMAT = 2
TOKEN_FIELDS = ("token_ids", "logprobs", "versions", "loss_mask")
DAMAGED = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error)
"""Exceptions of numpy and zipfile for a damaged file."""

LOG = logging.getLogger("rollick")


def save_groups(path: Path, groups: Sequence[Group]) -> None:
    samples = [sample for group in groups for sample in group.samples]
    # Unique Prompt objects, in order of appearance.
    prompts = {
        id(prompt): prompt
        for group in groups
        for prompt in (group.prompt, *(sample.prompt for sample in group.samples))
    }
    indices = {key: index for index, key in enumerate(prompts)}
    metadata = {
        "prompts": [_prompt_to_json(prompt) for prompt in prompts.values()],
        "groups": [
            {
                "uid": group.uid,
                "prompt": indices[id(group.prompt)],
                "start_version": group.start_version,
                "members": [_member_to_json(member, indices) for member in group.members],
            }
            for group in groups
        ],
    }
    arrays: dict[str, Array] = {}
    for name in (*TOKEN_FIELDS, "kept_cache"):
        parts = [part for sample in samples if (part := getattr(sample, name)) is not None]
        # A dtype wide enough that casting back is exact.
        arrays[name] = np.concatenate(parts) if parts else np.empty(0, np.int32)
    _write_file(path, "groups", arrays=arrays, metadata=metadata)


def load_groups(path: Path) -> list[Group]:
    arrays, metadata = _read_file(path, "groups")
    prompts = [_prompt_from_json(entry) for entry in metadata["prompts"]]
    groups: list[Group] = []
    token_start = flag_start = 0
    for entry in metadata["groups"]:
        members: list[ScoredSample] = []
        for member in entry["members"]:
            token_stop = token_start + member["length"]
            tokens = {
                name: frozen_array(arrays[name][token_start:token_stop], member["dtypes"][name])
                for name in TOKEN_FIELDS
            }
            if member["kept_cache"]:
                flags = arrays["kept_cache"][flag_start : flag_start + member["length"]]
                tokens["kept_cache"] = frozen_array(flags, np.bool_)
                flag_start += member["length"]
            members.append(_member_from_json(member, tokens, prompts))
            token_start = token_stop
        version = PolicyVersion(entry["start_version"])
        groups.append(Group(entry["uid"], prompts[entry["prompt"]], tuple(members), version))
    return groups


def save_batch(path: Path, batch: Batch) -> None:
    values = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    metadata = {"uids": [list(uid) for uid in batch.uids], "version": int(batch.version)}
    _write_file(path, "batch", arrays=arrays, metadata=metadata)


def load_batch(path: Path) -> Batch:
    arrays, metadata = _read_file(path, "batch")
    uids = tuple(SampleId(*uid) for uid in metadata["uids"])
    return Batch(uids=uids, version=metadata["version"], **arrays)


def samples_to_rows(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """One JSON-serialisable row per sample. A failed score is null."""
    return [_sample_to_row(group, member) for group in groups for member in group.members]


def _sample_to_row(group: Group, member: ScoredSample) -> dict[str, Any]:
    sample, score = member.sample, member.score
    sampled = sample.versions[sample.versions != NOT_SAMPLED]
    row: dict[str, Any] = {
        "sample": str(sample.uid),
        "prompt_uid": group.prompt.uid,
        "domain": group.prompt.domain,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "score": _finite_or_none(score.value),
        "parts": {name: _finite_or_none(value) for name, value in score.parts.items()},
        "status": score.status.value,
        "detail": score.detail,
        "version": score.version,
        "isolation": score.isolation,
        "stop": sample.stop.value,
        "tokens": sample.length,
        "response_tokens": len(sampled),
        "versions": [int(sampled.min()), int(sampled.max())] if len(sampled) else [],
    }
    if sample.episode is not None:
        # `rollick env show` replays it.
        names = ("environment", "seed", "replies", "rewards", "success", "summaries")
        row["episode"] = {name: getattr(sample.episode, name) for name in names}
        row["episode"]["options"] = dict(sample.episode.options)
    return row


def _finite_or_none(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def _prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    stringified: list[str] = []
    row = {name: _convert_to_json(value, name, stringified) for name, value in prompt.row.items()}
    if stringified:
        names = ", ".join(stringified)
        LOG.warning("row of prompt %s: saved %s as text: not a JSON type", prompt.uid, names)
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


def _convert_to_json(value: Any, path: str, stringified: list[str]) -> Any:
    """The value if JSON can hold it; otherwise its text, with its path added to `stringified`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        items = enumerate(cast("list[Any]", value))
        return [_convert_to_json(item, f"{path}[{number}]", stringified) for number, item in items]
    if type(value) is dict and all(type(key) is str for key in cast("dict[Any, Any]", value)):
        columns = cast("dict[str, Any]", value).items()
        return {key: _convert_to_json(item, f"{path}.{key}", stringified) for key, item in columns}
    stringified.append(path)
    return str(value)


def _member_to_json(member: ScoredSample, prompt_indices: Mapping[int, int]) -> dict[str, Any]:
    sample, score = member.sample, member.score
    return {
        "uid": list(sample.uid),
        "prompt": prompt_indices[id(sample.prompt)],
        "length": sample.length,
        "kept_cache": sample.kept_cache is not None,
        "dtypes": {name: getattr(sample, name).dtype.str for name in TOKEN_FIELDS},
        "temperature": float(sample.temperature),
        "stop": sample.stop.value,
        "text": sample.text,
        "states": list(sample.states),
        "segment_starts": list(sample.segment_starts),
        "score": {field.name: getattr(score, field.name) for field in fields(Score)},
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
        episode=None,
        segment_starts=tuple(entry["segment_starts"]),
        **tokens,
    )
    score: dict[str, Any] = entry["score"]
    status, rewards = ScoreStatus(score.pop("status")), tuple(score.pop("turn_rewards"))
    return ScoredSample(sample, Score(status=status, turn_rewards=rewards, **score))


def _to_json_type(value: Any) -> Any:
    """Convert a mapping or a number to a JSON type."""
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else float(value)


def _write_file(path: Path, kind: FileKind, *, arrays: Mapping[str, Array], metadata: Any) -> None:
    text = json.dumps({"format": FORMAT, "kind": kind, **metadata}, default=_to_json_type)
    entry = np.frombuffer(text.encode(), dtype=np.uint8)
    # Given a path, savez would append .npz to other names.
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, json=entry, **arrays)


def _read_file(path: Path, kind: FileKind) -> tuple[dict[str, Array], dict[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        metadata = json.loads(arrays.pop("json").tobytes())
    except DAMAGED as error:
        raise DataError(
            f"{path} cannot be read as saved {kind}: {error}", fix="the file is damaged; save again"
        ) from error
    actual_kind, version = metadata.get("kind"), metadata.get("format")
    if (actual_kind, version) != (kind, FORMAT):
        raise DataError(
            f"{path} holds {actual_kind} in format {version}, expected {kind} in format {FORMAT}",
            fix="use a file of this kind, with the version of rollick that saved it",
        )
    return arrays, metadata
