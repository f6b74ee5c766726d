"""The distribution of a teacher that is given by numbers: of all classes, or of some and the rest."""

import math
from typing import NamedTuple

from torch_aclnn_ops._numerics import widen
from torch_aclnn_ops.functional.linear_kl_div.divergences import Divergence
from torch_aclnn_ops.functional.linear_kl_div.inputs import Teacher

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where some classes stand among those of a process."""

    columns: Tensor  # any where a class is not here
    is_here: Tensor

    @classmethod
    def of(cls, teacher: Teacher, classes: slice) -> "Places":
        """Find the classes of a teacher."""
        assert teacher.indices is not None
        is_here = (teacher.indices >= classes.start) & (teacher.indices < classes.stop)
        return cls((teacher.indices - classes.start).clamp(0, max(classes.stop - classes.start - 1, 0)), is_here)

    def log_probabilities(self, values: Tensor) -> Tensor:
        """Return the values of the classes, and last the logarithm of the sum of all others' exponentials.

        What is not here is -inf.
        """
        rows, number = self.columns.shape
        if values.shape[1] == 0:
            return values.new_full((rows, number + 1), -math.inf)
        found = values.gather(1, self.columns).masked_fill(~self.is_here, -math.inf)
        # Columns of classes that are not here may meet those of others.
        counts = torch.zeros_like(values, dtype=torch.uint8).scatter_add(1, self.columns, self.is_here.to(torch.uint8))
        rest = values.masked_fill(counts > 0, -math.inf).logsumexp(1, keepdim=True)
        return torch.cat([found, rest], 1)


def log_probabilities(teacher: Teacher) -> Tensor:
    """Return the log-probabilities of a teacher that is given by numbers."""
    assert teacher.values is not None
    values = widen(teacher.values)
    return values if teacher.is_log else values.log()


def with_rest(teacher: Teacher, student: Tensor, divergence: Divergence) -> Tensor:
    """Return the log-probabilities of a teacher's classes, and in the last column that of all others together.

    Args:
        teacher: of some classes.
        student: what :meth:`Places.log_probabilities` has made of the student's.
        divergence: a reverse KL would be infinite where rounding leaves nothing to the others.
    """
    values = log_probabilities(teacher)
    least = 0.0
    if divergence == "reverse_kl" and teacher.values is not None:
        least = torch.finfo(teacher.values.dtype).eps
    rest = (-torch.expm1(values.logsumexp(1, keepdim=True))).clamp(min=least).log()
    there_are_none = student[:, -1:].detach() == -math.inf
    return torch.cat([values, rest.masked_fill(there_are_none, -math.inf)], 1).to(student.dtype)
