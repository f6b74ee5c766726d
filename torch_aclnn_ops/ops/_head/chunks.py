"""The chunks of rows of a loss on a head: logits in a reused buffer, overwritten by their gradient."""

from collections.abc import Callable, Sequence

from torch_aclnn_ops.ops._head.kept_rows import KeptRows
from torch_aclnn_ops.ops._head.products import Gradients, Head, logits_buffer
from torch_aclnn_ops.ops._head.tiling import Tiling, slices

import torch
from torch import Tensor

Results = tuple[Tensor, ...]
HeadGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def reduce_in_chunks(
    input: Tensor,
    head: Head,
    kept: KeptRows,
    tiling: Tiling,
    reduce_chunk: Callable[[Tensor, slice], Sequence[Results]],
    needed: tuple[bool, bool, bool] | None,
) -> tuple[Results, HeadGradients]:
    """Reduce the logits of all rows, and compute the gradients of input, weight and bias.

    Args:
        input: The rows, also those that are ignored.
        head: The products with the head.
        kept: The rows that are not ignored.
        tiling: The chunks of these rows.
        reduce_chunk: Given the logits of a chunk and its range of rows, returns the results of its blocks. If gradients
            are needed, it overwrites the logits with their gradient.
        needed: Which gradients are needed; ``None`` computes none.

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
    found = kept.expand_to_all_rows(values, 0 if values.is_floating_point() else -1)
    assert found is not None
    return found
