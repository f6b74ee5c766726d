"""A loss from the losses of all rows, which CANN's fused operators compute together with what their gradients need.

On an NPU every launch costs some microseconds of the host and of the device. What an option needs is launched only if
it is given, and no choice depends on values, which would synchronize with the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_aclnn_ops._autograd.derivatives import is_batched, scatter, vjp
from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._torch_compat.private import fast_apply
from torch_aclnn_ops.functional.linear_cross_entropy.autograd import statistics
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput, check_targets
from torch_aclnn_ops.functional.linear_cross_entropy.vocab_parallel import SharedVocabulary
from torch_aclnn_ops.ops._head import IGNORED
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call
from torch_aclnn_ops.ops.linear_cross_entropy.fused import Reduced, fused_gradients_of_losses, fused_losses

import torch
from torch import Tensor

_DIFFERENTIATED = 2  # input and weight


class _FusedLossFunction(torch.autograd.Function):
    """The losses of all rows and, if needed, their log-sum-exp; it is not used inside transforms."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        call: Call
        *_, call, vocabulary, needs_log_sum_exp = args
        if vocabulary is None:
            losses, without_class, reduced = fused_losses(call, call.linear_weight.shape[0])
        else:
            of_shard = vocabulary.shards.total, vocabulary.shards.own.start, vocabulary.combine_reduced
            losses, without_class, reduced = fused_losses(call, *of_shard)
        log_sum_exp = None
        if needs_log_sum_exp:
            log_sum_exp = reduced.sum_exp_logits.log().add_(reduced.logits_max).where(reduced.has_class, without_class)
        ctx.save_for_backward(*call[:_DIFFERENTIATED], call.target, without_class, *reduced)
        ctx.vocabulary = vocabulary
        ctx.mark_non_differentiable(without_class, reduced.has_class)
        ctx.set_materialize_grads(False)
        return losses, log_sum_exp, without_class, reduced.has_class

    @staticmethod
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_log_sum_exp: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        needed, no_others = ctx.needs_input_grad[:_DIFFERENTIATED], (None,) * 3
        if grad_losses is None and grad_log_sum_exp is None:
            return (None, None, *no_others)
        input, weight, target, without_class, *rest = ctx.saved_tensors
        reduced = Reduced(*rest)
        grads = [
            None if grad is None else grad.where(reduced.has_class, without_class)
            for grad in (grad_losses, grad_log_sum_exp)
        ]
        if not all(needed) or torch.is_grad_enabled() or any(grad is not None and is_batched(grad) for grad in grads):
            target = target.where(reduced.has_class, 0).masked_fill(without_class == 0, IGNORED)
            call = Call(input, weight, None, target, gradients=(*needed, False))
            return *_differentiable_gradients(call, needed, grads, ctx.vocabulary), *no_others
        return *fused_gradients_of_losses(input, weight, reduced, *grads), *no_others


_apply = fast_apply(_FusedLossFunction)


def _differentiable_gradients(
    call: Call, needed: tuple[bool, ...], grads: Sequence[Tensor | None], vocabulary: SharedVocabulary | None
) -> tuple[Tensor | None, ...]:
    """Compute the needed gradients in functions that have every derivative."""
    reduce = statistics
    if vocabulary is not None:  # the sum of the input's gradient over the ranks follows
        reduce = replace(vocabulary, reduces_gradient=False).statistics
    names = [name for name, is_needed in zip(Call._fields, needed, strict=False) if is_needed]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        reduced = reduce(call._replace(**dict[str, Any](zip(names, values, strict=True))))
        results = reduced.log_sum_exp - reduced.predicted, reduced.logits_max + reduced.log_sum_exp
        return tuple(result for result, grad in zip(results, grads, strict=True) if grad is not None)

    _, pull_back = vjp(function, *(getattr(call, name) for name in names))
    return scatter(needed, pull_back(*(grad for grad in grads if grad is not None)))


def fused_loss(call: Call, vocabulary: SharedVocabulary | None) -> Tensor | LinearCrossEntropyOutput:
    """Compute the loss and outputs of class indices in rows."""
    classes, has_z_loss = call.linear_weight.shape[0], call.lse_square_scale != 0
    if vocabulary is not None:
        call, classes = vocabulary.copy_input(call), vocabulary.shards.total
    needs_log_sum_exp = has_z_loss or "logsumexp" in call.outputs
    losses: Tensor
    losses, log_sum_exp, without_class, has_class = _apply(*call[:_DIFFERENTIATED], call, vocabulary, needs_log_sum_exp)
    if values_are_readable(losses):
        outside = without_class.isnan() & ~has_class
        check_targets(call, outside, classes)

    def reduced(losses: Tensor, weights: Tensor | None) -> Tensor:
        if weights is not None:
            weights = weights.where(has_class, without_class)
            losses = losses * weights
        if call.reduction == "none":
            return losses.reshape(call.shape)
        total = losses.sum()
        if call.reduction == "sum":
            return total
        number = has_class.sum() if weights is None else weights.sum()
        if call.zero_if_all_ignored:
            number = number + ~has_class.any()
        return total / number  # nan if all rows are ignored; the gradients of ignored rows are 0 then, too

    # nan for an infinite one, which makes the gradients nan, as in torch
    token_weight = None if call.token_weight is None else call.token_weight + 0 * call.token_weight
    z_losses = log_sum_exp.square() * call.lse_square_scale if has_z_loss else None
    if z_losses is not None and call.weight is None:  # the weights are the same
        loss = reduced(losses + z_losses, token_weight)
    else:
        loss = reduced(losses, _weights(call, token_weight, has_class))
        loss = loss if z_losses is None else loss + reduced(z_losses, token_weight)
    if not call.outputs:
        return loss
    outputs = {}
    if "log_probabilities" in call.outputs:
        outputs["log_probabilities"] = losses.neg().reshape(call.shape)
    if "logsumexp" in call.outputs:
        outputs["logsumexp"] = log_sum_exp.reshape(call.shape)
    if "z_loss" in call.outputs:
        outputs["z_loss"] = torch.zeros_like(loss) if z_losses is None else reduced(z_losses, token_weight)
    return LinearCrossEntropyOutput(loss, **outputs)


def _weights(call: Call, token_weight: Tensor | None, has_class: Tensor) -> Tensor | None:
    """Return the weight of every row in the cross entropy, or ``None`` if all are 1."""
    if call.weight is None:
        return token_weight
    of_class = call.weight[call.target.where(has_class, 0)]
    return of_class if token_weight is None else token_weight * of_class
