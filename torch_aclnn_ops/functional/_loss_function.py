"""Shared by the losses of an input and a target: the autograd Function, argument handling and reduction."""

import warnings
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops._autograd.derivatives import any_differentiated, in_functorch_transform
from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._checks import Reduction, why_not_dtype, why_not_rank
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._tensors import HALF_DTYPES
from torch_aclnn_ops.functional._drop_in import float32_autocast_dtype, is_ordinary, on_one_device

import torch
from torch import Tensor
from torch.autograd import Function

Gradient = Callable[..., Tensor]

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def loss_function(
    name: str,
    loss: Callable[..., Tensor],
    grad_input: Gradient,
    grad_target: Gradient | None,
    tensors: Sequence[str] = ("input", "target"),
) -> type[Function]:
    """Create the autograd Function of a loss, whose arguments are ``*tensors``, further options and ``reduction``.

    Args:
        name: The name of the Function.
        loss: Computes the loss from the Function's arguments.
        grad_input: Computes the gradient of ``input`` from ``grad_output`` and the Function's arguments.
        grad_target: Computes the gradient of ``target`` likewise; ``None`` if the loss depends on ``input - target``
            only, so that it is the negative of ``grad_input``.
        tensors: The names of ``input``, ``target``, and optionally a weight, which is not differentiable.
    """
    number = len(tensors)

    def target_gradient(*arguments: Any) -> Tensor:
        return -grad_input(*arguments) if grad_target is None else grad_target(*arguments)

    class LossFunction(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Tensor:
            _check_same_shape_and_dtype(name, tensors, args)
            return loss(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            tensors, ctx.options = inputs[:number], inputs[number:]
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            if not torch.compiler.is_compiling():
                ctx.set_materialize_grads(False)  # do not materialize a zero tangent for the target

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
            needs = ctx.needs_input_grad
            if grad_output is None:
                return (None,) * len(needs)
            if number > 2 and needs[2]:
                raise RuntimeError(
                    f"{name}: there is no derivative with respect to weight;"
                    " detach it, or multiply the unreduced loss by it"
                )
            arguments = (*ctx.saved_tensors, *ctx.options)
            gradient = grad_input(grad_output, *arguments) if needs[0] else None
            gradient_of_target = None
            if needs[1]:
                if grad_target is None and gradient is not None:
                    gradient_of_target = -gradient
                else:
                    gradient_of_target = target_gradient(grad_output, *arguments)
            return gradient, gradient_of_target, *(None,) * (len(arguments) - 2)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
            # Of the unreduced loss: in float16 the gradient of a mean of many, which is divided by their number, is 0.
            arguments = (*ctx.saved_tensors, *ctx.options[:-1], _REDUCTIONS["none"])
            product = torch.zeros_like(arguments[0])
            input_tangent, target_tangent, *_ = tangents
            if input_tangent is not None:
                product = product + grad_input(input_tangent, *arguments)
            if target_tangent is not None:
                product = product + target_gradient(target_tangent, *arguments)
            return reduce(product, ctx.options[-1])

    # Dynamo, where no gradient is needed, passes ctx to a forward with another number of parameters.
    parameters = [Parameter(one, Parameter.POSITIONAL_ONLY) for one in (*tensors, "reduction")]
    LossFunction.forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    LossFunction.__name__ = LossFunction.__qualname__ = name
    return LossFunction


def _check_same_shape_and_dtype(name: str, tensors: Sequence[str], args: Sequence[Any]) -> None:
    input = args[0]
    if (len(tensors) == 2 or args[2] is None) and input.dtype is args[1].dtype and input.shape == args[1].shape:
        return
    for argument, tensor in zip(tensors, args[: len(tensors)], strict=True):  # equal lengths, for Dynamo of 2.9
        if tensor is not None and (tensor.shape != input.shape or tensor.dtype != input.dtype):
            raise ValueError(
                f"{name}: {argument} must have input's shape and dtype, {list(input.shape)} and {input.dtype},"
                f" but it has {list(tensor.shape)} and {tensor.dtype}"
            )


def has_kernel(function: str, input: Tensor) -> bool:
    """Return whether PyTorch's kernel of a loss supports ``input``; on an NPU this is a CANN operator."""
    if input.is_cpu or input.device.type != "npu":
        return True
    soc = _extension.soc()
    reason = None if soc is None else why_not_rank(["input"], [input]) or why_not_dtype(soc, ["input"], input)
    if reason is not None:
        log_call(function, Implementation.FALLBACK, lambda: reason)
        _extension.check_queue(function)
    return reason is None


def has_native_gradient(operator: str, grad_output: Tensor, input: Tensor, target: Tensor) -> bool:
    """Return whether to use PyTorch's backward kernel, with PyTorch's rounding: for 16-bit tensors on the CPU.

    It needs half of the formula's memory. Higher derivatives and traced calls use the raw operator.
    """
    is_native = (
        input.dtype in HALF_DTYPES
        and input.is_cpu
        and not torch.compiler.is_compiling()
        and not in_functorch_transform()
        and not any_differentiated((grad_output, input, target))
    )
    if is_native:
        log_call(operator, Implementation.TORCH, lambda: f"the tensors are on cpu in {input.dtype}")
    return is_native


def reduction_number(function: str, reduction: str) -> int:
    """Return the value of a reduction in ``at::Reduction``; raise PyTorch's error for an invalid name."""
    number = _REDUCTIONS.get(reduction) if isinstance(reduction, str) else None
    if number is not None:
        return number
    if reduction == "elementwise_mean":
        warnings.warn("reduction='elementwise_mean' is deprecated. Please use reduction='mean' instead.", stacklevel=3)
        return 1
    raise ValueError(
        f"{reduction} is not a valid value for reduction\n"
        f'{function}: reduction must be "none", "mean" or "sum", but it is {reduction!r}'
    )


def reduction_of_flags(size_average: bool | None, reduce: bool | None) -> Reduction:
    """Convert PyTorch's deprecated ``size_average`` and ``reduce`` to a reduction, with PyTorch's warning."""
    reduction: Reduction
    if reduce is not None and not reduce:
        reduction = "none"
    else:
        reduction = "mean" if size_average is None or size_average else "sum"
    warnings.warn(
        f"size_average and reduce args will be deprecated, please use reduction='{reduction}' instead.", stacklevel=3
    )
    return reduction


def reduce(losses: Tensor, reduction: int) -> Tensor:
    """Apply a reduction to the losses of all elements."""
    if reduction == 0:
        return losses
    return losses.mean() if reduction == 1 else losses.sum()


def are_supported(function: str, input: Tensor, target: Tensor, weight: Tensor | None = None) -> bool:
    """Return whether a loss supports these tensors, instead of calling PyTorch's function."""
    if is_disabled() or not is_ordinary(input, target):
        return False
    if weight is None and (input.is_cpu and target.is_cpu or input.device == target.device):
        return True
    return (weight is None or is_ordinary(weight)) and on_one_device(
        function, input=input, target=target, weight=weight
    )


def warn_if_sizes_differ(input: Tensor, target: Tensor) -> None:
    """Emit PyTorch's warning if input and target differ in shape."""
    if input.shape != target.shape and not torch.compiler.is_compiling():
        warnings.warn(
            f"Using a target size ({target.size()}) that is different to the input size ({input.size()}). "
            "This will likely lead to incorrect results due to broadcasting. "
            "Please ensure they have the same size.",
            stacklevel=3,
        )


def broadcast(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Broadcast input and target, and cast them to the promoted dtype, or to float32 under autocast."""
    input_dtype, target_dtype = float32_autocast_dtype(input), float32_autocast_dtype(target)
    dtype = input_dtype if input_dtype is target_dtype else torch.promote_types(input_dtype, target_dtype)
    if input.dtype is not dtype or target.dtype is not dtype:
        input, target = input.to(dtype), target.to(dtype)
    if input.shape != target.shape:
        input, target = torch.broadcast_tensors(input, target)
    return input, target
