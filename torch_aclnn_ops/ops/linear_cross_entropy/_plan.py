"""How the rows of a linear cross entropy are cut."""

from dataclasses import dataclass
from typing import NoReturn

from torch_aclnn_ops.ops._numerics import accumulation_dtype

from torch import Tensor

# A chunk's logits take 56 MiB, or an eighth of the head where that is more: enough rows for matrix products at full
# speed, and little beside the gradient of the head.
_LOGITS_BYTES = 7 * 2**23
_SHARE_OF_HEAD = 8
_FEWEST_ROWS = 128
# The head's part in a product, widened if it has 16 bits: small enough for a CPU's caches.
_BLOCK_BYTES = 2**22
# Logits that are reduced at once take 16 MiB, which stay in a CPU's caches too.
_REDUCED_BYTES = 2**24
_REDUCED_ROWS = 2048
# The gradients of all logits may be kept in bfloat16 while they take no more than twice the head in float32.
_KEPT_ROWS_PER_FEATURE = 4


@dataclass(frozen=True)
class Options:
    """What shapes the logits and their chunks.

    Attributes:
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        temperature: logits are divided by it, after the softcap.
        chunk_size: rows whose logits are held at a time.
        max_memory: bytes that may be held beyond arguments and results, where ``chunk_size`` is not given.
    """

    softcap: float | None = None
    temperature: float = 1.0
    chunk_size: int | None = None
    max_memory: int | None = None


@dataclass(frozen=True)
class Plan:
    """The cut of one call.

    Attributes:
        rows: of the input.
        classes: of the head.
        rows_per_chunk: rows whose logits are held at a time.
        classes_per_chunk: classes whose logits are held at a time.
        classes_per_block: classes whose logits a matrix product makes at a time.
        keeps_gradients: the gradients of all logits are kept in 16 bits, so that one product makes the head's gradient.
        bytes_held: of logits, their gradients and sums in float32, beyond arguments and results.
    """

    rows: int
    classes: int
    rows_per_chunk: int
    classes_per_chunk: int
    classes_per_block: int
    keeps_gradients: bool
    bytes_held: int

    @property
    def is_one_chunk(self) -> bool:
        """Whether the logits of all rows are held at once."""
        return self.rows <= self.rows_per_chunk

    def chunks(self) -> list[slice]:
        """Return the rows of each chunk; no rows are a chunk too."""
        return _slices(self.rows, self.rows_per_chunk) or [slice(0, 0)]

    def parts(self) -> list[slice]:
        """Return the classes of each part of the vocabulary whose logits are held at a time."""
        return _slices(self.classes, self.classes_per_chunk)

    def __str__(self) -> str:
        """Say it for a log."""
        number, rows = len(self.chunks()), min(self.rows, self.rows_per_chunk)
        classes = f" and {self.classes_per_chunk} classes" if self.classes_per_chunk < self.classes else ""
        held = f"{self.bytes_held / 1e6:.1f} MB held"
        return f"{number} chunk{'s' if number > 1 else ''} of {rows} rows{classes}, {held}"


def plan_statistics(rows: int, weight: Tensor, options: Options, copies: int = 1) -> Plan:
    """Choose rows and classes whose logits are reduced at once, where no gradient needs the logits of a whole row.

    Args:
        rows: of the input.
        weight: the head, shape (V, H).
        options: with ``chunk_size`` or ``max_memory``, if the caller chooses.
        copies: of the logits that are held beside each other.
    """
    classes, features = weight.shape
    itemsize = accumulation_dtype(weight.dtype).itemsize
    widened = features * itemsize if weight.dtype.itemsize < itemsize else 0
    rows_per_chunk = max(min(options.chunk_size or _REDUCED_ROWS, rows), 1)
    budget = min(_REDUCED_BYTES, options.max_memory or _REDUCED_BYTES)
    classes_per_chunk = budget // (rows_per_chunk * itemsize * copies + widened)
    if options.max_memory is not None and classes_per_chunk < 1:
        rows_per_chunk = (budget - widened) // (itemsize * copies)
        if rows_per_chunk < 1:
            _refuse(options.max_memory, itemsize * copies + widened)
    if weight.device.type != "cpu" and options.max_memory is None:
        # A launch costs more than a cache saves, so logits are as many as where they are needed together.
        classes_per_chunk = _LOGITS_BYTES // (rows_per_chunk * itemsize * copies)
    classes_per_chunk = min(max(classes_per_chunk, 1), classes)
    held = classes_per_chunk * (rows_per_chunk * itemsize * copies + widened)
    return Plan(rows, classes, rows_per_chunk, classes_per_chunk, classes_per_chunk, False, held)


def plan_rows(
    rows: int, weight: Tensor, options: Options, copies: int = 1, with_gradient: bool = False, units: bool = False
) -> Plan:
    """Choose the rows whose logits are held at once.

    Args:
        rows: of the input.
        weight: the head, shape (V, H).
        options: with ``chunk_size`` or ``max_memory``, if the caller chooses.
        copies: of the logits that are held beside each other.
        with_gradient: the gradient of the head is needed.
        units: the device multiplies the head's dtype itself, and faster than float32.
    """
    classes, features = weight.shape
    itemsize = accumulation_dtype(weight.dtype).itemsize
    is_widened = weight.dtype.itemsize < itemsize
    row_bytes = max(classes * itemsize * copies, 1)
    other_row_bytes = classes * itemsize * (copies - 1)  # beside the logits themselves
    head_bytes = classes * features * itemsize
    block = max(min(_BLOCK_BYTES // max(features * itemsize, 1), classes), 1)
    if weight.device.type != "cpu" and not is_widened:
        block = classes
    keeps_gradients = units and with_gradient and rows <= _KEPT_ROWS_PER_FEATURE * features
    kept_bytes = rows * classes * weight.dtype.itemsize if keeps_gradients else 0
    # Until the kept gradients are multiplied, the memory of the head's own gradient is free for logits.
    free_rows = features * weight.dtype.itemsize // itemsize if keeps_gradients else 0
    block_bytes = block * features * itemsize if is_widened else 0
    # What several chunks add to a 16-bit gradient is summed in float32 beside it.
    sum_bytes = head_bytes if is_widened and with_gradient and not keeps_gradients else 0

    def bytes_held(rows_per_chunk: int) -> int:
        number = min(rows_per_chunk, rows)
        held = number * (row_bytes if number > free_rows else other_row_bytes) + block_bytes + kept_bytes
        return held if rows_per_chunk >= rows else held + sum_bytes

    if options.chunk_size is not None:
        rows_per_chunk = options.chunk_size
    elif options.max_memory is not None:
        left = options.max_memory - block_bytes - kept_bytes - sum_bytes
        most_free = min(left // other_row_bytes, free_rows) if other_row_bytes else free_rows
        choices = (rows, left // row_bytes, most_free)
        allowed = [choice for choice in choices if bytes_held(choice) <= options.max_memory]
        rows_per_chunk = max(allowed, default=0)
        if rows_per_chunk < 1 and rows > 0:
            if keeps_gradients:
                return plan_rows(rows, weight, options, copies, with_gradient)
            _refuse(options.max_memory, min(bytes_held(1), bytes_held(rows)))
    else:
        # Where the gradients are kept, only the logits are made chunk by chunk, for each of which the head is packed.
        logits_bytes = max(_LOGITS_BYTES, head_bytes // _SHARE_OF_HEAD) // (2 if keeps_gradients else 1)
        rows_per_chunk = max(logits_bytes // row_bytes, _FEWEST_ROWS * (2 if keeps_gradients else 1))
        if copies == 1:
            rows_per_chunk = max(rows_per_chunk, free_rows // 8 * 8)
        # Chunks of one size, in multiples of 8.
        number = max(-(-rows // rows_per_chunk), 1)
        rows_per_chunk = max(-(-rows // (8 * number)) * 8, 8)
        if bytes_held(rows) <= bytes_held(rows_per_chunk):
            rows_per_chunk = rows
    rows_per_chunk = max(rows_per_chunk, 1)
    return Plan(rows, classes, rows_per_chunk, classes, block, keeps_gradients, bytes_held(rows_per_chunk))


def _refuse(max_memory: int, least: int) -> NoReturn:
    raise ValueError(
        f"linear_cross_entropy: max_memory must be at least {least} bytes for these arguments, but it is {max_memory}"
    )


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
