"""Rows of logits: their statistics, and the gradient of a loss that is a function of these.

Everything is computed in float32 (float64 for float64): in place by :func:`reduce_rows`, for the kernels, and in
differentiable calls by :func:`statistics_of_rows`, for derivatives that the kernels do not have.
"""

from torch_aclnn_ops._tensors import widen, without_autocast
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import IGNORED, Coefficients, Statistics

import torch
from torch import Tensor


def reduce_rows(
    call: Call, logits: Tensor, target: Tensor, factors: Coefficients | None, have_classes: bool
) -> Statistics:
    """Reduce logits; with factors, overwrite them with the gradient of the loss by ``input @ weight.T + bias``.

    The logits of some rows are divided by the temperature unless there is a softcap. ``have_classes`` says whether it
    is known that all class indices are 0 or more.
    """
    class_weight = call.weight
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
    log_sum_exp = -torch.xlogy(1, probabilities.amax(1))
    entropy = torch.special.entr(probabilities).sum(1) if call.entropy else None
    found = Statistics(logits_max, log_sum_exp, predicted, weighted, entropy, tokens)
    if factors is not None:
        if call.temperature != 1:
            factors = Coefficients._make(None if one is None else one / call.temperature for one in factors)
        _write_gradient(call, probabilities, target, found, factors, have_classes, logits)
        if slope is not None:
            logits.mul_(slope)
    return found


def _predicted(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, offset: Tensor, have_classes: bool
) -> Tensor:
    if target.is_floating_point():
        return (_distribution(target, class_weight) * (logits - offset.unsqueeze(1))).sum(1)
    if have_classes:
        return logits.gather(1, target.unsqueeze(1)).squeeze(1) - offset
    at_target = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    return (at_target - offset).masked_fill_(target < 0, 0)


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
        distribution = widen(target) if class_weight is None else widen(target) * class_weight
        predicted = (distribution * shifted).sum(1)
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
