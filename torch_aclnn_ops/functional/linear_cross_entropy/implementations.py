"""The implementations of a call, except the one for few logits, and the choice among them, made once per call.

=============================  =====================================================================================
by CANN's fused operators      ``fused_loss``: from the losses of all rows; also by ranks that share a vocabulary, if
                               all have the operators
other scalar losses            ``loss_with_gradients``: computed together with its gradients, chunk by chunk
everything else                ``loss_of_statistics``: from differentiable statistics of each row, which are computed by
                               CANN's fused operators or in chunks, or by all ranks that share a vocabulary
=============================  =====================================================================================
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_aclnn_ops._autograd.derivatives import is_batched, is_exporting, scatter, vjp
from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops._torch_compat.private import fast_apply
from torch_aclnn_ops.functional._drop_in import check_no_tangent
from torch_aclnn_ops.functional._head.arguments import check_token_weight, flat, rounded_by_autocast
from torch_aclnn_ops.functional._head.shards import VocabularyShards, copy_to_group
from torch_aclnn_ops.functional.linear_cross_entropy.arguments import to_loss_dtype
from torch_aclnn_ops.functional.linear_cross_entropy.losses import (
    LinearCrossEntropyOutput,
    Rows,
    assemble,
    check_targets,
    mean_coefficients,
    rows_of,
    with_outputs,
)
from torch_aclnn_ops.functional.linear_cross_entropy.statistics import (
    ENGINE,
    SharedVocabulary,
    shared_vocabulary,
    statistics,
)
from torch_aclnn_ops.ops._chunks import IGNORED
from torch_aclnn_ops.ops.linear_cross_entropy import why_not_classes
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call
from torch_aclnn_ops.ops.linear_cross_entropy.fused import Reduced, fused_gradients_of_losses, fused_losses
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import why_not_fused

import torch
from torch import Tensor

_NOT_DIFFERENTIABLE = frozenset(("token_accuracy", "predicted_tokens"))
_Result = Tensor | LinearCrossEntropyOutput


def compute(call: Call, shards: VocabularyShards | None, reduce_input_grad: bool) -> _Result:
    """Compute a call with checked arguments."""
    call = _prepare(call)
    if call.max_memory is not None and not torch.compiler.is_compiling():
        # That of the largest shard, so that no rank raises alone while others wait in a collective.
        call.tile_rows(classes=None if shards is None else max(shards.sizes))
    is_fused = call.is_fused
    if is_fused is None:
        is_fused = why_not_fused(call) is None
        if not torch.compiler.is_compiling():  # compiled code chooses when it runs
            call = call._replace(is_fused=is_fused)
    is_fused = is_fused and not call.predicted_tokens
    needs_formula = ENGINE.needs_formula(call, call.token_weight)
    if shards is None and not (needs_formula or is_fused) and _can_compute_gradients(call):
        return loss_with_gradients(call)
    is_fused = is_fused and not needs_formula and _can_fuse_loss(call, shards)
    vocabulary = None if shards is None else shared_vocabulary(call, shards, reduce_input_grad, is_fused)
    return fused_loss(call, vocabulary) if is_fused else loss_of_statistics(call, vocabulary)


def _prepare(call: Call) -> Call:
    """Cast for autocast, flatten rows, and add what follows from the arguments."""
    input, linear_weight, linear_bias, target, weight, token_weight, *_ = call
    shape = tuple(input.shape[:-1])
    if weight is not None:
        if not target.is_floating_point():
            check_no_tangent("linear_cross_entropy", weight)
        weight = to_loss_dtype(input, weight)
    if token_weight is not None:
        check_token_weight("linear_cross_entropy", token_weight, shape, input)
        token_weight = to_loss_dtype(input, token_weight).reshape(-1)
    input, linear_weight, linear_bias = rounded_by_autocast(input, linear_weight, linear_bias)
    gradients = (False, False, False)
    if torch.is_grad_enabled() and not is_exporting():  # an exported call may get inputs that need others
        bias_grad = linear_bias is not None and linear_bias.requires_grad
        gradients = (input.requires_grad, linear_weight.requires_grad, bias_grad)
    return call._replace(
        input=flat(input),
        linear_weight=linear_weight,
        linear_bias=linear_bias,
        target=flat(target) if target.is_floating_point() else target.reshape(-1).long(),
        weight=weight,
        token_weight=token_weight,
        label_smoothing=float(call.label_smoothing),
        softcap=call.finite_softcap(accumulation_dtype(input.dtype)),
        shape=shape,
        gradients=gradients,
        weighted=True if call.label_smoothing > 0 else False,  # the branch makes it a constant for Dynamo
        entropy="entropy" in call.outputs,
        predicted_tokens=not _NOT_DIFFERENTIABLE.isdisjoint(call.outputs),
        is_fused=False if input.is_cpu else None,
    )


def _can_fuse_loss(call: Call, shards: VocabularyShards | None) -> bool:
    """Return whether CANN's operators compute the losses of rows, with both gradients or neither."""
    if torch.compiler.is_compiling() or call.gradients[0] != call.gradients[1]:
        return False
    # On every rank: those that differentiate a gradient need the same collectives.
    return shards is None or all([why_not_classes(size) is None for size in shards.sizes])


def _can_compute_gradients(call: Call) -> bool:
    """Return whether a scalar loss can be computed together with its gradients: the weights of rows are constants."""
    if call.reduction == "none" or not _NOT_DIFFERENTIABLE.issuperset(call.outputs) or True not in call.gradients:
        return False
    return call.token_weight is None or not call.token_weight.requires_grad


def loss_with_gradients(call: Call) -> _Result:
    """Compute a scalar loss together with its gradients."""
    rows = rows_of(call, call.linear_weight.shape[0])
    check_targets(call, rows.outside, call.linear_weight.shape[0])
    coefficients, nan_if_empty = mean_coefficients(rows, call)
    # Three matrix products instead of four. The first backward pass consumes the gradients; later ones recompute them.
    loss, *tokens = ENGINE.weighted_sum(_of_rows(call, rows), coefficients)
    loss = loss if nan_if_empty is None else loss + nan_if_empty
    return with_outputs(loss, tokens[0] if tokens else None, rows, call)


def loss_of_statistics(call: Call, vocabulary: SharedVocabulary | None) -> _Result:
    """Compute a loss from the statistics of every row."""
    classes = call.linear_weight.shape[0] if vocabulary is None else vocabulary.shards.total
    rows = rows_of(call, classes)
    if vocabulary is None:
        check_targets(call, rows.outside, classes)
        return assemble(statistics(_of_rows(call, rows)), rows, call)
    found = vocabulary.statistics(_of_rows(call, rows))
    check_targets(call, rows.outside, classes)  # after the collective, in which other ranks would wait for this one
    return assemble(found, rows, call)


def _of_rows(call: Call, rows: Rows) -> Call:
    """Return the call for the kernels, which need no weights of rows."""
    has_no_ignored = rows.kept == call.input.shape[0]
    return call._replace(target=rows.target, weight=rows.class_weight, token_weight=None, has_no_ignored=has_no_ignored)


_DIFFERENTIATED = 2  # input and weight


class _FusedLossFunction(torch.autograd.Function):
    """The losses of all rows with z-losses, or without them but with log-sum-exps; not used inside transforms."""

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
        ctx.vocabulary, ctx.lse_square_scale = vocabulary, call.lse_square_scale
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
            options = {"gradients": (*needed, False), "lse_square_scale": ctx.lse_square_scale}
            call = Call(input, weight, None, target, **options)
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
        log_sum_exp = reduced.logits_max + reduced.log_sum_exp
        losses = reduced.log_sum_exp - reduced.predicted + call.lse_square_scale * log_sum_exp.square()
        results = losses, log_sum_exp
        return tuple(result for result, grad in zip(results, grads, strict=True) if grad is not None)

    _, pull_back = vjp(function, *(getattr(call, name) for name in names))
    return scatter(needed, pull_back(*(grad for grad in grads if grad is not None)))


def fused_loss(call: Call, vocabulary: SharedVocabulary | None) -> Tensor | LinearCrossEntropyOutput:
    """Compute the loss and outputs of class indices in rows.

    On an NPU every launch costs some microseconds of the host and of the device. What an option needs is launched only
    if it is given, and no choice depends on values, which would synchronize with the device.
    """
    classes, has_z_loss = call.linear_weight.shape[0], call.lse_square_scale != 0
    if vocabulary is not None:
        classes = vocabulary.shards.total
        if vocabulary.reduces_gradient:
            call = call._replace(input=copy_to_group(call.input, vocabulary.shards.members))
    # z-losses with the weights of the losses are added where these are computed.
    is_z_loss_apart = has_z_loss and (call.weight is not None or bool(call.outputs))
    needs_log_sum_exp = is_z_loss_apart or "logsumexp" in call.outputs
    of_rows = call._replace(lse_square_scale=0.0) if is_z_loss_apart else call
    losses: Tensor
    losses, log_sum_exp, without_class, has_class = _apply(
        *call[:_DIFFERENTIATED], of_rows, vocabulary, needs_log_sum_exp
    )
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
    loss = reduced(losses, _weights(call, token_weight, has_class))
    z_loss = None
    if is_z_loss_apart:
        z_loss = reduced(log_sum_exp.square() * call.lse_square_scale, token_weight)
        loss = loss + z_loss
    if not call.outputs:
        return loss
    outputs = {}
    if "log_probabilities" in call.outputs:
        outputs["log_probabilities"] = losses.neg().reshape(call.shape)
    if "logsumexp" in call.outputs:
        outputs["logsumexp"] = log_sum_exp.reshape(call.shape)
    if "z_loss" in call.outputs:
        outputs["z_loss"] = torch.zeros_like(loss) if z_loss is None else z_loss
    return LinearCrossEntropyOutput(loss, **outputs)


def _weights(call: Call, token_weight: Tensor | None, has_class: Tensor) -> Tensor | None:
    """Return the weight of every row in the cross entropy, or ``None`` if all are 1."""
    if call.weight is None:
        return token_weight
    of_class = call.weight[call.target.where(has_class, 0)]
    return of_class if token_weight is None else token_weight * of_class
