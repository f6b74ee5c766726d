"""From rows to results: by a loss that makes its gradients, or by the statistics of every row."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch_aclnn_ops.functional.linear_cross_entropy.gradients_in_forward import (
    loss_with_gradients,
    makes_gradients_in_forward,
)
from torch_aclnn_ops.functional.linear_cross_entropy.losses import (
    LinearCrossEntropyOutput,
    LossOptions,
    Rows,
    assemble,
    divisors,
    with_outputs,
)
from torch_aclnn_ops.functional.linear_cross_entropy.statistics import statistics
from torch_aclnn_ops.ops._numerics import widen
from torch_aclnn_ops.ops.linear_cross_entropy._problem import Coefficients, Problem, Statistics

import torch
from torch import Tensor


def result_of(
    problem: Problem, rows: Rows, options: LossOptions, shape: tuple[int, ...], reduce: Callable[..., Statistics]
) -> Tensor | LinearCrossEntropyOutput:
    """Compute what the caller asked for.

    Args:
        problem: the arguments of the kernels; the head may have dimensions of positions between its own two.
        rows: the weights of the rows, and of the positions of a row one after the other.
        options: of the loss.
        shape: of class indices.
        reduce: :func:`statistics`, or what takes its place where the vocabulary is spread over processes.
    """
    has_positions = problem.linear_weight.dim() > 2
    if options.is_scalar and not has_positions and reduce is statistics:
        coefficients, of_nothing = rows.coefficients, None
        if options.reduction == "mean":
            divisor, count, of_nothing = divisors(rows, options)
            coefficients = _divided(coefficients, divisor, count)
        if makes_gradients_in_forward(problem, coefficients, options.needs_tokens):
            loss, tokens = loss_with_gradients(problem, coefficients, options.needs_tokens)
            loss = loss if of_nothing is None else loss + of_nothing
            if not options.outputs:
                return loss
            return with_outputs(loss, None, None, None, tokens, rows, options, shape)
    weighted = rows.coefficients.weighted is not None
    if has_positions:
        reduce = partial(_statistics_of_positions, reduce)
    return assemble(reduce(problem, weighted=weighted, predicted_tokens=options.needs_tokens), rows, options, shape)


def _divided(coefficients: Coefficients, divisor: Tensor, count: Tensor) -> Coefficients:
    log_sum_exp, predicted, weighted, square = coefficients
    return Coefficients(
        log_sum_exp / divisor,
        predicted / divisor,
        None if weighted is None else weighted / divisor,
        None if square is None else square / count,
    )


def _statistics_of_positions(
    reduce: Callable[..., Statistics], problem: Problem, weighted: bool, predicted_tokens: bool
) -> Statistics:
    """Reduce the logits of every row at every position of a K-dimensional loss, one linear layer per position."""
    weight, bias = problem.linear_weight, problem.linear_bias
    classes, positions = weight.shape[0], math.prod(weight.shape[1:-1])
    wide_input = widen(problem.input)  # so that the gradients of the positions add up in float32
    # unbind, not an index for each position, whose gradient would be a whole head
    weights = weight.reshape(classes, positions, weight.shape[-1]).unbind(1)
    biases = (None,) * positions if bias is None else bias.reshape(classes, positions).unbind(1)
    targets = problem.target.reshape(-1, positions, *problem.target.shape[1:]).unbind(1)
    parts = [
        reduce(
            replace(problem, input=wide_input.to(weight.dtype), linear_weight=one, linear_bias=of_one, target=target),
            weighted=weighted,
            predicted_tokens=predicted_tokens,
        )
        for one, of_one, target in zip(weights, biases, targets, strict=True)
    ]
    return Statistics._make(
        None if of_parts[0] is None else torch.stack(of_parts, 1).reshape(-1) for of_parts in zip(*parts, strict=True)
    )
