"""Annotate: what models say of a batch's tokens before it is trained on, where the recipe asks.

    policy    old log-probs          reference   log-probs (or the policy without its adapters)
    teacher   log-probs, likeliest   critic      values

Each role computes its part of the batch on each of its ranks; the answers are put together in the
order of the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollick.cluster.dispatch import gather_samples, gather_tokens, split_batch
from rollick.data.batch import Batch
from rollick.pipelines.base import HasSession, Session, phase
from rollick.types import FloatArray, RoleName


@phase("annotate")
async def annotate(pipeline: HasSession, batch: Batch) -> Batch:
    """The batch with every stream that the recipe's algorithms look at."""
    session = pipeline.session
    recipe = session.recipe
    if recipe.needs("old"):
        batch = replace(batch, old_logprobs_N=await logprobs(session, "policy", batch))
    if recipe.needs("reference"):
        batch = replace(batch, reference_logprobs_N=await _reference(session, batch))
    if recipe.needs("teacher"):
        batch = replace(batch, teacher_logprobs_N=await logprobs(session, "teacher", batch))
    if recipe.needs("teacher_top"):
        batch = await _with_top_tokens(session, batch)
    if recipe.needs("values"):
        batch = await _with_values(session, batch)
    return batch


async def _reference(session: Session, batch: Batch) -> FloatArray:
    """Of a model of its own, or of the policy with its adapters switched off."""
    if not session.recipe.policy_is_reference:
        return await logprobs(session, "reference", batch)
    results, plan = await _ask(session, "policy", "reference_logprobs", batch)
    return gather_tokens(results, batch, plan)


async def logprobs(session: Session, role: RoleName, batch: Batch) -> FloatArray:
    """A role's log-probs of the batch, computed over all its ranks."""
    results, plan = await _ask(session, role, "logprobs", batch)
    return gather_tokens(results, batch, plan)


async def _with_top_tokens(session: Session, batch: Batch) -> Batch:
    results, plan = await _ask(session, "teacher", "top_logprobs", batch)
    ids = [None if result is None else result.ids_NK for result in results]
    tops = [None if result is None else result.logprobs_NK for result in results]
    return replace(
        batch,
        teacher_ids_NK=gather_tokens(ids, batch, plan),
        teacher_top_NK=gather_tokens(tops, batch, plan),
    )


async def _with_values(session: Session, batch: Batch) -> Batch:
    results, plan = await _ask(session, "critic", "values", batch)
    values = [None if result is None else result.values_N for result in results]
    last = [None if result is None else result.last_values_B for result in results]
    return replace(
        batch,
        values_N=gather_tokens(values, batch, plan),
        last_values_B=gather_samples(last, batch, plan),
    )


async def _ask(session: Session, role: RoleName, method: str, batch: Batch) -> tuple[Any, Any]:
    """Each rank's answer about its part (None where it had none), and the plan of the parts."""
    group = session.group
    if role == "policy":  # Its ranks divide a batch among themselves.
        return [await group.together(role, method, batch)], (tuple(range(batch.samples)),)
    parts, plan = split_batch(batch, group.device_map.ranks(role))
    given = [part if part.samples else None for part in parts]
    return await group.scatter(role, method, given), plan
