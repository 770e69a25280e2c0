"""What a request must not ask of an engine, whichever it is.

A token id without an embedding, a temperature that makes logits infinite or a top-k that no
integer of the tables holds fails in the middle of a step, which is that of all requests. So each
request is looked at before it joins the others.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

from rollick.errors import EngineError
from rollick.infer.engine import LEAST_TEMPERATURE
from rollick.types import Request, SampleId

MOST = 2**31 - 1
"""What counts of tokens may be: engines keep them in integers of their own."""


def vocabulary_of(module: Any) -> int:
    """How many tokens a model of transformers has an embedding for."""
    return int(module.get_input_embeddings().weight.shape[0])


def check_request(
    request: Request,
    *,
    max_length: int,
    vocabulary: int,
    reads_text: bool,
    pending: Container[SampleId],
) -> None:
    """Raises EngineError for what an engine with these limits cannot generate."""
    length = len(request.token_ids)
    if length > max_length - 1:
        raise EngineError(
            f"{request.uid}: a prompt of {length} tokens leaves no room in a cache of "
            f"infer.max_length={max_length}",
            fix=f"use prompts of at most {max_length - 1} tokens, or raise infer.max_length",
        )
    if length == 0:
        raise EngineError(f"{request.uid}: the prompt is empty", fix="give at least one token")
    check_numbers(request, vocabulary=vocabulary)
    if request.sampling.stop and not reads_text:
        raise EngineError(
            f"{request.uid}: stop strings {request.sampling.stop} need text, and the engine "
            "has no decode function",
            fix="create the engine with decode=",
        )
    if request.uid in pending:
        raise EngineError(
            f"{request.uid} is already being generated", fix="abort it first, or await it"
        )


def check_numbers(request: Request, *, vocabulary: int) -> None:
    """Raises EngineError for what cannot be drawn with; ids run from 0 to below `vocabulary`."""
    sampling = request.sampling
    if not (sampling.temperature == 0 or LEAST_TEMPERATURE <= sampling.temperature < math.inf):
        raise EngineError(
            f"{request.uid}: the temperature is {sampling.temperature:g}",
            fix=f"use 0, which is greedy, or at least {LEAST_TEMPERATURE:g}",
        )
    for name, count in (("top_k", sampling.top_k), ("min_tokens", sampling.min_tokens)):
        if not 0 <= count <= MOST:
            raise EngineError(f"{request.uid}: {name} is {count}", fix=f"use 0 to {MOST}")
    if math.isnan(sampling.top_p) or math.isnan(sampling.min_p):
        raise EngineError(
            f"{request.uid}: top_p is {sampling.top_p:g} and min_p {sampling.min_p:g}",
            fix="use shares from 0 to 1",
        )
    wrong = [value for _, value in sampling.logit_bias if math.isnan(value) or value == math.inf]
    if wrong:
        raise EngineError(
            f"{request.uid}: a logit_bias is {wrong[0]:g}", fix="use a number, or -inf"
        )
    _check_ids(request, vocabulary)


def _check_ids(request: Request, vocabulary: int) -> None:
    earlier = request.continue_from
    arrays = [request.token_ids] if earlier is None else [request.token_ids, earlier.token_ids]
    ends = [int(end) for ids in arrays if len(ids) for end in (ids.min(), ids.max())]
    named = [token for token, _ in request.sampling.logit_bias]
    if request.sampling.min_tokens:
        # They are ruled out until then, by their place among the logits.
        named += request.sampling.stop_ids
    wrong = [token for token in (*ends, *named) if not 0 <= token < vocabulary]
    if wrong:
        raise EngineError(
            f"{request.uid}: the model has no token {wrong[0]}",
            fix=f"use ids from 0 to {vocabulary - 1}",
        )
