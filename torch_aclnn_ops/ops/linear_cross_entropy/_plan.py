"""How the rows of a linear cross entropy are cut."""

from dataclasses import dataclass

from torch_aclnn_ops.ops._numerics import accumulation_dtype

from torch import Tensor

# A chunk's logits take 56 MiB, or an eighth of the head where that is more: enough rows for matrix products at full
# speed, and little beside the gradient of the head.
_LOGITS_BYTES = 7 * 2**23
_SHARE_OF_HEAD = 8
_FEWEST_ROWS = 128
# A 16-bit head is widened block by block.
_BLOCK_BYTES = 2**24
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
        classes_per_block: classes whose weights are widened to float32 at a time, if they have 16 bits.
        keeps_gradients: the gradients of all logits are kept in 16 bits, so that one product makes the head's gradient.
        bytes_held: of logits, their gradients and sums in float32, beyond arguments and results.
    """

    rows: int
    classes: int
    rows_per_chunk: int
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

    def blocks(self) -> list[slice]:
        """Return the classes of each block."""
        return _slices(self.classes, self.classes_per_block)

    def __str__(self) -> str:
        """Say it for a log."""
        number = len(self.chunks())
        rows = min(self.rows, self.rows_per_chunk)
        return f"{number} chunk{'s' if number > 1 else ''} of {rows} rows, {self.bytes_held / 1e6:.1f} MB held"


def make_plan(
    rows: int, weight: Tensor, options: Options, copies: int = 1, with_gradient: bool = False, units: bool = False
) -> Plan:
    """Choose the rows per chunk.

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
    head_bytes = classes * features * itemsize
    block = max(min(_BLOCK_BYTES // max(features * itemsize, 1), classes), 1)
    keeps_gradients = units and with_gradient and rows <= _KEPT_ROWS_PER_FEATURE * features
    kept_bytes = rows * classes * weight.dtype.itemsize if keeps_gradients else 0
    block_bytes = block * features * itemsize if is_widened else 0
    # What several chunks add to a 16-bit gradient is summed in float32 beside it.
    sum_bytes = head_bytes if is_widened and with_gradient and not keeps_gradients else 0

    def bytes_held(rows_per_chunk: int) -> int:
        held = min(rows_per_chunk, rows) * row_bytes + block_bytes + kept_bytes
        return held if rows_per_chunk >= rows else held + sum_bytes

    if options.chunk_size is not None:
        rows_per_chunk = options.chunk_size
    elif options.max_memory is not None:
        if bytes_held(rows) <= options.max_memory:
            rows_per_chunk = max(rows, 1)
        else:
            rows_per_chunk = (options.max_memory - block_bytes - kept_bytes - sum_bytes) // row_bytes
        if rows_per_chunk < 1:
            if keeps_gradients:
                return make_plan(rows, weight, options, copies, with_gradient)
            raise ValueError(
                f"linear_cross_entropy: max_memory must be at least {min(bytes_held(1), bytes_held(rows))} bytes for"
                f" these arguments, but it is {options.max_memory}"
            )
    else:
        rows_per_chunk = max(max(_LOGITS_BYTES, head_bytes // _SHARE_OF_HEAD) // row_bytes, _FEWEST_ROWS)
        # Chunks of one size, in multiples of 8.
        number = max(-(-rows // rows_per_chunk), 1)
        rows_per_chunk = max(-(-rows // (8 * number)) * 8, 8)
        if bytes_held(rows) <= bytes_held(rows_per_chunk):
            rows_per_chunk = max(rows, 1)
    return Plan(rows, classes, rows_per_chunk, block, keeps_gradients, bytes_held(rows_per_chunk))


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
