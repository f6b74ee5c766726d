"""The kernels of a call: CANN's fused operators if they support it, else rows of logits, chunk by chunk.

The choice is made once per call and applies to its gradients too. Rows are computed in float32 (float64 for float64):
in place by :func:`_reduce_rows`, and in differentiable calls by :func:`statistics_of_rows`, for other derivatives.
"""

from collections.abc import Sequence

from torch_aclnn_ops import _extension
from torch_aclnn_ops._call_log import Implementation, log_call, log_detail
from torch_aclnn_ops._switch import is_disabled, why_disabled
from torch_aclnn_ops._tensors import widen, without_autocast
from torch_aclnn_ops.ops._chunks import (
    IGNORED,
    Head,
    HeadGradients,
    KeptRows,
    Results,
    blocks_of,
    has_logits_kernel,
    part_of,
    reduce_in_chunks,
)
from torch_aclnn_ops.ops._tiling import rows_of_block
from torch_aclnn_ops.ops.linear_cross_entropy import fused_linear_cross_entropy_loss_grad, fused_linear_online_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.call import NAME, Call, Coefficients, Statistics
from torch_aclnn_ops.ops.linear_cross_entropy.fused import fused_gradients, fused_statistics

import torch
from torch import Tensor


def reduce(call: Call, factors: Coefficients | None) -> tuple[Results, HeadGradients]:
    """Compute the requested statistics of every row and, given their factors in a loss, its gradients.

    With ``call.log_sum_exp``, the statistics of the forward pass, only the gradients are used.
    """
    is_fused = why_not_fused(call) is None if call.is_fused is None else call.is_fused
    if factors is None and is_fused and not call.predicted_tokens:
        return tuple(one for one in fused_statistics(call) if one is not None), (None, None, None)
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
    """Compute the requested statistics and, given their factors in a loss, its gradients.

    Ignored rows give zeros, and the predicted token -1.
    """
    are_all = call.has_no_ignored or call.target.is_floating_point()
    kept = KeptRows(None if are_all else call.target, call.input.shape[0])
    tiling = call.tile_rows(rows=kept.number, with_gradients=factors is not None)
    have_classes = kept.have_labels and not call.is_shard
    # The softcap is applied before the temperature.
    scale = 1.0 if call.softcap is not None else 1 / call.temperature
    head = Head(call.linear_weight, call.linear_bias, scale, kept.number)

    target = kept.select(call.target)
    selected = {one: kept.select(one) for one in factors or ()}  # some are the same
    if call.temperature != 1:
        selected = {one: None if values is None else values / call.temperature for one, values in selected.items()}
    of_rows = [selected[one] for one in factors or ()]

    def reduce_chunk(logits: Tensor, rows: slice) -> list[Results]:
        # All rows at once on a device, to launch fewer kernels.
        size = rows_of_block(logits.shape[1], logits.element_size()) if logits.is_cpu else logits.shape[0]
        found = []
        for block in blocks_of(rows, size):
            part = part_of(logits, slice(block.start - rows.start, block.stop - rows.start))
            of_block = [None if one is None else part_of(one, block) for one in of_rows]
            found.append(_reduce_rows(call, part, part_of(target, block), of_block, have_classes))
        return found

    needed = None if factors is None else call.gradients
    return reduce_in_chunks(call.input, head, kept, tiling, reduce_chunk, needed)


def why_not_fused(call: Call) -> str | None:
    """Return why CANN's operators do not compute a call's statistics and gradients, or ``None`` if they do."""
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


def _reduce_rows(
    call: Call, logits: Tensor, target: Tensor, of_rows: Sequence[Tensor | None], have_classes: bool
) -> Results:
    """Reduce logits; with factors, overwrite them with the loss's gradient for ``input @ weight.T + bias``.

    The logits of some rows are divided by the temperature unless there is a softcap. ``have_classes`` says whether it
    is known that all class indices are 0 or more.
    """
    class_weight, factors = call.weight, Coefficients._make(of_rows) if of_rows else None
    slope = None
    if call.softcap is not None:
        logits.div_(call.softcap).tanh_()
        slope = None if factors is None else logits.square().neg_().add_(1)
        logits.mul_(call.softcap / call.temperature)
    logits_max = logits.amax(1)
    offset = logits_max
    tokens = logits.argmax(1) if call.predicted_tokens else None
    weighted = None
    if call.weighted:
        # Subtract before summing: a sum of logits near the largest number would overflow.
        logits.sub_(offset.unsqueeze(1))
        offset = torch.zeros_like(offset)
        weighted = logits.sum(1) if class_weight is None else logits @ class_weight
    predicted = _predicted(logits, target, class_weight, offset, have_classes)
    probabilities = torch.softmax(logits, 1, out=logits) if logits.is_cpu else logits.softmax(1)
    # The largest probability is exp(max - max) / sum exp(z - max). xlogy is faster than log for few numbers, because
    # log uses MKL, whose threads must be woken up.
    log_sum_exp = torch.xlogy(-1, probabilities.amax(1))
    entropy = torch.special.entr(probabilities).sum(1) if call.entropy else None
    found = Statistics(logits_max, log_sum_exp, predicted, weighted, entropy, tokens)
    if factors is not None:
        _write_gradient(call, probabilities, target, found, factors, have_classes, logits)
        if slope is not None:
            logits.mul_(slope)
    return tuple([one for one in found if one is not None])


def _predicted(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, offset: Tensor, have_classes: bool
) -> Tensor:
    if target.is_floating_point():
        return (_distribution(target, class_weight) * (logits - offset.unsqueeze(1))).sum(1)
    if have_classes:
        return logits.gather(1, target.unsqueeze(1)).squeeze(1).sub_(offset)
    at_target = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    return at_target.sub_(offset).masked_fill_(target < 0, 0)


def _distribution(target: Tensor, class_weight: Tensor | None) -> Tensor:
    return widen(target) if class_weight is None else widen(target) * class_weight


def _write_gradient(
    call: Call,
    probabilities: Tensor,
    target: Tensor,
    found: Statistics,
    factors: Coefficients,
    have_classes: bool,
    out: Tensor,
) -> None:
    """Write the gradient of the logits ``z``, with probabilities p and the factors f of the statistics.

    It is ``(f_log_sum_exp + 2 f_square logsumexp(z)) p - f_predicted Q - f_weighted class_weight - f_entropy p (log p +
    entropy)``, where Q is the target's distribution.
    """
    of_softmax = factors.log_sum_exp
    if factors.square is not None:
        of_softmax = of_softmax + 2 * factors.square * (found.logits_max + found.log_sum_exp)
    if factors.entropy is not None and found.entropy is not None:
        surprise = torch.special.entr(probabilities)
        torch.mul(probabilities, (of_softmax - factors.entropy * found.entropy).unsqueeze(1), out=out)
        out.addcmul_(surprise, factors.entropy.unsqueeze(1))
    else:
        torch.mul(probabilities, of_softmax.unsqueeze(1), out=out)
    if target.is_floating_point():
        out.addcmul_(_distribution(target, call.weight), factors.predicted.unsqueeze(1), value=-1)
    elif have_classes:
        out.scatter_add_(1, target.unsqueeze(1), factors.predicted.neg().unsqueeze(1))
    else:
        column = target.clamp(min=0).unsqueeze(1)
        out.scatter_add_(1, column, factors.predicted.neg().masked_fill(target < 0, 0).unsqueeze(1))
    if factors.weighted is not None:
        weight, column = call.weight, factors.weighted.unsqueeze(1)
        out.sub_(column) if weight is None else out.addcmul_(weight, column, value=-1)


@without_autocast
def statistics_of_rows(call: Call) -> tuple[Tensor, ...]:
    """Reduce the logits ``z = softcap * tanh((input W^T + bias) / softcap) / temperature`` of every row.

    Returns the needed fields of ``Statistics``; the maximum is detached. Ignored rows give zeros, and the predicted
    token -1.
    """
    input, linear_weight, linear_bias, target, class_weight, *_ = call
    ignored = None if target.is_floating_point() else target == IGNORED
    if ignored is not None:
        input = input.masked_fill(ignored.unsqueeze(1), 0)  # keeps inf and nan out of the derivatives
    logits = widen(input) @ widen(linear_weight).T
    if linear_bias is not None:
        logits = logits + widen(linear_bias)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.temperature != 1:
        logits = logits / call.temperature
    logits_max = logits.detach().amax(1)
    shifted = logits - logits_max.unsqueeze(1)
    log_sum_exp = shifted.exp().sum(1).log()
    if target.is_floating_point():
        predicted = (_distribution(target, class_weight) * shifted).sum(1)
    else:
        predicted = shifted.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(target < 0, 0)
    results = [logits_max, log_sum_exp, predicted]
    if call.weighted:
        results.append((shifted if class_weight is None else shifted * class_weight).sum(1))
    if call.entropy:
        # - sum p log p, where p log p is 0 at p = 0.
        probabilities = shifted.softmax(1)
        results.append(log_sum_exp - (probabilities * shifted.masked_fill(probabilities == 0, 0)).sum(1))
    if ignored is not None:
        results = [result.masked_fill(ignored, 0) for result in results]
    if call.predicted_tokens:
        tokens = logits.detach().argmax(1)
        results.append(tokens if ignored is None else tokens.masked_fill(ignored, -1))
    return tuple(results)
