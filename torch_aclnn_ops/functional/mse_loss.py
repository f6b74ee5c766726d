"""The mean squared error, with ``mse_loss_backward`` as its backward kernel."""

import warnings
from collections.abc import Callable
from typing import Any

from torch_aclnn_ops._torch_compat import get_enum, legacy_get_string
from torch_aclnn_ops.functional._drop_in import float32_autocast_dtype, is_ordinary, on_one_device
from torch_aclnn_ops.functional._forward import mse_loss_forward
from torch_aclnn_ops.functional._function import EagerOrCompiled
from torch_aclnn_ops.ops import mse_loss_backward

import torch
from torch import Tensor


class MSELossFunction(torch.autograd.Function):
    """Squared error of two tensors of one shape and dtype; ``reduction`` is 0 (none), 1 (mean) or 2 (sum)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, target: Tensor, reduction: int) -> Tensor:
        """Compute the loss."""
        if input.shape != target.shape or input.dtype != target.dtype:
            raise ValueError(
                "MSELossFunction: target must have input's shape and dtype,"
                f" {list(input.shape)} and {input.dtype}, but it has {list(target.shape)} and {target.dtype}"
            )
        return mse_loss_forward(input, target, reduction)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the derivatives need."""
        input, target, ctx.reduction = inputs
        ctx.save_for_backward(input, target)
        ctx.save_for_forward(input, target)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Call the operator; the loss depends on ``input - target`` alone, so target's gradient is the negative."""
        input, target = ctx.saved_tensors
        needs_input, needs_target, _ = ctx.needs_input_grad
        gradient = mse_loss_backward(grad_output, input, target, ctx.reduction)
        return gradient if needs_input else None, -gradient if needs_target else None, None

    @staticmethod
    def jvp(ctx: Any, input_tangent: Tensor | None, target_tangent: Tensor | None, _: None) -> Tensor:
        """Push tangents forward."""
        input, target = ctx.saved_tensors
        gradient = mse_loss_backward(torch.ones_like(input), input, target, ctx.reduction)
        tangents = [input_tangent, None if target_tangent is None else -target_tangent]
        product: Tensor = gradient * sum(tangent for tangent in tangents if tangent is not None)
        return product if ctx.reduction == 0 else product.sum()


_mse_loss = EagerOrCompiled(MSELossFunction, mse_loss_forward)
_torch_mse_loss: Callable[..., Tensor] = torch.nn.functional.mse_loss  # its stub lacks weight


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the squared error, a drop-in for :func:`torch.nn.functional.mse_loss`.

    Args:
        input: predicted values, any shape, floating point.
        target: true values, a shape that broadcasts with input's (with a warning where they differ).
        size_average: deprecated, see ``reduction``.
        reduce: deprecated, see ``reduction``.
        reduction: ``"none"``, ``"mean"`` (of the elements after broadcasting) or ``"sum"``.
        weight: factors for the squared errors, input's shape; ``"mean"`` divides by their sum.

    Returns:
        The loss: 0-dim, or with ``"none"`` of the broadcast shape; its dtype is the promoted dtype of the arguments.

    Raises:
        RuntimeError: the shapes do not broadcast.
        ValueError: ``reduction`` is none of the three, or ``weight`` has another shape than ``input``.

    Example:
        >>> input = torch.tensor([0.0, 1.0, 2.0, 3.0], requires_grad=True)
        >>> loss = mse_loss(input, torch.ones(4))
        >>> loss.backward()
        >>> loss.item(), input.grad.tolist()
        (1.5, [-0.5, 0.0, 0.5, 1.0])

    Source: backward kernel aclnnMseLossBackward.
    """
    legacy = size_average is not None or reduce is not None
    if not _is_ours(input, target, weight, "mean" if legacy else reduction):
        return _torch_mse_loss(input, target, size_average, reduce, reduction, weight)
    if target.size() != input.size() and not torch.compiler.is_compiling():
        warnings.warn(
            f"Using a target size ({target.size()}) that is different to the input size ({input.size()}). "
            "The loss broadcasts them, which is rarely what was meant; give both the same shape.",
            stacklevel=2,
        )
    if legacy:
        reduction = legacy_get_string(size_average, reduce)
    if weight is not None:
        return _weighted_mse_loss(input, target, reduction, weight)
    return _broadcast_mse_loss(input, target, reduction)


def _is_ours(input: Tensor, target: Tensor, weight: Tensor | None, reduction: str) -> bool:
    """Return whether torch would accept the arguments; it makes the errors for those that it would not."""
    if not is_ordinary(input, target) or not on_one_device("mse_loss", input=input, target=target, weight=weight):
        return False
    if weight is None:
        return True
    return is_ordinary(weight) and weight.size() == input.size() and reduction in ("none", "mean", "sum")


def _broadcast_mse_loss(input: Tensor, target: Tensor, reduction: str) -> Tensor:
    dtype = torch.promote_types(float32_autocast_dtype(input), float32_autocast_dtype(target))
    input, target = torch.broadcast_tensors(input.to(dtype), target.to(dtype))
    loss: Tensor = _mse_loss(input, target, get_enum(reduction))
    return loss


def _weighted_mse_loss(input: Tensor, target: Tensor, reduction: str, weight: Tensor) -> Tensor:
    # Autocast widens torch's loss, but not its weighted loss.
    dtype = torch.promote_types(input.dtype, target.dtype)
    weighted = _broadcast_mse_loss(input, target, "none").to(dtype) * weight
    if reduction == "none":
        return weighted
    return weighted.sum() if reduction == "sum" else weighted.sum() / weight.sum()
