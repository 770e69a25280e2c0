"""Validation of requests and results, shared by all engines.

A step computes all running requests together, so one invalid request (a token id without an
embedding, an infinite logit) would fail all of them. Each request is checked before it is queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.errors import EngineError
from rollick.infer.engine import MIN_TEMPERATURE, StopRules
from rollick.types import Request, SampleId, StopReason

MAX_COUNT = 2**31 - 1
"""Upper limit of token counts: engines store them as 32-bit integers."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one engine, and the checks of requests against them."""

    max_length: int
    vocabulary_size: int
    stops: StopRules
    min_temperature: float = MIN_TEMPERATURE

    def check(self, request: Request, *, pending: Container[SampleId]) -> None:
        """Raises EngineError if the engine cannot generate the request."""
        for problem, fix in self._find_problems(request):
            raise EngineError(f"{request.uid}: {problem}", fix=fix)
        if request.uid in pending:
            fix = "abort it first, or await it"
            raise EngineError(f"{request.uid} is already being generated", fix=fix)

    def stop_before_start(self, request: Request) -> StopReason | None:
        """The stop reason of a continued request that is already finished; else None."""
        earlier, sampling = request.continue_from, request.sampling
        if earlier is None or len(earlier.token_ids) == 0:
            return None
        if int(earlier.token_ids[-1]) in (*self.stops.stop_ids, *sampling.stop_ids):
            return StopReason.STOP
        length = len(request.token_ids) + len(earlier.token_ids)
        return StopReason.LENGTH if length >= self.total_length(request) else None

    def total_length(self, request: Request) -> int:
        return min(len(request.token_ids) + request.sampling.max_tokens, self.max_length)

    def _find_problems(self, request: Request) -> Iterator[tuple[str, str]]:
        """Each problem and its fix."""
        length, max_prompt = len(request.token_ids), self.max_length - 1
        if length > max_prompt:
            room = f"no room in a cache of infer.max_length={self.max_length}"
            fix = f"use prompts of at most {max_prompt} tokens, or raise infer.max_length"
            yield f"a prompt of {length} tokens leaves {room}", fix
        if length == 0:
            yield "the prompt is empty", "pass at least one token"
        sampling, temperature = request.sampling, request.sampling.temperature
        if not (temperature == 0 or self.min_temperature <= temperature < math.inf):
            fix = f"use 0 (greedy), or at least {self.min_temperature:g}"
            yield f"the temperature is {temperature:g}", fix
        for name, count in (("top_k", sampling.top_k), ("min_tokens", sampling.min_tokens)):
            if not 0 <= count <= MAX_COUNT:
                yield f"{name} is {count}", f"use 0 to {MAX_COUNT}"
        top_p, min_p = sampling.top_p, sampling.min_p
        if math.isnan(top_p) or math.isnan(min_p):
            yield f"top_p is {top_p:g} and min_p {min_p:g}", "use values from 0 to 1"
        for _, value in sampling.logit_bias:
            if math.isnan(value) or value == math.inf:
                yield f"a logit_bias is {value:g}", "use a number, or -inf"
        for token in self._token_ids(request):
            if not 0 <= token < self.vocabulary_size:
                fix = f"use ids from 0 to {self.vocabulary_size - 1}"
                yield f"the model has no token {token}", fix
        if sampling.stop and self.stops.decode is None:
            fix = "create the engine with StopRules(stop_ids, decode)"
            yield f"stop strings {sampling.stop} need text, and the engine cannot decode", fix

    def _token_ids(self, request: Request) -> list[int]:
        """The lowest and the highest id of the tokens, and the ids in the sampling options."""
        earlier = request.continue_from
        arrays = [request.token_ids] if earlier is None else [request.token_ids, earlier.token_ids]
        ids = [int(bound) for ids in arrays if len(ids) for bound in (ids.min(), ids.max())]
        ids += [token for token, _ in request.sampling.logit_bias]
        if request.sampling.min_tokens:
            # The engine sets the logits of these tokens to -inf for the first min_tokens tokens.
            ids += request.sampling.stop_ids
        return ids


def vocabulary_size(module: Any) -> int:
    """The number of rows of a transformers model's input embedding."""
    return int(module.get_input_embeddings().weight.shape[0])


def check_finite(
    logprobs: npt.NDArray[np.floating[Any]], uid_of: Callable[[int], SampleId], *, version: int
) -> None:
    """Raises EngineError if a log-prob is not finite. `uid_of` maps an index to its request."""
    if not np.isfinite(logprobs).all():
        failed_uids = [str(uid_of(int(index))) for index in np.flatnonzero(~np.isfinite(logprobs))]
        raise EngineError(
            f"the model of version {version} computes logits that are not finite, "
            f"for {', '.join(failed_uids[:4])}",
            fix="check for a diverged policy (gradient norm, learning rate) or a narrow dtype",
        )
