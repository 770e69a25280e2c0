"""Checks that engine and learner compute the log-probs of a family, or refuse it before sampling.

    python tests/family_verdicts.py                           CPU engine, learner, vLLM's registry
    python tests/family_verdicts.py --device cuda FAMILY …    GPU engine

Each command writes its columns of docs/results/families.json, from which docs/make_families.py
makes docs/models.md. The reference is transformers' own forward with eager attention, one sequence
at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from tiny_families import FAMILIES, tiny_family
from torch import Tensor, nn

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import RollickError
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.gpu.forward import ForwardOptions
from rollick.infer.native.gpu.runner import PagedRunner
from rollick.infer.native.sequence_table import EngineRequest
from rollick.models.attention.slot_cache import CACHED
from rollick.models.attention.varlen import VARLEN
from rollick.models.decoder.spec import describe_decoder
from rollick.models.loading.load import load_model, silence_transformers
from rollick.models.loading.probe import PREFILLED, check_engine
from rollick.testing.batches import completions_to_batch, recipe_of, weighted_loss
from rollick.trainer.local import LocalStrategy
from rollick.types import Completion, Request, SampleId, Sampling, StopReason, frozen_array

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "families.json"

SAMPLES = (SampleId(0, 0), SampleId(1, 0), SampleId(2, 0), SampleId(0, 1))
PROMPTS = ([1, 14, 75], [1, 66], [1, 7, 80, 9, 10, 44, 23, 51], [1, 14, 75])
GENERATED = 12
INFER = InferConfig(slots=4, max_length=64)

TOLERANCE = 1e-3
"""Largest difference of a log-prob, in nats, and of a gradient, relative to the largest one. In
float32 the rounding of kernels explains a tenth of it."""


class Verdict(NamedTuple):
    """`result` is exact, refused, wrong (it differs) or late (it fails after it was loaded)."""

    result: str
    detail: str = ""


def judge(load: Callable[[], Any], error_of: Callable[[Any], float]) -> Verdict:
    """Load, then measure the error. Only a RollickError while loading counts as a refusal."""
    try:
        loaded = load()
    except RollickError as error:
        return Verdict("refused", error.message)
    except Exception as error:
        return Verdict("late", f"{type(error).__name__}: {error}")
    try:
        error = error_of(loaded)
    except Exception as error:
        return Verdict("late", f"{type(error).__name__}: {error}")
    return Verdict("exact") if error < TOLERANCE else Verdict("wrong", f"{error:.3g}")


def save_family(family: str, folder: Path) -> Path:
    with silence_transformers():
        model: Any = tiny_family(family)
        model.save_pretrained(folder)
    return folder


def reference_logprobs(model: nn.Module, token_ids: Tensor) -> Tensor:
    """The log-prob of each token after the first, at temperature 1."""
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]


def requests() -> list[Request]:
    return [
        Request(
            uid,
            frozen_array(prompt, np.int32),
            Sampling(temperature=1.0, max_tokens=GENERATED),
            stream=index,
        )
        for index, (uid, prompt) in enumerate(zip(SAMPLES, PROMPTS, strict=True))
    ]


async def generate(engine: NativeEngine) -> list[Completion]:
    try:
        async with asyncio.timeout(60):
            return list(await asyncio.gather(*(engine.generate(r) for r in requests())))
    finally:
        await engine.close()


def completion_error(model: nn.Module, completions: Sequence[Completion]) -> float:
    """The largest error of an engine's log-probs."""
    errors: list[float] = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
        with torch.no_grad():
            expected = reference_logprobs(model, ids)[len(prompt) - 1 :]
        actual = torch.from_numpy(np.array(completion.logprobs))
        errors.append((actual - expected).abs().max().item())
    return max(errors)


def judge_engine(folder: Path, reference: nn.Module, *, device: str) -> Verdict:
    model = ModelConfig(path=str(folder), dtype="float32")

    def load() -> NativeEngine:
        return NativeEngine.create(INFER, model, device=device, stops=StopRules())

    return judge(load, lambda engine: completion_error(reference, asyncio.run(generate(engine))))


def judge_paged(folder: Path, reference: nn.Module) -> Verdict:
    """The GPU engine's runner on the CPU, with the references of its kernels."""

    def load() -> PagedRunner:
        module = load_model(ModelConfig(path=str(folder)), device="cpu", attention=CACHED)
        options = ForwardOptions(cuda_graphs=False, compile_layers=False, triton_kernels=False)
        runner = PagedRunner(module, INFER, device="cpu", stops=StopRules(), options=options)
        compute = partial(runner.probe_logits, prefilled=PREFILLED)
        check_engine(module, compute, max_length=INFER.max_length)
        return runner

    def run(runner: PagedRunner) -> float:
        for request in requests():
            runner.queue.submit(EngineRequest(request))
        finished: dict[SampleId, Completion] = {}
        while runner.has_work:
            finished |= {request.request.uid: completion for request, completion in runner.step()}
        return completion_error(reference, [finished[uid] for uid in SAMPLES])

    return judge(load, run)


def judge_learner(folder: Path, reference: nn.Module) -> Verdict:
    """Log-probs and gradients of samples that share prefixes."""
    recipe = recipe_of(folder, model={"path": str(folder), "dtype": "float32"})
    return judge(lambda: LocalStrategy(recipe), lambda learner: _learner_error(learner, reference))


def _learner_error(learner: LocalStrategy, reference: nn.Module) -> float:
    random = np.random.default_rng(0)
    zeros = np.zeros(GENERATED)
    completions = [
        Completion(
            uid,
            frozen_array(random.integers(3, 90, GENERATED), np.int32),
            frozen_array(zeros, np.float32),
            frozen_array(zeros, np.int32),
            StopReason.LENGTH,
        )
        for uid in SAMPLES
    ]
    batch = completions_to_batch(requests(), completions)
    reference.zero_grad()
    expected: list[Tensor] = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
        expected.append(reference_logprobs(reference, ids)[len(prompt) - 1 :])
    torch.cat(expected).sum().backward()
    actual = torch.from_numpy(learner.logprobs(batch)[batch.loss_mask_N])
    learner.forward_backward(batch, _sum_logprobs)
    return max(
        (actual - torch.cat(expected).detach()).abs().max().item(),
        _gradient_error(learner.module, reference),
    )


def _sum_logprobs(inputs: LossInputs) -> Any:
    return weighted_loss(inputs, TokenLoss(inputs.logprobs_T / inputs.weights_T))


def _gradient_error(module: nn.Module, reference: nn.Module) -> float:
    expected = {name: value.grad for name, value in reference.named_parameters()}
    largest = max(g.abs().max().item() for g in expected.values() if g is not None)
    error = 0.0
    for name, parameter in module.named_parameters():
        gradient, expected_gradient = parameter.grad, expected[name]
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        expected_gradient = (
            torch.zeros_like(parameter) if expected_gradient is None else expected_gradient
        )
        error = max(error, (gradient - expected_gradient).abs().max().item() / largest)
    return error


def is_direct(folder: Path) -> bool:
    """Whether learner and engine compute the decoder without its modules."""
    model = load_model(ModelConfig(path=str(folder)), device="cpu", attention=VARLEN)
    base: Any = model.base_model
    return describe_decoder(base) is not None


def vllm_lists(architecture: str) -> str:
    """Whether vLLM's registry has the class. Its log-probs are not checked."""
    from vllm.model_executor.models.registry import ModelRegistry

    return "listed" if architecture in ModelRegistry.get_supported_archs() else "not listed"


def judge_family(family: str, folder: Path, *, device: str) -> dict[str, Any]:
    """The columns that can be measured on this device."""
    save_family(family, folder)
    reference = load_model(ModelConfig(path=str(folder)), device="cpu", attention="eager")
    if device != "cpu":
        return {"gpu_engine": judge_engine(folder, reference, device=device)}
    learner = judge_learner(folder, reference)
    return {
        "cpu_engine": judge_engine(folder, reference, device="cpu"),
        "learner": learner,
        "direct": learner if learner.result == "exact" and is_direct(folder) else Verdict("unused"),
        "vllm": Verdict(vllm_lists(type(reference).__name__)),
    }


def reason_only(verdict: Verdict, folder: Path) -> Verdict:
    """The verdict without details that differ between machines."""
    detail = verdict.detail.replace(f"{str(folder)!r}", "the model")
    return verdict._replace(detail=re.sub(r" \(relative difference [^)]*\)", "", detail))


def write_results(results: dict[str, Any]) -> None:
    """Write one line per family."""
    lines = [f"{json.dumps(name)}: {json.dumps(results[name])}" for name in sorted(results)]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    for family in options.families:
        with TemporaryDirectory() as root:
            folder = Path(root) / family
            columns = judge_family(family, folder, device=options.device)
        print(family, {name: verdict.result for name, verdict in columns.items()}, flush=True)
        cleaned = {name: reason_only(verdict, folder) for name, verdict in columns.items()}
        results[family] = results.get(family, {}) | cleaned
        write_results(results)


if __name__ == "__main__":
    main()
