"""The mean squared error, with ``mse_loss_backward`` as its backward kernel."""

from collections.abc import Callable

from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled, NativeFunction
from torch_aclnn_ops._checks import Reduction, drop_in
from torch_aclnn_ops._tensors import widen, without_autocast
from torch_aclnn_ops._torch_compat.private import is_any_autocast_enabled
from torch_aclnn_ops.functional._drop_in import call_torch_function, check_tensors
from torch_aclnn_ops.functional._loss_function import (
    are_supported,
    broadcast,
    has_kernel,
    has_native_gradient,
    loss_function,
    reduction_number,
    reduction_of_flags,
    warn_if_sizes_differ,
)
from torch_aclnn_ops.functional._loss_function import reduce as reduce_losses
from torch_aclnn_ops.ops import mse_loss_backward

import torch
from torch import Tensor

_native_loss: Callable[..., Tensor] = torch.ops.aten.mse_loss.default


@without_autocast
def _loss(input: Tensor, target: Tensor, reduction: int) -> Tensor:
    if has_kernel("mse_loss", input):
        return _native_loss(input, target, reduction)
    return reduce_losses((widen(input) - widen(target)).square(), reduction).to(input.dtype)


_native_backward = torch.ops.aten.mse_loss_backward.default


def _grad_input(grad_output: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor:
    backward = (
        _native_backward
        if has_native_gradient(mse_loss_backward.name, grad_output, input, target)
        else mse_loss_backward.apply
    )
    gradient: Tensor = backward(grad_output, input, target, reduction)
    return gradient


MSELossFunction = loss_function("MSELossFunction", _loss, _grad_input, grad_target=None)
MSELossFunction.__doc__ = """Squared error of two tensors with the same shape and dtype.

The arguments are ``input``, ``target`` and ``reduction``: 0 (none), 1 (mean) or 2 (sum).
"""

_mse_loss = EagerOrCompiled(MSELossFunction, _loss, native=NativeFunction("mse_loss", mse_loss_backward.why_not_dtype))
_torch_mse_loss: Callable[..., Tensor] = torch.nn.functional.mse_loss  # its stub lacks weight


@drop_in
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the mean squared error, a drop-in replacement for :func:`torch.nn.functional.mse_loss`.

    Args:
        input: Predicted values, any shape, floating point.
        target: Ground truth values, broadcastable with input (with a warning if the shapes differ).
        size_average: Deprecated, see ``reduction``.
        reduce: Deprecated, see ``reduction``.
        reduction: ``"none"``, ``"mean"`` (over the elements after broadcasting) or ``"sum"``.
        weight: Rescaling factors, input's shape; ``"mean"`` divides by their sum.

    Returns:
        The loss in the promoted dtype: a scalar, or a tensor of the broadcast shape for ``"none"``.

    Raises:
        RuntimeError: The shapes do not broadcast.
        ValueError: ``reduction`` is invalid, or the shapes of ``weight`` and ``input`` differ.

    Example:
        >>> input = torch.tensor([0.0, 1.0, 2.0, 3.0], requires_grad=True)
        >>> loss = mse_loss(input, torch.ones(4))
        >>> loss.backward()
        >>> loss.item(), input.grad.tolist()
        (1.5, [-0.5, 0.0, 0.5, 1.0])

    Source: backward kernel aclnnMseLossBackward.
    """
    is_legacy = size_average is not None or reduce is not None
    is_supported = are_supported("mse_loss", input, target, weight)
    if is_supported and weight is not None:
        # PyTorch raises the errors for an invalid weight.
        is_supported = weight.size() == input.size() and (is_legacy or reduction in ("none", "mean", "sum"))
    if not is_supported:
        check_tensors("mse_loss", ("weight",), input=input, target=target, weight=weight)
        return call_torch_function(_torch_mse_loss, input, target, size_average, reduce, reduction, weight)
    dtype = input.dtype
    are_alike = dtype is target.dtype and input.shape == target.shape and not is_any_autocast_enabled()
    if not are_alike:
        warn_if_sizes_differ(input, target)
    if is_legacy:
        reduction = reduction_of_flags(size_average, reduce)
    if not are_alike:
        dtype = torch.promote_types(dtype, target.dtype)
        input, target = broadcast(input, target)
    number = reduction_number("mse_loss", reduction)
    if weight is None:
        loss: Tensor = _mse_loss(input, target, number)
        return loss
    # Autocast applies to PyTorch's loss, but not to its weighted loss.
    weighted = _mse_loss(input, target, 0).to(dtype) * weight
    return weighted.sum() / weight.sum() if reduction == "mean" else reduce_losses(weighted, number)
