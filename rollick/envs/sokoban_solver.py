"""A* for Sokoban: a way with the fewest moves, or the proof that there is none.

A node is (player, boxes) right after a push; an edge is a walk to the side of a box and one push.
The bound of a position is the sum of each box's pushes to its nearest target, alone in the room
(never more than what is needed, so the first way found is a shortest). A box on a cell from which
no target can be reached at all ends a branch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count

from rollick.envs.grid import distances, offsets, path

Node = tuple[int, frozenset[int]]
NODES = 200_000
"""Positions that are looked at before the solver gives up: some seconds."""


@dataclass(frozen=True)
class Room:
    """Floor and targets. Cells are row * width + column; what is not floor is wall."""

    width: int
    floor: frozenset[int]
    targets: frozenset[int]

    @cached_property
    def pushes(self) -> dict[int, int]:
        """Pushes from each cell to the nearest target with nothing in the way; a cell that is not
        in it is a trap."""
        found = dict.fromkeys(sorted(self.targets), 0)
        queue = deque(found)
        while queue:
            cell = queue.popleft()
            for step in offsets(self.width):
                box, player = cell - step, cell - 2 * step
                if box in self.floor and player in self.floor and box not in found:
                    found[box] = found[cell] + 1
                    queue.append(box)
        return found

    def bound(self, boxes: AbstractSet[int]) -> int | None:
        """Pushes that are needed at least; None if a box is trapped."""
        total = 0
        for box in boxes:
            needed = self.pushes.get(box)
            if needed is None:
                return None
            total += needed
        return total

    def spread(self, boxes: AbstractSet[int]) -> int:
        """How far the boxes are from the targets, in all."""
        return sum(self.pushes[box] for box in boxes)


def solve(
    room: Room, player: int, boxes: frozenset[int], *, nodes: int = NODES
) -> list[int] | None:
    """Directions of a shortest way; None if there is none (or none was found in `nodes`)."""
    came: dict[Node, tuple[Node, int, int]] = {}
    cost = {(player, boxes): 0}
    least = room.bound(boxes)
    if least is None:
        return None
    order = count()
    queue = [(least, next(order), (player, boxes))]
    closed: set[Node] = set()
    while queue and len(closed) < nodes:
        _, _, node = heappop(queue)
        if node in closed:
            continue
        closed.add(node)
        if node[1] == room.targets:
            return _directions(room, node, came)
        for stand, direction, step, following in _pushes(room, node):
            total = cost[node] + step
            bound = room.bound(following[1])
            if bound is None or total >= cost.get(following, 1 << 30):
                continue
            cost[following] = total
            came[following] = (node, stand, direction)
            heappush(queue, (total + bound, next(order), following))
    return None


def _pushes(room: Room, node: Node) -> list[tuple[int, int, int, Node]]:
    """What can be pushed: from which cell, in which direction, for how many moves, to where."""
    player, boxes = node
    floor, moves = room.floor, offsets(room.width)
    reach = distances(player, lambda cell: cell in floor and cell not in boxes, room.width)
    found: list[tuple[int, int, int, Node]] = []
    for box in sorted(boxes):
        for direction, step in enumerate(moves):
            stand, beyond = box - step, box + step
            if stand in reach and beyond in floor and beyond not in boxes:
                following = (box, (boxes - {box}) | {beyond})
                found.append((stand, direction, reach[stand] + 1, following))
    return found


def _directions(room: Room, node: Node, came: dict[Node, tuple[Node, int, int]]) -> list[int]:
    parts: list[list[int]] = []
    while node in came:
        node, stand, direction = came[node]
        walk = path(node[0], stand, room.floor - node[1], room.width)
        assert walk is not None
        parts.append([*walk, direction])
    return [direction for part in reversed(parts) for direction in part]
