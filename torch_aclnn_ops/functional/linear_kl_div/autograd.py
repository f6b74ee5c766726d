"""Autograd of the losses of rows, and of their weighted sum, whose gradients are computed in the forward pass."""

from collections.abc import Sequence
from typing import Any

from torch_aclnn_ops._autograd.derivatives import is_batched, scatter, vjp
from torch_aclnn_ops._torch_compat.derivatives import fast_apply
from torch_aclnn_ops.functional._head.gradients import scaled
from torch_aclnn_ops.functional.linear_kl_div.chunks import losses_and_gradients_in_chunks
from torch_aclnn_ops.functional.linear_kl_div.formula import compare_by_formula
from torch_aclnn_ops.functional.linear_kl_div.inputs import NAME, Inputs, Teacher

import torch
from torch import Tensor

_STUDENT = 3  # the first fields of Inputs, by which a loss is differentiated
_TENSORS = _STUDENT + len(Teacher._fields[:-1]) + 1


def losses_of_rows(inputs: Inputs) -> Tensor:
    """Return the loss of every row; the backward pass recomputes the logits."""
    losses: Tensor = _apply(*inputs.student, inputs, None)
    return losses


def weighted_sum(inputs: Inputs, factors: Tensor) -> Tensor:
    """Return the sum of the rows' losses times factors; its gradients are computed in the same pass."""
    total: Tensor = _apply(*inputs.student, inputs, factors)
    return total


class _DivergenceFunction(torch.autograd.Function):
    """Losses with gradients of input, weight and bias; never in a transform, so ctx may hold the gradients."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *_, inputs, factors = args
        *of_teacher, ctx.is_log = inputs.teacher
        # Saved where saved-tensor hooks see them, except tensors of inference mode, which autograd does not save.
        ctx.unsaved = [one if one is not None and one.is_inference() else None for one in of_teacher]
        of_teacher = [one if unsaved is None else None for one, unsaved in zip(of_teacher, ctx.unsaved, strict=True)]
        ctx.save_for_backward(*inputs.student, *of_teacher, inputs.target, factors)
        ctx.rest, ctx.dtype, ctx.gradients = inputs[_STUDENT + 2 :], inputs.linear_weight.dtype, None
        needs_gradients = factors is not None and any(inputs.options.gradients)
        losses, made = losses_and_gradients_in_chunks(inputs, factors if needs_gradients else None)
        if factors is None:
            return losses
        ctx.gradients = made
        total: Tensor = (losses * factors).sum()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        made, ctx.gradients = ctx.gradients, None
        *tensors, factors = ctx.saved_tensors
        inputs = _inputs(tensors, ctx)
        if torch.is_grad_enabled() or (factors is None and is_batched(grad)):
            made = _by_formula(inputs, factors, ctx.needs_input_grad[:_STUDENT], grad)
        elif factors is None:
            _, made = losses_and_gradients_in_chunks(inputs, grad.contiguous())
        else:
            if made is None:  # the first backward pass consumed them
                _, made = losses_and_gradients_in_chunks(inputs, factors)
            if is_batched(grad):
                ctx.gradients = made
            made = scaled(made, grad)
        if ctx.dtype != torch.float32:
            made = [None if gradient is None else gradient.to(ctx.dtype) for gradient in made]
        return *made, None, None


_apply = fast_apply(_DivergenceFunction)


def _inputs(tensors: Sequence[Any], ctx: Any) -> Inputs:
    *student_and_teacher, target = tensors
    student, of_teacher = student_and_teacher[:_STUDENT], student_and_teacher[_STUDENT:]
    of_teacher = [one if unsaved is None else unsaved for one, unsaved in zip(of_teacher, ctx.unsaved, strict=True)]
    return Inputs._make((*student, Teacher._make((*of_teacher, ctx.is_log)), target, *ctx.rest))


def _by_formula(
    inputs: Inputs, factors: Tensor | None, needed: Sequence[bool], grad: Tensor
) -> Sequence[Tensor | None]:
    """Compute gradients that can be differentiated again."""
    if inputs.shards is not None:
        raise RuntimeError(
            f"{NAME}: with process_group only first derivatives are supported, but this is a backward pass with"
            " create_graph=True or is_grads_batched=True"
        )
    names = [name for name, is_needed in zip(Inputs._fields, needed, strict=False) if is_needed]

    def function(*values: Tensor) -> tuple[Tensor]:
        losses = compare_by_formula(inputs._replace(**dict[str, Any](zip(names, values, strict=True))))
        return (losses if factors is None else (losses * factors).sum(),)

    _, pull_back = vjp(function, *(getattr(inputs, name) for name in names))
    return scatter(needed, pull_back(grad))
