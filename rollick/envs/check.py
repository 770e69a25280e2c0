"""Tells the author of an environment what is wrong with it, in sentences.

    check_env(make) -> problems: the signature, determinism, seeds, endings, independence, actions
    check_across_processes(reference) -> problems: another hash seed, another puzzle

Each check plays a few short episodes. No problem found means that it can be trained on, not that it
is a good task.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rollick.children.process import describe_failure
from rollick.envs.base import (
    MakeEnv,
    Moment,
    NotAnAnswer,
    TextEnv,
    find_env,
    make_env,
    read_reset,
    read_step,
)
from rollick.envs.play import Episode, play_episode, play_random, play_solver, time_limit
from rollick.errors import RollickError

SEEDS = range(8)
ODD_ACTIONS = ("", "   ", "\x00", "no such action", "<answer>", "<answer></answer>", "é漢🙂" * 50)
"""What a policy writes on a bad day: none of it may raise."""
FAST_S = 10.0
"""For each episode of a check."""
HASH_SEEDS = ("0", "1", "4242")


def check_env(
    make: MakeEnv, options: Mapping[str, Any] | None = None, *, name: str = "the environment"
) -> list[str]:
    """All that is found wrong; empty if nothing is."""
    given = options or {}
    try:
        env = make_env(make, given, name=name)
    except RollickError as error:
        return [str(error)]
    except Exception as error:
        return [f"it cannot be made: {describe_failure(error)}"]
    problems = list(_signature(env))
    if problems:
        return problems

    def fresh() -> TextEnv:
        return make_env(make, given, name=name)

    before = _global_state()
    first: list[Episode] = []
    for seed in SEEDS:
        first.append(play_episode(fresh(), seed, play_random, timeout_s=FAST_S))
        if first[-1].error:
            return [f"it fails when it is played at random: {first[-1].error}"]
    if _global_state() != before:
        problems.append(
            "it uses the global random numbers of `random` or numpy: other code changes them; "
            "make a random.Random(seed) in reset()"
        )
    again = [play_episode(fresh(), seed, play_random, timeout_s=FAST_S) for seed in SEEDS]
    problems += _compare(first, again)
    problems += _same_puzzles(fresh, first)
    problems += _interleaved(fresh, first[0], first[1])
    problems += _odd_actions(fresh)
    problems += _solver(fresh())
    return problems


def check_across_processes(
    reference: str, options: Mapping[str, Any] | None = None, *, base: Path | None = None
) -> list[str]:
    """Whether processes with different hash seeds play the same episodes."""
    command = [sys.executable, "-m", "rollick.envs.check", reference, json.dumps(options or {})]
    digests: list[str] = []
    for seed in HASH_SEEDS:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        child = subprocess.run(
            command, env=environment, cwd=base, capture_output=True, text=True, timeout=120
        )
        if child.returncode:
            return [f"another process cannot play it: {child.stderr.strip()[-300:]}"]
        digests.append(child.stdout.strip())
    if len(set(digests)) > 1:
        return [
            "another process makes another puzzle of the same seed: something follows the order of "
            "a set or hash(); sort the set, or use rollick.types.stable_hash"
        ]
    return []


def digest_of(make: MakeEnv, options: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """A hash of all that happens in episodes that are played at random, and of the solver's."""
    digest = blake2b(digest_size=16)
    for policy in (play_random, play_solver):
        for seed in seeds:
            episode = play_episode(make(**options), seed, policy)
            digest.update(_told(episode).encode())
    return digest.hexdigest()


def _signature(env: Any) -> Iterator[str]:
    for method, arguments in (("reset", ("seed",)), ("step", ("action",))):
        function = getattr(env, method)
        if inspect.iscoroutinefunction(function):
            yield f"{method}() is a coroutine: write a plain function; waiting is the pool's work"
            continue
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            yield f"{method}() must take one argument, {arguments[0]}: {error}"


def _global_state() -> tuple[Any, ...]:
    kind, keys, place, *_ = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(keys)), place


def _compare(first: Sequence[Episode], again: Sequence[Episode]) -> Iterator[str]:
    for one, other in zip(first, again, strict=True):
        if _told(one) != _told(other):
            yield (
                f"seed {one.seed} does not give the same episode twice: all that is random must "
                "follow from the seed given to reset()"
            )
            break
    for episode in first:
        if any(not moment.text.strip() for moment in episode.moments[:-1]):
            yield "an observation is empty: the policy would have nothing to read"
            break


def _same_puzzles(fresh: Callable[[], TextEnv], played: Sequence[Episode]) -> Iterator[str]:
    """Whether the seed matters: by the first observations or, where these hide the puzzle, by what
    the same actions lead to. Without a list of actions nobody can tell."""
    if len({episode.moments[0].text for episode in played}) > 1:
        return
    first = played[0]
    replays: list[Episode] = []
    for seed in SEEDS:
        env, left = fresh(), iter(first.actions)
        replays.append(play_episode(env, seed, lambda env, _, left=left: next(left, None)))
        if not env.legal_actions():
            return
    if len({json.dumps([_moment(m) for m in episode.moments]) for episode in replays}) == 1:
        yield f"{len(played)} seeds give the same puzzle: does reset() use its seed?"


def _interleaved(fresh: Callable[[], TextEnv], alone: Episode, beside: Episode) -> Iterator[str]:
    """Two episodes at once must not notice each other."""
    one, other = fresh(), fresh()
    theirs = iter(beside.actions)
    try:
        seen = [read_reset(one.reset(alone.seed))]
        other.reset(beside.seed)
        for action in alone.actions:
            seen.append(read_step(one.step(action)))
            reply = next(theirs, None)
            if reply is not None:
                other.step(reply)
    except Exception as error:
        yield f"it fails when another episode is played beside it: {describe_failure(error)}"
        return
    finally:
        one.close()
        other.close()
    if [_moment(moment) for moment in seen] != [_moment(moment) for moment in alone.moments]:
        yield (
            "two episodes at once disturb each other: keep the state in the object, "
            "not in the class or the module"
        )


def _odd_actions(fresh: Callable[[], TextEnv]) -> Iterator[str]:
    for action in ODD_ACTIONS:
        env = fresh()
        try:
            with time_limit(FAST_S):
                env.reset(0)
                read_step(env.step(action))
        except NotAnAnswer as error:
            yield f"step({action[:20]!r}): {error}"
        except Exception as error:
            yield (
                f"step({action[:20]!r}) raises {describe_failure(error)}: a reply that is no "
                "action is an observation that says so"
            )
            return


def _solver(env: TextEnv) -> Iterator[str]:
    """Where there is a solver, it must not break the game."""
    if type(env).solve is TextEnv.solve:
        return
    episode = play_episode(env, 0, play_solver, timeout_s=FAST_S)
    if episode.error:
        yield f"its solver fails: {episode.error}"
    elif any(moment.info.get("valid") is False for moment in episode.moments):
        yield "its solver writes what the environment itself calls no valid action"


def _told(episode: Episode) -> str:
    moments = [_moment(moment) for moment in episode.moments]
    return json.dumps([episode.seed, episode.actions, moments, episode.error])


def _moment(moment: Moment) -> list[Any]:
    info = json.dumps(moment.info, sort_keys=True)
    return [moment.text, moment.reward, moment.terminated, moment.truncated, info]


def main(arguments: Sequence[str]) -> str:
    """The program of another process: the digest of an environment's episodes."""
    reference, options = arguments
    return digest_of(find_env(reference), json.loads(options), SEEDS)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]))
