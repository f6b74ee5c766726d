"""The autograd Functions of the linear cross entropy, with the fused operators as kernels where they apply."""

from collections.abc import Sequence
from typing import Any

from torch_aclnn_ops.functional._function import EagerOrCompiled
from torch_aclnn_ops.functional.linear_cross_entropy.rows import RowFunction, chunks_of, losses_of_rows
from torch_aclnn_ops.ops import (
    fused_cross_entropy_loss_with_max_sum,
    fused_linear_cross_entropy_loss_grad,
    fused_linear_online_max_sum,
)

import torch
from torch import Tensor

# input, linear_weight, linear_bias, target, target_weight, smoothing_weight, class_weight
_BY_ROW = (True, False, False, True, True, True, False)
_losses = RowFunction(losses_of_rows, _BY_ROW, (True,))


def is_fused(
    linear_bias: Tensor | None, target: Tensor, smoothing_weight: Tensor | None, chunk_size: int | None
) -> bool:
    """Return whether the fused operators can serve: indices as targets, neither bias nor smoothing, no chosen chunk."""
    return linear_bias is None and smoothing_weight is None and chunk_size is None and not target.is_floating_point()


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss of every row, and what the fused backward kernel needs (empty where another path is taken).

    The arguments are those of :func:`losses_of_rows` and the rows per chunk (``None`` leaves the choice to the kernel).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """Compute the losses in float32, or float64 for float64 inputs."""
        *tensors, chunk_size = args
        input, linear_weight, linear_bias, target, target_weight, smoothing_weight, _ = tensors
        if not is_fused(linear_bias, target, smoothing_weight, chunk_size):
            (losses,) = _losses(tensors, chunks_of(*_rows_and_classes(args), chunk_size))
            return losses, *(losses.new_empty(0) for _ in range(4))
        logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, _ = (
            fused_linear_online_max_sum.overload(input, linear_weight, target, 0, linear_weight.shape[0])
        )
        losses, _ = fused_cross_entropy_loss_with_max_sum.overload(logits_max, sum_exp_logits, predicted_logits)
        losses = torch.where(target_weight == 0, 0, losses * target_weight)
        return losses, logits_max, sum_exp_logits, target_mask, masked_target

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save what the derivatives need."""
        *tensors, ctx.chunk_size = inputs
        statistics = output[1:]
        ctx.mark_non_differentiable(*statistics)
        ctx.save_for_backward(*tensors, *statistics)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate by the arguments that need it; weights of rows never do."""
        positions = tuple(i for i in range(len(_BY_ROW)) if ctx.needs_input_grad[i])
        differentiate: Any = _gradients if torch.compiler.is_compiling() else _LinearCrossEntropyBackwardFunction.apply
        gradients = iter(differentiate(grad_outputs[0], *ctx.saved_tensors, ctx.chunk_size, positions))
        return *(next(gradients) if i in positions else None for i in range(len(_BY_ROW))), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Push tangents forward."""
        args = ctx.saved_tensors[: len(_BY_ROW)]
        positions, given = _present(tangents)
        chunks = chunks_of(*_rows_and_classes(args), ctx.chunk_size)
        return *_losses.jvp(args, positions, given, chunks), None, None, None, None


linear_cross_entropy_losses = EagerOrCompiled(LinearCrossEntropyFunction)


def _gradients(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    target_weight: Tensor,
    smoothing_weight: Tensor | None,
    class_weight: Tensor | None,
    logits_max: Tensor,
    sum_exp_logits: Tensor,
    target_mask: Tensor,
    masked_target: Tensor,
    chunk_size: int | None,
    positions: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """Pull the losses' gradient back to the arguments at ``positions``."""
    if positions == (0, 1) and is_fused(linear_bias, target, smoothing_weight, chunk_size):
        # The operator's mask does not silence a row, a zero gradient does.
        row_gradient = torch.where(target_weight == 0, 0, grad * target_weight)
        gradients: tuple[Tensor, ...] = fused_linear_cross_entropy_loss_grad.overload(
            row_gradient, input, linear_weight, target_mask, masked_target, logits_max, sum_exp_logits
        )
        return gradients
    args = (input, linear_weight, linear_bias, target, target_weight, smoothing_weight, class_weight)
    return _losses.vjp(args, positions, (grad,), chunks_of(input.shape[0], linear_weight.shape[0], chunk_size))


class _LinearCrossEntropyBackwardFunction(torch.autograd.Function):
    """The gradients as a function that can be differentiated itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _gradients(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.chunk_size, ctx.positions = inputs
        ctx.save_for_backward(*tensors[: 1 + len(_BY_ROW)])
        ctx.save_for_forward(*tensors[: 1 + len(_BY_ROW)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        args, function = ctx.saved_tensors, _gradients_of_rows(ctx.positions)
        positions = [i for i in range(len(args)) if ctx.needs_input_grad[i]]
        chunks = chunks_of(*_rows_and_classes(args[1:]), ctx.chunk_size)
        gradients = iter(function.vjp(args, positions, grad_outputs, chunks))
        return tuple(next(gradients) if needed else None for needed in ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        args, function = ctx.saved_tensors, _gradients_of_rows(ctx.positions)
        positions, given = _present(tangents[: len(args)])
        return function.jvp(args, positions, given, chunks_of(*_rows_and_classes(args[1:]), ctx.chunk_size))


def _gradients_of_rows(positions: tuple[int, ...]) -> RowFunction:
    """Make the vjp of the losses, a function of their gradient and their arguments, one that can be differentiated."""

    def gradients(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        _, vjp = _losses.linearize(args, positions)
        result: tuple[Tensor, ...] = vjp((grad,))
        return result

    return RowFunction(gradients, (True, *_BY_ROW), [_BY_ROW[position] for position in positions])


def _present(tangents: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    present = [(i, tangent) for i, tangent in enumerate(tangents) if tangent is not None]
    return [i for i, _ in present], [tangent for _, tangent in present]


def _rows_and_classes(args: Sequence[Any]) -> tuple[int, int]:
    return args[0].shape[0], args[1].shape[0]
