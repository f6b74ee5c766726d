"""The divergences of rows and their slopes, also in differentiable torch calls, and teachers given by probabilities."""

import math
from typing import NamedTuple

from torch_aclnn_ops._checks import Divergence
from torch_aclnn_ops._tensors import widen, without_autocast
from torch_aclnn_ops.functional.linear_kl_div.call import Call
from torch_aclnn_ops.ops._chunks import IGNORED

import torch
from torch import Tensor

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

    With the student's distribution q and the teacher's p, it is ``KL(p || q)``, ``KL(q || p)``, or with the mixture
    ``m = beta p + (1 - beta) q`` the generalized Jensen-Shannon divergence ``beta KL(p || m) + (1 - beta) KL(q || m)``.

    The divergences are differentiable in both arguments. The derivatives are correct up to a multiple of q, which
    the gradient of a softmax removes. Either result is None if it is not requested. Where probabilities may be 0
    (``may_be_masked``), their terms are 0.
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


@without_autocast
def losses_of_rows(call: Call) -> Tensor:
    """Return the loss of every row, 0 for an ignored one, with every derivative."""
    ignored = None if call.target is None else call.target == IGNORED
    if ignored is not None:  # so that no derivative sees inf or nan
        column = ignored.unsqueeze(1)
        # Log-probabilities of 0, because the reverse KL is infinite for probabilities of 0.
        rows, values = call.teacher_input, call.teacher_values
        call = call._replace(
            input=call.input.masked_fill(column, 0),
            teacher_input=None if rows is None else rows.masked_fill(column, 0),
            teacher_values=None if values is None else values.masked_fill(column, 0 if call.is_log else 1),
        )
    temperature = call.temperature
    student = _log_softmax(call.input, call.linear_weight, call.linear_bias, temperature)
    of_labels = None
    labels = call.labels()
    if labels is not None:
        columns = labels.clamp(0, student.shape[1] - 1).unsqueeze(1)
        of_labels = -(student * temperature).log_softmax(1).gather(1, columns).squeeze(1)
    if call.teacher_indices is not None:
        student = Places.of(call).log_probabilities(student)
        teacher = log_probabilities_with_rest(call, student)
    elif call.teacher_input is not None and call.teacher_weight is not None:
        teacher = _log_softmax(call.teacher_input, call.teacher_weight, call.teacher_bias, temperature)
    else:
        teacher = log_probabilities(call)
    losses, _ = losses_and_slopes(call.divergence, call.beta, student, teacher.to(student.dtype), call.may_be_masked())
    assert losses is not None
    if of_labels is not None:
        losses = losses + call.hard_weight * of_labels
    return losses if ignored is None else losses.masked_fill(ignored, 0)


def _log_softmax(input: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = widen(input) @ widen(weight).T
    if bias is not None:
        logits = logits + widen(bias)
    return (logits / temperature).log_softmax(1)


class Places(NamedTuple):
    """Columns of the top-k classes among the classes of this process."""

    columns: Tensor  # arbitrary where a class belongs to another process
    is_here: Tensor

    @classmethod
    def of(cls, call: Call) -> "Places":
        """Find the columns of a teacher's classes."""
        indices, classes = call.teacher_indices, call.classes()
        assert indices is not None
        is_here = (indices >= classes.start) & (indices < classes.stop)
        return cls((indices - classes.start).clamp(0, classes.stop - classes.start - 1), is_here)

    def log_probabilities(self, values: Tensor) -> Tensor:
        """Return the log-probabilities of the classes, and in the last column that of all others together.

        Classes of other processes are -inf.
        """
        found = values.gather(1, self.columns).masked_fill(~self.is_here, -math.inf)
        # A column may also stand for a class of another process, which must not hide it.
        counts = torch.zeros_like(values, dtype=torch.uint8).scatter_add(1, self.columns, self.is_here.to(torch.uint8))
        others = values.masked_fill(counts > 0, -math.inf)
        # The derivatives of logsumexp are nan where no class is left.
        there_are_none = (others == -math.inf).all(1, keepdim=True)
        rest = others.masked_fill(there_are_none, 0).logsumexp(1, keepdim=True)
        return torch.cat([found, rest.masked_fill(there_are_none, -math.inf)], 1)


def log_probabilities(call: Call) -> Tensor:
    """Return the log-probabilities of a teacher that has no head."""
    assert call.teacher_values is not None
    values = widen(call.teacher_values)
    return values if call.is_log else values.log()


def log_probabilities_with_rest(call: Call, student: Tensor) -> Tensor:
    """Return the log-probabilities of the teacher's top-k classes, with a last column for all other classes.

    For the reverse KL the rest is at least one rounding error, because the divergence is infinite at 0. ``student`` has
    the student's log-probabilities, from :meth:`Places.log_probabilities`.
    """
    values = log_probabilities(call)
    least = 0.0
    if call.divergence == "reverse_kl" and call.teacher_values is not None:
        least = torch.finfo(call.teacher_values.dtype).eps
    rest = (-torch.expm1(values.logsumexp(1, keepdim=True))).clamp(min=least).log()
    there_are_none = student[:, -1:].detach() == -math.inf
    return torch.cat([values, rest.masked_fill(there_are_none, -math.inf)], 1).to(student.dtype)
