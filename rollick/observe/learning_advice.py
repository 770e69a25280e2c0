"""Advice for a run that does not learn: what its metrics show, and what to try.

    rows of metrics -> find_advice -> messages by symptom -> live view, log, doctor, report

Reads only metrics; never changes the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite

from rollick.observe.metrics import MetricRows
from rollick.observe.reward_hacking import WINDOW, metric_change

FLAT_AFTER = 20
"""Steps after which a score that has not risen is called flat."""
SOLVED = 0.95
"""A flat score above this is not a symptom: there is little left to learn."""
MAX_EQUAL = 0.5
"""Share of groups without signal that is a symptom."""
MAX_TRUNCATED = 0.5
"""Share of samples at the token limit that is a symptom."""
SMALLEST_GRADIENT = 1e-9
SMALLEST_LOSS = 1e-6


def find_advice(rows: MetricRows) -> dict[str, str]:
    """The messages of the symptoms that the last steps show. `rows`: all of the run."""
    steps = [row for row in rows if "train/grad_norm" in row or "score/mean" in row]
    if len(steps) < WINDOW:
        return {}
    messages = {name: check(steps) for name, check in SYMPTOMS.items()}
    return {name: message for name, message in messages.items() if message is not None}


def _check_flat_score(rows: MetricRows) -> str | None:
    if not _last_values(rows, "score/mean"):
        return None
    scores = [row["score/mean"] for row in rows if "score/mean" in row]
    if not any(scores):
        return (
            f"every score has been 0 for {len(scores)} steps; try: read samples.jsonl, test the "
            "reward with `rollick reward test`, give partial credit, use easier prompts, or warm "
            "up with pipeline sft"
        )
    change = metric_change(rows, "score/mean") if len(scores) >= FLAT_AFTER else None
    if change is None or change.rose or change.now >= SOLVED:
        return None
    verb = "fallen" if change.fell else "not risen"
    rate = "".join(f" (now {lr:.3g})" for lr in _last_values(rows, "train/lr")[-1:])
    return (
        f"the score has {verb} in {len(scores)} steps: from {change}; try: another "
        f"train.optimizer.lr{rate}, a larger rollout.group_size or rollout.groups_per_step, "
        "prompts that the model solves sometimes, or a warm-up with pipeline sft"
    )


def _check_no_gradient(rows: MetricRows) -> str | None:
    rates, gradients = _last_values(rows, "train/lr"), _last_values(rows, "train/grad_norm")
    if rates and not any(rates):
        return (
            f"the learning rate has been 0 for {len(rates)} steps; try: a higher "
            "train.optimizer.lr, or another train.schedule"
        )
    if gradients and max(gradients) <= SMALLEST_GRADIENT:
        return (
            f"the gradient has been 0 for {len(gradients)} steps; try: check that scores differ "
            "within a group (samples.jsonl), that the advantage and the loss mask are not 0, and "
            "that the loss does not clip every token"
        )
    losses = _last_values(rows, "train/loss")
    is_supervised = not _last_values(rows, "score/mean")
    if is_supervised and losses and max(map(abs, losses)) <= SMALLEST_LOSS:
        return (
            f"the loss has been 0 for {len(losses)} steps: the examples are memorised, or no token "
            "is trained; try: fewer run.steps, more data, or check the loss mask"
        )
    return None


def _check_equal_scores(rows: MetricRows) -> str | None:
    if _score_rose(rows):
        return None
    recent = [row for row in rows if "rollout/groups" in row][-WINDOW:]
    dropped = sum(row.get("rollout/dropped/no_signal", 0.0) for row in recent)
    equal = dropped + sum(row.get("rollout/kept_no_signal", 0.0) for row in recent)
    groups = dropped + sum(row["rollout/groups"] for row in recent)
    if not groups or equal / groups <= MAX_EQUAL:
        return None
    score = _last_values(rows, "score/mean")
    mean = sum(score) / len(score) if score else 0.0
    level = "easier" if mean < 0.5 else "harder"
    return (
        f"all samples score the same in {equal / groups:.0%} of the groups (mean score {mean:.3g});"
        f" try: {level} prompts (data.selection chooses among them), a larger rollout.group_size, "
        "a higher sampling.temperature, or a reward with partial credit"
    )


def _check_truncation(rows: MetricRows) -> str | None:
    truncated = _last_values(rows, "rollout/truncated")
    lengths = _last_values(rows, "rollout/response_length")
    if _score_rose(rows) or not truncated or sum(truncated) / len(truncated) <= MAX_TRUNCATED:
        return None
    length = f" (mean length {sum(lengths) / len(lengths):.4g} tokens)" if lengths else ""
    return (
        f"{sum(truncated) / len(truncated):.0%} of the answers reach the token limit{length}; try: "
        "a higher sampling.max_tokens (and infer.max_length), a prompt that asks for short "
        "answers, or check that the model ends its answers with the stop token"
    )


SYMPTOMS: Mapping[str, Callable[[MetricRows], str | None]] = {
    "flat_score": _check_flat_score,
    "no_gradient": _check_no_gradient,
    "equal_scores": _check_equal_scores,
    "at_limit": _check_truncation,
}
"""Symptoms by name. Each function returns a message with values and advice, or None."""


def _score_rose(rows: MetricRows) -> bool:
    """Whether the score has risen since the start of the run."""
    change = metric_change(rows, "score/mean")
    return change is not None and change.rose


def _last_values(rows: MetricRows, name: str) -> list[float]:
    """The last WINDOW values of a metric; empty if fewer steps have it."""
    values = [row[name] for row in rows if name in row and isfinite(row[name])][-WINDOW:]
    return values if len(values) == WINDOW else []
