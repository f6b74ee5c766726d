"""Chunk sizes of a loss on a head."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch_aclnn_ops._tensors import accumulation_dtype

import torch

# The logits of a chunk take 32 MiB, or an eighth of the head if that is more: enough rows for efficient matrix
# products, and small compared with the gradient of the head.
LOGITS_BYTES = 2**25
_SHARE_OF_HEAD = 8
_FEWEST_ROWS = 128
# The block of the head per matrix product, in float32: small enough for CPU caches.
_BLOCK_BYTES = 2**22
# Rows that are reduced at a time take 1 MiB, which stays in a CPU's cache.
_ROWS_BYTES = 2**20
# The gradients of all logits are kept in bfloat16 if they need at most twice the memory of the head in float32.
_KEPT_ROWS_PER_FEATURE = 4


def rows_of_block(classes: int, itemsize: int) -> int:
    """Return how many rows of logits take 1 MiB, so that what reduces them finds them in a CPU's cache."""
    return max(_ROWS_BYTES // max(classes * itemsize, 1), 1)


def slices(start: int, stop: int, size: int) -> list[slice]:
    """Split a range into slices of equal size, except for the last one."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


class Sizes(NamedTuple):
    """The sizes that determine the tiling: rows, shape and dtype of the head, and whether it is on the CPU."""

    rows: int
    classes: int
    features: int
    dtype: torch.dtype
    is_cpu: bool

    @property
    def wide_itemsize(self) -> int:
        """Bytes per element of the logits."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def is_widened(self) -> bool:
        """Whether the head is upcast for the logits."""
        return self.dtype.itemsize < self.wide_itemsize

    @property
    def classes_per_block(self) -> int:
        """Classes of the head per matrix product."""
        if not self.is_cpu and not self.is_widened:
            return max(self.classes, 1)
        return max(min(_BLOCK_BYTES // max(self.features * self.wide_itemsize, 1), self.classes), 1)


@dataclass(frozen=True)
class Tiling:
    """The chunk sizes of a call."""

    rows: int  # of the input
    classes: int  # of the head
    rows_per_chunk: int  # rows whose logits are materialized at a time
    # whether the gradients of all logits are kept in 16 bits, for a single product for the head's gradient
    keeps_gradients: bool
    bytes_held: int  # memory for logits, their gradients and float32 accumulators

    def chunks(self) -> list[slice]:
        """Return the range of rows of each chunk; there is at least one, possibly empty."""
        return slices(0, self.rows, self.rows_per_chunk) or [slice(0, 0)]

    def __str__(self) -> str:
        """Format the tiling for the log."""
        number, rows = len(self.chunks()), min(self.rows, self.rows_per_chunk)
        held = f"{self.bytes_held / 1e6:.1f} MB of buffers"
        return f"{number} chunk{'s' if number > 1 else ''} of {rows} row{'' if rows == 1 else 's'}, {held}"


class _Costs:
    """The memory that chunks of rows need, in bytes."""

    def __init__(self, sizes: Sizes, copies: int, with_gradient: bool, keeps_gradients: bool) -> None:
        rows, features, itemsize = sizes.rows, sizes.features, sizes.wide_itemsize
        logits = sizes.classes * itemsize
        self.rows = rows
        self.row = max(logits * copies, 1)  # per row: logits and their copies
        self.row_beside_gradient = logits * (copies - 1)  # per row: the copies alone
        self.keeps_gradients = keeps_gradients
        # Until the kept gradients are multiplied, the memory of the head's gradient can hold the logits of some rows.
        self.free_rows = features * sizes.dtype.itemsize // itemsize if keeps_gradients else 0
        block_bytes = sizes.classes_per_block * features * itemsize if sizes.is_widened else 0
        kept_bytes = rows * sizes.classes * sizes.dtype.itemsize if keeps_gradients else 0
        self.constant = block_bytes + kept_bytes  # independent of the chunk size
        # A 16-bit gradient of the head needs a float32 accumulator if there is more than one chunk.
        self.sum = logits * features if sizes.is_widened and with_gradient and not keeps_gradients else 0

    def held(self, rows_per_chunk: int) -> int:
        """Return the bytes needed for chunks of this size."""
        number = min(rows_per_chunk, self.rows)
        held = number * (self.row if number > self.free_rows else self.row_beside_gradient) + self.constant
        return held if rows_per_chunk >= self.rows else held + self.sum

    def max_rows(self, max_memory: int) -> int:
        """Return the largest chunk size that needs at most ``max_memory`` bytes, or 0 if there is none."""
        if self.held(self.rows) <= max_memory:
            return max(self.rows, 1)
        return max((max_memory - self.constant - self.sum) // self.row, 0)


def _tile_rows(
    function: str,
    sizes: Sizes,
    chunk_size: int | None = None,
    max_memory: int | None = None,
    copies: int = 1,
    with_gradient: bool = False,
    units: bool = False,
) -> Tiling:
    """Choose chunks of rows.

    Args:
        function: The public function, for errors.
        sizes: The sizes of the call.
        chunk_size: The number of rows whose logits are materialized at a time, if it is given.
        max_memory: Bytes that logits and float32 accumulators may take, if ``chunk_size`` is not given.
        copies: Number of tensors of the logits' size that are alive at the same time.
        with_gradient: Whether the gradient of the head is needed.
        units: Whether the device has native matrix instructions for the head's dtype.
    """
    rows, classes = sizes.rows, sizes.classes
    keeps_gradients = units and with_gradient and max_memory is None and rows <= _KEPT_ROWS_PER_FEATURE * sizes.features
    costs = _Costs(sizes, copies, with_gradient, keeps_gradients)
    if chunk_size is not None:
        rows_per_chunk = chunk_size
    elif max_memory is None:
        rows_per_chunk = _rows_for_speed(costs, sizes, copies)
    else:
        rows_per_chunk = costs.max_rows(max_memory)
        if rows_per_chunk == 0:
            least = min(costs.held(1), costs.held(rows))
            raise ValueError(
                f"{function}: max_memory must be at least {least} bytes for these arguments, but it is {max_memory}"
            )
    rows_per_chunk = max(rows_per_chunk, 1)
    held = costs.held(rows_per_chunk)
    return Tiling(rows, classes, rows_per_chunk, costs.keeps_gradients, held)


_tile_rows_cached = lru_cache(_tile_rows)


def tile_rows(function: str, sizes: Sizes, *args: Any, **options: Any) -> Tiling:
    """Choose chunks of rows, of the arguments of :func:`_tile_rows`, once for the calls of a training loop."""
    # Symbolic sizes cannot be hashed.
    are_numbers = not torch.compiler.is_compiling() and all([type(size) is int for size in sizes[:3]])
    return (_tile_rows_cached if are_numbers else _tile_rows)(function, sizes, *args, **options)


def _rows_for_speed(costs: _Costs, sizes: Sizes, copies: int) -> int:
    """Choose a chunk size that is large enough for efficient matrix products."""
    head_bytes = sizes.classes * sizes.features * sizes.wide_itemsize
    # If the gradients are kept, only the logits are computed in chunks, for each of which oneDNN packs the head.
    share = 2 if costs.keeps_gradients else 1
    number = max(max(LOGITS_BYTES, head_bytes // _SHARE_OF_HEAD) // share // costs.row, _FEWEST_ROWS * share)
    if copies == 1:
        number = max(number, costs.free_rows // 8 * 8)
    # Equal chunks, in multiples of 8.
    chunks = max(-(-costs.rows // number), 1)
    number = max(-(-costs.rows // (8 * chunks)) * 8, 8)
    return costs.rows if costs.held(costs.rows) <= costs.held(number) else number
