"""Which kernels compute a linear cross entropy: the fused operators where they serve, else the chunks of rows."""

from collections.abc import Sequence

from torch_aclnn_ops.ops._numerics import autocast_disabled
from torch_aclnn_ops.ops._paths import log_path
from torch_aclnn_ops.ops.linear_cross_entropy import _chunks
from torch_aclnn_ops.ops.linear_cross_entropy._problem import IGNORED, Coefficients, Problem, Statistics
from torch_aclnn_ops.ops.linear_cross_entropy.grad import fused_linear_cross_entropy_loss_grad
from torch_aclnn_ops.ops.linear_cross_entropy.loss import fused_cross_entropy_loss_with_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import fused_linear_online_max_sum

import torch
from torch import Tensor

_NAME = "linear_cross_entropy"


def statistics(problem: Problem, weighted: bool, predicted_tokens: bool) -> Statistics:
    """Reduce the logits of every row."""
    reason = why_not_fused(problem, weighted, predicted_tokens)
    if reason is None:
        return _fused_statistics(problem)
    log_path(_NAME, lambda: f"formula in torch calls, because {reason}; {problem.plan_statistics()}{problem.how()}")
    with autocast_disabled(problem.input.device.type):
        return _chunks.statistics(problem, weighted, predicted_tokens)


def gradients(
    problem: Problem,
    cotangents: Statistics,
    log_sum_exp: Tensor,
    entropy: Tensor | None,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Pull the gradients of the statistics back to input, weight and bias, as far as they are needed.

    Args:
        problem: the arguments.
        cotangents: the gradients of the statistics, and the maximum itself.
        log_sum_exp: the statistic.
        entropy: the statistic, if its gradient is given.
        needed: whether the gradients of input, weight and bias are needed.
    """
    if cotangents.weighted is None and why_not_fused(problem) is None:
        # The operator makes both gradients or none.
        if needed[0] and needed[1]:
            return *_fused_gradients(problem, cotangents, log_sum_exp), None
        name = fused_linear_cross_entropy_loss_grad.name
        log_path(name, lambda: "formula in torch calls, because not both gradients are needed")
    plan = problem.plan(with_gradient=needed[1])
    log_path(_NAME, lambda: f"logits computed again for the gradients; {plan}{problem.how()}")
    with autocast_disabled(problem.input.device.type):
        return _chunks.gradients(problem, cotangents, entropy, needed)


def loss_and_gradients(
    problem: Problem, coefficients: Coefficients, needed: Sequence[bool], predicted_tokens: bool
) -> tuple[Tensor, tuple[Tensor | None, ...], Tensor | None]:
    """Compute the loss of all rows and its gradients by input, weight and bias; the fused operators do not serve."""
    reason = why_not_fused(problem, coefficients.weighted is not None, predicted_tokens)
    plan = problem.plan(with_gradient=needed[1])
    log_path(
        _NAME,
        lambda: f"formula in torch calls, because {reason}; gradients made in the forward pass; {plan}{problem.how()}",
    )
    with autocast_disabled(problem.input.device.type):
        return _chunks.loss_and_gradients(problem, coefficients, needed, predicted_tokens)


def why_not_fused(problem: Problem, weighted: bool = False, predicted_tokens: bool = False) -> str | None:
    """Return why the fused operators do not serve a call, or ``None`` if they do.

    Args:
        problem: the arguments.
        weighted: whether the sum of a row's logits is asked for, as for label smoothing.
        predicted_tokens: whether the classes of the largest logits are.
    """
    input, options = problem.input, problem.options
    if input.device.type != "npu":
        return f"the tensors are on {input.device.type}"
    reasons = {
        "of linear_bias": problem.linear_bias is not None,
        "of softcap": options.softcap is not None,
        "of temperature": options.temperature != 1,
        "of chunk_size": options.chunk_size is not None,
        "of max_memory": options.max_memory is not None,
        "the targets are probabilities": problem.target.is_floating_point(),
        "of label_smoothing": weighted,
        "the entropy is asked for": problem.entropy,
        "the predicted tokens are asked for": predicted_tokens,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    return reason or fused_linear_online_max_sum.why_not_cann(
        input, problem.linear_weight, problem.target, 0, problem.linear_weight.shape[0], False
    )


def _fused_statistics(problem: Problem) -> Statistics:
    target = problem.target
    logits_max, sum_exp_logits, predicted, *_ = fused_linear_online_max_sum.run(
        problem.input, problem.linear_weight, target, 0, problem.linear_weight.shape[0], False
    )
    # The loss of a row whose target has the largest logit is log sum exp(z - max).
    log_sum_exp, _ = fused_cross_entropy_loss_with_max_sum.run(
        logits_max, sum_exp_logits, torch.zeros_like(predicted), None
    )
    # So that a row which does not count adds nothing even if it is not finite.
    ignored = target == IGNORED
    return Statistics(
        logits_max.masked_fill(ignored, 0), log_sum_exp.masked_fill(ignored, 0), predicted.masked_fill(ignored, 0)
    )


def _fused_gradients(problem: Problem, cotangents: Statistics, log_sum_exp: Tensor) -> tuple[Tensor, Tensor]:
    """Call the operator, whose gradient of the logits is ``grad * (exp(z - max) / sum - onehot)``.

    Ours is ``g_log_sum_exp * softmax + g_predicted * onehot``. With ``grad = -g_predicted`` the sum takes up that the
    two cotangents differ, as they do in a shard of the vocabulary and with a z-loss. Where there is no second term, the
    mask leaves it out, and ``grad`` is the first cotangent.
    """
    target = problem.target
    ignored = target == IGNORED
    of_log_sum = cotangents.log_sum_exp.masked_fill(ignored, 0)
    of_predicted = -cotangents.predicted
    is_masked = (target < 0) | (of_predicted == 0)
    ratio = (of_predicted / of_log_sum).masked_fill(is_masked, 1)
    gradients: tuple[Tensor, Tensor] = fused_linear_cross_entropy_loss_grad.run(
        of_log_sum.where(is_masked, of_predicted),
        problem.input,
        problem.linear_weight,
        is_masked,
        target.clamp(min=0),
        cotangents.logits_max,
        log_sum_exp.exp() * ratio,
        None,
    )
    return gradients
