"""The rows of a linear cross entropy that count."""

from dataclasses import replace

from torch_aclnn_ops.ops._checks import values_are_readable
from torch_aclnn_ops.ops.linear_cross_entropy._problem import IGNORED, Problem

from torch import Tensor


class CountedRows:
    """The rows of a problem without those that do not count.

    They are dropped where looking for them waits for no device. Elsewhere they are rows of zeros, so that nothing that
    is not finite gets from them into a sum, and weigh nothing.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._rows = problem.input.shape[0]
        self._kept: Tensor | None = None
        self._ignored: Tensor | None = None
        if problem.target.is_floating_point():
            return
        ignored = problem.target == IGNORED
        if not values_are_readable(problem.target):
            self._ignored = ignored
            self.problem = replace(problem, input=problem.input.masked_fill(ignored.unsqueeze(1), 0))
        elif ignored.any():
            self._kept = kept = (~ignored).nonzero().squeeze(1)
            self.problem = replace(problem, input=problem.input[kept], target=problem.target[kept])

    def of(self, values: Tensor | None) -> Tensor | None:
        """Return the values of the rows that are left; zeros of those that do not count."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(self._ignored, 0)
        return values if self._kept is None else values[self._kept]

    def at_all_rows(self, values: Tensor | None, elsewhere: int = 0) -> Tensor | None:
        """Return the values with others, ``elsewhere``, for the rows that do not count."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(self._ignored.reshape(-1, *(1,) * (values.dim() - 1)), elsewhere)
        if self._kept is None:
            return values
        return values.new_full((self._rows, *values.shape[1:]), elsewhere).index_copy_(0, self._kept, values)
