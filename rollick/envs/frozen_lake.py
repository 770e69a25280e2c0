"""FrozenLake: walk over the ice from the start to the goal without falling into a hole.

Every map has a path to the goal. With probability `slip` a step goes to one of the two sides
instead (Gymnasium's lake: 2/3). Then even the best policy can fall into a hole; the solver is the
policy with the highest probability of success.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollick.envs import grid
from rollick.envs.base import seeded_random
from rollick.envs.grid import DOWN, LEFT, RIGHT, UP, GridGame, join_rows, offsets
from rollick.errors import EnvError

ICE, HOLE, GOAL, START, PLAYER, DROWNED, ARRIVED = range(7)
TILES = ("ice", "hole", "goal", "ice", "player", "drowned", "arrived")
SYMBOLS = {"letters": "FHGSPXW", "marks": "_O*_@X!", "digits": "0120389"}
"""One symbol per tile, in the order of the constants."""
MAX_ATTEMPTS = 100_000
"""Maximum maps generated for a puzzle: a few seconds."""
SIDES = {UP: (LEFT, RIGHT), DOWN: (LEFT, RIGHT), LEFT: (UP, DOWN), RIGHT: (UP, DOWN)}


@dataclass(kw_only=True, eq=False)
class FrozenLake(GridGame):
    """A lake of `size` by `size` cells, with start and goal in opposite corners."""

    size: int = 4
    holes: float = 0.2
    """The share of cells that are holes."""
    slip: float = 0.0
    """The probability that a step goes to a side."""
    symbols: Literal["letters", "marks", "digits"] = "letters"
    careless: float = 0.0
    """The probability that the solver ignores holes in a step and goes down, or right in the last
    row. Its episodes then show the format and leave something to learn."""

    def __post_init__(self) -> None:
        shares = (self.holes, self.slip, self.careless)
        are_valid = self.holes < 1 and all(0 <= share <= 1 for share in shares)
        if self.size < 2 or not are_valid or self.symbols not in SYMBOLS:
            values = f"holes={self.holes}, slip={self.slip}, careless={self.careless}"
            text = f"invalid options: size={self.size}, {values}, symbols={self.symbols!r}"
            fix = "use size >= 2; holes, slip and careless from 0 to 1 (holes < 1); symbols one of"
            raise EnvError(text, fix=f"{fix} {', '.join(SYMBOLS)}")
        self.max_steps = self.max_steps or (25 if self.slip else 4) * self.size
        super().__post_init__()
        if sum(map(bool, (self.careless, self.slip, self.progress_reward))) > 1:
            values = f"progress_reward={self.progress_reward} and careless={self.careless}"
            text = f"{values} cannot be combined with slip={self.slip} or with each other"
            raise EnvError(text, fix="set all but one of them to 0")
        self.symbol_of = SYMBOLS[self.symbols]
        self.tile_names = dict(zip(self.symbol_of, TILES, strict=True))
        self.width = self.size + 2
        self.moves = offsets(self.width)
        self.start = self.width + 1
        self.goal = self.size * self.width + self.size
        self.player = self.start
        self.policy: dict[int, int] = {}
        """The solver's direction in each cell, on slippery ice."""

    def build(self, seed: int) -> None:
        random = seeded_random("frozen_lake", seed, self.size, str(self.holes))
        self.random = seeded_random("frozen_lake slip", seed) if self.slip else random
        rows = range(1, self.size + 1)
        cells = [row * self.width + column for row in rows for column in rows]
        self.cells = frozenset(cells)
        for _ in range(MAX_ATTEMPTS):
            ice = {cell for cell in cells if random.random() >= self.holes}
            ice |= {self.start, self.goal}
            board = "".join("." if cell in ice else "O" for cell in cells)
            is_solvable = self.goal in grid.distances(self.start, ice.__contains__, self.width)
            if is_solvable and self.is_in_split(board):
                break
        else:
            values = f"size={self.size}, holes={self.holes}, split={self.split!r}"
            fix = "use fewer holes, a larger size or split=all"
            raise EnvError(f"could not generate a map with {values}", fix=fix)
        self.ice = frozenset(ice)
        """Cells without a hole, including start and goal."""
        # The board without the player, the only symbol that moves.
        self.background = [self.symbol_of[ICE if cell in ice else HOLE] for cell in cells]
        self.background[0], self.background[-1] = self.symbol_of[START], self.symbol_of[GOAL]

    def move(self, direction: int) -> tuple[float, bool]:
        if self.slip and self.random.random() < self.slip:
            direction = self.random.choice(SIDES[direction])
        cell = self.player + self.moves[direction]
        if cell not in self.cells:
            return 0.0, False
        self.player = cell
        return float(cell == self.goal), True

    def outcome(self) -> bool | None:
        if self.player == self.goal:
            return True
        return None if self.player in self.ice else False

    def grid(self) -> str:
        symbols = self.background.copy()
        row, column = divmod(self.player, self.width)
        tile = PLAYER if self.player in self.ice else DROWNED
        tile = ARRIVED if self.player == self.goal else tile
        symbols[(row - 1) * self.size + column - 1] = self.symbol_of[tile]
        return join_rows(symbols, self.size)

    def explain(self) -> str:
        ice, hole, goal, start, player, *_ = self.symbol_of
        slippery = " The ice is slippery: a step may go to the side." if self.slip else ""
        start_text = f"{start} where you started, " if start != ice else ""
        return (
            f"Walk over the frozen lake to the goal and fall into no hole.{slippery}\n"
            f"{player} is you, {start_text}{ice} ice, {hole} a hole, {goal} the goal."
        )

    def plan_moves(self) -> Sequence[int] | None:
        if self.outcome() is not None:
            return None
        if self.slip:
            self.policy = self.policy or self._best_policy()
            return [self.policy[self.player]]
        if self.careless and self.random.random() < self.careless:
            return [DOWN if self.player // self.width < self.size else RIGHT]
        directions = grid.shortest_path(
            self.player, self.goal, self.ice, self.width, random=self.random
        )
        return directions[:1] if directions and self.careless else directions

    def _best_policy(self) -> dict[int, int]:
        """Value iteration: the best direction from each cell."""
        value = dict.fromkeys(self.cells, 0.0) | {self.goal: 1.0}
        chances = [[(d, 1 - self.slip), *((s, self.slip / 2) for s in SIDES[d])] for d in range(4)]

        def action_value(cell: int, direction: int) -> float:
            ends = [(cell + self.moves[d], chance) for d, chance in chances[direction]]
            return sum(chance * value.get(end, value[cell]) for end, chance in ends)

        walkable = sorted(self.ice - {self.goal})
        for _ in range(self.max_steps):
            best = {cell: max(action_value(cell, d) for d in range(4)) for cell in walkable}
            value = value | best
        return {cell: max(range(4), key=lambda d: action_value(cell, d)) for cell in walkable}
