"""How the rows of a loss on a head are cut."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NoReturn

from torch_aclnn_ops._numerics import accumulation_dtype

import torch

# A chunk's logits take 56 MiB, or an eighth of the head where that is more: enough rows for matrix products at full
# speed, and little beside the gradient of the head.
LOGITS_BYTES = 7 * 2**23
_SHARE_OF_HEAD = 8
_FEWEST_ROWS = 128
# The head's part in a product, widened if it has 16 bits: small enough for a CPU's caches.
_BLOCK_BYTES = 2**22
# Logits that are reduced at once take 16 MiB, which stay in a CPU's caches too.
_REDUCED_BYTES = 2**24
_REDUCED_ROWS = 2048
# The gradients of all logits may be kept in bfloat16 while they take no more than twice the head in float32.
_KEPT_ROWS_PER_FEATURE = 4


def slices(start: int, stop: int, size: int) -> list[slice]:
    """Cut a range into slices of one size, of which the last may be shorter."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


@dataclass(frozen=True)
class LogitOptions:
    """What shapes the logits and their chunks."""

    softcap: float | None = None  # logits become ``softcap * tanh(logits / softcap)``
    temperature: float = 1.0  # logits are divided by it, after the softcap
    chunk_size: int | None = None  # rows whose logits are held at a time
    # bytes that may be held beyond arguments and results, where ``chunk_size`` is not given
    max_memory: int | None = None
    is_shard: bool = False  # the classes are a part of a vocabulary
    function: str = "linear_cross_entropy"  # which an error names

    def without_needless_softcap(self, dtype: torch.dtype) -> "LogitOptions":
        """Leave out a softcap beyond the largest number of the logits' dtype, in which it would be infinite."""
        if self.softcap is None or self.softcap / min(self.temperature, 1) <= torch.finfo(dtype).max:
            return self
        return replace(self, softcap=None)


@dataclass(frozen=True)
class Sizes:
    """What the tiling of a call depends on: rows, the head's shape (classes, features) and dtype, and the device."""

    rows: int
    classes: int
    features: int
    dtype: torch.dtype
    is_cpu: bool
    beside: int = 0  # bytes that are held beside the chunks, for instance of another head

    @property
    def wide_itemsize(self) -> int:
        """Bytes of a number in the dtype of logits."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def is_widened(self) -> bool:
        """Whether the head has fewer bits than the logits."""
        return self.dtype.itemsize < self.wide_itemsize


@dataclass(frozen=True)
class Tiling:
    """The cut of one call."""

    rows: int  # of the input
    classes: int  # of the head
    rows_per_chunk: int  # rows whose logits are held at a time
    classes_per_chunk: int  # classes whose logits are held at a time
    classes_per_block: int  # classes whose logits a matrix product makes at a time
    # the gradients of all logits are kept in 16 bits, so that one product makes the head's gradient
    keeps_gradients: bool
    bytes_held: int  # of logits, their gradients and sums in float32, beyond arguments and results

    def chunks(self) -> list[slice]:
        """Return the rows of each chunk; no rows are a chunk too."""
        return slices(0, self.rows, self.rows_per_chunk) or [slice(0, 0)]

    def parts(self) -> list[slice]:
        """Return the classes of each part of the vocabulary whose logits are held at a time."""
        return slices(0, self.classes, self.classes_per_chunk)

    def __str__(self) -> str:
        """Say it for a log."""
        number, rows = len(self.chunks()), min(self.rows, self.rows_per_chunk)
        classes = f" and {self.classes_per_chunk} classes" if self.classes_per_chunk < self.classes else ""
        held = f"{self.bytes_held / 1e6:.1f} MB held"
        return f"{number} chunk{'s' if number > 1 else ''} of {rows} rows{classes}, {held}"


def tile_statistics(sizes: Sizes, options: LogitOptions, copies: int = 1) -> Tiling:
    """Choose rows and classes whose logits are reduced at once, where no gradient needs the logits of a whole row.

    ``copies`` of the logits are held beside each other; ``options`` has what the caller chooses.
    """
    rows, classes, features = sizes.rows, sizes.classes, sizes.features
    itemsize = sizes.wide_itemsize
    widened = features * itemsize if sizes.is_widened else 0
    rows_per_chunk = max(min(options.chunk_size or _REDUCED_ROWS, rows), 1)
    budget = min(_REDUCED_BYTES, options.max_memory or _REDUCED_BYTES)
    classes_per_chunk = budget // (rows_per_chunk * itemsize * copies + widened)
    if options.max_memory is not None and classes_per_chunk < 1:
        rows_per_chunk = (budget - widened) // (itemsize * copies)
        if rows_per_chunk < 1:
            _raise_too_little_memory(options, itemsize * copies + widened)
    if not sizes.is_cpu and options.max_memory is None:
        # A launch costs more than a cache saves, so logits are as many as where they are needed together.
        classes_per_chunk = LOGITS_BYTES // (rows_per_chunk * itemsize * copies)
    classes_per_chunk = min(max(classes_per_chunk, 1), classes)
    held = classes_per_chunk * (rows_per_chunk * itemsize * copies + widened)
    return Tiling(rows, classes, rows_per_chunk, classes_per_chunk, classes_per_chunk, False, held)


class _Costs:
    """The bytes that chunks of rows hold."""

    def __init__(self, sizes: Sizes, block: int, copies: int, with_gradient: bool, keeps_gradients: bool) -> None:
        rows, features, itemsize = sizes.rows, sizes.features, sizes.wide_itemsize
        logits = sizes.classes * itemsize
        self.rows = rows
        self.row = max(logits * copies, 1)  # of a row's logits and their copies
        self.row_beside_gradient = logits * (copies - 1)  # of the copies alone
        self.keeps_gradients = keeps_gradients
        # Until the kept gradients are multiplied, the memory of the head's own gradient is free for some rows' logits.
        self.free_rows = features * sizes.dtype.itemsize // itemsize if keeps_gradients else 0
        block_bytes = block * features * itemsize if sizes.is_widened else 0
        kept_bytes = rows * sizes.classes * sizes.dtype.itemsize if keeps_gradients else 0
        self.constant = sizes.beside + block_bytes + kept_bytes  # that are held for any number of rows
        # What several chunks add to a 16-bit gradient is summed in float32 beside it.
        self.sum = logits * features if sizes.is_widened and with_gradient and not keeps_gradients else 0

    def held(self, rows_per_chunk: int) -> int:
        """Return the bytes that chunks of so many rows hold."""
        number = min(rows_per_chunk, self.rows)
        held = number * (self.row if number > self.free_rows else self.row_beside_gradient) + self.constant
        return held if rows_per_chunk >= self.rows else held + self.sum

    def least(self) -> int:
        """Return the bytes that are held at least."""
        return min(self.held(1), self.held(self.rows))

    def most_rows(self, max_memory: int) -> int | None:
        """Return the most rows in a chunk that hold no more than some bytes, or ``None`` if any number holds more."""
        left = max_memory - self.constant - self.sum
        beside = left // self.row_beside_gradient if self.row_beside_gradient else self.free_rows
        most = None
        for number in (self.rows, left // self.row, min(beside, self.free_rows)):
            if number >= min(self.rows, 1) and self.held(number) <= max_memory:
                most = number if most is None else max(most, number)
        return most


def tile_rows(
    sizes: Sizes, options: LogitOptions, copies: int = 1, with_gradient: bool = False, units: bool = False
) -> Tiling:
    """Choose the rows whose logits are held at once, where those of a row are needed together.

    ``with_gradient``: the gradient of the head is needed. ``units``: the device multiplies the head's dtype itself, and
    faster than float32. The other arguments are those of :func:`tile_statistics`.
    """
    rows, classes, features = sizes.rows, sizes.classes, sizes.features
    block = max(min(_BLOCK_BYTES // max(features * sizes.wide_itemsize, 1), classes), 1)
    if not sizes.is_cpu and not sizes.is_widened:
        block = classes
    keeps_gradients = units and with_gradient and rows <= _KEPT_ROWS_PER_FEATURE * features
    costs = _Costs(sizes, block, copies, with_gradient, keeps_gradients)
    if options.chunk_size is not None:
        rows_per_chunk = options.chunk_size
    elif options.max_memory is None:
        rows_per_chunk = _rows_for_speed(costs, sizes, copies)
    else:
        found, least = costs.most_rows(options.max_memory), costs.least()
        if found is None and keeps_gradients:
            costs = _Costs(sizes, block, copies, with_gradient, False)
            found, least = costs.most_rows(options.max_memory), min(costs.least(), least)
        rows_per_chunk = _raise_too_little_memory(options, least) if found is None else found
    rows_per_chunk = max(rows_per_chunk, 1)
    held = costs.held(rows_per_chunk)
    return Tiling(rows, classes, rows_per_chunk, classes, block, costs.keeps_gradients, held)


# Calls of a training loop are alike.
tile_rows_once = lru_cache(tile_rows)


def _rows_for_speed(costs: _Costs, sizes: Sizes, copies: int) -> int:
    """Choose as many rows as matrix products need to be fast."""
    head_bytes = sizes.classes * sizes.features * sizes.wide_itemsize
    # Where the gradients are kept, only the logits are made chunk by chunk, for each of which the head is packed.
    share = 2 if costs.keeps_gradients else 1
    number = max(max(LOGITS_BYTES, head_bytes // _SHARE_OF_HEAD) // share // costs.row, _FEWEST_ROWS * share)
    if copies == 1:
        number = max(number, costs.free_rows // 8 * 8)
    # Chunks of one size, in multiples of 8.
    chunks = max(-(-costs.rows // number), 1)
    number = max(-(-costs.rows // (8 * chunks)) * 8, 8)
    return costs.rows if costs.held(costs.rows) <= costs.held(number) else number


def _raise_too_little_memory(options: LogitOptions, least: int) -> NoReturn:
    raise ValueError(
        f"{options.function}: max_memory must be at least {least} bytes for these arguments, but it is"
        f" {options.max_memory}"
    )
