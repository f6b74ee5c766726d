"""The autograd Functions of the linear cross entropy, with the fused operators as kernels where they apply."""

from collections.abc import Sequence
from typing import Any

from torch_aclnn_ops.functional._function import EagerOrCompiled
from torch_aclnn_ops.functional.linear_cross_entropy.rows import RowFunction, chunks_of, losses_of_rows, weighted
from torch_aclnn_ops.ops import (
    fused_cross_entropy_loss_with_max_sum,
    fused_linear_cross_entropy_loss_grad,
    fused_linear_online_max_sum,
)
from torch_aclnn_ops.ops._derivatives import in_functorch_transform, is_batched
from torch_aclnn_ops.ops._paths import note

import torch
from torch import Tensor

# input, linear_weight, linear_bias, target, target_weight, smoothing_weight, class_weight
_BY_ROW = (True, False, False, True, True, True, False)
_TENSORS = len(_BY_ROW)
_losses = RowFunction(losses_of_rows, _BY_ROW, (True,))


def linear_cross_entropy_losses(*args: Any) -> Tensor:
    """Compute the loss of every row.

    Args:
        *args: the arguments of :func:`losses_of_rows`, and the rows per chunk (``None`` leaves them to the kernel).

    Returns:
        The losses, shape (N,), in float32, or float64 for float64 inputs.
    """
    losses: Tensor = _linear_cross_entropy(*args, *_statistics(*args))
    return losses


def _statistics(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    target_weight: Tensor,
    smoothing_weight: Tensor | None,
    class_weight: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor | None, ...]:
    """Reduce the logits with the fused operator, or return ``None`` for each result where it cannot serve.

    It can for indices as targets, without bias and smoothing, and where the chunk is its own choice. Batched, it would
    hold the logits of all rows, and compiled inside a transform its derivatives are not traced.
    """
    reasons = {
        "of linear_bias": linear_bias is not None,
        "of label_smoothing": smoothing_weight is not None,
        "of chunk_size": chunk_size is not None,
        "the targets are probabilities": target.is_floating_point(),
        "vmap or a compiled transform runs over it": _is_transformed(input, linear_weight, target),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        note("linear_cross_entropy", f"formula in torch calls, because {reason}")
        return (None,) * 5
    with torch.no_grad():
        *statistics, _ = fused_linear_online_max_sum(
            input.detach(), linear_weight.detach(), target, 0, linear_weight.shape[0], False
        )
    return tuple(statistics)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss of every row, with ``fused_linear_cross_entropy_loss_grad`` as backward kernel where it can serve.

    Its arguments are those of :func:`linear_cross_entropy_losses` and the five results of
    ``fused_linear_online_max_sum`` (maximum, sum, predicted logit, packed mask, masked target), each ``None`` where
    another path is taken. They are functions of input and weight, and the derivatives take them as such.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        target_weight: Tensor,
        smoothing_weight: Tensor | None,
        class_weight: Tensor | None,
        chunk_size: int | None,
        logits_max: Tensor | None,
        sum_exp_logits: Tensor | None,
        predicted_logits: Tensor | None,
        target_mask: Tensor | None,
        masked_target: Tensor | None,
    ) -> Tensor:
        """Compute the losses."""
        if logits_max is None:
            tensors = (input, linear_weight, linear_bias, target, target_weight, smoothing_weight, class_weight)
            return _formula(*tensors, chunk_size)
        losses, _ = fused_cross_entropy_loss_with_max_sum(logits_max, sum_exp_logits, predicted_logits)
        return weighted(losses, target_weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the derivatives need."""
        tensors, ctx.chunk_size, statistics = inputs[:_TENSORS], inputs[_TENSORS], inputs[_TENSORS + 1 :]
        logits_max, sum_exp_logits, _, target_mask, masked_target = statistics
        saved = (*tensors, logits_max, sum_exp_logits, target_mask, masked_target)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)  # functorch wants the same tensors for both

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate by the arguments that need it."""
        positions = frozenset(i for i in range(_TENSORS) if ctx.needs_input_grad[i])  # to functorch, not a tree
        differentiate: Any = _gradients if torch.compiler.is_compiling() else _LinearCrossEntropyBackwardFunction.apply
        gradients = iter(differentiate(grad_output, *ctx.saved_tensors, ctx.chunk_size, positions))
        return tuple(next(gradients) if i in positions else None for i in range(len(ctx.needs_input_grad)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """Push tangents forward."""
        tensors = ctx.saved_tensors[:_TENSORS]
        positions, given = _present(tangents[:_TENSORS])
        chunks = chunks_of(*_rows_and_classes(tensors), ctx.chunk_size)
        return _losses.jvp(tensors, positions, given, chunks)[0]


def _formula(*args: Any) -> Tensor:
    """Compute the losses in differentiable torch calls, chunk by chunk; without the operator's statistics."""
    tensors, chunk_size = args[:_TENSORS], args[_TENSORS]
    (losses,) = _losses(tensors, chunks_of(*_rows_and_classes(tensors), chunk_size))
    return losses


_linear_cross_entropy = EagerOrCompiled(LinearCrossEntropyFunction, _formula)


def _gradients(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    target_weight: Tensor,
    smoothing_weight: Tensor | None,
    class_weight: Tensor | None,
    logits_max: Tensor | None,
    sum_exp_logits: Tensor | None,
    target_mask: Tensor | None,
    masked_target: Tensor | None,
    chunk_size: int | None,
    positions: frozenset[int],
) -> tuple[Tensor, ...]:
    """Pull the losses' gradient back to the arguments at ``positions``."""
    # The operator makes both gradients or none. It may write to a softmax, so PyTorch does not batch it.
    if logits_max is not None and positions == {0, 1} and not _is_transformed(grad, input, linear_weight):
        # The operator's mask does not silence a row, a zero gradient does.
        row_gradient = weighted(grad, target_weight)
        gradients: tuple[Tensor, ...] = fused_linear_cross_entropy_loss_grad.run(
            row_gradient, input, linear_weight, target_mask, masked_target, logits_max, sum_exp_logits
        )
        return gradients
    if logits_max is not None:
        note("fused_linear_cross_entropy_loss_grad", "formula in torch calls, because not both gradients are needed")
    args = (input, linear_weight, linear_bias, target, target_weight, smoothing_weight, class_weight)
    return _losses.vjp(args, sorted(positions), (grad,), chunks_of(input.shape[0], linear_weight.shape[0], chunk_size))


class _LinearCrossEntropyBackwardFunction(torch.autograd.Function):
    """The gradients as a function that can be differentiated itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _gradients(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.chunk_size, ctx.positions = inputs
        ctx.save_for_backward(*tensors[: 1 + _TENSORS])
        ctx.save_for_forward(*tensors[: 1 + _TENSORS])

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
        gradients = function.jvp(args, positions, given, chunks_of(*_rows_and_classes(args[1:]), ctx.chunk_size))
        like = (args[1 + position] for position in sorted(ctx.positions))
        return tuple(gradient.to(arg.dtype) for gradient, arg in zip(gradients, like, strict=True))


def _gradients_of_rows(positions: frozenset[int]) -> RowFunction:
    """Make the vjp of the losses, a function of their gradient and their arguments, one that can be differentiated."""
    ordered = sorted(positions)

    def gradients(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        _, pull_back = _losses.linearize(args, ordered)
        return pull_back(grad)

    return RowFunction(gradients, (True, *_BY_ROW), [_BY_ROW[position] for position in ordered])


def _present(tangents: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    present = [(i, tangent) for i, tangent in enumerate(tangents) if tangent is not None]
    return [i for i, _ in present], [tangent for _, tangent in present]


def _is_transformed(*tensors: Tensor) -> bool:
    """Return whether the call is batched by ``vmap``, or is compiled inside any transform."""
    if torch.compiler.is_compiling():
        return in_functorch_transform()
    return any(map(is_batched, tensors))


def _rows_and_classes(args: Sequence[Any]) -> tuple[int, int]:
    return args[0].shape[0], args[1].shape[0]
