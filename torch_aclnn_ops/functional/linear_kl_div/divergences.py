"""Divergences of rows of log-probabilities: student's and teacher's, and what derivatives are made of."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]
DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jensen_shannon")
_AS_GOOD_AS_MINUS_INFINITY = -1e30


@dataclass(frozen=True)
class Measure:
    """A divergence of the student's distribution q and the teacher's p.

    Attributes:
        divergence: ``KL(p || q)``, ``KL(q || p)``, or with the mixture ``m = beta p + (1 - beta) q`` the generalized
            Jensen-Shannon divergence ``beta KL(p || m) + (1 - beta) KL(q || m)``.
        beta: of the latter.
    """

    divergence: Divergence
    beta: float

    def losses_and_slopes(self, student: Tensor, teacher: Tensor, may_be_masked: bool) -> tuple[Tensor, Tensor]:
        """Return each row's sum over classes, and its derivatives by the student's log-probabilities.

        The sums are differentiable by both arguments; the derivatives are right but for a multiple of q, which the
        softmax takes out.

        Args:
            student: log-probabilities, shape (rows, classes).
            teacher: the same of the teacher.
            may_be_masked: probabilities may be 0, whose terms are 0 then.
        """

        def difference(one: Tensor, other: Tensor, probabilities: Tensor) -> Tensor:
            found = one - other
            # Before it is multiplied, so that no derivative sees a number that is not finite.
            return found.masked_fill(probabilities == 0, 0) if may_be_masked else found

        if self.divergence == "forward_kl":
            p = teacher.exp()
            return (p * difference(teacher, student, p)).sum(1), -p
        if self.divergence == "reverse_kl":
            q = student.exp()
            terms = q * difference(student, teacher, q)
            return terms.sum(1), terms
        if may_be_masked:
            is_masked = (student == -math.inf) & (teacher == -math.inf)  # where logaddexp has no derivative
            student = student.masked_fill(is_masked, _AS_GOOD_AS_MINUS_INFINITY)
            teacher = teacher.masked_fill(is_masked, _AS_GOOD_AS_MINUS_INFINITY)
        p, q = teacher.exp(), student.exp()
        mixture = torch.logaddexp(teacher + math.log(self.beta), student + math.log1p(-self.beta))
        terms = q * difference(student, mixture, q)
        of_teacher = (p * difference(teacher, mixture, p)).sum(1)
        return self.beta * of_teacher + (1 - self.beta) * terms.sum(1), terms * (1 - self.beta)
