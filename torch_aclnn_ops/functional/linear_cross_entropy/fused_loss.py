"""A loss from the losses of all rows, which CANN's fused operators compute together with what their gradients need.

On an NPU every launch costs some microseconds of the host and of the device. What an option needs is launched only if
it is given, and no choice depends on values, which would synchronize with the device.
"""

from dataclasses import replace
from typing import Any

from torch_aclnn_ops._autograd.derivatives import is_batched, scatter, vjp
from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._torch_compat.derivatives import fast_apply
from torch_aclnn_ops.functional.linear_cross_entropy.autograd import statistics
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LossOptions, check_targets
from torch_aclnn_ops.functional.linear_cross_entropy.vocab_parallel import SharedVocabulary
from torch_aclnn_ops.ops.linear_cross_entropy.fused import Reduced, fused_gradients_of_losses, fused_losses
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, RequestedOutputs
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import IGNORED

import torch
from torch import Tensor

_DIFFERENTIATED = 2  # input and weight


class _FusedLossFunction(torch.autograd.Function):
    """The losses of all rows; it is not used inside transforms."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs: Inputs
        *_, inputs, ignore_index, vocabulary = args
        if vocabulary is None:
            losses, without_class, reduced = fused_losses(inputs, ignore_index)
        else:
            losses, without_class, reduced = fused_losses(
                inputs, ignore_index, vocabulary.start, vocabulary.combine_reduced
            )
        ctx.save_for_backward(*inputs[:_DIFFERENTIATED], inputs.target, without_class, *reduced)
        ctx.options, ctx.vocabulary = inputs.options, vocabulary
        ctx.mark_non_differentiable(without_class, reduced.has_class)
        ctx.set_materialize_grads(False)
        return losses, without_class, reduced.has_class

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:_DIFFERENTIATED]
        if grad_losses is None:
            return (None,) * 5
        input, weight, target, without_class, *rest = ctx.saved_tensors
        reduced = Reduced(*rest)
        grad_losses = grad_losses.where(reduced.has_class, without_class)
        if not all(needed) or torch.is_grad_enabled() or is_batched(grad_losses):
            target = target.where(reduced.has_class, 0).masked_fill(without_class == 0, IGNORED)
            requested = RequestedOutputs(gradients=(*needed, False))
            inputs = Inputs(input, weight, None, target, None, ctx.options, requested)
            return *_differentiable_gradients(inputs, needed, grad_losses, ctx.vocabulary), None, None, None
        return *fused_gradients_of_losses(input, weight, reduced, grad_losses), None, None, None


_apply = fast_apply(_FusedLossFunction)


def _differentiable_gradients(
    inputs: Inputs, needed: tuple[bool, ...], grad_losses: Tensor, vocabulary: SharedVocabulary | None
) -> tuple[Tensor | None, ...]:
    """Compute the needed gradients in functions that have every derivative."""
    reduce = statistics
    if vocabulary is not None:  # the sum of the input's gradient over the ranks follows
        reduce = replace(vocabulary, reduces_gradient=False).statistics
    names = [name for name, is_needed in zip(Inputs._fields, needed, strict=False) if is_needed]

    def losses(*values: Tensor) -> tuple[Tensor]:
        reduced = reduce(inputs._replace(**dict[str, Any](zip(names, values, strict=True))))
        return (reduced.log_sum_exp - reduced.predicted,)

    _, pull_back = vjp(losses, *(getattr(inputs, name) for name in names))
    return scatter(needed, pull_back(grad_losses))


def fused_loss(
    inputs: Inputs, token_weight: Tensor | None, options: LossOptions, vocabulary: SharedVocabulary | None
) -> Tensor:
    """Compute the loss of class indices in rows, reduced as the options say."""
    classes = inputs.linear_weight.shape[0]
    if vocabulary is not None:
        inputs, classes = vocabulary.copy_input(inputs), vocabulary.shards.total
    losses: Tensor
    losses, without_class, has_class = _apply(*inputs[:_DIFFERENTIATED], inputs, options.ignore_index, vocabulary)
    if values_are_readable(losses):
        outside = without_class.isnan() & ~has_class
        check_targets(inputs.target, outside, classes, options.ignore_index)
    weights = _weights(inputs, token_weight, has_class)
    if weights is not None:
        weights = weights.where(has_class, without_class)
        losses = losses * weights
    if options.reduction == "none":
        return losses
    total = losses.sum()
    if options.reduction == "sum":
        return total
    number = has_class.sum() if weights is None else weights.sum()
    if options.zero_if_all_ignored:
        number = number + ~has_class.any()
    return total / number  # nan if all rows are ignored; the gradients of ignored rows are 0 then, too


def _weights(inputs: Inputs, token_weight: Tensor | None, has_class: Tensor) -> Tensor | None:
    """Return the weight of every row that has a class, or ``None`` if all are 1."""
    weights = token_weight
    if weights is not None:
        weights = weights + 0 * weights  # nan for an infinite one, which makes the gradients nan, as in torch
    if inputs.class_weight is not None:
        of_class = inputs.class_weight[inputs.target.where(has_class, 0)]
        weights = of_class if weights is None else weights * of_class
    return weights
