"""The rows of a loss on a head that are not ignored, and their chunks: logits in a reused buffer."""

from collections.abc import Callable, Sequence
from typing import Any

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops.ops._head.products import Gradients, Head, logits_buffer
from torch_aclnn_ops.ops._head.tiling import Tiling, slices

import torch
from torch import Tensor

Results = tuple[Tensor, ...]
HeadGradients = tuple[Tensor | None, Tensor | None, Tensor | None]
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

    def select(self, values: Any, rows: slice = slice(None)) -> Any:
        """Return the values, if any, of a range of the remaining rows, with zeros for ignored rows."""
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

    def expand_to_all_rows(self, values: Any, elsewhere: int = 0) -> Any:
        """Return the values of all rows, with ``elsewhere`` for ignored rows."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(_as_column(self._ignored, values), elsewhere)
        if self._kept is None:
            return values
        return values.new_full((self._rows, *values.shape[1:]), elsewhere).index_copy_(0, self._kept, values)


def reduce_in_chunks(
    input: Tensor,
    head: Head,
    kept: KeptRows,
    tiling: Tiling,
    reduce_chunk: Callable[[Tensor, slice], Sequence[Results]],
    needed: tuple[bool, bool, bool] | None,
) -> tuple[Results, HeadGradients]:
    """Reduce the logits of all rows, and compute the gradients of input, weight and bias that are needed, if any.

    Given the logits of a chunk and its range of rows, ``reduce_chunk`` returns the results of its blocks. If gradients
    are needed, it overwrites the logits with their gradient.

    Returns:
        The results of all rows, 0 for ignored ones (-1 for integers), and the gradients: float32 for 16-bit tensors,
        except for that of a bfloat16 head that one product computes.
    """
    # Without keeps_gradients, Gradients uses the shape only, and add() gets the rows.
    rows_of_input = kept.select(input) if tiling.keeps_gradients else input[: kept.number]
    total = None if needed is None else Gradients(rows_of_input, head, tiling, needed)
    buffer = logits_buffer(input, head, tiling, total)
    blocks: list[Results] = []
    for rows in tiling.chunks():
        chunk = kept.select(input, rows)
        shape = (chunk.shape[0], tiling.classes)
        logits = head.logits(chunk, buffer[: shape[0] * shape[1]].view(shape))
        blocks += reduce_chunk(logits, rows)
        if total is not None:
            kept.zero_ignored(logits, rows)
            total.add(logits, chunk, rows)
    results = tuple(_all_rows(kept, column) for column in zip(*blocks, strict=True))
    if total is None:
        return results, (None, None, None)
    input_grad, weight_grad, bias_grad = total.finish()
    return results, (kept.expand_to_all_rows(input_grad), weight_grad, bias_grad)


def blocks_of(rows: slice, size: int) -> list[slice]:
    """Split the rows of a chunk; there is at least one block, possibly empty."""
    return slices(rows.start, rows.stop, max(size, 1)) or [rows]


def _all_rows(kept: KeptRows, parts: Sequence[Tensor]) -> Tensor:
    values = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    found: Tensor = kept.expand_to_all_rows(values, 0 if values.is_floating_point() else -1)
    return found


def _as_column(rows: Tensor, values: Tensor) -> Tensor:
    return rows.reshape(-1, *(1,) * (values.dim() - 1))
