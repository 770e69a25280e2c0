"""Publishing from a sharded learner: only the receivers' memory holds full weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from rollick.models.loading.fingerprint import fingerprint
from rollick.trainer.strategy import ShardedWeights
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.host import HostReceiver
from rollick.weights.plan import Route
from rollick.weights.sender import WeightSender


def test_one_parameter_at_a_time_is_written_where_engines_read_it():
    shapes = [(name, torch.empty(3, 5, device="meta")) for name in "abcd"]
    kept: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most_alive
        for number, (name, _) in enumerate(shapes):
            tensor = torch.full((3, 5), float(number))
            kept.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            most_alive = max(most_alive, sum(ref() is not None for ref in kept))

    sender, receiver = WeightSender(), HostReceiver()
    route = Route("host", (0,))
    manifest = sender.offer(ShardedWeights(shapes, parameters()), PolicyVersion(3), route=route)
    arrived = list(receiver.open(manifest, 0))
    assert [(name, value[0, 0].item()) for name, value in arrived] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
        ("d", 3),
    ]
    assert fingerprint(arrived) == manifest.fingerprint
    assert most_alive <= 1  # the one that was just written
    sender.release(PublishOutcome(True))
    sender.close()
