"""The linear cross entropy for the engine of losses on a head: its results are the statistics of rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_aclnn_ops.functional._head.engine import Engine
from torch_aclnn_ops.functional.linear_cross_entropy.formula import statistics_of_rows
from torch_aclnn_ops.ops._head.chunks import HeadGradients, Results
from torch_aclnn_ops.ops._head.tiling import LogitOptions
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, RequestedOutputs
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import choose_kernels, reduce
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Coefficients, Statistics, losses_of_rows

import torch
from torch import Tensor

_NAME = "linear_cross_entropy"


class _CrossEntropy:
    name = _NAME
    number_of_factors = len(Coefficients._fields)
    schema = (
        "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? class_weight,"
        " float? softcap, float temperature, SymInt? chunk_size, SymInt? max_memory, bool is_shard, bool weighted,"
        " bool entropy, bool predicted_tokens, bool[] gradients, Tensor? logits_max, Tensor? log_sum_exp"
    )

    def reduce(self, call: Inputs, factors: Sequence[Tensor | None] | None) -> tuple[Results, HeadGradients]:
        return reduce(call, None if factors is None else _coefficients(factors))

    def formula(self, call: Inputs) -> Results:
        return statistics_of_rows(call)

    def check_formula(self, call: Inputs, in_backward: bool) -> None:
        pass

    def total(self, call: Inputs, results: Results, factors: Sequence[Tensor | None]) -> Tensor:
        return losses_of_rows(call.requested.name(results), _coefficients(factors)).sum()

    def differentiable(self, call: Inputs) -> range:
        return range(1, 1 + call.requested.differentiable)  # the loss does not depend on logits_max

    def beside_total(self, call: Inputs) -> range:
        first = 1 + call.requested.differentiable
        return range(first, first + call.requested.predicted_tokens)

    def backward_call(self, call: Inputs, results: Results) -> Inputs:
        requested = replace(call.requested, predicted_tokens=False)
        return call._replace(requested=requested, found=call.requested.name(results))

    def factors_of(self, call: Inputs, grads: Sequence[Tensor]) -> Coefficients:
        _, log_sum_exp, predicted, weighted, entropy, _ = call.requested.name(grads)
        return Coefficients(log_sum_exp, -predicted, None if weighted is None else -weighted, None, entropy)

    def tensors(self, call: Inputs) -> Sequence[Tensor | None]:
        return call.target, call.class_weight

    def replace(self, call: Inputs, student: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> Inputs:
        return Inputs._make((*student, *tensors, *call[5:]))

    def rows_of(self, call: Inputs, rows: slice) -> Inputs:
        return call._replace(input=call.input[rows], target=call.target[rows])

    def chunks(self, call: Inputs) -> Sequence[slice]:
        return call.tile_rows().chunks()

    def needed(self, call: Inputs) -> tuple[bool, bool, bool]:
        return call.requested.gradients

    def empty(self, call: Inputs) -> list[Tensor]:
        return call.empty_statistics()

    def flatten(self, call: Inputs) -> tuple[Any, ...]:
        input, linear_weight, linear_bias, target, class_weight, options, requested, _, found = call
        return (
            *(input, linear_weight, linear_bias, target, class_weight),
            *(options.softcap, options.temperature, options.chunk_size, options.max_memory, options.is_shard),
            *(requested.weighted, requested.entropy, requested.predicted_tokens, requested.gradients),
            *((None, None) if found is None else (found.logits_max, found.log_sum_exp)),
        )

    def unflatten(self, arguments: Sequence[Any]) -> Inputs:
        softcap, temperature, chunk_size, max_memory, is_shard = arguments[5:10]
        weighted, entropy, predicted_tokens, gradients, logits_max, log_sum_exp = arguments[10:]
        options = LogitOptions(softcap, temperature, chunk_size, max_memory, is_shard)
        requested = RequestedOutputs(weighted, entropy, predicted_tokens, tuple(gradients))
        # The backward pass reads no other statistic.
        found = None if logits_max is None else Statistics(logits_max, log_sum_exp, log_sum_exp)
        return Inputs._make((*arguments[:5], options, requested, None, found))


def _coefficients(factors: Sequence[Tensor | None]) -> Coefficients:
    log_sum_exp, predicted, weighted, square, entropy = factors
    assert log_sum_exp is not None and predicted is not None
    return Coefficients(log_sum_exp, predicted, weighted, square, entropy)


LOSS = _CrossEntropy()
ENGINE = Engine(LOSS)


def statistics(inputs: Inputs) -> Statistics:
    """Reduce the logits of every row, differentiably to any order.

    Returns:
        The requested statistics in float32, or float64 for float64 inputs.
    """
    return inputs.requested.name(ENGINE.rows(_with_kernels(inputs)))


def loss(inputs: Inputs, coefficients: Coefficients) -> tuple[Tensor, Tensor | None]:
    """Compute the sum of the losses of all rows together with its gradients: three matrix products instead of four.

    The first backward pass consumes the gradients; a second one, or double backward, recomputes the logits. Also
    returns the predicted tokens if they are requested.
    """
    value, *tokens = ENGINE.weighted_sum(_with_kernels(inputs), coefficients)
    return value, tokens[0] if tokens else None


def _with_kernels(inputs: Inputs) -> Inputs:
    """Choose the kernels, which apply to the gradients too; compiled code chooses them when it runs."""
    if torch.compiler.is_compiling() or inputs.kernels is not None:
        return inputs
    return inputs._replace(kernels=choose_kernels(inputs))
