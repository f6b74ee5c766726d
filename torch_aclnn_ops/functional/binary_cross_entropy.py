"""The binary cross entropy, with ``binary_cross_entropy_backward`` as its backward kernel."""

from collections.abc import Callable

from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled, NativeFunction
from torch_aclnn_ops._checks import Reduction, drop_in, is_expandable
from torch_aclnn_ops._tensors import widen, without_autocast
from torch_aclnn_ops._torch_compat.private import is_any_autocast_enabled
from torch_aclnn_ops.functional._drop_in import (
    call_torch_function,
    check_no_tangent,
    check_tensors,
    float32_autocast_dtype,
)
from torch_aclnn_ops.functional._loss_function import (
    are_supported,
    has_kernel,
    has_native_gradient,
    loss_function,
    reduction_number,
    reduction_of_flags,
)
from torch_aclnn_ops.functional._loss_function import reduce as reduce_losses
from torch_aclnn_ops.ops import binary_cross_entropy_backward

import torch
from torch import Tensor

_native_loss: Callable[..., Tensor] = torch.ops.aten.binary_cross_entropy.default


@without_autocast  # which raises for this operator on some devices
def _loss(input: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    """Compute the loss with logarithms clamped to at least -100, as in PyTorch."""
    if has_kernel("binary_cross_entropy", input):
        return _native_loss(input, target, weight, reduction)
    probability, truth = widen(input), widen(target)
    losses = -(truth * probability.log().clamp(min=-100) + (1 - truth) * (-probability).log1p().clamp(min=-100))
    if weight is not None:
        losses = losses * widen(weight)
    return reduce_losses(losses, reduction).to(input.dtype)


def _formula(input: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    """Compute the loss with a product that has the tangent of the weight, which PyTorch's loss drops."""
    if weight is None:
        return _loss(input, target, None, reduction)
    return reduce_losses(_loss(input, target, None, 0) * weight, reduction)


_native_backward = torch.ops.aten.binary_cross_entropy_backward.default


def _grad_input(grad_output: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    # In float16 the native kernel's lower bound of the denominator is 0, and the gradient at 0 and 1 would be NaN.
    is_native = input.dtype is not torch.float16 and has_native_gradient(
        binary_cross_entropy_backward.name, grad_output, input, target
    )
    backward = _native_backward if is_native else binary_cross_entropy_backward.apply
    gradient: Tensor = backward(grad_output, input, target, weight, reduction)
    return gradient


def _grad_target(grad_output: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    # The loss is linear in the target: d/dy of -(y log x + (1 - y) log(1 - x)) is log(1 - x) - log x.
    probability = widen(input)
    gradient = ((-probability).log1p() - probability.log()) * grad_output
    if weight is not None:
        gradient = gradient * weight
    return (gradient / input.numel() if reduction == 1 else gradient).to(input.dtype)


BinaryCrossEntropyFunction = loss_function(
    "BinaryCrossEntropyFunction",
    _loss,
    _grad_input,
    _grad_target,
    tensors=("input", "target", "weight"),
)
BinaryCrossEntropyFunction.__doc__ = """Binary cross entropy of tensors with the same shape and dtype.

The arguments are ``input``, ``target``, ``weight`` (or ``None``) and ``reduction``: 0 (none), 1 (mean) or 2 (sum).
"""

_binary_cross_entropy = EagerOrCompiled(
    BinaryCrossEntropyFunction,
    _formula,
    native=NativeFunction("binary_cross_entropy", binary_cross_entropy_backward.why_not_dtype),
)
_torch_binary_cross_entropy = torch.nn.functional.binary_cross_entropy


@drop_in
def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the binary cross entropy, a drop-in replacement for :func:`torch.nn.functional.binary_cross_entropy`.

    Under autocast it runs in float32 on every device; PyTorch raises on some.

    Args:
        input: Probabilities in [0, 1], any shape, floating point.
        target: Probabilities in [0, 1], input's shape and dtype.
        weight: Rescaling factors, broadcastable to input's shape; not differentiable.
        size_average: Deprecated, see ``reduction``.
        reduce: Deprecated, see ``reduction``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss in input's dtype: a scalar, or a tensor of input's shape for ``"none"``.

    Raises:
        RuntimeError: ``input`` is outside [0, 1] (checked on the CPU), dtypes differ, or ``weight`` does not broadcast
            or requires grad.
        ValueError: The shapes of input and target differ, or ``reduction`` is invalid.

    Example:
        >>> input = torch.tensor([0.3], requires_grad=True)
        >>> loss = binary_cross_entropy(input, torch.tensor([0.5]))
        >>> loss.backward()
        >>> round(loss.item(), 6), round(input.grad.item(), 6)
        (0.780324, -0.952381)

    Source: backward kernel aclnnBinaryCrossEntropyBackward.
    """
    if not _is_supported(input, target, weight):
        check_tensors("binary_cross_entropy", ("weight",), input=input, target=target, weight=weight)
        return call_torch_function(_torch_binary_cross_entropy, input, target, weight, size_average, reduce, reduction)
    dtype = float32_autocast_dtype(input) if is_any_autocast_enabled() else input.dtype
    if weight is not None:
        check_no_tangent("binary_cross_entropy", weight)
        weight = weight.to(dtype).expand(input.shape)
    if size_average is not None or reduce is not None:
        reduction = reduction_of_flags(size_average, reduce)
    if input.dtype is not dtype or target.dtype is not dtype:
        input, target = input.to(dtype), target.to(dtype)
    number = reduction_number("binary_cross_entropy", reduction)
    loss: Tensor = _binary_cross_entropy(input, target, weight, number)
    return loss


def _is_supported(input: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Return whether the arguments are supported; PyTorch raises the errors for invalid ones."""
    if not are_supported("binary_cross_entropy", input, target, weight) or target.shape != input.shape:
        return False
    if weight is None and target.dtype is input.dtype:
        return True
    dtype = float32_autocast_dtype(input)
    if target.dtype is not input.dtype and float32_autocast_dtype(target) is not dtype:
        return False
    return weight is None or (
        float32_autocast_dtype(weight) is dtype and not weight.requires_grad and is_expandable(weight, input.shape)
    )
