"""Shared by grid games: directions, shortest paths, parsing of actions, text observations.

A cell is a number, row * width + column; a grid has a border of walls, so that a move is one
addition without an edge check.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args

from rollick.envs.base import Reset, Step, TextEnv, TileGrid
from rollick.envs.formats import SEPARATOR, Format, describe_format, read_actions, write_reply
from rollick.errors import EnvError
from rollick.types import stable_hash

Split = Literal["all", "train", "held_out"]
"""A fifth of the boards, chosen by hash, is held out."""
DIRECTIONS = ("Up", "Down", "Left", "Right")
UP, DOWN, LEFT, RIGHT = range(4)
SYNONYMS = ("up u north ↑", "down d south ↓", "left l west ←", "right r east →")
WORDS = {word: direction for direction, words in enumerate(SYNONYMS) for word in words.split()}


def offsets(width: int) -> tuple[int, int, int, int]:
    """The cell offset of each direction."""
    return (-width, width, -1, 1)


def distances(start: int, is_free: Callable[[int], bool], width: int) -> dict[int, int]:
    """Moves from `start` to every cell reachable over free cells."""
    moves_to = {start: 0}
    queue = deque([start])
    moves = offsets(width)
    while queue:
        cell = queue.popleft()
        for move in moves:
            if cell + move not in moves_to and is_free(cell + move):
                moves_to[cell + move] = moves_to[cell] + 1
                queue.append(cell + move)
    return moves_to


def shortest_path(
    start: int, goal: int, free: Container[int], width: int, *, random: Random | None = None
) -> list[int] | None:
    """Directions of a shortest path over the cells of `free`; a random one if `random` is
    set; None if there is no path."""
    moves_left = distances(goal, free.__contains__, width)
    if start not in moves_left:
        return None
    moves, directions, cell = offsets(width), list[int](), start
    while cell != goal:
        closer = moves_left[cell] - 1
        nearer = [d for d in range(4) if moves_left.get(cell + moves[d]) == closer]
        direction = nearer[0] if random is None else random.choice(nearer)
        directions.append(direction)
        cell += moves[direction]
    return directions


@dataclass(kw_only=True, eq=False)
class GridGame(TextEnv):
    """A game with four directions: parses replies, counts turns, writes observations. Subclasses
    define the effect of a move, `tile_names` and the default of `max_steps`."""

    max_steps: int = 0
    """Maximum turns; 0 chooses a limit that depends on the size."""
    style: Format = "answer"
    max_actions: int = 1
    """Maximum moves in one turn."""
    rules: bool = True
    """Explain the rules in the first observation."""
    invalid_reward: float = 0.0
    """Reward of a reply without a valid action."""
    progress_reward: float = 0.0
    """Reward of each move closer to success; negative for a move away from it."""
    split: Split = "all"

    def __post_init__(self) -> None:
        if min(self.max_steps, self.max_actions) < 1:
            limits = f"max_steps={self.max_steps} and max_actions={self.max_actions}"
            raise EnvError(f"{limits} must be positive")
        if self.split not in get_args(Split):
            text = f"split={self.split!r} is not supported"
            raise EnvError(text, fix="use all, train or held_out")
        self.turns = 0
        self.plan: list[int] = []
        """Remaining directions of the solver, as long as the episode follows them."""
        self.tile_names: Mapping[str, str] = {}
        """The tile of each symbol."""

    @abstractmethod
    def build(self, seed: int) -> None:
        """Generate the puzzle of the seed: the first one that `is_in_split`."""

    def is_in_split(self, board: str) -> bool:
        """Whether a board is in the split. It depends on the board, not the seed: no board is in
        both train and held_out."""
        if self.split == "all":
            return True
        return (stable_hash("split", board) % 5 == 0) == (self.split == "held_out")

    @abstractmethod
    def move(self, direction: int) -> tuple[float, bool]:
        """Make one move. Returns the reward, and whether the board changed."""

    @abstractmethod
    def grid(self) -> str:
        """The board as lines of symbols; also the key of the state."""

    @abstractmethod
    def explain(self) -> str:
        """The rules and the meaning of each symbol."""

    @abstractmethod
    def outcome(self) -> bool | None:
        """True if solved, False if lost, None while the game runs."""

    @abstractmethod
    def plan_moves(self) -> Sequence[int] | None:
        """Known directions from the current state to success; None if it is unreachable."""

    def reset(self, seed: int) -> Reset:
        self.build(seed)
        grid = self.grid()
        text = f"{self.explain()}\n{self._instructions()}\n\n{grid}" if self.rules else grid
        return text, {"state": grid, "success": False}

    def step(self, action: str) -> Step:
        self.turns += 1
        directions = read_actions(action, self.style, WORDS, limit=self.max_actions)
        before = self._moves_left() if self.progress_reward else None
        reward, changed = (0.0, False) if directions else (self.invalid_reward, False)
        for direction in directions:
            move_reward, moved = self.move(direction)
            reward += move_reward
            changed = changed or moved
            if self.outcome() is not None:
                break
        if before is not None and changed:
            after = self._moves_left()
            # If success is no longer reachable, the turn counts as one move away.
            reward += self.progress_reward * (-1 if after is None else before - after)
        followed = directions and self.plan[: len(directions)] == directions
        self.plan = self.plan[len(directions) :] if followed else []
        outcome, grid = self.outcome(), self.grid()
        terminated = outcome is not None
        info: dict[str, Any] = {"valid": bool(directions), "effective": changed}
        info |= {"success": outcome is True, "state": grid}
        truncated = not terminated and self.turns >= self.max_steps
        feedback = self._feedback(bool(directions), changed, outcome)
        return f"{feedback}{grid}", reward, terminated, truncated, info

    def legal_actions(self) -> Sequence[str]:
        return [write_reply(name, self.style) for name in DIRECTIONS]

    def solve(self) -> str | None:
        self.plan = self.plan or list(self.plan_moves() or ())
        if not self.plan:
            return None
        names = [DIRECTIONS[direction] for direction in self.plan[: self.max_actions]]
        return write_reply(f" {SEPARATOR} ".join(names), self.style)

    def draw(self) -> TileGrid:
        rows = self.grid().split("\n")
        return [[self.tile_names[symbol] for symbol in row] for row in rows]

    def _moves_left(self) -> int | None:
        """Length of the solver's path to success; None if it is unreachable."""
        directions = [] if self.outcome() else self.plan_moves()
        return None if directions is None else len(directions)

    def _instructions(self) -> str:
        text = describe_format(self.style, "Up, Down, Left or Right")
        if self.max_actions == 1:
            return text
        return f"{text} Up to {self.max_actions} moves at once, with || between them."

    def _feedback(self, valid: bool, changed: bool, outcome: bool | None) -> str:
        if outcome is not None:
            return "You made it.\n" if outcome else "You lost.\n"
        if not valid:
            return f"That is no action. {self._instructions()}\n"
        return "" if changed else "Nothing moved.\n"


def join_rows(symbols: Sequence[str], size: int) -> str:
    """The symbols of a square board as lines."""
    rows = range(0, size * size, size)
    return "\n".join("".join(symbols[begin : begin + size]) for begin in rows)
