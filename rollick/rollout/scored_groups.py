"""The scored samples of all groups in flight (not trained, dropped or deferred).

Stores the samples; the ledger stores only their states. On resume, checks that both agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollick.errors import CheckpointError
from rollick.rollout.ledger.group_record import GroupRecord, GroupState, SampleState
from rollick.types import (
    Group,
    PolicyVersion,
    Sample,
    SampleId,
    ScoredSample,
    ScoreStatus,
    frozen_array,
)


@dataclass(slots=True)
class _OpenGroup:
    """An incomplete group: its record and the samples scored so far, by index."""

    record: GroupRecord
    members: dict[int, ScoredSample] = field(default_factory=dict[int, ScoredSample])

    def group(self) -> Group:
        members = tuple(member for _, member in sorted(self.members.items()))
        return Group(self.record.uid, self.record.prompt, members, self.record.start_version)


class ScoredGroups:
    """Scored samples of open (incomplete) and complete groups, by group id."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenGroup] = {}
        self._complete: dict[int, Group] = {}
        self.sample_count = 0

    def begin(self, record: GroupRecord) -> None:
        self._open[record.uid] = _OpenGroup(record)

    def add(self, uid: SampleId, member: ScoredSample) -> None:
        self._open[uid.group].members[uid.index] = member
        self.sample_count += 1

    def group(self, uid: int) -> Group:
        """The group with its members so far, ordered by id."""
        return self._complete.get(uid) or self._open[uid].group()

    def complete(self, group: Group) -> None:
        """Mark an open group as complete and store its final members."""
        del self._open[group.uid]
        self._complete[group.uid] = group

    def find_unavailable(self) -> list[int]:
        """Ids of the groups with a sample that was not scored because a server did not answer."""
        groups = [*self._complete.values(), *(each.group() for each in self._open.values())]
        missing = ScoreStatus.UNAVAILABLE
        return [g.uid for g in groups if any(m.score.status is missing for m in g.members)]

    def is_complete(self, uid: int) -> bool:
        return uid in self._complete

    def remove(self, uid: int) -> Group:
        group = self._complete.pop(uid, None) or self._open.pop(uid).group()
        self.sample_count -= len(group.members)
        return group

    def restore(self, records: Iterable[GroupRecord], saved: Mapping[int, Group]) -> None:
        """Restore the saved samples of the groups in flight; raises if they do not match."""
        for record in records:
            group = saved.get(record.uid)
            members = _check_members(record, group.members if group else ())
            self.sample_count += len(members)
            if group is not None and record.state is GroupState.COMPLETE:
                self._complete[record.uid] = group
            else:
                self._open[record.uid] = _OpenGroup(record, members)


def without_loss(sample: Sample) -> Sample:
    """A copy of the sample with all tokens masked, for samples without a score."""
    return replace(sample, loss_mask=frozen_array(np.zeros(sample.length), np.bool_))


def mask_old_tokens(group: Group, oldest: PolicyVersion) -> tuple[Group, int]:
    """Mask tokens sampled before version `oldest`. Also returns the number masked."""
    members, masked = list(group.members), 0
    for n, sample in enumerate(group.samples):
        stale = sample.loss_mask & (sample.versions < oldest)
        if stale.any():
            mask = frozen_array(sample.loss_mask & ~stale, np.bool_)
            members[n] = replace(members[n], sample=replace(sample, loss_mask=mask))
            masked += int(np.count_nonzero(stale))
    return replace(group, members=tuple(members)), masked


def _check_members(record: GroupRecord, saved: Sequence[ScoredSample]) -> dict[int, ScoredSample]:
    members = {member.sample.uid.index: member for member in saved}
    done = {n for n, state in enumerate(record.samples) if state is SampleState.DONE}
    if set(members) != done:
        raise CheckpointError(
            f"samples {sorted(done)} of group {record.uid} are done, but the checkpoint has "
            f"samples {sorted(members)}",
            fix="resume from another checkpoint",
        )
    return members
