"""The binary cross entropy, with ``binary_cross_entropy_backward`` as its backward kernel."""

from typing import Any

from torch_aclnn_ops._torch_compat import get_enum, legacy_get_string
from torch_aclnn_ops.functional._drop_in import float32_autocast_dtype, is_ordinary, on_one_device, refuse_tangent
from torch_aclnn_ops.functional._forward import binary_cross_entropy_forward
from torch_aclnn_ops.functional._function import EagerOrCompiled
from torch_aclnn_ops.ops import binary_cross_entropy_backward

import torch
from torch import Tensor


class BinaryCrossEntropyFunction(torch.autograd.Function):
    """Binary cross entropy of tensors of one shape and dtype; ``reduction`` is 0 (none), 1 (mean) or 2 (sum)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
        """Compute the loss."""
        for name, tensor in (("target", target), ("weight", weight)):
            if tensor is not None and (tensor.shape != input.shape or tensor.dtype != input.dtype):
                raise ValueError(
                    f"BinaryCrossEntropyFunction: {name} must have input's shape and dtype,"
                    f" {list(input.shape)} and {input.dtype}, but it has {list(tensor.shape)} and {tensor.dtype}"
                )
        return binary_cross_entropy_forward(input, target, weight, reduction)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the derivatives need."""
        input, target, weight, ctx.reduction = inputs
        ctx.save_for_backward(input, target, weight)
        ctx.save_for_forward(input, target, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Call the operator for the input; torch calls suffice for the target."""
        input, target, weight = ctx.saved_tensors
        needs_input, needs_target, needs_weight, _ = ctx.needs_input_grad
        if needs_weight:
            raise RuntimeError(
                "binary_cross_entropy has no derivative with respect to weight;"
                " detach it, or multiply the unreduced loss by it"
            )
        input_gradient = target_gradient = None
        if needs_input:
            input_gradient = binary_cross_entropy_backward(grad_output, input, target, weight, ctx.reduction)
        if needs_target:
            target_gradient = _target_gradient(grad_output, input, weight, ctx.reduction)
        return input_gradient, target_gradient, None, None

    @staticmethod
    def jvp(ctx: Any, input_tangent: Tensor | None, target_tangent: Tensor | None, *_: None) -> Tensor:
        """Push tangents forward."""
        input, target, weight = ctx.saved_tensors
        ones = torch.ones_like(input)
        product = torch.zeros_like(input)
        if input_tangent is not None:
            gradient = binary_cross_entropy_backward(ones, input, target, weight, ctx.reduction)
            product = product + gradient * input_tangent
        if target_tangent is not None:
            product = product + _target_gradient(ones, input, weight, ctx.reduction) * target_tangent
        return product if ctx.reduction == 0 else product.sum()


def _target_gradient(grad_output: Tensor, input: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    # The loss is linear in the target: d/dy of -(y log x + (1 - y) log(1 - x)) is log(1 - x) - log x.
    gradient = ((1 - input).log() - input.log()) * grad_output
    if weight is not None:
        gradient = gradient * weight
    return gradient / input.numel() if reduction == 1 else gradient


_binary_cross_entropy = EagerOrCompiled(BinaryCrossEntropyFunction, binary_cross_entropy_forward)


def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute the cross entropy of probabilities, a drop-in for :func:`torch.nn.functional.binary_cross_entropy`.

    Under autocast it runs in float32 on every device, where torch refuses on some.

    Args:
        input: probabilities in [0, 1], any shape, floating point.
        target: probabilities in [0, 1], input's shape and dtype.
        weight: factors for the losses, a shape that broadcasts to input's; not differentiable.
        size_average: deprecated, see ``reduction``.
        reduce: deprecated, see ``reduction``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss in input's dtype: 0-dim, or with ``"none"`` of input's shape.

    Raises:
        RuntimeError: input is outside [0, 1] (on a CPU), dtypes differ, or ``weight`` does not broadcast or requires
            grad.
        ValueError: the shapes of input and target differ, or ``reduction`` is none of the three.

    Example:
        >>> input = torch.tensor([0.3], requires_grad=True)
        >>> loss = binary_cross_entropy(input, torch.tensor([0.5]))
        >>> loss.backward()
        >>> round(loss.item(), 6), round(input.grad.item(), 6)
        (0.780324, -0.952381)

    Source: backward kernel aclnnBinaryCrossEntropyBackward.
    """
    if not _is_ours(input, target, weight):
        return torch.nn.functional.binary_cross_entropy(input, target, weight, size_average, reduce, reduction)
    refuse_tangent("binary_cross_entropy", weight)
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    dtype = float32_autocast_dtype(input)
    if weight is not None:
        weight = weight.to(dtype).expand(input.shape)
    loss: Tensor = _binary_cross_entropy(input.to(dtype), target.to(dtype), weight, get_enum(reduction))
    return loss


def _is_ours(input: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Return whether torch would accept the arguments; it makes the errors for those that it would not."""
    others = (target,) if weight is None else (target, weight)
    if not is_ordinary(input, *others) or target.shape != input.shape:
        return False
    if not on_one_device("binary_cross_entropy", input=input, target=target, weight=weight):
        return False
    if any(float32_autocast_dtype(other) != float32_autocast_dtype(input) for other in others):
        return False
    return weight is None or not weight.requires_grad and _is_expandable(weight, input)


def _is_expandable(weight: Tensor, input: Tensor) -> bool:
    missing = input.dim() - weight.dim()
    return missing >= 0 and all(size in (1, input.shape[missing + i]) for i, size in enumerate(weight.shape))
