"""The rows of a loss that are not ignored."""

from typing import overload

from torch_aclnn_ops._checks import values_are_readable

from torch import Tensor

# The target of an ignored row.
IGNORED = -1


class KeptRows:
    """The rows that are not ignored.

    Ignored rows are dropped if finding them does not synchronize with a device. Otherwise they are set to zero, so that
    inf and nan in them do not reach sums in which their coefficient is 0.

    Args:
        target: class indices, ``IGNORED`` for ignored rows; ``None`` if no row is ignored.
        rows: the number of rows.
    """

    def __init__(self, target: Tensor | None, rows: int) -> None:
        self._rows = rows
        self._kept: Tensor | None = None
        self._ignored: Tensor | None = None
        if target is None:
            return
        if not values_are_readable(target):
            self._ignored = target == IGNORED
        elif rows > 0 and int(target.min()) < 0:
            kept = (target != IGNORED).nonzero().squeeze(1)
            self._kept = kept if kept.shape[0] < rows else None

    @property
    def are_all(self) -> bool:
        """Whether it is known that no row is ignored."""
        return self._kept is None and self._ignored is None

    @property
    def have_labels(self) -> bool:
        """Whether it is known that the remaining rows have targets of 0 or more, unless those are in other shards."""
        return self._ignored is None

    @property
    def number(self) -> int:
        """The number of rows that are not dropped."""
        return self._rows if self._kept is None else self._kept.shape[0]

    @overload
    def select(self, values: Tensor, rows: slice = ...) -> Tensor: ...
    @overload
    def select(self, values: Tensor | None, rows: slice = ...) -> Tensor | None: ...
    def select(self, values: Tensor | None, rows: slice = slice(None)) -> Tensor | None:
        """Return the values of a range of the remaining rows, with zeros for ignored rows."""
        if values is None:
            return None
        if self.are_all and rows.start in (0, None) and rows.stop in (self._rows, None):
            return values
        if self._ignored is not None:
            return values[rows].masked_fill(_as_column(self._ignored[rows], values), 0)
        return values[rows] if self._kept is None else values[self._kept[rows]]

    def zero_ignored(self, values: Tensor, rows: slice) -> None:
        """Zero the values of ignored rows in-place; a no-op if they are dropped."""
        if self._ignored is not None:
            values.masked_fill_(_as_column(self._ignored[rows], values), 0)

    def expand_to_all_rows(self, values: Tensor | None, elsewhere: int = 0) -> Tensor | None:
        """Return the values of all rows, with ``elsewhere`` for ignored rows."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(_as_column(self._ignored, values), elsewhere)
        if self._kept is None:
            return values
        return values.new_full((self._rows, *values.shape[1:]), elsewhere).index_copy_(0, self._kept, values)


def _as_column(rows: Tensor, values: Tensor) -> Tensor:
    return rows.reshape(-1, *(1,) * (values.dim() - 1))
