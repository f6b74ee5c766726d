"""The choice of kernels for the linear cross entropy: CANN's fused operators if they support a call, else chunks.

The choice is made once per call and applies to its gradients too.
"""

from torch_aclnn_ops import _extension
from torch_aclnn_ops._call_log import Implementation, log_call, log_detail
from torch_aclnn_ops._switch import is_disabled, why_disabled
from torch_aclnn_ops._tensors import without_autocast
from torch_aclnn_ops.ops._head import (
    Head,
    HeadGradients,
    KeptRows,
    Results,
    blocks_of,
    has_logits_kernel,
    reduce_in_chunks,
)
from torch_aclnn_ops.ops._tiling import rows_of_block
from torch_aclnn_ops.ops.linear_cross_entropy.call import NAME, Call
from torch_aclnn_ops.ops.linear_cross_entropy.fused import fused_gradients, fused_statistics
from torch_aclnn_ops.ops.linear_cross_entropy.grad import fused_linear_cross_entropy_loss_grad
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import fused_linear_online_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.rows import reduce_rows
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Coefficients

from torch import Tensor

_NO_GRADIENTS = (None, None, None)


def reduce(call: Call, factors: Coefficients | None) -> tuple[Results, HeadGradients]:
    """Compute the requested statistics of every row, and with factors the gradients of the loss that has them.

    With ``call.log_sum_exp``, the statistics of the forward pass, only the gradients are used.
    """
    is_fused = why_not_fused(call) is None if call.is_fused is None else call.is_fused
    if factors is None and is_fused and not call.predicted_tokens:
        return tuple(one for one in fused_statistics(call) if one is not None), _NO_GRADIENTS
    if factors is not None and call.log_sum_exp is not None and is_fused:
        # The operator always computes both gradients.
        if all(call.gradients[:2]):
            return (), (*fused_gradients(call, factors), None)
        name = fused_linear_cross_entropy_loss_grad.name
        log_call(name, Implementation.FALLBACK, lambda: "only one of the two gradients is needed")
    _check_queue(call.input)
    _log(call, factors)
    return _statistics_in_chunks(call, factors)


@without_autocast
def _statistics_in_chunks(call: Call, factors: Coefficients | None) -> tuple[Results, HeadGradients]:
    """Compute the requested statistics, and with factors the gradients of the loss that has these factors.

    Ignored rows give zeros, and the predicted token -1.
    """
    kept = KeptRows(None if call.target.is_floating_point() else call.target, call.input.shape[0])
    tiling = call.tile_rows(rows=kept.number, with_gradients=factors is not None)
    have_classes = kept.have_labels and not call.is_shard
    # The softcap is applied before the temperature.
    scale = 1.0 if call.softcap is not None else 1 / call.temperature
    head = Head(call.linear_weight, call.linear_bias, scale, kept.number)

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


def why_not_fused(call: Call) -> str | None:
    """Return why CANN's operators compute neither the statistics of a call nor their gradients, or ``None``."""
    if call.input.device.type != "npu":
        return f"the tensors are on {call.input.device.type}"
    if is_disabled():
        return why_disabled()
    reasons = (
        ("of linear_bias", call.linear_bias is not None),
        ("of softcap", call.softcap is not None),
        ("of temperature", call.temperature != 1),
        ("of chunk_size", call.chunk_size is not None),
        ("of max_memory", call.max_memory is not None),
        ("the targets are probabilities", call.target.is_floating_point()),
        ("of label_smoothing", call.weighted),
        ("entropy is requested", call.entropy),
    )
    for reason, holds in reasons:
        if holds:
            return reason
    weight, start, return_logits = call.linear_weight, 0, False
    return fused_linear_online_max_sum.why_not_cann(
        call.input, weight, call.target, start, start + weight.shape[0], return_logits
    )


def log_few_logits(call: Call) -> None:
    """Log a call whose logits are computed all at once, in torch calls."""
    _check_queue(call.target)

    def described() -> str:
        return f"{why_not_fused(call)}; few logits: all {call.target.numel()} rows in one chunk"

    log_call(NAME, Implementation.FALLBACK, described)


def _log(call: Call, factors: Coefficients | None) -> None:
    def described() -> str:
        tiling = call.tile_rows(with_gradients=factors is not None)
        is_native = has_logits_kernel(call.linear_weight, tiling.rows)
        return f"{tiling}{'; logits use native bfloat16 instructions' if is_native else ''}"

    if call.log_sum_exp is not None:
        log_detail(NAME, lambda: f"logits recomputed for the gradients; {described()}")
        return
    how = "" if factors is None else "gradients computed in the forward pass; "

    def reason() -> str:
        return f"{why_not_fused(call) or 'predicted tokens are requested'}; {how}{described()}"

    log_call(NAME, Implementation.FALLBACK, reason)


def _check_queue(tensor: Tensor) -> None:
    """Raise if torch_npu's task queue has stopped, because it would silently drop the work of the PyTorch fallback."""
    if not tensor.is_cpu and tensor.device.type == "npu":
        _extension.check_queue(NAME)
