"""The linear cross entropy for the engine of losses on a head: its results are the statistics of rows."""

from collections.abc import Sequence

from torch_aclnn_ops.functional._head.engine import Engine
from torch_aclnn_ops.functional._head.loss import HeadLoss
from torch_aclnn_ops.ops._head import HeadGradients, Results
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call, Coefficients, Statistics, losses_of_rows
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import reduce, statistics_of_rows, why_not_fused

import torch
from torch import Tensor

# What becomes the coefficients of the statistics, or is chosen before them.
_UNREAD = (
    *("token_weight", "reduction", "ignore_index", "label_smoothing", "lse_square_scale", "zero_if_all_ignored"),
    *("outputs", "shape", "is_fused"),
)


class _CrossEntropy(HeadLoss):
    number_of_factors = len(Coefficients._fields)

    def reduce(self, call: Call, factors: Sequence[Tensor | None] | None) -> tuple[Results, HeadGradients]:
        return reduce(call, None if factors is None else Coefficients._make(factors))

    def formula(self, call: Call) -> Results:
        return statistics_of_rows(call)

    def total(self, call: Call, results: Results, factors: Sequence[Tensor | None]) -> Tensor:
        return losses_of_rows(call.name(results), Coefficients._make(factors)).sum()

    def differentiable(self, call: Call) -> range:
        return range(1, 3 + call.weighted + call.entropy)  # the loss does not depend on logits_max

    def beside_total(self, call: Call) -> range:
        first = 3 + call.weighted + call.entropy
        return range(first, first + call.predicted_tokens)

    def backward_call(self, call: Call, results: Results) -> Call:
        return call._replace(predicted_tokens=False, logits_max=results[0], log_sum_exp=results[1])

    def factors_of(self, call: Call, grads: Sequence[Tensor]) -> Coefficients:
        _, log_sum_exp, predicted, weighted, entropy, _ = call.name(grads)
        return Coefficients(log_sum_exp, -predicted, None if weighted is None else -weighted, None, entropy)

    def empty(self, call: Call) -> list[Tensor]:
        return call.empty_statistics()


LOSS = _CrossEntropy("linear_cross_entropy", Call, _UNREAD, of_rows=["target"])
ENGINE = Engine(LOSS)


def statistics(call: Call) -> Statistics:
    """Reduce the logits of every row, differentiably to any order.

    Returns:
        The needed statistics in float32, or float64 for float64 inputs.
    """
    if call.is_fused is None and not torch.compiler.is_compiling():  # which applies to the gradients, too
        call = call._replace(is_fused=why_not_fused(call) is None)
    return call.name(ENGINE.rows(call))
