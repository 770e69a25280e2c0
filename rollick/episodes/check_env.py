"""Checks an environment and returns a message for each problem found.

    check_env(make) -> problems: signature, determinism, seeds, independence, bad actions, solver
    check_across_processes(reference) -> problems: episodes that depend on PYTHONHASHSEED

Most checks run a few short episodes. They do not judge whether the environment is a good task.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from rollick.children.process import describe_failure
from rollick.envs.base import (
    EnvResponse,
    InvalidEnvResponse,
    MakeEnv,
    TextEnv,
    close_env,
    find_env,
    make_env,
    read_reset,
    read_step,
)
from rollick.episodes.in_process import (
    EpisodeTrace,
    ScriptedPolicy,
    random_policy,
    run_episode,
    solver_policy,
    time_limit,
)
from rollick.errors import RollickError

SEEDS = range(8)
BAD_ACTIONS = ("", "   ", "\x00", "no such action", "<answer>", "<answer></answer>", "é漢🙂" * 50)
"""Invalid actions, for which step() must not raise."""
EPISODE_TIMEOUT_S = 10.0
HASH_SEEDS = ("0", "1", "4242")
NewEnv = Callable[[], TextEnv]
Traces = Sequence[EpisodeTrace]


def check_env(
    make: MakeEnv, options: Mapping[str, Any] | None = None, *, name: str = "the environment"
) -> list[str]:
    """Run all checks in this process; returns the problems found."""
    new_env = partial(make_env, make, options or {}, name=name)
    try:
        env = new_env()
    except RollickError as error:
        return [str(error)]
    except Exception as error:
        return [f"it cannot be created: {describe_failure(error)}"]
    problems = list(_check_signature(env))
    if problems:
        return problems
    random_state = _global_random_state()
    first: list[EpisodeTrace] = []
    for seed in SEEDS:
        first.append(_run(new_env(), seed, random_policy))
        if first[-1].error:
            return [f"it fails with random actions: {first[-1].error}"]
    if _global_random_state() != random_state:
        problem = "it uses the global random state of `random` or numpy, which other code changes"
        problems.append(f"{problem}; create a random.Random(seed) in reset()")
    repeated = [_run(new_env(), seed, random_policy) for seed in SEEDS]
    problems += _check_determinism(first, repeated)
    problems += _check_seeds(new_env, first)
    problems += _check_independence(new_env, first[0], first[1])
    problems += _check_bad_actions(new_env)
    problems += _check_solver(new_env())
    return problems


def check_across_processes(
    reference: str, options: Mapping[str, Any] | None = None, *, base: Path | None = None
) -> list[str]:
    """Return a problem if the episodes depend on PYTHONHASHSEED. Runs three child processes."""
    arguments = [reference, json.dumps(options or {})]
    command = [sys.executable, "-m", "rollick.episodes.check_env", *arguments]
    digests: list[str] = []
    for seed in HASH_SEEDS:
        variables = {**os.environ, "PYTHONHASHSEED": seed}
        child = subprocess.run(
            command, env=variables, cwd=base, capture_output=True, text=True, timeout=120
        )
        if child.returncode:
            return [f"another process cannot run it: {child.stderr.strip()[-300:]}"]
        digests.append(child.stdout.strip())
    problem = "the same seed gives another puzzle in another process: something depends on"
    fix = "sort the set, or use rollick.types.stable_hash"
    return [f"{problem} the order of a set or on hash(); {fix}"] if len(set(digests)) > 1 else []


def _run(env: TextEnv, seed: int, policy: ScriptedPolicy) -> EpisodeTrace:
    return run_episode(env, seed, policy, timeout_s=EPISODE_TIMEOUT_S)


def _check_signature(env: Any) -> Iterator[str]:
    for method, arguments in (("reset", ("seed",)), ("step", ("action",))):
        function = getattr(env, method)
        if inspect.iscoroutinefunction(function):
            yield f"{method}() is a coroutine: write a plain function, since the pool waits for it"
            continue
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            yield f"{method}() must take one argument, {arguments[0]}: {error}"


def _global_random_state() -> tuple[Any, ...]:
    kind, keys, position, *_ = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(keys)), position


def _check_determinism(first: Traces, repeated: Traces) -> Iterator[str]:
    for trace, repetition in zip(first, repeated, strict=True):
        if _trace_text(trace) != _trace_text(repetition):
            fix = "all randomness must depend only on the seed given to reset()"
            yield f"seed {trace.seed} gives different episodes: {fix}"
            break
    if not all(r.text.strip() for trace in first for r in trace.responses[:-1]):
        yield "an observation is empty: the policy would have nothing to read"


def _check_seeds(new_env: NewEnv, traces: Traces) -> Iterator[str]:
    """Report a seed without effect: all first observations are equal, and so are the responses
    to equal actions. The second test is skipped if the environment lists no legal actions."""
    if len({trace.responses[0].text for trace in traces}) > 1:
        return
    first = traces[0]
    reruns: list[EpisodeTrace] = []
    for seed in SEEDS:
        env, actions = new_env(), iter(first.actions)
        reruns.append(run_episode(env, seed, lambda env, _, actions=actions: next(actions, None)))
        if not env.legal_actions():
            return
    if len({json.dumps(_step_rows(trace.responses)) for trace in reruns}) == 1:
        yield f"{len(traces)} seeds give the same puzzle: does reset() use its seed?"


def _check_independence(new_env: NewEnv, alone: EpisodeTrace, other: EpisodeTrace) -> Iterator[str]:
    """Two interleaved episodes must not affect each other."""
    env, other_env = new_env(), new_env()
    other_actions = other.actions[: len(alone.actions)]
    try:
        responses = [read_reset(env.reset(alone.seed))]
        other_env.reset(other.seed)
        for action, other_action in zip_longest(alone.actions, other_actions):
            responses.append(read_step(env.step(action)))
            if other_action is not None:
                other_env.step(other_action)
    except Exception as error:
        yield f"it fails while another episode runs: {describe_failure(error)}"
        return
    finally:
        close_env(env)
        close_env(other_env)
    if _step_rows(responses) != _step_rows(alone.responses):
        fix = "keep the state in the object, not in the class or the module"
        yield f"two concurrent episodes affect each other: {fix}"


def _check_bad_actions(new_env: NewEnv) -> Iterator[str]:
    for action in BAD_ACTIONS:
        env = new_env()
        try:
            with time_limit(EPISODE_TIMEOUT_S):
                env.reset(0)
                read_step(env.step(action))
        except InvalidEnvResponse as error:
            yield f"step({action[:20]!r}): {error}"
        except Exception as error:
            fix = "for an invalid action, return an observation that explains this"
            yield f"step({action[:20]!r}) raises {describe_failure(error)}: {fix}"
            return
        finally:
            close_env(env)


def _check_solver(env: TextEnv) -> Iterator[str]:
    if type(env).solve is TextEnv.solve:
        return
    episode = _run(env, 0, solver_policy)
    if episode.error:
        yield f"its solver fails: {episode.error}"
    elif any(response.info.get("valid") is False for response in episode.responses):
        yield "its solver writes an action that the environment reports as invalid"


def _trace_text(trace: EpisodeTrace) -> str:
    return json.dumps([trace.seed, trace.actions, _step_rows(trace.responses), trace.error])


def _step_rows(responses: Sequence[EnvResponse]) -> list[list[Any]]:
    return [
        [r.text, r.reward, r.terminated, r.truncated, json.dumps(r.info, sort_keys=True)]
        for r in responses
    ]


def main(arguments: Sequence[str]) -> str:
    """Entry point of the child processes of `check_across_processes`. Returns a hash of the
    episodes of the random policy and of the solver."""
    make, options = find_env(arguments[0]), json.loads(arguments[1])
    digest = blake2b(digest_size=16)
    for policy in (random_policy, solver_policy):
        for seed in SEEDS:
            digest.update(_trace_text(run_episode(make(**options), seed, policy)).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]))
