"""Arguments that losses on a linear layer's output share: the layer, token weights, and shifted labels."""

import math
from typing import Any

from torch_aclnn_ops._autograd.derivatives import has_tangent
from torch_aclnn_ops._checks import check_device, check_floating_point, describe
from torch_aclnn_ops._tensors import without_autocast
from torch_aclnn_ops._torch_compat.private import is_any_autocast_enabled
from torch_aclnn_ops.functional._drop_in import lower_precision_autocast_dtype

import torch
from torch import Tensor


def check_token_weight(function: str, token_weight: object, target_shape: tuple[int, ...], input: Tensor) -> None:
    """Check that token_weight is a floating-point tensor of the target's shape."""
    if not isinstance(token_weight, Tensor):
        raise TypeError(f"{function}: token_weight must be a Tensor or None, but it is {describe(token_weight)}")
    check_floating_point(function, token_weight=token_weight)
    if token_weight.shape != target_shape:
        raise ValueError(
            f"{function}: token_weight must have the shape of class indices, {list(target_shape)}, but its"
            f" shape is {list(token_weight.shape)}"
        )
    check_device(function, ("input", "token_weight"), (input, token_weight))


def flat(rows: Tensor) -> Tensor:
    """Return the rows as a matrix."""
    return rows if rows.dim() == 2 else rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def rounded_by_autocast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round the tensors of a linear layer as autocast does."""
    if not is_any_autocast_enabled():
        return input, weight, bias
    dtype = lower_precision_autocast_dtype(input)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


@without_autocast  # which refuses to roll numbers of its other 16-bit dtype on a CPU
def labels_to_rows(
    target: Tensor, token_weight: Tensor | None, places: int, ignored: int
) -> tuple[Tensor, Tensor | None]:
    """Shift labels and their weights to the rows that predict them.

    The last rows of a sequence have no label and are ignored, so the input is not copied.
    """
    target = torch.nn.functional.pad(target[..., places:].long(), (0, places), value=ignored)
    if isinstance(token_weight, Tensor):
        token_weight = token_weight.roll(-places, -1)
    return target, token_weight


def rows_to_labels(result: Tensor, places: int) -> Tensor:
    """Shift the results of rows to their labels; those of ignored rows come first."""
    return result.roll(places, -1) if result.dim() > 0 else result


def check_one_shape(function: str, **tensors: Any) -> None:
    """Check that tensors have the same shape, because broadcasting would give a wrong result."""
    name, first = next(iter(tensors.items()))
    for other, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {other} must be a Tensor, but it is {describe(tensor)}")
        if tensor.shape != first.shape:
            raise ValueError(
                f"{function}: {other} must have shape {list(first.shape)}, as {name} has, but its shape is"
                f" {list(tensor.shape)}"
            )


def check_log_probs(function: str, shape: str, **tensors: Any) -> None:
    """Check that tensors are floating point and have the same ``shape``, ``"(B,)"`` or ``"(B, T)"``."""
    check_one_shape(function, **tensors)
    name, first = next(iter(tensors.items()))
    if first.dim() != len(shape.strip("(,)").split(",")):
        raise ValueError(f"{function}: {name} must have shape {shape}, but its shape is {list(first.shape)}")
    check_floating_point(function, **tensors)


def check_constant(function: str, name: str, tensor: Tensor, owner: str) -> None:
    """Raise if a gradient of a tensor would be recorded, although its owner gets none."""
    if (torch.is_grad_enabled() and tensor.requires_grad) or has_tangent(tensor):
        raise RuntimeError(
            f"{function}: {name} must not require grad, because {owner} gets no gradient, but it"
            f" {'has a tangent' if has_tangent(tensor) else 'does'}; pass {name}.detach()"
        )


def choose(condition: Tensor, numbers: tuple[float, float], like: Tensor) -> Tensor:
    """Return the first number where a condition holds, else the second, in the dtype of ``like``."""
    # Not torch.where of numbers, which it would convert to tensors of the default dtype.
    first, second = (torch.full_like(condition, number, dtype=like.dtype) for number in numbers)
    return torch.where(condition, first, second)
