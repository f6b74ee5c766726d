"""The ways past the chunks: CANN's fused operators; and small losses in few calls, for which they take their time."""

from collections.abc import Callable

from torch_aclnn_ops import _cpu_extension
from torch_aclnn_ops._torch_compat import log_softmax_backward
from torch_aclnn_ops.ops.linear_cross_entropy.grad import fused_linear_cross_entropy_loss_grad
from torch_aclnn_ops.ops.linear_cross_entropy.loss import fused_cross_entropy_loss_with_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import fused_linear_online_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.problem import IGNORED, PlainLoss, Problem, Statistics

import torch
from torch import Tensor

_MEAN, _SUM = 1, 2  # torch's numbers of these reductions
_nll_loss_forward = torch.ops.aten.nll_loss_forward.default
_nll_loss_backward = torch.ops.aten.nll_loss_backward.default

# The gradients by input, weight and bias of a loss whose own is 1, or the map from its own to them.
MadeGradients = tuple[Tensor | None, ...] | Callable[[Tensor], tuple[Tensor | None, ...]]


def small_loss(problem: Problem, plain: PlainLoss) -> tuple[Tensor, MadeGradients] | None:
    """Compute a loss and its gradients in few calls; the logits, and two tensors of their size, may be held.

    The result is ``None`` where products need another
    dtype than the head's, and for what is not just the logits' loss.
    """
    input, weight, target = problem.input, problem.linear_weight, problem.target
    if weight.dtype != torch.float32 or problem.options.temperature != 1 or not problem.is_plain:
        return None
    if plain.zero_if_all_ignored:
        return None
    if not weight.is_cpu:
        return _small_loss_on_device(problem, plain)
    has_memory = type(weight) in (Tensor, torch.nn.Parameter)  # fake tensors have none
    if not has_memory or _cpu_extension.why_unavailable() is not None:
        return None
    kernel, needed = torch.ops.torch_aclnn_ops.linear_cross_entropy_loss, problem.request.gradients
    loss, *made = kernel(input, weight, target, plain.ignore_index, plain.is_mean, *needed[:2])
    return (loss, (*made, None)) if loss.dim() == 0 else None


def _small_loss_on_device(problem: Problem, plain: PlainLoss) -> tuple[Tensor, MadeGradients]:
    """Compute a loss by the kernels of ``torch.nn.functional.cross_entropy``, as each call is a launch."""
    input, weight, target, ignore_index = problem.input, problem.linear_weight, problem.target, plain.ignore_index
    ignored, clamped = target == ignore_index, target.clamp(0, weight.shape[0] - 1)
    # A device does not stop for a wrong index, so its row is divided by 0, which makes the loss nan.
    input = torch.where(ignored.unsqueeze(1), 0.0, input / (clamped == target).unsqueeze(1))
    target = torch.where(ignored, target, clamped)
    log_probabilities = torch.mm(input, weight.t()).log_softmax(1)
    reduction = _MEAN if plain.is_mean else _SUM
    loss, number = _nll_loss_forward(log_probabilities, target, None, reduction, ignore_index)

    def differentiate(grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _nll_loss_backward(grad_loss, log_probabilities, target, None, reduction, ignore_index, number)
        gradient = log_softmax_backward(gradient, log_probabilities, 1, torch.float32)
        needs_input, needs_weight, _ = problem.request.gradients
        input_grad = torch.mm(gradient, weight) if needs_input else None
        return input_grad, torch.mm(gradient.t(), input) if needs_weight else None, None

    return loss, differentiate


def why_not_fused(problem: Problem) -> str | None:
    """Return why the fused operators do not serve a call, or ``None`` if they do."""
    input, options, request = problem.input, problem.options, problem.request
    if input.device.type != "npu":
        return f"the tensors are on {input.device.type}"
    reasons = (
        ("of linear_bias", problem.linear_bias is not None),
        ("of softcap", options.softcap is not None),
        ("of temperature", options.temperature != 1),
        ("of chunk_size", options.chunk_size is not None),
        ("of max_memory", options.max_memory is not None),
        ("the targets are probabilities", problem.target.is_floating_point()),
        ("of label_smoothing", request.weighted),
        ("the entropy is asked for", request.entropy),
        ("the predicted tokens are asked for", request.predicted_tokens),
    )
    for reason, holds in reasons:
        if holds:
            return reason
    weight = problem.linear_weight
    return fused_linear_online_max_sum.why_not_cann(input, weight, problem.target, 0, weight.shape[0], False)


def fused_statistics(problem: Problem) -> Statistics:
    """Reduce the logits of every row by CANN's operators."""
    target = problem.target
    logits_max, sum_exp_logits, predicted, *_ = fused_linear_online_max_sum.run(
        problem.input, problem.linear_weight, target, 0, problem.linear_weight.shape[0], False
    )
    # The loss of a row whose target has the largest logit is log sum exp(z - max).
    log_sum_exp, _ = fused_cross_entropy_loss_with_max_sum.run(
        logits_max, sum_exp_logits, torch.zeros_like(predicted), None
    )
    # So that an ignored row adds nothing even if it is not finite.
    ignored = target == IGNORED
    return Statistics(
        logits_max.masked_fill(ignored, 0), log_sum_exp.masked_fill(ignored, 0), predicted.masked_fill(ignored, 0)
    )


def fused_gradients(problem: Problem, grad_statistics: Statistics, log_sum_exp: Tensor) -> tuple[Tensor, Tensor]:
    """Call the operator, whose gradient of the logits is ``grad * (exp(z - max) / sum - onehot)``.

    Ours is ``g_log_sum_exp * softmax + g_predicted * onehot``. With ``grad = -g_predicted`` the sum takes up that the
    two gradients differ, as they do in a shard of the vocabulary and with a z-loss. Where there is no second term, the
    mask leaves it out, and ``grad`` is the first gradient.
    """
    target = problem.target
    ignored = target == IGNORED
    grad_log_sum_exp = grad_statistics.log_sum_exp.masked_fill(ignored, 0)
    grad_predicted = -grad_statistics.predicted
    is_masked = (target < 0) | (grad_predicted == 0)
    ratio = (grad_predicted / grad_log_sum_exp).masked_fill(is_masked, 1)
    gradients: tuple[Tensor, Tensor] = fused_linear_cross_entropy_loss_grad.run(
        grad_log_sum_exp.where(is_masked, grad_predicted),
        problem.input,
        problem.linear_weight,
        is_masked,
        target.clamp(min=0),
        grad_statistics.logits_max,
        log_sum_exp.exp() * ratio,
        None,
    )
    return gradients
