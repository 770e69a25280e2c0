"""Sokoban: push every box onto a target. Every puzzle is solvable by construction.

A puzzle is generated backwards: the boxes start on the targets, and the player walks and *pulls* at
random. The reversed moves solve the puzzle. Of several such walks, the one that moved the boxes
farthest is used.

The solver is an A* search for the fewest moves. A node is (player, boxes) right after a push; an
edge is a walk to a box and one push. The heuristic is the sum over boxes of the pushes to the
nearest target in an empty room. It is admissible, so the first solution is a shortest one. A box on
a cell without a path to any target prunes the branch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Literal, NamedTuple

from rollick.envs.base import seeded_random
from rollick.envs.grid import GridGame, distances, join_rows, offsets, shortest_path
from rollick.errors import EnvError

WALL, FLOOR, TARGET, BOX, DONE, PLAYER, STANDING = range(7)
TILES = ("wall", "floor", "target", "box", "done", "player", "standing")
"""`done`: a box on a target; `standing`: the player on a target."""
SYMBOLS = {"classic": "# .$*@+", "letters": "WFTBDPS", "marks": "#_OX√PS", "digits": "0123456"}
"""One symbol per tile, in the order of the constants. `classic` is the level file format."""
WALKS = 6
"""Backward walks per puzzle; the best one is used."""
MAX_ATTEMPTS = 200
"""Maximum rooms generated for a puzzle; usually one or two are enough."""
MAX_NODES = 200_000
"""Maximum nodes that the solver expands: a few seconds."""
Node = tuple[int, frozenset[int]]


@dataclass(frozen=True)
class Room:
    """Floor and targets. A cell is row * width + column; all other cells are walls."""

    width: int
    floor: frozenset[int]
    targets: frozenset[int]

    @cached_property
    def pushes(self) -> dict[int, int]:
        """Pushes from each cell to the nearest target in an empty room. A box on any other cell
        cannot reach a target."""
        pushes_from = dict.fromkeys(sorted(self.targets), 0)
        queue = deque(pushes_from)
        while queue:
            cell = queue.popleft()
            for step in offsets(self.width):
                box, player = cell - step, cell - 2 * step
                if box in self.floor and player in self.floor and box not in pushes_from:
                    pushes_from[box] = pushes_from[cell] + 1
                    queue.append(box)
        return pushes_from

    def lower_bound(self, boxes: AbstractSet[int]) -> float:
        """Lower bound of the pushes to the nearest targets; infinite if a box is stuck."""
        return sum(self.pushes.get(box, inf) for box in boxes)


class Puzzle(NamedTuple):
    """A start position."""

    room: Room
    player: int
    boxes: frozenset[int]

    @property
    def board(self) -> str:
        """Walls, targets, boxes and player, cell by cell."""
        room = self.room
        parts = (room.floor, room.targets, self.boxes, (self.player,))
        return ";".join(",".join(map(str, sorted(cells))) for cells in parts)


@dataclass(kw_only=True, eq=False)
class Sokoban(GridGame):
    """A room of `size` by `size` cells, including the outer walls. Solving it has the reward 1."""

    size: int = 6
    boxes: int = 1
    walls: float = 0.1
    """The share of inner cells that are walls."""
    symbols: Literal["classic", "letters", "marks", "digits"] = "marks"
    box_reward: float = 0.0
    """For each box pushed onto a target, subtracted when it is pushed off."""
    step_reward: float = 0.0
    """For each move."""

    def __post_init__(self) -> None:
        size, boxes = self.size, self.boxes
        if size < 5 or not 1 <= boxes <= (size - 2) ** 2 // 5 or self.symbols not in SYMBOLS:
            text = f"invalid options: size={size}, boxes={boxes}, symbols={self.symbols!r}"
            fix = "use size >= 5, at most one box per five inner cells, symbols"
            raise EnvError(text, fix=f"{fix} one of {', '.join(SYMBOLS)}")
        self.max_steps = self.max_steps or 5 * size * (1 + boxes)
        super().__post_init__()
        self.symbol_of = SYMBOLS[self.symbols]
        self.tile_names = dict(zip(self.symbol_of, TILES, strict=True))
        self.moves = offsets(size)

    def build(self, seed: int) -> None:
        random = seeded_random("sokoban", seed, self.size, self.boxes, str(self.walls))
        while True:
            puzzle = make_puzzle(random, size=self.size, boxes=self.boxes, walls=self.walls)
            if self.is_in_split(puzzle.board):
                break
        self.room, self.player, start = puzzle
        self.box_cells = set(start)
        floor, targets, cells = self.room.floor, self.room.targets, range(self.size**2)
        tiles = [TARGET if c in targets else FLOOR if c in floor else WALL for c in cells]
        # The board without player and boxes, the only symbols that move.
        self.background = [self.symbol_of[tile] for tile in tiles]

    def move(self, direction: int) -> tuple[float, bool]:
        step = self.moves[direction]
        cell = self.player + step
        if cell not in self.room.floor:
            return self.step_reward, False
        reward = self.step_reward
        if cell in self.box_cells:
            beyond = cell + step
            if beyond not in self.room.floor or beyond in self.box_cells:
                return reward, False
            self.box_cells.remove(cell)
            self.box_cells.add(beyond)
            targets = self.room.targets
            reward += self.box_reward * ((beyond in targets) - (cell in targets))
        self.player = cell
        return reward + float(self.box_cells <= self.room.targets), True

    def outcome(self) -> bool | None:
        return True if self.box_cells <= self.room.targets else None

    def grid(self) -> str:
        symbols, targets = self.background.copy(), self.room.targets
        for cell in self.box_cells:
            symbols[cell] = self.symbol_of[DONE if cell in targets else BOX]
        symbols[self.player] = self.symbol_of[STANDING if self.player in targets else PLAYER]
        return join_rows(symbols, self.size)

    def explain(self) -> str:
        wall, floor, target, box, done, player, standing = self.symbol_of
        floor = "a space" if floor == " " else floor
        return (
            "Push every box onto a target. You cannot pull, and you push one box at a time.\n"
            f"{player} is you ({standing} on a target), {wall} a wall, {floor} floor, "
            f"{target} a target, {box} a box, {done} a box on a target."
        )

    def plan_moves(self) -> Sequence[int] | None:
        return solve(self.room, self.player, frozenset(self.box_cells))


def make_puzzle(random: Random, *, size: int, boxes: int, walls: float) -> Puzzle:
    """Generate a solvable puzzle. Raises EnvError if the room is too small for the boxes."""
    for _ in range(MAX_ATTEMPTS):
        room = _make_room(random, size, boxes, walls)
        if room is None:
            continue
        walks = [_walk_backwards(random, room) for _ in range(WALKS)]
        # The first wins a tie: the choice must not depend on the order of a set.
        pulls, puzzle = max(walks, key=lambda walk: walk[0])
        if pulls and puzzle.boxes != room.targets:
            return puzzle
    text = f"could not generate a puzzle with size={size}, boxes={boxes}, walls={walls}"
    raise EnvError(text, fix="use a larger size, fewer boxes or fewer walls")


def _make_room(random: Random, size: int, boxes: int, walls: float) -> Room | None:
    """A connected floor with targets; None if it is too small."""
    inner = [row * size + column for row in range(1, size - 1) for column in range(1, size - 1)]
    open_cells = {cell for cell in inner if random.random() >= walls}
    if not open_cells:
        return None
    start = random.choice(sorted(open_cells))
    floor = distances(start, open_cells.__contains__, size)
    if len(floor) < len(inner) // 2 or len(floor) < 3 * boxes + 3:
        return None
    targets = random.sample(sorted(floor), boxes)
    return Room(size, frozenset(floor), frozenset(targets))


def _walk_backwards(random: Random, room: Room) -> tuple[float, Puzzle]:
    """Walk and pull from the solved room. Returns the distance of the boxes, and the puzzle."""
    floor, moves = room.floor, offsets(room.width)
    boxes = set(room.targets)
    player = random.choice(sorted(floor - boxes))
    for _ in range(10 * room.width * len(boxes)):
        step = moves[int(random.random() * 4)]
        cell = player - step
        if cell not in floor or cell in boxes:
            continue
        # A push in the direction `step` would leave this box in front of the player.
        if player + step in boxes and random.random() < 0.8:
            boxes.remove(player + step)
            boxes.add(player)
        player = cell
    return room.lower_bound(boxes), Puzzle(room, player, frozenset(boxes))


def solve(room: Room, player: int, boxes: frozenset[int]) -> list[int] | None:
    """Directions of a shortest solution; None if there is none within MAX_NODES."""
    came_from: dict[Node, tuple[Node, int, int]] = {}
    cost = {(player, boxes): 0}
    order = count()
    queue = [(room.lower_bound(boxes), next(order), (player, boxes))]
    closed: set[Node] = set()
    while queue and len(closed) < MAX_NODES:
        _, _, node = heappop(queue)
        if node in closed:
            continue
        closed.add(node)
        if node[1] == room.targets:
            return _directions(room, node, came_from)
        for stand, direction, step, next_node in _pushes(room, node):
            total = cost[node] + step
            bound = room.lower_bound(next_node[1])
            if bound == inf or total >= cost.get(next_node, inf):
                continue
            cost[next_node] = total
            came_from[next_node] = (node, stand, direction)
            heappush(queue, (total + bound, next(order), next_node))
    return None


def _pushes(room: Room, node: Node) -> list[tuple[int, int, int, Node]]:
    """Possible pushes: the player's cell, direction, number of moves, and next node."""
    player, boxes = node
    floor, moves = room.floor, offsets(room.width)
    reach = distances(player, lambda cell: cell in floor and cell not in boxes, room.width)
    pushes: list[tuple[int, int, int, Node]] = []
    for box in sorted(boxes):
        for direction, step in enumerate(moves):
            stand, beyond = box - step, box + step
            if stand in reach and beyond in floor and beyond not in boxes:
                next_node = (box, (boxes - {box}) | {beyond})
                pushes.append((stand, direction, reach[stand] + 1, next_node))
    return pushes


def _directions(room: Room, node: Node, came_from: dict[Node, tuple[Node, int, int]]) -> list[int]:
    parts: list[list[int]] = []
    while node in came_from:
        node, stand, direction = came_from[node]
        walk = shortest_path(node[0], stand, room.floor - node[1], room.width)
        assert walk is not None
        parts.append([*walk, direction])
    return [direction for part in reversed(parts) for direction in part]
