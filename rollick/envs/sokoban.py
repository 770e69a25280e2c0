"""Sokoban: push every box onto a target. Solvable by construction, and a solver proves it.

A puzzle is made backwards: the boxes stand on the targets, and the player walks and *pulls* at
random. Whatever comes of it can be pushed back, move by move. Of several such walks the one that
took the boxes farthest is the puzzle. The solver is an A* over pushes that finds a way with the
fewest moves (envs/sokoban_solver.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal, NamedTuple, Unpack

from rollick.envs.base import Frame, random_of
from rollick.envs.grid import GridGame, GridOptions, distances, offsets
from rollick.envs.sokoban_solver import Room, solve
from rollick.errors import EnvError

WALL, FLOOR, TARGET, BOX, DONE, PLAYER, STANDING = range(7)
TILES = ("wall", "floor", "target", "box", "done", "player", "standing")
"""`done`: a box on a target; `standing`: the player on a target."""
SYMBOLS = {
    "classic": "# .$*@+",
    "letters": "WFTBDPS",
    "marks": "#_OX√PS",
    "digits": "0123456",
}
"""One symbol a tile, in the order of the constants. `classic` is that of Sokoban's level files."""
WALKS = 6
"""Backward walks that a puzzle is chosen from."""
ATTEMPTS = 200
"""Rooms that are tried before a size is refused; the first or second nearly always does."""


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


class Sokoban(GridGame):
    """A room of `size` by `size` cells, its outer walls among them."""

    def __init__(
        self,
        *,
        size: int = 6,
        boxes: int = 1,
        walls: float = 0.1,
        max_steps: int = 0,
        symbols: Literal["classic", "letters", "marks", "digits"] = "marks",
        box_reward: float = 0.0,
        step_reward: float = 0.0,
        **shared: Unpack[GridOptions],
    ) -> None:
        """`walls`: the share of the inner cells. Solving pays 1; `box_reward` is for each box that
        comes onto a target (and is taken back when it leaves), `step_reward` for each move."""
        if size < 5 or not 1 <= boxes <= (size - 2) ** 2 // 5 or symbols not in SYMBOLS:
            raise EnvError(
                f"no room has size={size}, boxes={boxes}, symbols={symbols!r}",
                fix="size from 5, at most a box for five inner cells, "
                f"symbols of {', '.join(SYMBOLS)}",
            )
        super().__init__(max_steps=max_steps or 5 * size * (1 + boxes), **shared)
        self.size = size
        self.count = boxes
        self.walls = walls
        self.symbols = SYMBOLS[symbols]
        self.box_reward = box_reward
        self.step_reward = step_reward
        self.moves = offsets(size)

    def build(self, seed: int) -> None:
        random = random_of("sokoban", seed, self.size, self.count, str(self.walls))
        while True:
            puzzle = make_puzzle(random, size=self.size, boxes=self.count, walls=self.walls)
            if self.fits(puzzle.board):
                break
        self.room, self.player, start = puzzle
        self.boxes = set(start)
        floor, targets = self.room.floor, self.room.targets
        kinds = [WALL if cell not in floor else FLOOR for cell in range(self.size**2)]
        for cell in targets:
            kinds[cell] = TARGET
        # The board without player and boxes: only their places change.
        self.letters = [self.symbols[kind] for kind in kinds]

    def move(self, direction: int) -> tuple[float, bool]:
        step = self.moves[direction]
        there = self.player + step
        if there not in self.room.floor:
            return self.step_reward, False
        reward = self.step_reward
        if there in self.boxes:
            beyond = there + step
            if beyond not in self.room.floor or beyond in self.boxes:
                return reward, False
            self.boxes.remove(there)
            self.boxes.add(beyond)
            targets = self.room.targets
            reward += self.box_reward * ((beyond in targets) - (there in targets))
        self.player = there
        return reward + float(self.boxes <= self.room.targets), True

    def outcome(self) -> bool | None:
        return True if self.boxes <= self.room.targets else None

    def grid(self) -> str:
        letters, size, targets = self.letters.copy(), self.size, self.room.targets
        for cell in self.boxes:
            letters[cell] = self.symbols[DONE if cell in targets else BOX]
        letters[self.player] = self.symbols[STANDING if self.player in targets else PLAYER]
        return "\n".join(["".join(letters[at : at + size]) for at in range(0, size * size, size)])

    def explain(self) -> str:
        wall, floor, target, box, done, player, standing = self.symbols
        floor = "a space" if floor == " " else floor
        return (
            "Push every box onto a target. You cannot pull, and you push one box at a time.\n"
            f"{player} is you ({standing} on a target), {wall} a wall, {floor} floor, "
            f"{target} a target, {box} a box, {done} a box on a target."
        )

    def find_way(self) -> Sequence[int] | None:
        return solve(self.room, self.player, frozenset(self.boxes))

    def draw(self) -> Frame:
        tile_of = dict(zip(self.symbols, TILES, strict=True))
        rows = self.grid().split("\n")
        return Frame(tuple(tuple(tile_of[letter] for letter in row) for row in rows))


def make_puzzle(random: Random, *, size: int, boxes: int, walls: float) -> Puzzle:
    """A puzzle that can be solved. EnvError if the room is too tight for so many boxes."""
    for _ in range(ATTEMPTS):
        room = _make_room(random, size, boxes, walls)
        if room is None:
            continue
        found = [_walk_back(random, room) for _ in range(WALKS)]
        # A tie goes to the first: the choice must not depend on how sets are ordered.
        pulls, puzzle = max(found, key=lambda walk: walk[0])
        if pulls and puzzle.boxes != room.targets:
            return puzzle
    raise EnvError(
        f"no puzzle of size {size} with {boxes} boxes and walls={walls} was found",
        fix="take a larger room, or fewer boxes or walls",
    )


def _make_room(random: Random, size: int, boxes: int, walls: float) -> Room | None:
    """Floor in one piece, with the targets; None if the walls left too little."""
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


def _walk_back(random: Random, room: Room) -> tuple[int, Puzzle]:
    """Walk and pull from the solved room: how far the boxes came in all, and the puzzle."""
    floor, moves = room.floor, offsets(room.width)
    boxes = set(room.targets)
    places = sorted(floor - boxes)
    player = random.choice(places)
    for _ in range(10 * room.width * len(boxes)):
        step = moves[int(random.random() * 4)]
        there = player - step
        if there not in floor or there in boxes:
            continue
        # The box that a push in the direction `step` would have left in front of the player.
        if player + step in boxes and random.random() < 0.8:
            boxes.remove(player + step)
            boxes.add(player)
        player = there
    return room.spread(boxes), Puzzle(room, player, frozenset(boxes))
