"""The implementations of a call, and the choice among them, which is made once per call.

=============================  =====================================================================================
by CANN's fused operators      ``fused_loss``: from the losses of all rows; also by ranks that share a vocabulary, if
                               all have the operators
other scalar losses            ``loss_with_gradients``: computed together with its gradients, chunk by chunk
everything else                ``loss_of_statistics``: from differentiable statistics of each row, which are computed by
                               CANN's fused operators or in chunks, for each position of a K-dimensional loss, or by
                               all ranks that share a vocabulary
=============================  =====================================================================================
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch_aclnn_ops._numerics import accumulation_dtype, widen
from torch_aclnn_ops._torch_compat.modes import is_any_autocast_enabled
from torch_aclnn_ops.functional._drop_in import check_no_tangent, lower_precision_autocast_dtype
from torch_aclnn_ops.functional._head.arguments import check_token_weight
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.functional.linear_cross_entropy import autograd
from torch_aclnn_ops.functional.linear_cross_entropy.fused_loss import fused_loss
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
from torch_aclnn_ops.functional.linear_cross_entropy.options import (
    check_outputs_of_probabilities,
)
from torch_aclnn_ops.functional.linear_cross_entropy.torch_function import TorchArguments, to_loss_dtype
from torch_aclnn_ops.functional.linear_cross_entropy.vocab_parallel import SharedVocabulary, shared_vocabulary
from torch_aclnn_ops.ops._head.tiling import LogitOptions
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, RequestedOutputs
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import choose_kernels
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import why_not_classes
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Statistics

import torch
from torch import Tensor


class LossCall(NamedTuple):
    """A call of :func:`linear_cross_entropy` with checked arguments.

    Attributes:
        inputs: The arguments of the kernels, with the caller's class indices. For a K-dimensional loss the head has
            shape (C, d_1, ..., d_K, H), and the targets of each row's positions are consecutive.
        token_weight: Weight of each row's loss, shape (N,).
        options: The options of the loss.
        shape: The shape of class indices.
        shards: The shards of the vocabulary, if several ranks share it.
        reduce_input_grad: Whether to sum the gradient of the input over the ranks.
    """

    inputs: Inputs
    token_weight: Tensor | None
    options: LossOptions
    shape: tuple[int, ...]
    shards: VocabularyShards | None
    reduce_input_grad: bool


_Result = Tensor | LinearCrossEntropyOutput
_Reduce = Callable[[Inputs], Statistics]


def prepare(
    given: TorchArguments,
    token_weight: Tensor | None,
    logit_options: LogitOptions,
    loss_options: LossOptions,
    shards: VocabularyShards | None,
    reduce_input_grad: bool,
) -> LossCall:
    """Check the options that PyTorch's function lacks, cast for autocast, and flatten rows."""
    input, linear_weight, target, linear_bias, weight, *_ = given
    shape = (*input.shape[:-1], *linear_weight.shape[1:-1])
    if target.is_floating_point():
        check_outputs_of_probabilities(loss_options.outputs)
    elif weight is not None:
        check_no_tangent("linear_cross_entropy", weight)
    if token_weight is not None:
        check_token_weight("linear_cross_entropy", token_weight, shape, input)
        token_weight = to_loss_dtype(input, token_weight).reshape(-1)
    weight = None if weight is None else to_loss_dtype(input, weight)
    if is_any_autocast_enabled():
        dtype = lower_precision_autocast_dtype(input)
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    gradients = (False, False, False)
    if torch.is_grad_enabled():
        bias_grad = linear_bias is not None and linear_bias.requires_grad
        gradients = (input.requires_grad, linear_weight.requires_grad, bias_grad)
    if logit_options.softcap is not None:
        logit_options = logit_options.without_infinite_softcap(accumulation_dtype(input.dtype))
    is_smoothed = True if loss_options.label_smoothing > 0 else False  # the branch makes it a constant for Dynamo
    inputs = Inputs(
        input if input.dim() == 2 else input.reshape(math.prod(input.shape[:-1]), input.shape[-1]),
        linear_weight,
        linear_bias,
        target if target.dim() == 1 and target.dtype == torch.int64 else _flatten_target(target, linear_weight),
        weight,
        logit_options,
        RequestedOutputs(is_smoothed, "entropy" in loss_options.outputs, loss_options.needs_tokens, gradients),
    )
    if logit_options.max_memory is not None and not torch.compiler.is_compiling():
        _check_memory(inputs, shards)
    return LossCall(inputs, token_weight, loss_options, shape, shards, reduce_input_grad)


def _check_memory(inputs: Inputs, shards: VocabularyShards | None) -> None:
    """Raise ``ValueError`` if ``max_memory`` is too small for a forward or backward pass."""
    # That of the largest shard, so that no rank raises alone while others wait in a collective.
    classes = None if shards is None else max(shards.sizes)
    inputs.tile_rows(classes=classes)


def _flatten_target(target: Tensor, linear_weight: Tensor) -> Tensor:
    """Flatten the targets, so that the positions of each row are consecutive."""
    if not target.is_floating_point():
        return target.reshape(-1).long()
    if linear_weight.dim() > 2:
        target = target.movedim(1, -1)
    return target.reshape(math.prod(target.shape[:-1]), target.shape[-1])


def choose(call: LossCall) -> Callable[[LossCall], _Result]:
    """Choose the implementation of a call; this is the only place that does."""
    inputs, head = call.inputs, call.inputs.linear_weight
    has_positions = head.dim() > 2
    vocabulary = None
    if call.shards is not None:
        weights = call.token_weight, inputs.class_weight
        vocabulary = shared_vocabulary(inputs, call.shards, call.reduce_input_grad, call.options, weights)
    if not has_positions and not autograd.ENGINE.needs_formula(inputs, call.token_weight):
        is_fused = choose_kernels(inputs).why_not_fused is None
        if is_fused and _can_fuse_loss(call):
            return partial(_fused_loss, vocabulary=vocabulary)
        if vocabulary is None and not is_fused and _can_compute_gradients(call):
            return loss_with_gradients
    reduce: _Reduce = autograd.statistics if vocabulary is None else vocabulary.statistics
    return partial(loss_of_statistics, reduce=partial(_reduce_positions, reduce=reduce) if has_positions else reduce)


def _can_fuse_loss(call: LossCall) -> bool:
    """Return whether CANN's operators compute the losses of rows, and their gradients, which are those of both."""
    gradients = call.inputs.requested.gradients
    if torch.compiler.is_compiling():
        return False
    if call.shards is not None:
        # On every rank: those that differentiate a gradient need the same collectives.
        if call.shards.excess or any(why_not_classes(size) is not None for size in call.shards.sizes):
            return False
    return gradients[0] == gradients[1]


def _can_compute_gradients(call: LossCall) -> bool:
    """Return whether a scalar loss can be computed together with its gradients: the weights of rows are constants."""
    if not call.options.is_scalar or True not in call.inputs.requested.gradients:
        return False
    return call.token_weight is None or not call.token_weight.requires_grad


def _fused_loss(call: LossCall, vocabulary: SharedVocabulary | None) -> _Result:
    """Compute a loss by CANN's fused operators."""
    return fused_loss(call.inputs, call.token_weight, call.options, call.shape, vocabulary)


def loss_with_gradients(call: LossCall) -> _Result:
    """Compute a scalar loss together with its gradients."""
    options = call.options
    inputs, rows = _prepare_rows(call)
    _check_targets(call, rows)
    coefficients, nan_if_empty = rows.coefficients, None
    if options.reduction == "mean":
        divisor, count, nan_if_empty = divisors(rows, options)
        coefficients = coefficients.divided(divisor, count)
    loss, tokens = autograd.loss(inputs, coefficients)
    return with_outputs(loss if nan_if_empty is None else loss + nan_if_empty, tokens, rows, options, call.shape)


def loss_of_statistics(call: LossCall, reduce: _Reduce) -> _Result:
    """Compute a loss from the statistics of every row, which ``reduce`` computes."""
    inputs, rows = _prepare_rows(call)
    if call.shards is None:
        _check_targets(call, rows)
    statistics = reduce(inputs)
    if call.shards is not None:
        _check_targets(call, rows)  # after the collective, in which other ranks would wait for this one
    return assemble(statistics, rows, call.options, call.shape)


def _check_targets(call: LossCall, rows: Rows) -> None:
    check_targets(call.inputs.target, rows.outside, _classes(call), call.options.ignore_index)


def _classes(call: LossCall) -> int:
    """Return the size of the full vocabulary."""
    return call.inputs.linear_weight.shape[0] if call.shards is None else call.shards.total


def _prepare_rows(call: LossCall) -> tuple[Inputs, Rows]:
    """Return the inputs with prepared targets and class weights, and the weight of each row."""
    rows = rows_of(call.inputs, call.token_weight, _classes(call), call.options)
    return call.inputs._replace(target=rows.target, class_weight=rows.class_weight), rows


def _reduce_positions(inputs: Inputs, reduce: _Reduce) -> Statistics:
    """Reduce the logits of every row and position of a K-dimensional loss, as one linear layer per position."""
    weight, bias = inputs.linear_weight, inputs.linear_bias
    classes, positions = weight.shape[0], math.prod(weight.shape[1:-1])
    wide_input = widen(inputs.input)  # so that the gradients of the positions are accumulated in float32
    # unbind instead of indexing, whose gradient would have the size of the full head for each position
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
