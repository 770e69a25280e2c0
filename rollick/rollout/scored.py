"""What came back: the scored samples of all groups that are neither trained nor dropped.

Owns the samples themselves, where the ledger has only their states. Checks on a resume that the
two agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np

from rollick.errors import CheckpointError
from rollick.rollout.groups import GroupState, LiveGroup, SampleState
from rollick.rollout.stats import token_ages
from rollick.types import Group, PolicyVersion, Sample, SampleId, ScoredSample, frozen_array


@dataclass(slots=True)
class _Open:
    """A group whose samples come one by one."""

    live: LiveGroup
    members: dict[int, ScoredSample] = field(default_factory=dict[int, ScoredSample])

    def group(self) -> Group:
        members = tuple(member for _, member in sorted(self.members.items()))
        return Group(self.live.uid, self.live.prompt, members, self.live.started)


class Scored:
    """Scored samples by group: of open groups so far, of complete ones all."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._whole: dict[int, Group] = {}

    def begin(self, live: LiveGroup) -> None:
        self._open[live.uid] = _Open(live)

    def add(self, uid: SampleId, member: ScoredSample) -> None:
        self._open[uid.group].members[uid.index] = member

    def group(self, uid: int) -> Group:
        """As it stands, its members ordered by id."""
        return self._whole[uid] if uid in self._whole else self._open[uid].group()

    def keep(self, group: Group) -> None:
        """An open group has all that it needs."""
        del self._open[group.uid]
        self._whole[group.uid] = group

    def is_whole(self, uid: int) -> bool:
        return uid in self._whole

    def remove(self, uid: int) -> Group:
        """Forget a group that was trained or dropped; returns it as it stood."""
        return self._whole.pop(uid) if uid in self._whole else self._open.pop(uid).group()

    def restore(self, live: Iterable[LiveGroup], saved: Mapping[int, Group]) -> None:
        """Take over the saved samples of the groups in flight; refuses what does not fit."""
        for group in live:
            before = saved.get(group.uid)
            members = _check_members(group, before.members if before else ())
            if before is not None and group.state is GroupState.COMPLETE:
                self._whole[group.uid] = before
            else:
                self._open[group.uid] = _Open(group, members)


def refuse_older(saved: Sequence[Group], version: PolicyVersion, *, max_staleness: float) -> None:
    """Samples that were drawn with more staleness than is allowed now cannot be trained on."""
    oldest = int(token_ages(saved, version).max(initial=0))
    if oldest > ceil(max_staleness):
        raise CheckpointError(
            f"the checkpoint has samples with tokens {oldest} versions old, and "
            f"rollout.max_staleness is {max_staleness:g}",
            fix=f"resume with rollout.max_staleness={oldest}",
        )


def without_loss(sample: Sample) -> Sample:
    """Nothing to train on: its score is none."""
    return replace(sample, loss_mask=frozen_array(np.zeros(sample.length), np.bool_))


def mask_older(group: Group, oldest: PolicyVersion) -> tuple[Group, int]:
    """The group without the tokens of versions before `oldest`, and how many that were."""
    members: list[ScoredSample] = []
    masked = 0
    for member in group.members:
        sample = member.sample
        stale = sample.loss_mask & (sample.versions < oldest)
        count = int(np.count_nonzero(stale))
        if count:
            mask = frozen_array(sample.loss_mask & ~stale, np.bool_)
            member = replace(member, sample=replace(sample, loss_mask=mask))
        members.append(member)
        masked += count
    return replace(group, members=tuple(members)), masked


def _check_members(live: LiveGroup, saved: Sequence[ScoredSample]) -> dict[int, ScoredSample]:
    members = {member.sample.uid.index: member for member in saved}
    done = {n for n, state in enumerate(live.samples) if state is SampleState.DONE}
    if set(members) != done:
        raise CheckpointError(
            f"samples {sorted(done)} of group {live.uid} are done, but the checkpoint has "
            f"samples {sorted(members)}",
            fix="resume from another checkpoint",
        )
    return members
