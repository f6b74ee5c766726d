"""Divergences between rows of log-probabilities of a student and a teacher, and their slopes."""

import math
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]
DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jensen_shannon")
_VERY_NEGATIVE = -1e30


def losses_and_slopes(
    divergence: Divergence,
    beta: float,
    student: Tensor,
    teacher: Tensor,
    may_be_masked: bool,
    with_losses: bool = True,
    with_slopes: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Return each row's divergence, and its derivatives with respect to the student's log-probabilities.

    Of the student's distribution q and the teacher's p it is ``KL(p || q)``, ``KL(q || p)``, or with the mixture
    ``m = beta p + (1 - beta) q`` the generalized Jensen-Shannon divergence ``beta KL(p || m) + (1 - beta) KL(q || m)``.

    The divergences are differentiable in both arguments. The derivatives are correct up to a multiple of q, which
    the gradient of a softmax removes.

    Args:
        divergence: which one.
        beta: weight of the teacher in the Jensen-Shannon divergence.
        student: log-probabilities, shape (rows, classes).
        teacher: log-probabilities of the teacher, shape (rows, classes).
        may_be_masked: probabilities may be 0, and their terms are 0.
        with_losses: whether the divergences are needed, otherwise None.
        with_slopes: whether the derivatives are needed.
    """

    def difference(one: Tensor, other: Tensor, probabilities: Tensor) -> Tensor:
        found = one - other
        # Before the product, so that no derivative sees inf or nan.
        return found.masked_fill(probabilities == 0, 0) if may_be_masked else found

    if divergence == "forward_kl":
        p = teacher.exp()
        losses = (p * difference(teacher, student, p)).sum(1) if with_losses else None
        return losses, -p if with_slopes else None
    if divergence == "reverse_kl":
        q = student.exp()
        terms = q * difference(student, teacher, q)
        return terms.sum(1) if with_losses else None, terms
    if may_be_masked:
        is_masked = (student == -math.inf) & (teacher == -math.inf)  # where logaddexp has no derivative
        student = student.masked_fill(is_masked, _VERY_NEGATIVE)
        teacher = teacher.masked_fill(is_masked, _VERY_NEGATIVE)
    p, q = teacher.exp(), student.exp()
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    terms = q * difference(student, mixture, q)
    losses = None
    if with_losses:
        losses = beta * (p * difference(teacher, mixture, p)).sum(1) + (1 - beta) * terms.sum(1)
    return losses, terms * (1 - beta) if with_slopes else None
