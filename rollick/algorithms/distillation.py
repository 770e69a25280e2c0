"""Divergences of a student from its teacher, on the teacher's k likeliest tokens. Pure.

T positions, K tokens. `teacher_TK` and `student_TK` are log-probs of the same tokens, over the
whole vocabulary (not normalised over the K). All other tokens count as one more outcome, with the
mass that is left: what is measured is a true divergence (never negative, 0 iff equal) and at most
that of the whole vocabulary. Each function gives one value a position, with a gradient to the
student.
"""

from __future__ import annotations

from functools import partial
from math import log

import torch

from rollick.algorithms.losses import LossInputs, TokenLoss
from rollick.config.losses import DistillationLoss
from rollick.errors import ConfigError

LEAST_REST = 1e-6
"""Smallest mass of the other tokens: below it, float32 knows no digit of 1 - sum."""


ROWS_AT_ONCE = 1 << 16
"""Positions of one piece: whole micro-batches would hold a dozen [T, K] arrays at the same time."""

LEAST_LOGPROB = -1e4
"""Log-probs are cut here: that of an impossible token, -inf, times its mass of 0 would be NaN."""


def distillation(inputs: LossInputs, options: DistillationLoss) -> TokenLoss:
    """The divergence that the options name, at each trained token."""
    if inputs.teacher_TK is None or inputs.student_TK is None:
        raise ConfigError(
            "the loss distillation needs the teacher's likeliest tokens, and the batch has none",
            fix="name a teacher in the recipe",
        )
    divergence = DIVERGENCES[options.divergence]
    if options.divergence in ("skewed", "skewed_reverse"):
        divergence = partial(divergence, skew=options.skew)
    elif options.divergence == "adaptive":
        divergence = partial(divergence, head=options.head)
    pieces = (values_TK.split(ROWS_AT_ONCE) for values_TK in (inputs.teacher_TK, inputs.student_TK))
    loss_T = torch.cat([divergence(*both) for both in zip(*pieces, strict=True)])
    return TokenLoss(loss_T, {"divergence": loss_T.detach().sum()})


def forward_kl(teacher_TK: torch.Tensor, student_TK: torch.Tensor) -> torch.Tensor:
    """KL(t || s): the student covers all that the teacher does."""
    return _kl(_with_rest(teacher_TK), _with_rest(student_TK))


def reverse_kl(teacher_TK: torch.Tensor, student_TK: torch.Tensor) -> torch.Tensor:
    """KL(s || t): the student avoids what the teacher avoids."""
    return _kl(_with_rest(student_TK), _with_rest(teacher_TK))


def js(teacher_TK: torch.Tensor, student_TK: torch.Tensor) -> torch.Tensor:
    """(KL(t || m) + KL(s || m)) / 2, m = (t + s) / 2; at most ln 2."""
    teacher, student = _with_rest(teacher_TK), _with_rest(student_TK)
    middle = _mixture(teacher, student, 0.5)
    return 0.5 * (_kl(teacher, middle) + _kl(student, middle))


def skewed_kl(
    teacher_TK: torch.Tensor, student_TK: torch.Tensor, *, skew: float = 0.1
) -> torch.Tensor:
    """KL(t || skew t + (1 - skew) s): finite where the student has no mass (arXiv 2402.03898)."""
    teacher, student = _with_rest(teacher_TK), _with_rest(student_TK)
    return _kl(teacher, _mixture(teacher, student, skew))


def skewed_reverse_kl(
    teacher_TK: torch.Tensor, student_TK: torch.Tensor, *, skew: float = 0.1
) -> torch.Tensor:
    """KL(s || skew s + (1 - skew) t)."""
    teacher, student = _with_rest(teacher_TK), _with_rest(student_TK)
    return _kl(student, _mixture(student, teacher, skew))


def adaptive_kl(
    teacher_TK: torch.Tensor, student_TK: torch.Tensor, *, head: float = 0.5
) -> torch.Tensor:
    """g KL(t || s) + (1 - g) KL(s || t), g the head's share of the gap |t - s|, held fixed.

    The head are the teacher's likeliest tokens up to the mass `head`. The forward KL mends the
    head first and the reverse KL the tail, so each gets the weight of its part (arXiv 2404.02657).
    """
    teacher, student = _with_rest(teacher_TK), _with_rest(student_TK)
    with torch.no_grad():
        gap = (teacher.exp() - student.exp()).abs()
        order = teacher.argsort(dim=-1, descending=True)
        mass = teacher.exp().gather(-1, order)
        in_head = torch.zeros_like(gap).scatter(
            -1, order, ((mass.cumsum(-1) - mass) < head).to(gap.dtype)
        )
        share_T = (gap * in_head).sum(-1) / gap.sum(-1).clamp(min=torch.finfo(gap.dtype).tiny)
    return share_T * _kl(teacher, student) + (1 - share_T) * _kl(student, teacher)


DIVERGENCES = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "js": js,
    "skewed": skewed_kl,
    "skewed_reverse": skewed_reverse_kl,
    "adaptive": adaptive_kl,
}
"""Divergences by name."""


def _with_rest(logprobs_TK: torch.Tensor) -> torch.Tensor:
    """[T, K + 1]: the log of the mass of all other tokens added."""
    known_TK = logprobs_TK.clamp(min=LEAST_LOGPROB)
    rest_T1 = 1 - known_TK.exp().sum(-1, keepdim=True)
    return torch.cat([known_TK, rest_T1.clamp(min=LEAST_REST).log()], dim=-1)


def _mixture(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """log(share first + (1 - share) second)."""
    return torch.logaddexp(first + log(share), second + log(1 - share))


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
