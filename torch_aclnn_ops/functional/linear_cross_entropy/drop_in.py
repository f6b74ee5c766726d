"""The public function: torch's arguments and errors on the outside, rows and their weights on the inside."""

import math
from numbers import Integral, Real
from typing import Any

from torch_aclnn_ops.functional._drop_in import (
    float32_autocast_dtype,
    is_ordinary,
    lower_precision_autocast_dtype,
    on_one_device,
    overrides_torch,
    refuse_tangent,
)
from torch_aclnn_ops.functional.linear_cross_entropy.function import linear_cross_entropy_losses
from torch_aclnn_ops.ops._checks import values_are_readable
from torch_aclnn_ops.ops._numerics import accumulation_dtype, widen

import torch
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions

_REDUCTIONS = ("none", "mean", "sum")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: LinearCrossEntropyOptions | None = None,
    chunk_size: int | str = "auto",
) -> Tensor:
    """Compute the cross entropy of ``linear(input, linear_weight, linear_bias)`` without holding these logits.

    A drop-in for :func:`torch.nn.functional.linear_cross_entropy`, with two differences: memory is always that of the
    logits of a few rows (also with label smoothing, probabilities as targets, and in every derivative), and float16 and
    bfloat16 inputs give a float32 loss.

    Args:
        input: rows, shape (H,) or (N, H), floating point.
        linear_weight: the head, shape (C, H), or (C, d_1, ..., d_K, H) for a K-dimensional loss; input's dtype.
        target: class indices (int64 or uint8), shape () or (N,) or (N, d_1, ..., d_K); or probabilities of input's kind
            of dtype, shape (C,) or (N, C) or (N, C, d_1, ..., d_K).
        linear_bias: added to the logits, ``linear_weight``'s shape without H.
        weight: factor of each class, shape (C,); differentiable with probabilities only.
        reduction: ``"none"``, ``"mean"`` (divided by the weights of the targets that count) or ``"sum"``.
        ignore_index: class index whose rows do not count, -100 by default; only with class indices.
        label_smoothing: share of the uniform distribution in the target, from 0 to 1.
        options: torch's options. ``batch_chunk_size`` is used as ``chunk_size``; the others promise what always holds
            here (accumulation in float32, a backward that can be repeated).
        chunk_size: rows whose logits are held at a time. ``"auto"`` lets the operator choose; only then the fused
            operators are used.

    Returns:
        The loss: 0-dim, or with ``"none"`` of the shape of class indices; float32 for 16-bit inputs. On other devices
        than the CPU, where a check would wait for the device, a class index outside the classes gives a loss of nan.

    Raises:
        IndexError: a class index is outside the classes (on a CPU).
        RuntimeError: shapes or dtypes do not fit each other; ``label_smoothing`` is outside [0, 1].
        TypeError: ``chunk_size`` or ``options`` is of a wrong type.
        ValueError: ``reduction`` is none of the three; ``chunk_size`` is less than 1.

    Example:
        >>> input, head = torch.eye(2, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
        >>> loss = linear_cross_entropy(input, head, torch.tensor([1, 3]))
        >>> loss.backward()
        >>> round(loss.item(), 6) == round(math.log(4), 6), head.grad[1].tolist()
        (True, [-0.375, 0.125])

    Source: kernels aclnnFusedLinearOnlineMaxSum, aclnnFusedCrossEntropyLossWithMaxSum and
    aclnnFusedLinearCrossEntropyLossGrad.
    """
    rows_per_chunk = _rows_per_chunk(chunk_size, options)
    arguments: dict[str, Any] = {
        "linear_bias": linear_bias,
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    if not _is_ours(input, linear_weight, target, **arguments):
        return torch.nn.functional.linear_cross_entropy(input, linear_weight, target, **arguments)
    if not target.is_floating_point():
        refuse_tangent("linear_cross_entropy", weight)
    if input.dim() == 1:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
        losses = linear_cross_entropy(input, linear_weight, target, **arguments, chunk_size=chunk_size, options=options)
        return losses.squeeze(0) if reduction == "none" else losses
    dtype = lower_precision_autocast_dtype(input)
    input, linear_weight = input.to(dtype), linear_weight.to(dtype)
    linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    losses, row_weights = _losses_of_positions(
        input,
        linear_weight,
        linear_bias,
        target if target.is_floating_point() else target.long(),
        None if weight is None else widen(weight),
        -100 if ignore_index is None else ignore_index,
        label_smoothing,
        rows_per_chunk,
    )
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / row_weights.sum()


def _losses_of_positions(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Compute the loss of every row at every position of a K-dimensional loss, one linear layer per position."""
    positions_shape = linear_weight.shape[1:-1]
    if not positions_shape:
        return _losses_and_row_weights(input, linear_weight, linear_bias, target, *options)
    classes, positions = linear_weight.shape[0], math.prod(positions_shape)
    wide_input = widen(input)  # so that the gradients of the positions add up in float32
    # unbind, not an index for each position, whose gradient would be a whole head
    weights = linear_weight.reshape(classes, positions, linear_weight.shape[-1]).unbind(1)
    biases = (None,) * positions if linear_bias is None else linear_bias.reshape(classes, positions).unbind(1)
    targets = target.reshape(*target.shape[: target.dim() - len(positions_shape)], positions).unbind(-1)
    parts = [
        _losses_and_row_weights(wide_input.to(input.dtype), *of_position, *options)
        for of_position in zip(weights, biases, targets, strict=True)
    ]
    shape = (input.shape[0], *positions_shape)
    losses, row_weights = (torch.stack(part, 1).reshape(shape) for part in zip(*parts, strict=True))
    return losses, row_weights


def _losses_and_row_weights(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of every row, and the weights whose sum divides a mean."""
    classes = linear_weight.shape[0]
    counted = input.new_ones(input.shape[0], dtype=accumulation_dtype(input.dtype))
    row_weight = counted
    if not target.is_floating_point():
        ignored = target == ignore_index
        outside = ~ignored & ((target < 0) | (target >= classes))
        _check_indices(target, outside)
        target = target.masked_fill(ignored | outside, 0)
        # A device does not stop for a wrong index, so its row shows it.
        counted = counted.masked_fill(ignored, 0).masked_fill(outside, math.nan)
        row_weight = counted if weight is None else counted * weight[target]
        if label_smoothing == 0:
            weight = None  # is in row_weight
    losses = linear_cross_entropy_losses(
        input,
        linear_weight,
        linear_bias,
        target,
        row_weight * (1 - label_smoothing),
        counted * (label_smoothing / classes) if label_smoothing > 0 else None,
        weight,
        chunk_size,
    )
    return losses, row_weight


def _check_indices(target: Tensor, outside: Tensor) -> None:
    if values_are_readable(target) and bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


def _rows_per_chunk(chunk_size: int | str, options: LinearCrossEntropyOptions | None) -> int | None:
    if options is not None and not isinstance(options, LinearCrossEntropyOptions):
        raise TypeError(
            f"linear_cross_entropy: options must be None or a LinearCrossEntropyOptions, but it is {options!r}"
        )
    if chunk_size == "auto":
        return None if options is None else options.batch_chunk_size
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, Integral):  # numpy's integers are Integral too
        raise TypeError(f'linear_cross_entropy: chunk_size must be "auto" or an int, but it is {chunk_size!r}')
    if chunk_size < 1:
        raise ValueError(f"linear_cross_entropy: chunk_size must be at least 1, but it is {chunk_size}")
    return int(chunk_size)


def _is_ours(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
) -> bool:
    """Return whether torch would accept the arguments; it makes the errors for those that it would not."""
    optional = [tensor for tensor in (linear_bias, weight) if tensor is not None]
    if not is_ordinary(input, linear_weight, *optional) or not isinstance(target, Tensor) or overrides_torch(target):
        return False
    tensors = {"input": input, "linear_weight": linear_weight, "target": target, "linear_bias": linear_bias}
    if not on_one_device("linear_cross_entropy", **tensors, weight=weight):
        return False
    if input.dim() not in (1, 2) or linear_weight.dim() < 2 or input.shape[-1] != linear_weight.shape[-1]:
        return False
    classes, *positions, _ = linear_weight.shape
    if classes == 0 or 0 in positions or (positions and input.dim() == 1):
        return False
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        return False
    if weight is not None and weight.shape != (classes,):
        return False
    if reduction not in _REDUCTIONS or not isinstance(label_smoothing, Real) or not 0 <= label_smoothing <= 1:
        return False
    if ignore_index is not None and not isinstance(ignore_index, int):
        return False
    product_dtype = lower_precision_autocast_dtype(input)
    products = (linear_weight,) if linear_bias is None else (linear_weight, linear_bias)
    if any(lower_precision_autocast_dtype(tensor) != product_dtype for tensor in products):
        return False
    if target.shape == (*input.shape[:-1], classes, *positions):
        return target.is_floating_point() and ignore_index is None
    if weight is not None and (weight.requires_grad or not _has_loss_dtype(weight, input)):
        return False
    return target.shape == (*input.shape[:-1], *positions) and target.dtype in (torch.int64, torch.uint8)


def _has_loss_dtype(weight: Tensor, input: Tensor) -> bool:
    """Return whether a class weight has the dtype of the logits, or gets it from autocast."""
    in_autocast = float32_autocast_dtype(input) != lower_precision_autocast_dtype(input)
    return float32_autocast_dtype(weight) == (torch.float32 if in_autocast else input.dtype)
