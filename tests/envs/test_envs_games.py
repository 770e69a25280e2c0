"""FrozenLake and Sokoban: rules on hand-made maps, a thousand seeds each, pictures."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from rollick.envs.base import TextEnv
from rollick.envs.formats import read_actions, read_reply, write_reply
from rollick.envs.frozen_lake import FrozenLake
from rollick.envs.grid import DOWN, LEFT, RIGHT, UP, WORDS
from rollick.envs.sokoban import SYMBOLS, Room, Sokoban, make_puzzle, solve
from rollick.episodes.check_env import check_env
from rollick.episodes.in_process import random_policy, run_episode, run_episodes, solver_policy
from rollick.episodes.pictures import save_episode
from rollick.errors import EnvError

GAMES: list[tuple[type[TextEnv], dict[str, Any]]] = [
    (FrozenLake, {}),
    (FrozenLake, {"size": 8, "holes": 0.3, "style": "think", "symbols": "marks"}),
    (FrozenLake, {"slip": 2 / 3, "style": "plain"}),
    (Sokoban, {}),
    (Sokoban, {"size": 8, "boxes": 2, "symbols": "classic", "max_actions": 3}),
]


def make_lake(*rows: str, **options: Any) -> FrozenLake:
    """A lake with this map instead of a random one."""
    env = FrozenLake(size=len(rows), holes=0.0, style="plain", **options)
    env.reset(0)
    tiles = {
        (y + 1) * env.width + x + 1: tile
        for y, row in enumerate(rows)
        for x, tile in enumerate(row)
    }
    env.ice = frozenset(cell for cell, tile in tiles.items() if tile != "H")
    env.background = [tile for row in rows for tile in row]
    return env


def room(*rows: str, **options: Any) -> Sokoban:
    """A room with this map, in the symbols of Sokoban's level files."""
    env = Sokoban(size=len(rows), style="plain", symbols="classic", **options)
    env.reset(0)
    size, text = len(rows), "".join(rows)
    cells = {mark: {index for index, seen in enumerate(text) if seen == mark} for mark in "# .$*@+"}
    targets = cells["."] | cells["*"] | cells["+"]
    floor = set(range(size * size)) - cells["#"]
    env.room = Room(size, frozenset(floor), frozenset(targets))
    env.box_cells = cells["$"] | cells["*"]
    [env.player] = cells["@"] | cells["+"]
    env.background = [
        "#" if index not in floor else "." if index in targets else " " for index in range(size**2)
    ]
    return env


@pytest.mark.parametrize(("make", "options"), GAMES)
def test_it_passes_its_check(make: type[TextEnv], options: dict[str, Any]) -> None:
    assert check_env(make, options) == []


@pytest.mark.parametrize(("make", "options"), [GAMES[0], GAMES[1], GAMES[3]])
def test_a_thousand_puzzles_are_all_solved(make: type[TextEnv], options: dict[str, Any]) -> None:
    report = run_episodes(make, range(1000), options=options, policy=solver_policy)
    assert (report.success, report.errors, report.valid) == (1.0, 0, 1.0)


def test_two_boxes_in_a_larger_room_are_solved() -> None:
    report = run_episodes(
        Sokoban, range(100), options={"size": 8, "boxes": 2}, policy=solver_policy
    )
    assert (report.success, report.errors) == (1.0, 0)


@pytest.mark.parametrize(("make", "options"), GAMES)
def test_a_thousand_random_episodes_are_deterministic_and_raise_nothing(
    make: type[TextEnv], options: dict[str, Any]
) -> None:
    options = {**options, "max_steps": 15}
    first = run_episodes(make, range(1000), options=options, policy=random_policy)
    again = run_episodes(make, range(1000), options=options, policy=random_policy)
    assert first.errors == 0
    assert (first.success, first.reward, first.steps, first.effective) == (
        again.success, again.reward, again.steps, again.effective,
    )  # fmt: skip


def test_the_best_policy_on_slippery_ice_sometimes_falls_in() -> None:
    options = {"slip": 2 / 3, "max_steps": 200}
    solver_report = run_episodes(FrozenLake, range(100), options=options, policy=solver_policy)
    random_report = run_episodes(FrozenLake, range(100), options=options, policy=random_policy)
    assert 0.8 < solver_report.success < 1.0
    assert random_report.success < 0.3


def test_walking_over_ice_to_the_goal_has_reward_one() -> None:
    env = make_lake("SF", "HG")
    text, reward, terminated, truncated, info = env.step("Right")
    assert (text, reward, terminated, truncated) == ("SP\nHG", 0.0, False, False)
    assert info == {"valid": True, "effective": True, "success": False, "state": "SP\nHG"}
    text, reward, terminated, _, info = env.step("down.")
    assert (text, reward, terminated, info["success"]) == ("You made it.\nSF\nHW", 1.0, True, True)


def test_progress_is_rewarded_and_a_step_back_costs_it() -> None:
    env = make_lake("SFF", "FHF", "FFG", progress_reward=0.1)
    rewards = [env.step(action)[1] for action in ("Right", "Left", "Up", "Jump", "Down", "Down")]
    assert rewards == pytest.approx([0.1, -0.1, 0.0, 0.0, 0.1, 0.1])
    assert env.step("Right")[1] == pytest.approx(0.1)
    assert env.step("Right")[1] == pytest.approx(1.1)
    env = make_lake("SF", "HG", progress_reward=0.1)
    assert env.step("Down")[1] == pytest.approx(-0.1)


def test_a_box_that_can_no_longer_reach_a_target_is_one_step_away() -> None:
    env = room("######", "#    #", "# $@ #", "#    #", "#   .#", "######", progress_reward=0.5)
    assert env.step("Left")[1] == pytest.approx(-0.5)
    assert env.step("Right")[1] == 0.0


def test_slippery_ice_has_no_progress_reward() -> None:
    with pytest.raises(EnvError, match="cannot be combined with slip"):
        FrozenLake(slip=0.5, progress_reward=0.1)


def test_a_careless_solver_ignores_holes_and_falls_in() -> None:
    def success(careless: float) -> float:
        options = {"careless": careless}
        return run_episodes(FrozenLake, range(200), options=options, policy=solver_policy).success

    assert success(0.0) == 1.0
    assert success(1.0) < success(0.6) < success(0.3) < 1.0


def test_a_hole_ends_the_episode_with_nothing() -> None:
    text, reward, terminated, _, info = make_lake("SF", "HG").step("Down")
    assert (text, reward, terminated) == ("You lost.\nSF\nXG", 0.0, True)
    assert not info["success"]


@pytest.mark.parametrize(
    ("action", "valid", "message"),
    [("Up", True, "Nothing moved."), ("Jump", False, "That is no action. Reply with")],
)
def test_actions_without_effect_are_explained_and_marked(
    action: str, valid: bool, message: str
) -> None:
    text, _, _, _, info = make_lake("SF", "HG").step(action)
    assert text.startswith(message)
    assert (info["valid"], info["effective"]) == (valid, False)


def test_if_slipping_is_certain_every_step_goes_sideways() -> None:
    for _ in range(20):
        env = make_lake("SFF", "FFF", "FFG", slip=1.0)
        env.player += env.width + 1  # the middle
        before = env.player
        env.move(UP)
        assert env.player - before in (-1, 1)


def test_an_episode_is_truncated_after_its_turns() -> None:
    env = FrozenLake(max_steps=2, style="plain")
    env.reset(0)
    assert [env.step("?")[3] for _ in range(2)] == [False, True]


def test_a_box_can_be_pushed_but_not_pulled_or_pushed_into_a_wall() -> None:
    env = room("#####", "#@$.#", "#   #", "#   #", "#####", box_reward=0.25, step_reward=-0.5)
    assert env.move(LEFT) == (-0.5, False)
    text, reward, terminated, _, info = env.step("Right")
    assert (reward, terminated, info["success"]) == (0.75, True, True)
    assert text.split("\n")[2] == "# @*#"
    env = room("#####", "#$@.#", "#   #", "#   #", "#####")
    assert env.move(LEFT) == (0.0, False)
    assert env.move(RIGHT) == (0.0, True)
    assert env.grid().split("\n")[1] == "#$ +#"


def test_the_solver_finds_a_shortest_solution_and_detects_a_lost_position() -> None:
    env = room("#####", "#@  #", "# $ #", "#  .#", "#####")
    # Above the box, push down, walk round, push right: five moves.
    assert len(solve(env.room, env.player, frozenset(env.box_cells)) or []) == 5
    stuck = room("#####", "#$ @#", "#   #", "#  .#", "#####")
    assert stuck.solve() is None


def test_the_solver_needs_as_few_moves_as_a_plain_search() -> None:
    for seed in range(30):
        puzzle = make_puzzle(Random(seed), size=6, boxes=1, walls=0.1)
        solution = solve(puzzle.room, puzzle.player, puzzle.boxes)
        assert solution is not None
        assert len(solution) == count_fewest_moves(puzzle.room, puzzle.player, puzzle.boxes)


def count_fewest_moves(room: Room, player: int, boxes: frozenset[int]) -> int:
    """The length of a shortest solution, by breadth-first search over single moves."""
    seen, frontier, count = {(player, boxes)}, [(player, boxes)], 0
    while not any(current == room.targets for _, current in frontier):
        next_frontier: list[tuple[int, frozenset[int]]] = []
        for (cell, current), step in product(frontier, (-room.width, room.width, -1, 1)):
            neighbour, moved = cell + step, current
            if neighbour in current:
                moved = (current - {neighbour}) | {neighbour + step}
                if neighbour + step in current or neighbour + step not in room.floor:
                    continue
            if neighbour in room.floor and (neighbour, moved) not in seen:
                seen.add((neighbour, moved))
                next_frontier.append((neighbour, moved))
        frontier, count = next_frontier, count + 1
    return count


@pytest.mark.parametrize("symbols", list(SYMBOLS))
def test_every_symbol_set_has_a_distinct_explained_symbol_for_each_tile(symbols: Any) -> None:
    assert len(set(SYMBOLS[symbols])) == 7
    text, info = Sokoban(symbols=symbols).reset(1)
    assert isinstance(text, str)
    assert set(info["state"]) - {"\n"} <= set(SYMBOLS[symbols])
    assert f"{SYMBOLS[symbols][3]} a box" in text


def test_a_group_of_symbols_is_the_same_puzzle() -> None:
    states = [Sokoban(symbols=name).reset(5)[1]["state"] for name in ("classic", "digits")]
    assert states[0].translate(str.maketrans(SYMBOLS["classic"], SYMBOLS["digits"])) == states[1]


@pytest.mark.parametrize(
    ("text", "style", "actions"),
    [
        ("Right", "plain", [RIGHT]),
        ("<answer>Right</answer>", "answer", [RIGHT]),
        ("<answer> up || LEFT </answer>", "answer", [UP, LEFT]),
        ("<answer>up||left||down</answer>", "answer", []),
        ("<answer>up||jump</answer>", "answer", []),
        ("Right", "answer", []),
        ("<think>Why not?</think><answer>Down</answer>", "think", [DOWN]),
        ("Why not?</think> <answer>Down</answer>", "think", [DOWN]),
        ("<answer>Down</answer>", "think", []),
        ("<think>x</think>Down", "think", []),
    ],
)
def test_replies_are_read_by_their_format(text: str, style: Any, actions: list[int]) -> None:
    assert read_actions(text, style, WORDS, limit=2) == actions


@pytest.mark.parametrize("part", ["</think><answer>", "<answer>", "</answer> ", "</think> ", "\n"])
def test_a_long_reply_in_no_format_is_read_in_one_pass(part: str) -> None:
    """A step that times out is masked, so a slow parser would let a policy choose to be masked."""
    text = "<think></think><answer>" + part * (300_000 // len(part)) + "x"
    begun = time.process_time()
    assert read_reply(text, "think") is None
    assert read_reply(text.removeprefix("<think></think>"), "answer") is None
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("style", ["plain", "answer", "think"])
def test_what_is_written_is_read_again(style: Any) -> None:
    assert read_reply(write_reply("click[a]", style), style) == "click[a]"


def test_several_moves_in_a_turn_stop_at_the_end_of_the_game() -> None:
    env = FrozenLake(max_actions=6)
    env.reset(1)
    reply = env.solve()
    assert reply is not None
    assert reply.count("||") == 5
    assert env.step(reply)[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("make", "options"),
    [(FrozenLake, {"size": 1}), (FrozenLake, {"slip": 2}), (Sokoban, {"size": 4}),
     (FrozenLake, {"careless": 0.5, "progress_reward": 1}),
     (Sokoban, {"boxes": 9}), (Sokoban, {"symbols": "runes"}), (FrozenLake, {"max_steps": -1})],
)  # fmt: skip
def test_impossible_options_are_refused(make: type[TextEnv], options: dict[str, Any]) -> None:
    with pytest.raises(EnvError):
        make(**options)


@pytest.mark.parametrize("make", [FrozenLake, Sokoban])
def test_an_episode_becomes_a_gif_and_a_png(make: type[TextEnv], tmp_path: Path) -> None:
    episode = run_episode(make(), 3, solver_policy, pictures=True)
    save_episode(tmp_path / "a.gif", episode)
    save_episode(tmp_path / "a.png", episode)
    with Image.open(tmp_path / "a.gif") as film, Image.open(tmp_path / "a.png") as sheet:
        assert getattr(film, "n_frames", 1) == len(episode.responses)
        assert sheet.width > film.width
    with pytest.raises(EnvError, match=r"neither \.gif nor \.png"):
        save_episode(tmp_path / "a.txt", episode)
