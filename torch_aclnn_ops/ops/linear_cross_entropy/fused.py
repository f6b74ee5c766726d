"""Kernels of the linear cross entropy that use CANN's fused operators."""

from collections.abc import Callable
from typing import NamedTuple

from torch_aclnn_ops._torch_compat.private import foreach_exp
from torch_aclnn_ops.ops._chunks import IGNORED
from torch_aclnn_ops.ops._tiling import slices
from torch_aclnn_ops.ops.linear_cross_entropy import (
    fused_cross_entropy_loss_with_max_sum,
    fused_linear_cross_entropy_loss_grad,
    fused_linear_online_max_sum,
)
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call, Coefficients, Statistics

import torch
from torch import Tensor

_FEATURES_AT_A_TIME = 2**22  # of the rows of the head at the targets: 16 MiB in float32
# Only bfloat16 logits above 16,384 are rounded by more, of which float32 has no exp, and no log of a sum of exp.
_LARGEST_ROUNDING = 64.0
_LEAST_SUM = torch.finfo(torch.float32).tiny


class Reduced(NamedTuple):
    """What the logits of every row are reduced to, shape (N,) each, and where their classes are."""

    logits_max: Tensor
    sum_exp_logits: Tensor  # ``sum exp(z - max)``
    predicted: Tensor  # ``z[target] - max``, 0 for a row without a class
    target_mask: Tensor  # packed, as CANN's operators take it: 1 for a row without a class
    masked_target: Tensor  # 0 for a row without a class
    has_class: Tensor
    is_here: Tensor | None = None  # whether the class is in this shard; ``None`` if there are no others


Combine = Callable[[Call, Reduced], Reduced]


def _reduce(call: Call) -> Reduced:
    """Reduce the logits with CANN's operator, which rounds them to 16 bits, and replace the target's by the exact one.

    The gradient is ``exp(z - max) / sum - onehot`` of logits that are not rounded. If the target has nearly all of the
    probability, its gradient is nearly 0, but with its rounded logit in ``sum`` it would be ``exp(rounding error) - 1``
    (the error is up to ``|z| / 2**8`` in bfloat16).
    """
    logits_max, sum_exp_logits, predicted, target_mask, masked_target, _ = fused_linear_online_max_sum.run(
        call.input, call.linear_weight, call.target, 0, call.linear_weight.shape[0], False
    )
    has_class = masked_target == call.target
    exact = _target_logits(call, masked_target, logits_max)
    exact = exact.clamp_(max=_LARGEST_ROUNDING).where(has_class, predicted)
    exp_rounded, exp_exact = foreach_exp([predicted, exact])
    sum_exp_logits = sum_exp_logits.sub_(exp_rounded).clamp_(min=_LEAST_SUM).add_(exp_exact)
    return Reduced(logits_max, sum_exp_logits, exact, target_mask, masked_target, has_class)


def _target_logits(call: Call, classes: Tensor, logits_max: Tensor) -> Tensor:
    """Return the logit of one class for each row, minus the maximum, in float32."""
    input, weight = call.input, call.linear_weight
    features = input.shape[1]
    share = (logits_max / -features).unsqueeze(1)  # of the maximum, added to each feature's product
    parts = [
        torch.addcmul(share[rows], weight.index_select(0, classes[rows]), input[rows]).sum(1)
        for rows in slices(0, max(input.shape[0], 1), max(_FEATURES_AT_A_TIME // max(features, 1), 1))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def fused_statistics(call: Call) -> Statistics:
    """Reduce the logits of every row with CANN's operators."""
    reduced = _reduce(call)
    # With a target logit equal to the maximum, the loss of a row is log sum exp(z - max).
    log_sum_exp, _ = fused_cross_entropy_loss_with_max_sum.run(
        reduced.logits_max, reduced.sum_exp_logits, torch.zeros_like(reduced.predicted), None
    )
    statistics = Statistics(reduced.logits_max, log_sum_exp, reduced.predicted)
    # Ignored rows must contribute zero even if they are not finite; those of shards are set to zero once combined.
    return statistics if call.is_shard else statistics.without(call.target == IGNORED)


def fused_losses(
    call: Call, classes: int, start: int = 0, combine: Combine | None = None
) -> tuple[Tensor, Tensor, Reduced]:
    """Compute the loss of every row with CANN's operators, in few launches.

    Args:
        call: The arguments of the call, with the caller's class indices.
        classes: The number of classes of the vocabulary.
        start: The first class of the head.
        combine: Combines this shard's results with those of others, if there are any.

    Returns:
        The losses with their z-losses, 0 for an ignored row and nan for a class out of range; what stands for values of
        a row without a class, 0 or nan in the same way; and what the gradients need.
    """
    target, ignore_index = call.target, call.ignored_class()
    ignored = target == ignore_index
    if 0 <= ignore_index < classes:
        target = target.masked_fill(ignored, IGNORED)
    reduced = _reduce(call._replace(target=target - start if start else target))
    if combine is not None:
        reduced = combine(call._replace(target=target), reduced)
    losses, _ = fused_cross_entropy_loss_with_max_sum.run(*reduced[:3], None)
    if call.lse_square_scale != 0:
        log_sum_exp = reduced.sum_exp_logits.log().add_(reduced.logits_max)
        losses.addcmul_(log_sum_exp, log_sum_exp, value=call.lse_square_scale)
        # The gradient of the logits is (1 + 2 scale log_sum_exp) softmax - onehot.
        factor = log_sum_exp.mul_(2 * call.lse_square_scale).add_(1)
        reduced = reduced._replace(sum_exp_logits=reduced.sum_exp_logits / factor)
    without_class = reduced.predicted / ignored  # 0 / 1 or 0 / 0
    return losses.where(reduced.has_class, without_class), without_class, reduced


def fused_gradients_of_losses(
    input: Tensor, weight: Tensor, reduced: Reduced, grad_losses: Tensor | None, grad_log_sum_exp: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of input and weight with CANN's operator; gradients of rows without a class are 0 or nan.

    The gradient of the logits is ``grad_losses * (softmax - onehot) + grad_log_sum_exp * softmax``.
    """
    mask, sums = reduced.target_mask, reduced.sum_exp_logits
    if grad_losses is None:
        assert grad_log_sum_exp is not None
        grad_losses = torch.zeros_like(grad_log_sum_exp)
    if grad_log_sum_exp is not None:
        of_class = grad_losses if reduced.is_here is None else grad_losses * reduced.is_here
        grad_losses, mask, sums = _with_ratio(grad_losses + grad_log_sum_exp, of_class, sums)
    gradients: tuple[Tensor, Tensor] = fused_linear_cross_entropy_loss_grad.run(
        grad_losses, input, weight, mask, reduced.masked_target, reduced.logits_max, sums, None
    )
    return gradients


def fused_gradients(call: Call, factors: Coefficients) -> tuple[Tensor, Tensor]:
    """Compute the gradients of input and weight with CANN's operator, from the statistics of the forward pass."""
    assert call.logits_max is not None and call.log_sum_exp is not None
    target = call.target
    ignored = target == IGNORED
    of_softmax, of_class = factors.log_sum_exp.masked_fill(ignored, 0), factors.predicted.masked_fill(target < 0, 0)
    grad, mask, sums = _with_ratio(of_softmax, of_class, call.log_sum_exp.exp())
    logits_max = call.logits_max.masked_fill(ignored, torch.inf)  # their exp(z) might overflow, and 0 * inf is nan
    gradients: tuple[Tensor, Tensor] = fused_linear_cross_entropy_loss_grad.run(
        grad, call.input, call.linear_weight, mask, target.clamp(min=0), logits_max, sums, None
    )
    return gradients


def _with_ratio(of_softmax: Tensor, of_class: Tensor, sum_exp_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operator's ``grad``, mask and ``sum`` for a gradient ``of_softmax * softmax - of_class * onehot``.

    The operator's gradient of the logits is ``grad * (exp(z - max) / sum - onehot)``. The two factors differ in a shard
    of the vocabulary and with a z-loss: with ``grad = of_class``, the argument ``sum`` absorbs their ratio. Rows
    without the second term are masked, and ``grad`` is the first factor.
    """
    is_masked = of_class == 0
    ratio = (of_class / of_softmax).masked_fill_(is_masked, 1)
    return of_softmax.where(is_masked, of_class), is_masked, sum_exp_logits * ratio
