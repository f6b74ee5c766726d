"""The implementations of a call that is not one of few logits, and the choice among them, made once per call.

=============================  =====================================================================================
by CANN's fused operators      ``fused_loss``: from the losses of all rows; also by ranks that share a vocabulary, if
                               all have the operators
other scalar losses            ``loss_with_gradients``: computed together with its gradients, chunk by chunk
everything else                ``loss_of_statistics``: from differentiable statistics of each row, which are computed by
                               CANN's fused operators or in chunks, or by all ranks that share a vocabulary
=============================  =====================================================================================
"""

from collections.abc import Callable

from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops.functional._drop_in import check_no_tangent
from torch_aclnn_ops.functional._head.arguments import check_token_weight, flat, rounded_by_autocast
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.functional.linear_cross_entropy import autograd
from torch_aclnn_ops.functional.linear_cross_entropy.fused_loss import fused_loss
from torch_aclnn_ops.functional.linear_cross_entropy.losses import (
    LinearCrossEntropyOutput,
    Rows,
    assemble,
    check_targets,
    divisors,
    rows_of,
    with_outputs,
)
from torch_aclnn_ops.functional.linear_cross_entropy.torch_function import to_loss_dtype
from torch_aclnn_ops.functional.linear_cross_entropy.vocab_parallel import SharedVocabulary, shared_vocabulary
from torch_aclnn_ops.ops.linear_cross_entropy import why_not_classes
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call, Statistics
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import why_not_fused

import torch
from torch import Tensor

_NOT_DIFFERENTIABLE = frozenset(("token_accuracy", "predicted_tokens"))
_Result = Tensor | LinearCrossEntropyOutput
_Reduce = Callable[[Call], Statistics]


def compute(call: Call, shards: VocabularyShards | None, reduce_input_grad: bool) -> _Result:
    """Compute a call with checked arguments."""
    call = _prepare(call)
    if call.max_memory is not None and not torch.compiler.is_compiling():
        # That of the largest shard, so that no rank raises alone while others wait in a collective.
        call.tile_rows(classes=None if shards is None else max(shards.sizes))
    if not torch.compiler.is_compiling():  # compiled code chooses when it runs
        call = call._replace(is_fused=why_not_fused(call) is None)
    implementation = _choose(call, shards)
    if shards is None:
        return implementation(call, None)
    is_fused = implementation is fused_loss
    return implementation(call, shared_vocabulary(call, shards, reduce_input_grad, is_fused))


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
    if torch.is_grad_enabled():
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
    )


def _choose(call: Call, shards: VocabularyShards | None) -> Callable[[Call, SharedVocabulary | None], _Result]:
    """Choose the implementation of a call."""
    if autograd.ENGINE.needs_formula(call, call.token_weight):
        return loss_of_statistics
    is_fused = (why_not_fused(call) is None if call.is_fused is None else call.is_fused) and not call.predicted_tokens
    if is_fused and _can_fuse_loss(call, shards):
        return fused_loss
    if shards is None and not is_fused and _can_compute_gradients(call):
        return loss_with_gradients
    return loss_of_statistics


def _can_fuse_loss(call: Call, shards: VocabularyShards | None) -> bool:
    """Return whether CANN's operators compute the losses of rows, and their gradients, which are those of both."""
    if torch.compiler.is_compiling():
        return False
    if shards is not None:
        # On every rank: those that differentiate a gradient need the same collectives.
        if any(why_not_classes(size) is not None for size in shards.sizes):
            return False
    return call.gradients[0] == call.gradients[1]


def _can_compute_gradients(call: Call) -> bool:
    """Return whether a scalar loss can be computed together with its gradients: the weights of rows are constants."""
    if call.reduction == "none" or not _NOT_DIFFERENTIABLE.issuperset(call.outputs) or True not in call.gradients:
        return False
    return call.token_weight is None or not call.token_weight.requires_grad


def loss_with_gradients(call: Call, _: SharedVocabulary | None) -> _Result:
    """Compute a scalar loss together with its gradients."""
    rows = rows_of(call, call.linear_weight.shape[0])
    check_targets(call, rows.outside, call.linear_weight.shape[0])
    coefficients, nan_if_empty = rows.coefficients, None
    if call.reduction == "mean":
        divisor, count, nan_if_empty = divisors(rows, call)
        coefficients = coefficients.divided(divisor, count)
    # Three matrix products instead of four. The first backward pass consumes the gradients; later ones recompute them.
    loss, *tokens = autograd.ENGINE.weighted_sum(_of_rows(call, rows), coefficients)
    loss = loss if nan_if_empty is None else loss + nan_if_empty
    return with_outputs(loss, tokens[0] if tokens else None, rows, call)


def loss_of_statistics(call: Call, vocabulary: SharedVocabulary | None) -> _Result:
    """Compute a loss from the statistics of every row."""
    classes = call.linear_weight.shape[0] if vocabulary is None else vocabulary.shards.total
    rows = rows_of(call, classes)
    if vocabulary is None:
        check_targets(call, rows.outside, classes)
    reduce: _Reduce = autograd.statistics if vocabulary is None else vocabulary.statistics
    statistics = reduce(_of_rows(call, rows))
    if vocabulary is not None:
        check_targets(call, rows.outside, classes)  # after the collective, in which other ranks would wait for this one
    return assemble(statistics, rows, call)


def _of_rows(call: Call, rows: Rows) -> Call:
    """Return the call for the kernels, which need no weights of rows."""
    return call._replace(target=rows.target, weight=rows.class_weight, token_weight=None)
