"""Which implementation computes a call, and the implementations, each of which runs to its end.

=============================  =====================================================================================
a plain loss of few logits     ``small_loss``: in few calls, which hold all logits
another scalar loss            ``loss_with_gradients``: made together with its gradients, chunk by chunk
everything else                ``loss_of_statistics``: of a few numbers of each row, which have every derivative. They
                               are reduced by CANN's fused operators or by chunks, for each position of a K-dimensional
                               loss, or by all processes that share a vocabulary
=============================  =====================================================================================
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch_aclnn_ops._autograd.derivatives import in_functorch_transform
from torch_aclnn_ops._numerics import widen
from torch_aclnn_ops._torch_compat import in_jit_trace, is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch_aclnn_ops.functional.linear_cross_entropy import autograd
from torch_aclnn_ops.functional.linear_cross_entropy.losses import (
    LinearCrossEntropyOutput,
    LossOptions,
    Rows,
    assemble,
    check_targets,
    divisors,
    rows_of,
    with_outputs,
)
from torch_aclnn_ops.functional.linear_cross_entropy.vocab_parallel import VocabularyShards, vocab_parallel_statistics
from torch_aclnn_ops.ops.linear_cross_entropy import small_loss as small_losses
from torch_aclnn_ops.ops.linear_cross_entropy import tiling
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, PlainLoss
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import choose_kernels
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Coefficients, Statistics

import torch
from torch import Tensor
from torch.autograd import forward_ad

_REAL = (Tensor, torch.nn.Parameter)  # fake tensors have no memory


class LossCall(NamedTuple):
    """A call of :func:`linear_cross_entropy` whose arguments were checked.

    Attributes:
        inputs: the arguments of the kernels, with the caller's class indices. The head may have dimensions of positions
            between its own two; the targets have the positions of a row one after the other.
        token_weight: factor of each row's loss, shape (N,).
        options: of the loss.
        shape: of class indices.
        shards: the cut of the vocabulary, if several processes share it.
        reduce_input_grad: sum the gradient of the input over these processes.
    """

    inputs: Inputs
    token_weight: Tensor | None
    options: LossOptions
    shape: tuple[int, ...]
    shards: VocabularyShards | None
    reduce_input_grad: bool


_Result = Tensor | LinearCrossEntropyOutput
_Reduce = Callable[[Inputs], Statistics]


def choose(call: LossCall) -> Callable[[LossCall], _Result]:
    """Choose the implementation; nobody asks again what serves a call."""
    inputs, head = call.inputs, call.inputs.linear_weight
    has_positions = head.dim() > 2
    reduce: _Reduce
    if call.shards is not None:
        reduce = partial(
            vocab_parallel_statistics,
            shards=call.shards,
            reduce_input_grad=call.reduce_input_grad,
            loss_options=call.options,
        )
    else:
        can_make_gradients = call.options.is_scalar and not has_positions and _can_make_gradients(call)
        if can_make_gradients and _is_small(call):
            return small_loss
        while head.dim() > 2:  # the kernels are given the head of one position
            head = head.select(1, 0)
        kernels = choose_kernels(inputs._replace(linear_weight=head) if has_positions else inputs)
        if can_make_gradients and kernels.why_not_fused is not None:
            return loss_with_gradients
        reduce = partial(autograd.statistics, kernels=kernels)
    return partial(loss_of_statistics, reduce=partial(_of_positions, reduce=reduce) if has_positions else reduce)


def _can_make_gradients(call: LossCall) -> bool:
    """Return whether a scalar loss can be computed together with its gradients.

    It cannot inside transforms and ``torch.jit.trace``, and for derivatives by other arguments.
    """
    inputs, token_weight = call.inputs, call.token_weight
    if True not in inputs.requested.gradients or in_functorch_transform():
        return False
    if not torch.compiler.is_compiling():
        if in_jit_trace():
            return False
        for tensor in (*inputs[:5], token_weight):
            if tensor is None:
                continue
            if is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor):
                return False
            if forward_ad.unpack_dual(tensor).tangent is not None:
                return False
    for tensor in (inputs.target, inputs.class_weight, token_weight):
        if tensor is not None and tensor.requires_grad:
            return False
    return True


def _is_small(call: LossCall) -> bool:
    """Return whether the loss is plain, and may hold all logits and two tensors of their size."""
    inputs, options = call.inputs, call.options
    if call.token_weight is not None or inputs.class_weight is not None or torch.compiler.is_compiling():
        return False
    if options.label_smoothing or options.lse_square_scale or options.outputs or options.zero_if_all_ignored:
        return False
    rows, weight, logit_options = inputs.input.shape[0], inputs.linear_weight, inputs.options
    if weight.dtype != torch.float32 or type(weight) not in _REAL or not inputs.is_plain:
        return False
    if logit_options.temperature != 1 or logit_options.chunk_size is not None or logit_options.max_memory is not None:
        return False
    return 0 < 12 * rows * weight.shape[0] <= tiling.LOGITS_BYTES and small_losses.has_kernel(weight)


def small_loss(call: LossCall) -> _Result:
    """Compute a plain loss in few calls, unless its targets say no."""
    value = autograd.small_loss(call.inputs, PlainLoss(call.options.reduction, call.options.ignore_index))
    return loss_with_gradients(call) if value is None else value


def loss_with_gradients(call: LossCall) -> _Result:
    """Compute a scalar loss together with its gradients."""
    options = call.options
    inputs, rows = _weighed(call)
    check_targets(call.inputs.target, rows)
    coefficients, nan_if_empty = rows.coefficients, None
    if options.reduction == "mean":
        divisor, count, nan_if_empty = divisors(rows, options)
        pairs = zip(coefficients, (divisor, divisor, divisor, count), strict=True)
        coefficients = Coefficients._make(None if factor is None else factor / by for factor, by in pairs)
    loss, tokens = autograd.loss(inputs, coefficients)
    return with_outputs(loss if nan_if_empty is None else loss + nan_if_empty, tokens, rows, options, call.shape)


def loss_of_statistics(call: LossCall, reduce: _Reduce) -> _Result:
    """Compute a loss from the statistics of every row, which ``reduce`` makes."""
    inputs, rows = _weighed(call)
    if call.shards is None:
        check_targets(call.inputs.target, rows)
    statistics = reduce(inputs)
    if call.shards is not None:
        check_targets(call.inputs.target, rows)  # now that no process waits for this one
    return assemble(statistics, rows, call.options, call.shape)


def _weighed(call: LossCall) -> tuple[Inputs, Rows]:
    """Return what the kernels are given, and the factors of the rows' losses."""
    classes = call.inputs.linear_weight.shape[0] if call.shards is None else call.shards.total
    rows = rows_of(call.inputs, call.token_weight, classes, call.options)
    return call.inputs._replace(target=rows.target, class_weight=rows.class_weight), rows


def _of_positions(inputs: Inputs, reduce: _Reduce) -> Statistics:
    """Reduce the logits of every row at every position of a K-dimensional loss, one linear layer per position."""
    weight, bias = inputs.linear_weight, inputs.linear_bias
    classes, positions = weight.shape[0], math.prod(weight.shape[1:-1])
    wide_input = widen(inputs.input)  # so that the gradients of the positions add up in float32
    # unbind, not an index for each position, whose gradient would be a whole head
    weights = weight.reshape(classes, positions, weight.shape[-1]).unbind(1)
    biases = (None,) * positions if bias is None else bias.reshape(classes, positions).unbind(1)
    targets = inputs.target.reshape(-1, positions, *inputs.target.shape[1:]).unbind(1)
    parts = [
        reduce(
            inputs._replace(
                input=wide_input.to(weight.dtype), linear_weight=one_weight, linear_bias=one_bias, target=target
            )
        )
        for one_weight, one_bias, target in zip(weights, biases, targets, strict=True)
    ]
    return Statistics._make(
        None if column[0] is None else torch.stack(column, 1).reshape(-1) for column in zip(*parts, strict=True)
    )
