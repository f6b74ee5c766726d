"""What a linear cross entropy computes on a CPU by other means than torch.mm and torch.softmax."""

from torch_aclnn_ops import _cpu_extension
from torch_aclnn_ops._torch_compat import has_bfloat16_units as chip_has_bfloat16_units

import torch
from torch import Tensor

# oneDNN makes a kernel for each new shape, in about 2 ms, in which other products do about 2^28 more multiplications.
# A call has up to six shapes, which are new where the number of ignored rows is.
_FEWEST_MULTIPLICATIONS = 2**32


def has_row_kernels(weight: Tensor) -> bool:
    """Return whether csrc/cpu turns rows of logits to their softmax and to their gradient."""
    return weight.device.type == "cpu" and weight.dtype != torch.float64 and _cpu_extension.why_unavailable() is None


def has_bfloat16_units(weight: Tensor) -> bool:
    """Return whether the CPU multiplies bfloat16 numbers faster than float32 ones, and the tensor has such numbers."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and chip_has_bfloat16_units()


def has_logits_kernel(weight: Tensor, rows: int) -> bool:
    """Return whether csrc/cpu makes the logits: of large bfloat16 products, where the chip has units for them.

    Args:
        weight: the head, shape (V, H).
        rows: their number.
    """
    return (
        has_bfloat16_units(weight)
        and weight.shape[1] % 2 == 0
        and weight.is_contiguous()
        and rows * weight.numel() >= _FEWEST_MULTIPLICATIONS
        and bool(torch.backends.mkldnn.enabled)
        and _cpu_extension.why_no_bfloat16_products() is None
    )


def how(weight: Tensor, rows: int) -> str:
    """Say for a log what is not computed by torch.mm and torch.softmax.

    Args:
        weight: the head, shape (V, H).
        rows: their number.
    """
    of_rows = f"; rows by {_cpu_extension.vectors()} kernels" if has_row_kernels(weight) else ""
    return of_rows + ("; logits by the chip's units for bfloat16" if has_logits_kernel(weight, rows) else "")


def write_logits(input: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write ``input @ weight.T`` of bfloat16 tensors to a float32 one.

    Args:
        input: shape (N, H), contiguous rows.
        weight: shape (V, H), contiguous rows.
        out: shape (N, V), contiguous rows.
    """
    torch.ops.torch_aclnn_ops.linear_cross_entropy_logits(input, weight, out)


def reduce(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``max z``, ``log sum exp(z - max)`` and ``z[target] - max`` of every row; the last is 0 without a target.

    Args:
        logits: shape (N, V), float32, contiguous rows.
        target: classes, or others for none, shape (N,).
    """
    statistics: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_aclnn_ops.linear_cross_entropy_logits_statistics(
        logits, target
    )
    return statistics


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
