"""What csrc/cpu computes: logits in float32, and their softmax or their gradient in one go."""

import torch
from torch import Tensor


def write_logits(input: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write ``input @ weight.T`` of bfloat16 or float32 tensors to a float32 one.

    Args:
        input: shape (N, H), contiguous rows.
        weight: shape (V, H), contiguous rows.
        out: shape (N, V), contiguous rows.
    """
    torch.ops.torch_aclnn_ops.linear_cross_entropy_logits(input, weight, out)


def to_softmax(logits: Tensor, logits_max: Tensor) -> Tensor:
    """Turn float32 logits to their softmax in place, and return ``log sum exp(logits - logits_max)`` of every row.

    Args:
        logits: shape (N, V), contiguous rows.
        logits_max: their maxima, shape (N,).
    """
    log_sum_exp: Tensor = torch.ops.torch_aclnn_ops.linear_cross_entropy_softmax(logits, logits_max)
    return log_sum_exp


def write_gradient(
    logits: Tensor,
    target: Tensor,
    of_log_sum_exp: Tensor,
    of_predicted: Tensor,
    of_square: Tensor | None,
    gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the gradient of a loss by float32 logits, which it overwrites.

    It is ``(of_log_sum_exp + of_square * logsumexp(z)) * softmax(z) + of_predicted * onehot(target)``.

    Args:
        logits: shape (N, V), contiguous rows.
        target: classes, or -1 for none, shape (N,).
        of_log_sum_exp: shape (N,).
        of_predicted: shape (N,).
        of_square: shape (N,).
        gradient: where it is written, in float32 or bfloat16; it may be the logits.

    Returns:
        ``max z``, ``log sum exp(z - max)`` and ``z[target] - max`` of every row; the last is 0 without a target.
    """
    statistics: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_aclnn_ops.linear_cross_entropy_logits_gradient(
        logits, target, of_log_sum_exp, of_predicted, of_square, gradient
    )
    return statistics
