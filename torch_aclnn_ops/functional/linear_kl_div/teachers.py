"""Teachers that are given by probabilities: of all classes, or of the top k and the rest."""

import math
from typing import NamedTuple

from torch_aclnn_ops._numerics import widen
from torch_aclnn_ops.functional.linear_kl_div.call import Call

import torch
from torch import Tensor


class Places(NamedTuple):
    """Columns of the top-k classes among the classes of this process."""

    columns: Tensor  # arbitrary where a class belongs to another process
    is_here: Tensor

    @classmethod
    def of(cls, call: Call) -> "Places":
        """Find the columns of a teacher's classes."""
        indices, classes = call.teacher_indices, call.classes
        assert indices is not None
        is_here = (indices >= classes.start) & (indices < classes.stop)
        return cls((indices - classes.start).clamp(0, max(classes.stop - classes.start - 1, 0)), is_here)

    def log_probabilities(self, values: Tensor) -> Tensor:
        """Return the log-probabilities of the classes, and in the last column that of all others together.

        Classes of other processes are -inf.
        """
        rows, number = self.columns.shape
        if values.shape[1] == 0:
            return values.new_full((rows, number + 1), -math.inf)
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
