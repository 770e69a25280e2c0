"""What the games on a grid share: directions, ways, how a turn is read and told.

A cell is a number, row * width + column; a grid has a border that nobody can enter, so that a move
is one addition and needs no test of the edge.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Container, Sequence
from random import Random
from typing import Any, Literal, TypedDict

from rollick.envs.base import Reset, Step, TextEnv
from rollick.envs.formats import Format, ask, read_actions, write_actions, write_reply
from rollick.errors import EnvError
from rollick.types import stable_hash

Split = Literal["all", "train", "held_out"]
"""Which puzzles: one of five, by its board alone, is held out."""
DIRECTIONS = ("Up", "Down", "Left", "Right")
UP, DOWN, LEFT, RIGHT = range(4)
NAMES_OF = (
    ("up", "u", "north", "↑"),
    ("down", "d", "south", "↓"),
    ("left", "l", "west", "←"),
    ("right", "r", "east", "→"),
)
WORDS = {word: direction for direction, words in enumerate(NAMES_OF) for word in words}


def offsets(width: int) -> tuple[int, int, int, int]:
    """What each direction adds to a cell."""
    return (-width, width, -1, 1)


def distances(start: int, free: Callable[[int], bool], width: int) -> dict[int, int]:
    """Moves from `start` to every cell that can be reached over free ones."""
    found = {start: 0}
    queue = deque([start])
    moves = offsets(width)
    while queue:
        cell = queue.popleft()
        for move in moves:
            if cell + move not in found and free(cell + move):
                found[cell + move] = found[cell] + 1
                queue.append(cell + move)
    return found


def path(
    start: int, goal: int, free: Container[int], width: int, *, random: Random | None = None
) -> list[int] | None:
    """Directions of a shortest way over the cells of `free`, of several any, if `random` is given;
    None if there is none."""
    left = distances(goal, free.__contains__, width)
    if start not in left:
        return None
    moves, way, cell = offsets(width), list[int](), start
    while cell != goal:
        nearer = [d for d in range(4) if left.get(cell + moves[d], 1 << 30) < left[cell]]
        direction = nearer[0] if random is None else random.choice(nearer)
        way.append(direction)
        cell += moves[direction]
    return way


class GridOptions(TypedDict, total=False):
    """What every game takes besides its own options."""

    style: Format
    max_actions: int
    """Moves in one turn."""
    rules: bool
    """Explain the game at its beginning."""
    invalid_reward: float
    """For a reply that is no action."""
    progress_reward: float
    """For each move nearer to success, less it for one away from it."""
    split: Split


class GridGame(TextEnv):
    """A game of four directions: reads replies, counts, speaks. A game says what a move does."""

    def __init__(
        self,
        *,
        max_steps: int,
        style: Format = "answer",
        max_actions: int = 1,
        rules: bool = True,
        invalid_reward: float = 0.0,
        progress_reward: float = 0.0,
        split: Split = "all",
    ) -> None:
        if max_steps < 1 or max_actions < 1:
            raise EnvError(f"max_steps={max_steps} and max_actions={max_actions} must be positive")
        if split not in ("all", "train", "held_out"):
            raise EnvError(f"no game has split={split!r}", fix="use all, train or held_out")
        self.split: Split = split
        self.max_steps = max_steps
        self.style: Format = style
        self.max_actions = max_actions
        self.rules = rules
        self.invalid_reward = invalid_reward
        self.progress_reward = progress_reward
        self.turns = 0
        self.plan: list[int] = []
        """What is left of the solver's way, while somebody follows it."""

    @abstractmethod
    def build(self, seed: int) -> None:
        """Make the puzzle; of several that the seed gives, the first that `fits`."""

    def fits(self, board: str) -> bool:
        """Whether a puzzle is of the split. The board decides, not the seed: the same board is
        never on both sides."""
        if self.split == "all":
            return True
        return (stable_hash("split", board) % 5 == 0) == (self.split == "held_out")

    @abstractmethod
    def move(self, direction: int) -> tuple[float, bool]:
        """Do one move: the reward, and whether anything changed."""

    @abstractmethod
    def grid(self) -> str:
        """The board as lines of symbols; also the key of the state."""

    @abstractmethod
    def explain(self) -> str:
        """The rules and what each symbol means."""

    @abstractmethod
    def outcome(self) -> bool | None:
        """True: solved; False: lost; None: the game goes on."""

    @abstractmethod
    def find_way(self) -> Sequence[int] | None:
        """Directions from here to success, as far as they are certain; None if there is no way."""

    def reset(self, seed: int) -> Reset:
        self.build(seed)
        grid = self.grid()
        text = f"{self.explain()}\n{self._asks()}\n\n{grid}" if self.rules else grid
        return text, {"state": grid, "success": False}

    def step(self, action: str) -> Step:
        self.turns += 1
        directions = read_actions(action, self.style, WORDS, limit=self.max_actions)
        before = self._moves_left() if self.progress_reward else None
        reward, changed = (0.0, False) if directions else (self.invalid_reward, False)
        for direction in directions:
            gained, moved = self.move(direction)
            reward += gained
            changed = changed or moved
            if self.outcome() is not None:
                break
        if before is not None and changed:
            after = self._moves_left()
            # Where there is no way any more, the turn has led one step away.
            reward += self.progress_reward * (-1 if after is None else before - after)
        followed = directions and self.plan[: len(directions)] == directions
        self.plan = self.plan[len(directions) :] if followed else []
        outcome, grid = self.outcome(), self.grid()
        terminated = outcome is not None
        info: dict[str, Any] = {
            "valid": bool(directions),
            "effective": changed,
            "success": outcome is True,
            "state": grid,
        }
        truncated = not terminated and self.turns >= self.max_steps
        said = self._say(bool(directions), changed, outcome)
        return f"{said}{grid}", reward, terminated, truncated, info

    def legal_actions(self) -> Sequence[str]:
        return [write_reply(name, self.style) for name in DIRECTIONS]

    def solve(self) -> str | None:
        self.plan = self.plan or list(self.find_way() or ())
        if not self.plan:
            return None
        names = [DIRECTIONS[direction] for direction in self.plan[: self.max_actions]]
        return write_actions(names, self.style)

    def _moves_left(self) -> int | None:
        """From here to success, at the least; None if there is no way."""
        way = [] if self.outcome() else self.find_way()
        return None if way is None else len(way)

    def _asks(self) -> str:
        names = ", ".join(DIRECTIONS[:-1]) + f" or {DIRECTIONS[-1]}"
        several = ""
        if self.max_actions > 1:
            several = f" Up to {self.max_actions} moves at once, with || between them."
        return f"{ask(self.style, names)}{several}"

    def _say(self, valid: bool, changed: bool, outcome: bool | None) -> str:
        if outcome is not None:
            return "You made it.\n" if outcome else "You lost.\n"
        if not valid:
            return f"That is no action. {self._asks()}\n"
        return "" if changed else "Nothing moved.\n"
