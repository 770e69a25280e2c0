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
    references: list[weakref.ref[torch.Tensor]] = []
    max_alive = 0

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal max_alive
        for index, (name, _) in enumerate(shapes):
            tensor = torch.full((3, 5), float(index))
            references.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            max_alive = max(max_alive, sum(ref() is not None for ref in references))

    sender, receiver = WeightSender(), HostReceiver()
    route = Route("host", (0,))
    manifest = sender.offer(ShardedWeights(shapes, parameters()), PolicyVersion(3), route=route)
    received = list(receiver.open(manifest, 0))
    assert [(name, value[0, 0].item()) for name, value in received] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
        ("d", 3),
    ]
    assert fingerprint(received) == manifest.fingerprint
    assert max_alive <= 1  # the tensor that was just written
    sender.release(PublishOutcome(True))
    sender.close()
