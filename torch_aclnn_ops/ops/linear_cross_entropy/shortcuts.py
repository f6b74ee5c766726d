"""The ways past the chunks: CANN's fused operators; and small losses in few calls, for which they take their time."""

from functools import cache
from typing import Any

from torch_aclnn_ops import _cpu_extension, _extension
from torch_aclnn_ops._torch_compat import get_enum
from torch_aclnn_ops.ops.linear_cross_entropy import tiling
from torch_aclnn_ops.ops.linear_cross_entropy.grad import fused_linear_cross_entropy_loss_grad
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, PlainLoss
from torch_aclnn_ops.ops.linear_cross_entropy.loss import fused_cross_entropy_loss_with_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import fused_linear_online_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import IGNORED, Statistics

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)  # fake tensors have no memory
_NPU_FUNCTION = "linear_cross_entropy"


def serves_small_loss(inputs: Inputs) -> bool:
    """Return whether a plain loss may be computed in few calls, which hold its logits and two tensors of their size."""
    weight, options = inputs.linear_weight, inputs.options
    if weight.dtype != torch.float32 or type(weight) not in _PLAIN or not inputs.is_plain:
        return False
    if options.temperature != 1 or options.chunk_size is not None or options.max_memory is not None:
        return False
    if 12 * inputs.input.shape[0] * weight.shape[0] > tiling.LOGITS_BYTES:
        return False
    if weight.is_cpu:
        return _cpu_extension.why_unavailable() is None
    return _NPU_FUNCTION in _extension.functions and weight.device.type == "npu" and not _extension.checks_values()


def small_loss_on_cpu(inputs: Inputs, loss: PlainLoss) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """Compute a loss and its gradients, or ``None`` as the loss where a target is no class or is ignored."""
    input, weight, (needs_input, needs_weight, _) = inputs.input, inputs.linear_weight, inputs.requested.gradients
    kernel, is_mean = torch.ops.torch_aclnn_ops.linear_cross_entropy_loss, loss.reduction == "mean"
    value, *made = kernel(input, weight, inputs.target, loss.ignore_index, is_mean, needs_input, needs_weight)
    return value if value.dim() == 0 else None, (*made, None)


@cache
def _npu_function() -> Any:
    return _extension.functions[_NPU_FUNCTION](lambda *_: None, (torch.float32,))


def small_loss_on_npu(inputs: Inputs, loss: PlainLoss) -> Tensor | None:
    """Compute a loss, which autograd differentiates, or ``None`` inside a mode that torch functions are seen by."""
    input, weight, reduction = inputs.input, inputs.linear_weight, get_enum(loss.reduction)
    value: Tensor | None = _npu_function()(input, weight, inputs.target, loss.ignore_index, reduction)
    return value


def why_not_fused(inputs: Inputs) -> str | None:
    """Return why the fused operators do not serve a call, or ``None`` if they do."""
    input, options, requested = inputs.input, inputs.options, inputs.requested
    if input.device.type != "npu":
        return f"the tensors are on {input.device.type}"
    reasons = (
        ("of linear_bias", inputs.linear_bias is not None),
        ("of softcap", options.softcap is not None),
        ("of temperature", options.temperature != 1),
        ("of chunk_size", options.chunk_size is not None),
        ("of max_memory", options.max_memory is not None),
        ("the targets are probabilities", inputs.target.is_floating_point()),
        ("of label_smoothing", requested.weighted),
        ("the entropy is asked for", requested.entropy),
        ("the predicted tokens are asked for", requested.predicted_tokens),
    )
    for reason, holds in reasons:
        if holds:
            return reason
    weight = inputs.linear_weight
    return fused_linear_online_max_sum.why_not_cann(input, weight, inputs.target, 0, weight.shape[0], False)


def fused_statistics(inputs: Inputs) -> Statistics:
    """Reduce the logits of every row by CANN's operators."""
    target = inputs.target
    logits_max, sum_exp_logits, predicted, *_ = fused_linear_online_max_sum.run(
        inputs.input, inputs.linear_weight, target, 0, inputs.linear_weight.shape[0], False
    )
    # The loss of a row whose target has the largest logit is log sum exp(z - max).
    log_sum_exp, _ = fused_cross_entropy_loss_with_max_sum.run(
        logits_max, sum_exp_logits, torch.zeros_like(predicted), None
    )
    # So that an ignored row adds nothing even if it is not finite.
    return Statistics(logits_max, log_sum_exp, predicted).without(target == IGNORED)


def fused_gradients(inputs: Inputs, grad_statistics: Statistics, log_sum_exp: Tensor) -> tuple[Tensor, Tensor]:
    """Call the operator, whose gradient of the logits is ``grad * (exp(z - max) / sum - onehot)``.

    Ours is ``g_log_sum_exp * softmax + g_predicted * onehot``. With ``grad = -g_predicted`` the sum takes up that the
    two gradients differ, as they do in a shard of the vocabulary and with a z-loss. Where there is no second term, the
    mask leaves it out, and ``grad`` is the first gradient.
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
