"""The PyTorch fallback of the linear cross entropy: its rows, chunk by chunk."""

from torch_aclnn_ops._numerics import without_autocast
from torch_aclnn_ops.ops._head.chunks import HeadGradients, Results, blocks_of, reduce_in_chunks
from torch_aclnn_ops.ops._head.kept_rows import KeptRows
from torch_aclnn_ops.ops._head.products import Head
from torch_aclnn_ops.ops._head.tiling import rows_of_block
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call
from torch_aclnn_ops.ops.linear_cross_entropy.rows import reduce_rows
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Coefficients

from torch import Tensor


@without_autocast
def statistics_in_chunks(call: Call, factors: Coefficients | None) -> tuple[Results, HeadGradients]:
    """Compute the requested statistics, and with factors the gradients of the loss that has these factors.

    Ignored rows give zeros, and the predicted token -1.
    """
    kept = KeptRows(None if call.target.is_floating_point() else call.target, call.input.shape[0])
    tiling = call.tile_rows(rows=kept.number, with_gradients=factors is not None)
    have_classes = kept.have_labels and not call.is_shard
    # The softcap is applied before the temperature.
    scale = 1.0 if call.softcap is not None else 1 / call.temperature
    head = Head(call.linear_weight, call.linear_bias, scale, tiling)

    def reduce_chunk(logits: Tensor, rows: slice) -> list[Results]:
        # All rows at once on a device, to launch fewer kernels.
        size = rows_of_block(logits.shape[1], logits.element_size()) if logits.is_cpu else logits.shape[0]
        blocks = blocks_of(rows, size)
        return [reduce_block(logits[block.start - rows.start : block.stop - rows.start], block) for block in blocks]

    def reduce_block(logits: Tensor, rows: slice) -> Results:
        of_rows = None if factors is None else Coefficients._make(kept.select(one, rows) for one in factors)
        found = reduce_rows(call, logits, kept.select(call.target, rows), of_rows, have_classes)
        return tuple(one for one in found if one is not None)

    needed = None if factors is None else call.gradients
    return reduce_in_chunks(call.input, head, kept, tiling, reduce_chunk, needed)
