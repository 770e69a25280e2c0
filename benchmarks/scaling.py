"""How throughput grows with the number of engines: the real controller, scheduler and Ray.

    python benchmarks/scaling.py [--json] [--engines 1 2 4 ... 64] [--steps 12] [--without native]

A complete RLVR run with a tiny learner. Each engine is a process on Ray whose computation is a
timed wait, so that one machine can hold many: a sample waits `TOKEN_S` for each of its tokens, and
lengths have a long tail. The batch grows with the engines (weak scaling, max_staleness 1), so with
perfect scaling every step takes the same time.

    efficiency   samples per second of n engines / (n x those of one engine)
    busy         share of the time in which a slot generates
    lag_ms       largest delay of the controller's event loop in a measured step

Each run trains the same number of samples per engine (asserted). The first steps, which fill the
pipeline, are not counted. `native` are real engines of a tiny model, for 1 and 2: they share the
cores with the learner and each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from rollick.config.load import recipe_from_dict
from rollick.infer.engine import Capability, StopRules, WeightStream
from rollick.observe.metrics import read_metrics
from rollick.types import (
    Completion,
    EngineLoad,
    Fingerprint,
    PolicyVersion,
    Request,
    SampleId,
    StopReason,
    stable_hash,
)

SLOTS, GROUP_SIZE = 8, 8
TOKEN_S = 0.1
SHORTEST, LONGEST = 4, 32
FILLING_STEPS = 3


class TimedEngine:
    """An Engine that waits instead of computing."""

    capabilities = frozenset[Capability]()

    def __init__(self, slots: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._count = slots
        self._version = PolicyVersion(0)
        self._aborts: dict[SampleId, asyncio.Event] = {}
        self._generated = 0

    @classmethod
    def create(cls, infer: Any, model: Any, *, stops: StopRules, **options: Any) -> Self:
        return cls(infer.slots)

    async def generate(self, request: Request) -> Completion:
        aborted = self._aborts[request.uid] = asyncio.Event()
        tokens = length_of(request.uid)
        try:
            async with self._slots, asyncio.timeout(tokens * TOKEN_S):
                await aborted.wait()
            tokens = 0
        except TimeoutError:
            self._generated += tokens
        finally:
            del self._aborts[request.uid]
        ids = np.full(tokens, request.token_ids[0], np.int32)
        return Completion(
            request.uid,
            ids,
            np.full(tokens, -1.0, np.float32),
            np.full(tokens, self._version, np.int32),
            StopReason.STOP if tokens else StopReason.ABORTED,
        )

    async def abort(self, uid: SampleId) -> None:
        if uid in self._aborts:
            self._aborts[uid].set()

    def load(self) -> EngineLoad:
        running = min(len(self._aborts), self._count)
        return EngineLoad(
            running=running,
            waiting=len(self._aborts) - running,
            slots=self._count,
            generated_tokens=self._generated,
            version=self._version,
        )

    async def update(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None = None,
        *,
        keep_cache: bool = False,
    ) -> Fingerprint:
        self._version = version
        return expected or Fingerprint("")

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        raise AssertionError("a timed engine shares no weights")

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def close(self) -> None: ...


def length_of(uid: SampleId) -> int:
    """Log-uniform between the shortest and the longest."""
    share = stable_hash("length", *uid) % 10**6 / 10**6
    return round(SHORTEST * (LONGEST / SHORTEST) ** share)


@dataclass(frozen=True)
class Result:
    engine: str
    engines: int
    samples: int
    seconds: float
    tokens: float
    lag_ms: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def busy(self) -> float:
        """Of timed engines."""
        return self.tokens * TOKEN_S / (self.seconds * self.engines * SLOTS)


def recipe_of(folder: Path, engine: str, engines: int, steps: int) -> Mapping[str, Any]:
    return {
        "pipeline": "rlvr",
        "model": {"path": str(folder / "model")},
        "data": {
            "domains": {
                "letters": {
                    "source": "rollick.testing.toys:letter_rows",
                    "rewards": ["rollick.testing.toys:says_letter"],
                }
            }
        },
        "algorithm": {"preset": "grpo"},
        "sampling": {"max_tokens": LONGEST},
        "rollout": {
            "groups_per_step": engines,
            "group_size": GROUP_SIZE,
            "max_staleness": 1,
            "drop_no_signal": False,
        },
        "infer": {
            "engine": engine,
            "slots": SLOTS,
            "max_length": 64,
        },
        "devices": {"policy": "cpu:0", "generators": f"cpu:1-{engines}"},
        "cluster": {"backend": "ray", "cpus_per_worker": 0.01, "place_timeout_s": 600},
        "checkpoint": {"every": 0, "every_s": 0, "snapshot": False},
        "observe": {"live": "off", "report": False, "sinks": []},
        "run": {"name": f"{engine}-{engines}", "folder": str(folder), "steps": steps, "threads": 1},
    }


def register_timed_engine(folder: Path) -> None:
    """As a plugin of a package, for this process and the workers on Ray."""
    metadata = folder / "timed_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: timed-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rollick.engines]\ntimed = scaling:TimedEngine\n")
    sys.path[:0] = [str(folder), str(Path(__file__).parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))


def measure(folder: Path, engine: str, engines: int, *, steps: int) -> Result:
    from rollick.pipelines.run import run_recipe

    result = run_recipe(recipe_from_dict(recipe_of(folder, engine, engines, steps)))
    rows = read_metrics(result.folder / "metrics.jsonl")[FILLING_STEPS:]
    samples = sum(round(row["rollout/samples"]) for row in rows)
    assert samples == len(rows) * engines * GROUP_SIZE, "a step trained other samples than planned"
    return Result(
        engine=engine,
        engines=engines,
        samples=samples,
        seconds=sum(row["time/step"] for row in rows),
        tokens=sum(row["rollout/tokens"] for row in rows),
        lag_ms=max(row["controller/event_loop_lag_ms"] for row in rows),
    )


def show(result: Result, one: Result) -> None:
    scaled = result.samples_per_s / (result.engines * one.samples_per_s)
    busy = f"busy {result.busy:.1%}" if result.engine == "timed" else ""
    print(
        f"{result.engine:<7}{result.engines:>4} engines  {result.samples_per_s:8.2f} samples/s  "
        f"efficiency {scaled:.3f}  lag {result.lag_ms:6.1f} ms  {busy}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--without", choices=["native"], action="append", default=[])
    arguments = parser.parse_args()
    from rollick.testing.tiny import save_tiny

    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_tiny(folder / "model")
        register_timed_engine(folder)
        for engine in ["timed", *({"native"} - set(arguments.without))]:
            for engines in arguments.engines if engine == "timed" else (1, 2):
                results.append(measure(folder, engine, engines, steps=arguments.steps))
                show(results[-1], next(r for r in results if r.engine == engine))
    if arguments.json:
        timed = [result for result in results if result.engine == "timed"]
        one, most = timed[0], timed[-1]
        figures = {
            f"efficiency_{most.engines}": most.samples_per_s
            / (most.engines / one.engines * one.samples_per_s),
            f"busy_{most.engines}": most.busy,
            "lag_ms": max(result.lag_ms for result in timed),
            "results": [asdict(result) for result in results],
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
