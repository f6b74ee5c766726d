"""The rows of a linear cross entropy reduced, and differentiated, chunk by chunk, in buffers that are used again.

Logits are written once per chunk and become the softmax, then their own gradient, in place. All of it is computed in
float32 (float64 for float64). :mod:`torch_aclnn_ops.functional.linear_cross_entropy.rows` has the same mathematics in
calls that can be differentiated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch_aclnn_ops.ops._checks import values_are_readable
from torch_aclnn_ops.ops._numerics import widen
from torch_aclnn_ops.ops.linear_cross_entropy._plan import Options, Plan, make_plan
from torch_aclnn_ops.ops.linear_cross_entropy._products import Gradients, Head, has_bfloat16_units

import torch
from torch import Tensor

# Targets that are no class of the head: of a row that does not count, and of a row whose class is in another shard.
IGNORED = -1
ELSEWHERE = -2


class Statistics(NamedTuple):
    """What the logits ``z`` of each row are reduced to, shape (N,) each; ``max`` is a constant to derivatives.

    Attributes:
        logits_max: ``max z``.
        log_sum_exp: ``log sum exp(z - max)``.
        predicted: ``z[target] - max``, or ``sum(target * class_weight * (z - max))`` for probabilities.
        weighted: ``sum(class_weight * (z - max))``.
        entropy: of the softmax, in nats.
        predicted_tokens: the class of the largest logit.
    """

    logits_max: Tensor
    log_sum_exp: Tensor
    predicted: Tensor
    weighted: Tensor | None = None
    entropy: Tensor | None = None
    predicted_tokens: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """The arguments of a call, the same for all its kernels.

    Attributes:
        input: shape (N, H).
        linear_weight: shape (V, H).
        linear_bias: shape (V,).
        target: class indices, ``IGNORED`` or ``ELSEWHERE``, shape (N,), or probabilities, shape (N, V).
        class_weight: shape (V,).
        options: what shapes the logits.
        entropy: whether the entropy is used.
    """

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    options: Options
    entropy: bool = False

    def plan(self, rows: int | None = None, with_gradient: bool = False) -> Plan:
        """Cut the rows, or as many as are left of them."""
        copies = 1 + (self.options.softcap is not None) + self.entropy + 2 * self.target.is_floating_point()
        units = has_bfloat16_units(self.linear_weight)
        rows = self.input.shape[0] if rows is None else rows
        return make_plan(rows, self.linear_weight, self.options, copies, with_gradient, units)


class _Chunk:
    """Some rows, whose logits become the softmax and then their gradient."""

    def __init__(self, problem: Problem, head: Head, buffer: Tensor, rows: slice) -> None:
        self.rows = rows
        self.input, self._target = problem.input[rows], problem.target[rows]
        self._problem = problem
        self._values = head.logits(self.input, buffer[: self.input.shape[0]])
        self._tanh: Tensor | None = None
        softcap = problem.options.softcap
        if softcap is not None:
            self._values.div_(softcap).tanh_()
            self._tanh = self._values.clone()
            self._values.mul_(softcap / problem.options.temperature)

    def reduce(self, weighted: bool, predicted_tokens: bool) -> Statistics:
        """Turn the logits to the softmax."""
        logits = self._values
        logits_max = logits.amax(1)
        tokens = logits.argmax(1) if predicted_tokens else None
        predicted = self._predicted(logits, logits_max)
        weighted_sum = self._weighted(logits, logits_max) if weighted else None
        self.to_softmax()
        # The largest probability is exp(max - max) / sum exp(z - max). A logarithm of few numbers by xlogy is done in no
        # time; log goes through MKL, whose threads have to be woken.
        log_sum_exp = -torch.xlogy(1, self._values.amax(1))
        entropy = torch.special.entr(self._values).sum(1) if self._problem.entropy else None
        return Statistics(logits_max, log_sum_exp, predicted, weighted_sum, entropy, tokens)

    def to_softmax(self) -> None:
        """Turn the logits to the softmax."""
        if self._values.device.type == "cpu":
            torch.softmax(self._values, 1, out=self._values)
        else:
            self._values = self._values.softmax(1)

    def _predicted(self, logits: Tensor, logits_max: Tensor) -> Tensor:
        if self._target.is_floating_point():
            return (self._distribution() * (logits - logits_max.unsqueeze(1))).sum(1)
        predicted = logits.gather(1, self._target.clamp(min=0).unsqueeze(1)).squeeze(1) - logits_max
        return predicted.masked_fill_(self._target < 0, 0)

    def _weighted(self, logits: Tensor, logits_max: Tensor) -> Tensor:
        weight = self._problem.class_weight
        if weight is None:
            return logits.sum(1) - logits.shape[1] * logits_max
        return logits @ weight - weight.sum() * logits_max

    def _distribution(self) -> Tensor:
        target = widen(self._target)
        return target if self._problem.class_weight is None else target * self._problem.class_weight

    def to_gradient(self, cotangents: Statistics, entropy: Tensor | None) -> Tensor:
        """Turn the softmax to the gradient of ``input @ weight.T + bias``.

        With probabilities p and the cotangents g of the statistics, the gradient of the logits z is
        ``g_log_sum_exp p + g_predicted Q + g_weighted class_weight - g_entropy p (log p + entropy)``, where Q is the
        target's distribution; ``dz / d(linear) = (1 - tanh^2) / temperature``.
        """
        values, options = self._values, self._problem.options
        _, of_log_sum, of_predicted, of_weighted, of_entropy, _ = (
            None if cotangent is None else cotangent / options.temperature for cotangent in cotangents
        )
        assert of_log_sum is not None and of_predicted is not None
        if of_entropy is not None and entropy is not None:
            surprise = torch.special.entr(values)
            values.mul_((of_log_sum - of_entropy * entropy).unsqueeze(1)).addcmul_(surprise, of_entropy.unsqueeze(1))
        else:
            values.mul_(of_log_sum.unsqueeze(1))
        if self._target.is_floating_point():
            values.addcmul_(self._distribution(), of_predicted.unsqueeze(1))
        else:
            of_target = of_predicted.masked_fill(self._target < 0, 0).unsqueeze(1)
            values.scatter_add_(1, self._target.clamp(min=0).unsqueeze(1), of_target)
        if of_weighted is not None:
            weight = self._problem.class_weight
            column = of_weighted.unsqueeze(1)
            values.add_(column) if weight is None else values.addcmul_(weight, column)
        if self._tanh is not None:
            values.mul_(self._tanh.square_().neg_().add_(1))
        return values


def statistics(problem: Problem, weighted: bool = False, predicted_tokens: bool = False) -> Statistics:
    """Reduce the logits of every row; a row that does not count gets zeros, and the predicted token -1."""
    counted = _CountedRows(problem)
    plan = counted.problem.plan()
    head = _head(problem, plan)
    parts = [chunk.reduce(weighted, predicted_tokens) for chunk in _chunks(counted.problem, head, plan)]
    *values, tokens = (None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))
    return Statistics._make((*map(counted.at_all_rows, values), counted.at_all_rows(tokens, -1)))


def gradients(
    problem: Problem, cotangents: Statistics, entropy: Tensor | None, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Pull the gradients of the statistics back to input, weight and bias, in their dtypes.

    Args:
        problem: the arguments.
        cotangents: the gradients of the statistics.
        entropy: the statistic, if its gradient is given.
        needed: whether the gradients of input, weight and bias are needed.
    """
    counted = _CountedRows(problem)
    cotangents = Statistics._make(map(counted.of, cotangents))
    entropy = counted.of(entropy)
    plan = counted.problem.plan(with_gradient=needed[1])
    head = _head(problem, plan)
    total = Gradients(counted.problem.input, head, plan, needed)
    for chunk in _chunks(counted.problem, head, plan):
        chunk.to_softmax()
        of_rows = None if entropy is None else entropy[chunk.rows]
        total.add(chunk.to_gradient(_rows_of(cotangents, chunk.rows), of_rows), chunk.input, chunk.rows)
    of_input, *others = total.finish()
    arguments = (problem.input, problem.linear_weight, problem.linear_bias)
    return tuple(
        None if gradient is None or argument is None else gradient.to(argument.dtype)
        for gradient, argument in zip((counted.at_all_rows(of_input), *others), arguments, strict=True)
    )


class Coefficients(NamedTuple):
    """The factors of each row's statistics in a loss, shape (N,) each.

    The loss is the sum of ``log_sum_exp * log_sum_exp_factor - predicted * predicted_factor - weighted *
    weighted_factor + square_factor * (logits_max + log_sum_exp)^2``.
    """

    log_sum_exp: Tensor
    predicted: Tensor
    weighted: Tensor | None
    square: Tensor | None


def loss_and_gradients(
    problem: Problem, coefficients: Coefficients, needed: Sequence[bool], predicted_tokens: bool = False
) -> tuple[Tensor, tuple[Tensor | None, ...], Tensor | None]:
    """Compute the loss of all rows together with its gradients by input, weight and bias: three matrix products.

    Args:
        problem: the arguments.
        coefficients: of the loss.
        needed: whether the gradients of input, weight and bias are needed.
        predicted_tokens: whether the classes of the largest logits are returned.

    Returns:
        The loss, the gradients (wide, but for a bfloat16 head's that is summed in one product), and the predicted
        tokens, -1 for a row that does not count.
    """
    counted = _CountedRows(problem)
    coefficients = Coefficients._make(map(counted.of, coefficients))
    plan = counted.problem.plan(with_gradient=needed[1])
    head = _head(problem, plan)
    total = Gradients(counted.problem.input, head, plan, needed)
    losses, tokens = [], []
    for chunk in _chunks(counted.problem, head, plan):
        of_rows = Coefficients._make(None if factor is None else factor[chunk.rows] for factor in coefficients)
        reduced = chunk.reduce(of_rows.weighted is not None, predicted_tokens)
        loss, cotangents = _loss_of_rows(reduced, of_rows)
        losses.append(loss)
        tokens.append(reduced.predicted_tokens)
        total.add(chunk.to_gradient(cotangents, None), chunk.input, chunk.rows)
    loss = torch.cat(losses).sum()
    found = torch.cat([part for part in tokens if part is not None]) if predicted_tokens else None
    of_input, *others = total.finish()
    return loss, (counted.at_all_rows(of_input), *others), counted.at_all_rows(found, -1)


def _loss_of_rows(reduced: Statistics, factors: Coefficients) -> tuple[Tensor, Statistics]:
    """Return the losses of some rows, and their derivatives by the statistics."""
    loss = factors.log_sum_exp * reduced.log_sum_exp - factors.predicted * reduced.predicted
    of_log_sum, of_weighted = factors.log_sum_exp, None
    if factors.weighted is not None and reduced.weighted is not None:
        loss = loss - factors.weighted * reduced.weighted
        of_weighted = -factors.weighted
    if factors.square is not None:
        log_normalizer = reduced.logits_max + reduced.log_sum_exp
        loss = loss + factors.square * log_normalizer.square()
        of_log_sum = of_log_sum + 2 * factors.square * log_normalizer
    return loss, Statistics(of_log_sum, of_log_sum, -factors.predicted, of_weighted)


def _head(problem: Problem, plan: Plan) -> Head:
    # The softcap comes before the temperature.
    scale = 1.0 if problem.options.softcap is not None else 1 / problem.options.temperature
    return Head(problem.linear_weight, problem.linear_bias, scale, plan)


def _chunks(problem: Problem, head: Head, plan: Plan) -> Iterator[_Chunk]:
    buffer = problem.input.new_empty(min(plan.rows, plan.rows_per_chunk), plan.classes, dtype=head.dtype)
    for rows in plan.chunks():
        yield _Chunk(problem, head, buffer, rows)


class _CountedRows:
    """The rows of a problem without those that do not count.

    They are dropped where looking for them waits for no device. Elsewhere they are rows of zeros, so that nothing that
    is not finite gets from them into a sum, and weigh nothing.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._rows = problem.input.shape[0]
        self._kept: Tensor | None = None
        self._ignored: Tensor | None = None
        if problem.target.is_floating_point():
            return
        ignored = problem.target == IGNORED
        if not values_are_readable(problem.target):
            self._ignored = ignored
            self.problem = replace(problem, input=problem.input.masked_fill(ignored.unsqueeze(1), 0))
        elif ignored.any():
            self._kept = kept = (~ignored).nonzero().squeeze(1)
            self.problem = replace(problem, input=problem.input[kept], target=problem.target[kept])

    def of(self, values: Tensor | None) -> Tensor | None:
        """Return the values of the rows that are left; zeros of those that do not count."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(self._ignored, 0)
        return values if self._kept is None else values[self._kept]

    def at_all_rows(self, values: Tensor | None, elsewhere: int = 0) -> Tensor | None:
        """Return the values with others, ``elsewhere``, for the rows that do not count."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(self._ignored.reshape(-1, *(1,) * (values.dim() - 1)), elsewhere)
        if self._kept is None:
            return values
        return values.new_full((self._rows, *values.shape[1:]), elsewhere).index_copy_(0, self._kept, values)


def _rows_of(tensors: Statistics, rows: slice) -> Statistics:
    return Statistics._make(None if tensor is None else tensor[rows] for tensor in tensors)
