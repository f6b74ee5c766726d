"""Kernels of the linear cross entropy that use CANN's fused operators."""

from torch_aclnn_ops.ops.linear_cross_entropy.grad import fused_linear_cross_entropy_loss_grad
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs
from torch_aclnn_ops.ops.linear_cross_entropy.loss import fused_cross_entropy_loss_with_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import fused_linear_online_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import IGNORED, Statistics

import torch
from torch import Tensor


def fused_statistics(inputs: Inputs) -> Statistics:
    """Reduce the logits of every row with CANN's operators."""
    target = inputs.target
    logits_max, sum_exp_logits, predicted, *_ = fused_linear_online_max_sum.run(
        inputs.input, inputs.linear_weight, target, 0, inputs.linear_weight.shape[0], False
    )
    # With a target logit equal to the maximum, the loss of a row is log sum exp(z - max).
    log_sum_exp, _ = fused_cross_entropy_loss_with_max_sum.run(
        logits_max, sum_exp_logits, torch.zeros_like(predicted), None
    )
    # Ignored rows must contribute zero even if they are not finite.
    return Statistics(logits_max, log_sum_exp, predicted).without(target == IGNORED)


def fused_gradients(inputs: Inputs, grad_statistics: Statistics, log_sum_exp: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of input and weight with CANN's operator.

    Its gradient of the logits is ``grad * (exp(z - max) / sum - onehot)``; the one needed here is
    ``g_log_sum_exp * softmax + g_predicted * onehot``. The two coefficients differ in a shard of the vocabulary and
    with a z-loss: with ``grad = -g_predicted``, the argument ``sum`` absorbs their ratio. Rows without the second term
    are masked, and ``grad`` is the first coefficient.
    """
    target = inputs.target
    ignored = target == IGNORED
    grad_log_sum_exp = grad_statistics.log_sum_exp.masked_fill(ignored, 0)
    grad_predicted = -grad_statistics.predicted
    is_masked = (target < 0) | (grad_predicted == 0)
    ratio = (grad_predicted / grad_log_sum_exp).masked_fill(is_masked, 1)
    gradients: tuple[Tensor, Tensor] = fused_linear_cross_entropy_loss_grad.run(
        grad_log_sum_exp.where(is_masked, grad_predicted),
        inputs.input,
        inputs.linear_weight,
        is_masked,
        target.clamp(min=0),
        grad_statistics.logits_max,
        log_sum_exp.exp() * ratio,
        None,
    )
    return gradients
