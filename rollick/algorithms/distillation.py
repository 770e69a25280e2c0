"""Divergences between student and teacher on the teacher's k most likely tokens.

T positions, K tokens. `teacher_TK` and `student_TK` are log-probs of the same tokens over the full
vocabulary, not normalised over the K. All other tokens form a single outcome with the remaining
mass, so the result is a divergence (never negative, 0 iff equal) and at most that over the full
vocabulary. Each function returns one value per position, with a gradient to the student.
"""

from __future__ import annotations

from functools import partial
from math import log

import torch

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.config.names import resolve
from rollick.config.schema.losses import DistillationLoss
from rollick.errors import ConfigError

MIN_OTHER_PROBABILITY = 1e-6
"""Lower bound of the other tokens' probability: below it, 1 - sum is inaccurate in float32."""

CHUNK_POSITIONS = 1 << 16
"""Positions per chunk, to limit memory: a divergence holds a dozen [T, K] arrays at once."""

MIN_LOGPROB = -1e4
"""Lower bound of log-probs: -inf times a mass of 0 would be NaN."""


def distillation(inputs: LossInputs, options: DistillationLoss) -> TokenLoss:
    """The divergence selected by the options, at each trained token."""
    if inputs.teacher_TK is None or inputs.student_TK is None:
        raise ConfigError(
            "the loss distillation needs the teacher's top tokens, and the batch has none",
            fix="name a teacher in the recipe",
        )
    divergence = resolve("divergences", options.divergence)
    if options.divergence in ("skewed", "skewed_reverse"):
        divergence = partial(divergence, skew=options.skew)
    elif options.divergence == "adaptive":
        divergence = partial(divergence, head=options.head)
    chunks = (x_TK.split(CHUNK_POSITIONS) for x_TK in (inputs.teacher_TK, inputs.student_TK))
    loss_T = torch.cat([divergence(*chunk) for chunk in zip(*chunks, strict=True)])
    return TokenLoss(loss_T, {"divergence": loss_T.detach().sum()})


def forward_kl(teacher_TK: torch.Tensor, student_TK: torch.Tensor) -> torch.Tensor:
    """KL(t || s): mode-covering."""
    return _kl(_append_other_tokens(teacher_TK), _append_other_tokens(student_TK))


def reverse_kl(teacher_TK: torch.Tensor, student_TK: torch.Tensor) -> torch.Tensor:
    """KL(s || t): mode-seeking."""
    return forward_kl(student_TK, teacher_TK)


def js(teacher_TK: torch.Tensor, student_TK: torch.Tensor) -> torch.Tensor:
    """(KL(t || m) + KL(s || m)) / 2, m = (t + s) / 2; at most ln 2."""
    teacher, student = _append_other_tokens(teacher_TK), _append_other_tokens(student_TK)
    mixture = _mixture(teacher, student, 0.5)
    return 0.5 * (_kl(teacher, mixture) + _kl(student, mixture))


def skewed_kl(
    teacher_TK: torch.Tensor, student_TK: torch.Tensor, *, skew: float = 0.1
) -> torch.Tensor:
    """KL(t || skew t + (1 - skew) s): finite where the student has no mass (arXiv 2402.03898)."""
    teacher, student = _append_other_tokens(teacher_TK), _append_other_tokens(student_TK)
    return _kl(teacher, _mixture(teacher, student, skew))


def skewed_reverse_kl(
    teacher_TK: torch.Tensor, student_TK: torch.Tensor, *, skew: float = 0.1
) -> torch.Tensor:
    """KL(s || skew s + (1 - skew) t)."""
    return skewed_kl(student_TK, teacher_TK, skew=skew)


def adaptive_kl(
    teacher_TK: torch.Tensor, student_TK: torch.Tensor, *, head: float = 0.5
) -> torch.Tensor:
    """g KL(t || s) + (1 - g) KL(s || t), g the head's share of the gap |t - s|, without gradient.

    The head is the teacher's most likely tokens up to the mass `head`. The forward KL first fits
    the head and the reverse KL the tail, so each is weighted by its gap (arXiv 2404.02657).
    """
    teacher, student = _append_other_tokens(teacher_TK), _append_other_tokens(student_TK)
    with torch.no_grad():
        gap = (teacher.exp() - student.exp()).abs()
        order = teacher.argsort(dim=-1, descending=True)
        mass = teacher.exp().gather(-1, order)
        mass_before = mass.cumsum(-1) - mass
        in_head = torch.zeros_like(gap).scatter(-1, order, (mass_before < head).to(gap.dtype))
        weight_T = (gap * in_head).sum(-1) / gap.sum(-1).clamp(min=torch.finfo(gap.dtype).tiny)
    return weight_T * _kl(teacher, student) + (1 - weight_T) * _kl(student, teacher)


def _append_other_tokens(logprobs_TK: torch.Tensor) -> torch.Tensor:
    """[T, K + 1]: the last column is the log of the other tokens' probability."""
    clamped_TK = logprobs_TK.clamp(min=MIN_LOGPROB)
    other_T1 = 1 - clamped_TK.exp().sum(-1, keepdim=True)
    return torch.cat([clamped_TK, other_T1.clamp(min=MIN_OTHER_PROBABILITY).log()], dim=-1)


def _mixture(first: torch.Tensor, second: torch.Tensor, weight: float) -> torch.Tensor:
    """log(weight first + (1 - weight) second)."""
    return torch.logaddexp(first + log(weight), second + log(1 - weight))


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
