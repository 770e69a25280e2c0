"""Groups and batches on disk: exact, without pickle, and refused when damaged."""

import datetime
import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import mask_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.data.batch import Batch
from rollick.data.store import (
    load_batch,
    load_groups,
    samples_to_rows,
    save_batch,
    save_groups,
)
from rollick.errors import DataError
from rollick.testing.fakes import group, prompt
from rollick.types import Group, Prompt, SampleId, Score, ScoreStatus, StopReason, Turn

TOKEN_FIELDS = ("token_ids", "logprobs", "versions", "loss_mask")


def assert_same_groups(left: list[Group], right: list[Group]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a.uid, a.prompt, a.start_version) == (b.uid, b.prompt, b.start_version)
        for member_a, member_b in zip(a.members, b.members, strict=True):
            np.testing.assert_equal(
                get_score_fields(member_a.score), get_score_fields(member_b.score)
            )
            for name in ("uid", "prompt", "temperature", "stop", "text", "states"):
                assert getattr(member_a.sample, name) == getattr(member_b.sample, name)
            for name in TOKEN_FIELDS:
                value_a, value_b = getattr(member_a.sample, name), getattr(member_b.sample, name)
                assert value_a.dtype == value_b.dtype
                assert value_a.tobytes() == value_b.tobytes()


def get_score_fields(score: Score) -> dict[str, Any]:
    return {spec.name: getattr(score, spec.name) for spec in fields(Score)}


def make_varied_groups() -> list[Group]:
    source = Prompt("d/7", "d", (Turn("system", "s"), Turn("user", "q\n\u00fc")), {"n": [1, None]})
    first = group([1, None], uid=3, of=source, start_version=2, texts=["yes", ""])
    member = first.members[0]
    score = Score(
        0.1 + 0.2,
        {"length": -1e-300},
        ScoreStatus.OK,
        "fine",
        0.25,
        turn_rewards=(0.1, -1e-300),
        version="length@1",
        isolation="process",
        metrics={"length/cost": 1e-300},
    )
    sample = replace(
        member.sample,
        logprobs=member.sample.logprobs.astype(np.float64) / 3,
        temperature=0.7,
        stop=StopReason.LENGTH,
        states=("at the door", "\u00fc"),
        segment_starts=(1,),
    )
    members = (replace(member, sample=sample, score=score), first.members[1])
    return [replace(first, members=members), group([0], uid=9, of=prompt("x", answer={"a": 1.5}))]


def test_saved_groups_are_loaded_bit_for_bit(tmp_path: Path):
    groups = make_varied_groups()
    save_groups(tmp_path / "groups", groups)
    loaded = load_groups(tmp_path / "groups")
    assert_same_groups(loaded, groups)
    assert loaded[0].members[0].score.status is ScoreStatus.OK
    assert not loaded[0].samples[0].token_ids.flags.writeable


def test_flags_of_kept_caches_are_loaded_with_their_samples(tmp_path: Path):
    plain = group([0, 1, 2], texts=["ab", "cde", "f"])
    flags = mask_of("....x.x")
    first, second, third = plain.members
    flagged = replace(second, sample=replace(second.sample, kept_cache=flags))
    save_groups(tmp_path / "groups", [replace(plain, members=(first, flagged, third))])
    [loaded] = load_groups(tmp_path / "groups")
    kept = [sample.kept_cache for sample in loaded.samples]
    assert kept[0] is kept[2] is None
    assert kept[1].tolist() == flags.tolist()
    assert loaded.samples[1].kept_cache_tokens == 2


def test_a_prompt_is_stored_once_and_shared_again(tmp_path: Path):
    save_groups(tmp_path / "g.npz", [group([1, 0, 1])])
    (loaded,) = load_groups(tmp_path / "g.npz")
    assert all(sample.prompt is loaded.prompt for sample in loaded.samples)


def test_no_groups_are_saved_and_loaded_too(tmp_path: Path):
    save_groups(tmp_path / "g.npz", [])
    assert load_groups(tmp_path / "g.npz") == []


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(
    row=st.dictionaries(st.text(), JSON_VALUES, max_size=3),
    content=st.text(st.characters(), max_size=8),
    value=st.floats(),
)
def test_any_row_text_and_score_survive(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any], content: str, value: float
):
    path = tmp_path_factory.getbasetemp() / "any.npz"
    source = Prompt("d/0", "d", (Turn("user", content),), row)
    groups = [group([value], of=source, texts=["a"])]
    save_groups(path, groups)
    assert_same_groups(load_groups(path), groups)


def test_row_values_that_json_does_not_know_become_text_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    day = datetime.date(2024, 2, 29)
    source = prompt("q", day=day, deep=[{"pair": (1, 2)}], keys={1: "x"}, fine=3)
    save_groups(tmp_path / "g.npz", [group([1], of=source)])
    (loaded,) = load_groups(tmp_path / "g.npz")
    assert loaded.prompt.row == {
        "day": "2024-02-29",
        "deep": [{"pair": "(1, 2)"}],
        "keys": "{1: 'x'}",
        "fine": 3,
    }
    assert "saved day, deep[0].pair, keys as text" in caplog.text


def make_full_batch() -> Batch:
    return Batch(
        token_ids_N=np.array([1, 2, 3], np.int32),
        lengths_B=np.array([1, 2], np.int32),
        uids=(SampleId(5, 0), SampleId(2**40, 1)),
        group_B=np.array([5, 6], np.int32),
        temperature_B=np.array([1.0, 0.7]),
        loss_mask_N=np.array([False, True, True]),
        logprobs_N=np.array([0.0, -0.1, -np.inf], np.float32),
        versions_N=np.array([-1, 3, 3], np.int32),
        advantages_N=np.array([0.0, 0.1, 0.2]),
        weights_N=np.array([0.0, 0.5, 0.5]),
        scores_B=np.array([1.0, -0.1]),
        component_N=np.array([0, 1, 1], np.int8),
        kl_weights_N=np.array([0.0, 0.1, 0.2]),
        old_logprobs_N=np.array([0.0, np.nan, -1.0], np.float32),
        teacher_ids_NK=np.array([[1, 2], [3, 4], [5, 6]], np.int32),
        teacher_top_NK=np.array([[-1, -2], [-3, -4], [-5, -np.inf]], np.float32),
        last_values_B=np.array([0.5, 0.25]),
        version=9,
    )


def test_a_saved_batch_is_loaded_bit_for_bit_and_absent_fields_stay_absent(tmp_path: Path):
    batch = make_full_batch()
    save_batch(tmp_path / "b.npz", batch)
    loaded = load_batch(tmp_path / "b.npz")
    assert (loaded.uids, loaded.version) == (batch.uids, 9)
    assert loaded.reference_logprobs_N is None
    for spec in fields(Batch):
        value_a, value_b = getattr(batch, spec.name), getattr(loaded, spec.name)
        if isinstance(value_a, np.ndarray):
            assert (value_a.dtype, value_a.shape) == (value_b.dtype, value_b.shape)
            assert value_a.tobytes() == value_b.tobytes()
        else:
            assert value_a == value_b


def test_one_kind_of_file_is_not_taken_for_the_other(tmp_path: Path):
    save_batch(tmp_path / "b.npz", make_full_batch())
    with pytest.raises(DataError, match="holds batch in format 2, expected groups"):
        load_groups(tmp_path / "b.npz")


def make_damaged_files() -> dict[str, bytes]:
    return {
        "empty": b"",
        "text": b"hello",
        "pickle": pickle.dumps([1]),
        "array": b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }",
    }


@pytest.mark.parametrize("kind", make_damaged_files())
def test_a_file_of_another_kind_is_refused_and_never_unpickled(tmp_path: Path, kind: str):
    path = tmp_path / "g.npz"
    path.write_bytes(make_damaged_files()[kind])
    with pytest.raises(DataError, match=r"g\.npz cannot be read as saved groups"):
        load_groups(path)


def test_a_pickled_array_inside_the_file_is_refused(tmp_path: Path):
    path = tmp_path / "g.npz"
    np.savez(path, json=np.array([{"format": 2}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="allow_pickle=False"):
        load_groups(path)


def test_a_truncated_file_and_a_missing_one_are_refused(tmp_path: Path):
    path = tmp_path / "g.npz"
    save_groups(path, make_varied_groups())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="damaged"):
        load_groups(path)
    with pytest.raises(DataError, match="No such file"):
        load_groups(tmp_path / "gone.npz")


def test_a_row_of_samples_jsonl_has_prompt_response_and_score():
    (row,) = samples_to_rows([group([1], uid=4, of=prompt("1+1=", uid="toy/3"), start_version=2)])
    assert json.loads(json.dumps(row)) == {
        "sample": "g4.0",
        "prompt_uid": "toy/3",
        "domain": "toy",
        "prompt": "1+1=",
        "response": "2",
        "score": 1.0,
        "parts": {},
        "status": "ok",
        "detail": "",
        "version": "",
        "isolation": "",
        "stop": "stop",
        "tokens": 5,
        "response_tokens": 1,
        "versions": [2, 2],
    }


def test_a_failed_score_is_null_in_samples_jsonl_and_the_row_is_strict_json():
    (row,) = samples_to_rows([group([None], texts=[""])])
    assert (row["score"], row["status"], row["versions"]) == (None, "failed", [])
    json.dumps(row, allow_nan=False)
