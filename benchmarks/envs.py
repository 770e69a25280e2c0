"""Speed and success of the environments, and of the pool that runs them.

    python benchmarks/envs.py [--json] [--episodes 1000] [--products FILE] [--only frozen_lake ...]

Each environment runs with its solver (success over the seeds) and with random actions (steps a
second on one core: CPU seconds of this process, resets included). The bounds: FrozenLake
20,000, Sokoban 10,000, WebShop 300 steps/s, success 99 %.
`pool` steps 2,000 FrozenLake episodes at once through 2 processes, in wall-clock seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from rollick.envs.base import find_env
from rollick.envs.pool import EnvPool
from rollick.episodes.in_process import random_policy, run_episodes, solver_policy

PRODUCTS = Path(__file__).parents[2] / "shared/data/webshop_products.jsonl.gz"


@dataclass(frozen=True)
class Case:
    """An environment to measure and its bounds; 0 means no bound."""

    label: str
    name: str
    options: dict[str, Any]
    steps_per_s: float = 0.0
    success: float = 0.99


@dataclass(frozen=True)
class Figures:
    """The figures of one environment."""

    label: str
    episodes: int
    success: float
    solver_steps: float
    random_success: float
    random_steps_per_s: float
    solver_steps_per_s: float
    errors: int
    within: bool


def cases(products: Path) -> list[Case]:
    shop = {"products": str(products)}
    every = [
        Case("frozen_lake", "frozen_lake", {}, 20_000),
        Case("frozen_lake_8x8", "frozen_lake", {"size": 8}, 20_000),
        Case("frozen_lake_slippery", "frozen_lake", {"slip": 2 / 3}, 20_000, success=0.0),
        Case("sokoban", "sokoban", {}, 10_000),
        Case("sokoban_8x8_2", "sokoban", {"size": 8, "boxes": 2}, 10_000),
    ]
    if products.exists():
        every += [
            Case("webshop", "webshop", shop, 300),
            Case("webshop_held_out", "webshop", {**shop, "split": "held_out"}, 300),
        ]
    return every


def measure(case: Case, episodes: int) -> Figures:
    make, seeds = find_env(case.name), range(episodes)
    run_episodes(make, range(2), options=case.options, policy=random_policy)  # loads the products
    begun = process_time()
    solved = run_episodes(make, seeds, options=case.options, policy=solver_policy)
    middle = process_time()
    chance = run_episodes(make, seeds, options=case.options, policy=random_policy)
    end = process_time()
    speed = chance.steps * episodes / (end - middle)
    errors = solved.errors + chance.errors
    return Figures(
        label=case.label,
        episodes=episodes,
        success=solved.success,
        solver_steps=solved.steps,
        random_success=chance.success,
        random_steps_per_s=speed,
        solver_steps_per_s=solved.steps * episodes / (middle - begun),
        errors=errors,
        within=speed >= case.steps_per_s and solved.success >= case.success and not errors,
    )


async def measure_pool(episodes: int = 2000, rounds: int = 5) -> dict[str, float]:
    async with EnvPool.open({"lake": "frozen_lake"}, processes=2) as pool:
        options = {"rules": False, "holes": 0.0, "max_steps": 1000}
        sessions = await asyncio.gather(*(pool.reset("lake", options, n) for n in range(episodes)))
        begun = perf_counter()
        for _ in range(rounds):
            await asyncio.gather(*(session.step("<answer>Left</answer>") for session in sessions))
        seconds = perf_counter() - begun
        failed = pool.stats.failures.total()
    return {"episodes": episodes, "steps_per_s": episodes * rounds / seconds, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--products", type=Path, default=PRODUCTS)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    chosen = [c for c in cases(given.products) if not given.only or c.label in given.only]
    results = [measure(case, given.episodes) for case in chosen]
    pool = asyncio.run(measure_pool()) if not given.only or "pool" in given.only else None
    if given.json:
        within = all(result.within for result in results)
        figures = {result.label: asdict(result) for result in results}
        print(json.dumps({"environments": figures, "pool": pool, "within": within}))
        return
    for result in results:
        print(
            f"{result.label:<22}{result.random_steps_per_s:>10,.0f} steps/s at random, solver "
            f"{result.success:.1%} in {result.solver_steps:.1f} steps, {result.errors} errors"
        )
    if pool:
        print(f"{'pool':<22}{pool['steps_per_s']:>10,.0f} steps/s over {pool['episodes']} episodes")


if __name__ == "__main__":
    main()
