"""FrozenLake: walk over the ice from the start to the goal, and into no hole.

Every map has a way. Where the lake is slippery a step goes astray with the chance `slip`, to either
side alike (2/3 is Gymnasium's lake): then the best policy can drown, too, and the solver is the
policy that reaches the goal most often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from rollick.envs.base import Frame, random_of
from rollick.envs.grid import (
    DOWN,
    LEFT,
    RIGHT,
    UP,
    GridGame,
    GridOptions,
    distances,
    offsets,
    path,
)
from rollick.errors import EnvError

ICE, HOLE, GOAL, START, PLAYER, DROWNED, ARRIVED = range(7)
TILES = ("ice", "hole", "goal", "start", "player", "drowned", "arrived")
SYMBOLS = {
    "letters": "FHGSPXW",
    "marks": "_O*_@X!",
    "digits": "0120389",
}
"""One symbol a tile, in the order of the constants."""
SIDES = {UP: (LEFT, RIGHT), DOWN: (LEFT, RIGHT), LEFT: (UP, DOWN), RIGHT: (UP, DOWN)}


class FrozenLake(GridGame):
    """A lake of `size` by `size` cells; start and goal are in opposite corners."""

    def __init__(
        self,
        *,
        size: int = 4,
        holes: float = 0.2,
        slip: float = 0.0,
        max_steps: int = 0,
        symbols: Literal["letters", "marks", "digits"] = "letters",
        careless: float = 0.0,
        **shared: Unpack[GridOptions],
    ) -> None:
        """`holes`: the share of the cells; `slip`: the chance that a step goes astray;
        `max_steps` in turns, by default several times the longest way. `careless`: the chance that
        the solver takes a step without looking for holes, down if it can and else to the right; it
        shows how to walk, then, and leaves something to learn."""
        shares = holes < 1 and all(0 <= share <= 1 for share in (holes, slip, careless))
        if size < 2 or not shares or symbols not in SYMBOLS:
            raise EnvError(
                f"no lake has size={size}, holes={holes}, slip={slip}, careless={careless}, "
                f"symbols={symbols!r}",
                fix="size from 2, holes, slip and careless from 0 to 1, "
                f"symbols of {', '.join(SYMBOLS)}",
            )
        super().__init__(max_steps=max_steps or (25 if slip else 4) * size, **shared)
        if careless and (slip or self.progress_reward):
            raise EnvError(
                f"careless={careless} is for a solver that knows where it goes, and progress is "
                "counted along its way",
                fix="leave slip and progress_reward at 0",
            )
        if slip and self.progress_reward:
            raise EnvError(
                f"progress_reward={self.progress_reward} pays for steps that slip={slip} may turn "
                "aside",
                fix="leave one of the two at 0",
            )
        self.size = size
        self.holes = holes
        self.slip = slip
        self.careless = careless
        self.symbols = SYMBOLS[symbols]
        self.width = size + 2
        self.moves = offsets(self.width)
        self.start = self.width + 1
        self.goal = size * self.width + size
        self.ice: frozenset[int] = frozenset()
        """Where one can stand, start and goal among them."""
        self.cells: frozenset[int] = frozenset()
        self.player = self.start
        self.policy: dict[int, int] = {}

    def build(self, seed: int) -> None:
        random = random_of("frozen_lake", seed, self.size, str(self.holes))
        self.random = random_of("frozen_lake slip", seed) if self.slip else random
        rows = range(1, self.size + 1)
        cells = [row * self.width + column for row in rows for column in rows]
        self.cells = frozenset(cells)
        while True:
            ice = {cell for cell in cells if random.random() >= self.holes}
            ice |= {self.start, self.goal}
            board = "".join("." if cell in ice else "O" for cell in cells)
            solvable = self.goal in distances(self.start, ice.__contains__, self.width)
            if solvable and self.fits(board):
                break
        self.ice = frozenset(ice)
        # Every turn of the board starts from these symbols; only the player's place changes.
        letters = [self.symbols[ICE] if cell in ice else self.symbols[HOLE] for cell in cells]
        letters[0], letters[-1] = self.symbols[START], self.symbols[GOAL]
        self.letters = letters

    def move(self, direction: int) -> tuple[float, bool]:
        if self.slip and self.random.random() < self.slip:
            direction = self.random.choice(SIDES[direction])
        there = self.player + self.moves[direction]
        if there not in self.cells:
            return 0.0, False
        self.player = there
        return float(there == self.goal), True

    def outcome(self) -> bool | None:
        if self.player == self.goal:
            return True
        return None if self.player in self.ice else False

    def grid(self) -> str:
        letters, size = self.letters.copy(), self.size
        row, column = divmod(self.player, self.width)
        letters[(row - 1) * size + column - 1] = self.symbols[self._player_tile()]
        return "\n".join(["".join(letters[at : at + size]) for at in range(0, size * size, size)])

    def explain(self) -> str:
        ice, hole, goal, start, player, *_ = self.symbols
        slippery = " The ice is slippery: a step may go to the side." if self.slip else ""
        begun = f"{start} where you started, " if start != ice else ""
        return (
            f"Walk over the frozen lake to the goal and fall into no hole.{slippery}\n"
            f"{player} is you, {begun}{ice} ice, {hole} a hole, {goal} the goal."
        )

    def find_way(self) -> Sequence[int] | None:
        if self.outcome() is not None:
            return None
        if self.slip:
            self.policy = self.policy or self._best_policy()
            return [self.policy[self.player]]
        if self.careless and self.random.random() < self.careless:
            return [DOWN if self.player // self.width < self.size else RIGHT]
        way = path(self.player, self.goal, self.ice, self.width, random=self.random)
        return way[:1] if way and self.careless else way

    def draw(self) -> Frame:
        tile = {self.symbols[HOLE]: "hole", self.symbols[GOAL]: "goal", self.symbols[START]: "ice"}
        player, size = self._player_tile(), self.size
        names = [tile.get(letter, "ice") for letter in self.letters]
        row, column = divmod(self.player, self.width)
        names[(row - 1) * size + column - 1] = TILES[player]
        return Frame(tuple(tuple(names[at : at + size]) for at in range(0, size * size, size)))

    def _player_tile(self) -> int:
        if self.player == self.goal:
            return ARRIVED
        return PLAYER if self.player in self.ice else DROWNED

    def _best_policy(self) -> dict[int, int]:
        """Value iteration: the direction from each cell that leads to the goal most often."""
        value = dict.fromkeys(self.cells, 0.0) | {self.goal: 1.0}
        chances = [[(d, 1 - self.slip), *((s, self.slip / 2) for s in SIDES[d])] for d in range(4)]

        def worth(cell: int, direction: int) -> float:
            ends = [(cell + self.moves[way], chance) for way, chance in chances[direction]]
            return sum(chance * value.get(end, value[cell]) for end, chance in ends)

        walkable = sorted(self.ice - {self.goal})
        for _ in range(self.max_steps):
            value = value | {cell: max(worth(cell, d) for d in range(4)) for cell in walkable}
        return {cell: max(range(4), key=lambda d: worth(cell, d)) for cell in walkable}
