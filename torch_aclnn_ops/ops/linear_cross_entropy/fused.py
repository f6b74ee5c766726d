"""Kernels of the linear cross entropy that use CANN's fused operators."""

from torch_aclnn_ops._call_log import is_explaining
from torch_aclnn_ops.ops._head.tiling import slices
from torch_aclnn_ops.ops.linear_cross_entropy.grad import fused_linear_cross_entropy_loss_grad
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs
from torch_aclnn_ops.ops.linear_cross_entropy.loss import fused_cross_entropy_loss_with_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import fused_linear_online_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import IGNORED, Statistics

import torch
from torch import Tensor

_FEATURES_AT_A_TIME = 2**22  # of the rows of the head at the targets: 16 MiB in float32
_LARGEST_ROUNDING = 64.0  # exp of it is finite in float32; only bfloat16 logits from 32,768 on are rounded by more


def fused_statistics(inputs: Inputs) -> Statistics:
    """Reduce the logits of every row with CANN's operators."""
    target = inputs.target
    logits_max, sum_exp_logits, predicted, _, masked_target, _ = fused_linear_online_max_sum.run(
        inputs.input, inputs.linear_weight, target, 0, inputs.linear_weight.shape[0], False
    )
    if not is_explaining():
        exact = _target_logits(inputs, masked_target) - logits_max
        sum_exp_logits, predicted = _with_exact_target(sum_exp_logits, predicted, exact, target >= 0)
    # With a target logit equal to the maximum, the loss of a row is log sum exp(z - max).
    log_sum_exp, _ = fused_cross_entropy_loss_with_max_sum.run(
        logits_max, sum_exp_logits, torch.zeros_like(predicted), None
    )
    # Ignored rows must contribute zero even if they are not finite.
    return Statistics(logits_max, log_sum_exp, predicted).without(target == IGNORED)


def _target_logits(inputs: Inputs, classes: Tensor) -> Tensor:
    """Return the logit of one class for each row, in float32."""
    input, weight = inputs.input, inputs.linear_weight
    logits = input.new_empty(classes.shape, dtype=torch.float32)
    for rows in slices(0, input.shape[0], max(_FEATURES_AT_A_TIME // max(input.shape[1], 1), 1)):
        torch.sum(weight.index_select(0, classes[rows]).float().mul_(input[rows]), 1, out=logits[rows])
    return logits


def _with_exact_target(
    sum_exp_logits: Tensor, predicted: Tensor, exact: Tensor, has_target: Tensor
) -> tuple[Tensor, Tensor]:
    """Replace the target's logit minus the maximum, ``predicted``, by the ``exact`` one, also in the sum.

    CANN rounds the logits to 16 bits before it reduces them, but not for the gradient ``exp(z - max) / sum - onehot``.
    If the target has nearly all of the probability, its gradient is nearly 0, but with its rounded logit in ``sum`` it
    would be ``exp(rounding error) - 1``, in bfloat16 up to ``|z| / 2**8``.
    """
    # nan for infinite logits, which are kept
    rounding = (exact - predicted).nan_to_num(0, _LARGEST_ROUNDING, -_LARGEST_ROUNDING)
    exact = predicted + rounding.clamp(-_LARGEST_ROUNDING, _LARGEST_ROUNDING)
    others = (sum_exp_logits - predicted.exp()).clamp(min=0)
    return torch.where(has_target, others + exact.exp(), sum_exp_logits), torch.where(has_target, exact, predicted)


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
