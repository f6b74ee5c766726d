"""The statistics of rows in differentiable torch calls, for derivatives that the kernels do not have."""

import math

from torch_aclnn_ops._numerics import widen, without_autocast
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import IGNORED

import torch
from torch import Tensor


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
    shifted = finite = logits - logits_max.unsqueeze(1)
    is_masked = None
    if call.is_shard and linear_bias is not None:
        # A bias of -inf may mask all classes of a shard, which then has a weight of 0 and no derivative.
        is_masked = logits_max == -math.inf
        shifted = logits - logits_max.masked_fill(is_masked, 0).unsqueeze(1)
        finite = shifted.masked_fill(is_masked.unsqueeze(1), 0)
    log_sum_exp = finite.exp().sum(1).log()
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
        probabilities = finite.softmax(1)
        results.append(log_sum_exp - (probabilities * finite.masked_fill(probabilities == 0, 0)).sum(1))
    if is_masked is not None:
        results[1] = log_sum_exp.masked_fill(is_masked, -math.inf)
        if call.entropy:
            results[-1] = results[-1].masked_fill(is_masked, 0)
    if ignored is not None:
        results = [result.masked_fill(ignored, 0) for result in results]
    if call.predicted_tokens:
        tokens = logits.detach().argmax(1)
        results.append(tokens if ignored is None else tokens.masked_fill(ignored, -1))
    return tuple(results)
