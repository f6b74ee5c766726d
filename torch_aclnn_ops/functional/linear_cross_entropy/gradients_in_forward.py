"""A loss that is one number, whose gradients are made in the forward pass: three matrix products, not four.

The first backward pass takes them. One that follows it, or one that is to be differentiated itself, computes the
logits again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_aclnn_ops.functional.linear_cross_entropy.statistics import statistics
from torch_aclnn_ops.ops._checks import values_are_readable
from torch_aclnn_ops.ops._derivatives import has_tangent, in_functorch_transform, is_batched, is_differentiated, vjp
from torch_aclnn_ops.ops.linear_cross_entropy import _kernels, chunked
from torch_aclnn_ops.ops.linear_cross_entropy._problem import Coefficients, Problem, cross_entropies, z_losses

import torch
from torch import Tensor


def makes_gradients_in_forward(problem: Problem, coefficients: Coefficients, predicted_tokens: bool) -> bool:
    """Return whether the sum of a call's losses is to be computed together with its gradients."""
    trained = _trained(problem)
    others = (problem.target, problem.class_weight, *coefficients)
    if not torch.is_grad_enabled() or not any(tensor is not None and tensor.requires_grad for tensor in trained):
        return False
    if in_functorch_transform() or any(map(is_differentiated, others)):
        return False
    if not torch.compiler.is_compiling() and any(map(_is_transformed, trained)):
        return False
    return _kernels.why_not_fused(problem, coefficients.weighted is not None, predicted_tokens) is not None


def loss_with_gradients(
    problem: Problem, coefficients: Coefficients, predicted_tokens: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the sum of all rows' losses.

    Args:
        problem: the arguments.
        coefficients: of the loss.
        predicted_tokens: whether the classes of the largest logits are returned.
    """
    if torch.compiler.is_compiling():
        needed = [tensor is not None and tensor.requires_grad for tensor in _trained(problem)]
        return chunked.loss(problem, coefficients, needed, predicted_tokens)
    apply: Any = _LossFunction.apply
    loss, tokens = apply(*_trained(problem), problem, coefficients, predicted_tokens)
    return loss, tokens


class _LossFunction(torch.autograd.Function):
    """The loss; never inside of a transform, so a context can hold the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        problem: Problem,
        coefficients: Coefficients,
        predicted_tokens: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(input, linear_weight, linear_bias, problem.target, problem.class_weight, *coefficients)
        # The tensors come from save_for_backward, where hooks see them.
        ctx.options = problem.options
        needed = ctx.needs_input_grad[:3]
        loss, ctx.gradients, tokens = _kernels.loss_and_gradients(problem, coefficients, needed, predicted_tokens)
        if tokens is not None:
            ctx.mark_non_differentiable(tokens)
        return loss, tokens

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        input, linear_weight, linear_bias, target, class_weight, *factors = ctx.saved_tensors
        trained = (input, linear_weight, linear_bias)
        needed, nothing = ctx.needs_input_grad[:3], (None, None, None)
        made, ctx.gradients = ctx.gradients, None
        if made is None or torch.is_grad_enabled():
            problem = Problem(input, linear_weight, linear_bias, target, class_weight, ctx.options)
            return *_recomputed(problem, Coefficients._make(factors), needed, grad_loss), *nothing
        if is_batched(grad_loss):
            ctx.gradients = made  # each sample's are a product of their own
            return *(
                None if one is None else (one * grad_loss).to(like.dtype) for one, like in _pairs(made, trained)
            ), *nothing
        if not (values_are_readable(grad_loss) and grad_loss.item() == 1):
            for gradient in made:
                if gradient is not None:
                    gradient.mul_(grad_loss)
        return *(None if one is None else one.to(like.dtype) for one, like in _pairs(made, trained)), *nothing


def _recomputed(
    problem: Problem, coefficients: Coefficients, needed: Sequence[bool], grad_loss: Tensor
) -> tuple[Tensor | None, ...]:
    """Differentiate the loss as a function that can be differentiated again."""
    names = ("input", "linear_weight", "linear_bias")
    selected: dict[str, Any] = {
        name: getattr(problem, name) for name, is_needed in zip(names, needed, strict=True) if is_needed
    }

    def loss(*values: Tensor) -> tuple[Tensor]:
        replaced = replace(problem, **dict[str, Any](zip(selected, values, strict=True)))
        reduced = statistics(replaced, coefficients.weighted is not None)
        losses = cross_entropies(reduced, coefficients)
        if coefficients.square is not None:
            losses = losses + z_losses(reduced, coefficients)
        return (losses.sum(),)

    _, pull_back = vjp(loss, *selected.values())
    gradients = iter(pull_back(grad_loss))
    return tuple(next(gradients) if is_needed else None for is_needed in needed)


def _pairs(gradients: Sequence[Tensor | None], arguments: Sequence[Any]) -> list[tuple[Tensor | None, Any]]:
    return list(zip(gradients, arguments, strict=True))


def _trained(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    return problem.input, problem.linear_weight, problem.linear_bias


def _is_transformed(tensor: Tensor | None) -> bool:
    return tensor is not None and (has_tangent(tensor) or is_batched(tensor))
