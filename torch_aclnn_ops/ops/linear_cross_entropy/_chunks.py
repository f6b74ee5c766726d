"""The rows of a linear cross entropy reduced, and differentiated, chunk by chunk, in buffers that are used again.

Logits are written once per chunk and become the softmax, then their own gradient, in place; or their gradient at once,
in compiled code. All of it is computed in float32 (float64 for float64).
:mod:`torch_aclnn_ops.functional.linear_cross_entropy.rows` has the same mathematics in differentiable calls.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_aclnn_ops.ops._numerics import widen
from torch_aclnn_ops.ops.linear_cross_entropy import _cpu
from torch_aclnn_ops.ops.linear_cross_entropy._counted_rows import CountedRows
from torch_aclnn_ops.ops.linear_cross_entropy._parts import combine
from torch_aclnn_ops.ops.linear_cross_entropy._plan import Plan
from torch_aclnn_ops.ops.linear_cross_entropy._problem import (
    Coefficients,
    Problem,
    Statistics,
    cross_entropies,
    z_losses,
)
from torch_aclnn_ops.ops.linear_cross_entropy._products import Gradients, Head

import torch
from torch import Tensor


class _Chunk:
    """The logits of some rows for some classes, which become the softmax and then their gradient."""

    def __init__(self, problem: Problem, head: Head, buffer: Tensor, rows: slice, classes: slice) -> None:
        self.rows = rows
        self.input, target = problem.input[rows], problem.target[rows]
        self._problem = problem
        self._first_class = classes.start
        number = classes.stop - classes.start
        if target.is_floating_point():
            self._target, self._is_here = target[:, classes], None
        else:
            self._is_here = (target >= classes.start) & (target < classes.stop)
            self._target = (target - classes.start).clamp(0, number - 1).unsqueeze(1)
        self._class_weight = None if problem.class_weight is None else problem.class_weight[classes]
        self._has_kernels = head.has_row_kernels
        # What compiled code makes the gradient of in one go, from the logits.
        is_linear = problem.linear_bias is None and problem.options.softcap is None
        self.is_plain = self._has_kernels and is_linear and self._is_here is not None
        self.values = head.logits(self.input, classes, _view(buffer, self.input.shape[0], number))
        self._tanh: Tensor | None = None
        softcap = problem.options.softcap
        if softcap is not None:
            self.values.div_(softcap).tanh_()
            self._tanh = self.values.clone()
            self.values.mul_(softcap / problem.options.temperature)

    def reduce_alone(self, weighted: bool, predicted_tokens: bool) -> Statistics:
        """Reduce the logits, of which nothing more is wanted."""
        if not self.is_plain or weighted or self._problem.entropy:
            return self.reduce(weighted, predicted_tokens)
        tokens = self.values.argmax(1) if predicted_tokens else None
        target = self._problem.target[self.rows] - self._first_class
        return Statistics(*_cpu.reduce(self.values, target), predicted_tokens=tokens)

    def reduce(self, weighted: bool, predicted_tokens: bool) -> Statistics:
        """Turn the logits to the softmax."""
        logits = self.values
        logits_max = logits.amax(1)
        tokens = logits.argmax(1) if predicted_tokens else None
        predicted = self._predicted(logits, logits_max)
        weighted_sum = self._weighted(logits, logits_max) if weighted else None
        log_sum_exp = self._to_softmax(logits_max)
        if log_sum_exp is None:
            # The largest probability is exp(max - max) / sum exp(z - max). xlogy takes the logarithm of few numbers in
            # no time; log goes through MKL, whose threads have to be woken.
            log_sum_exp = -torch.xlogy(1, self.values.amax(1))
        entropy = torch.special.entr(self.values).sum(1) if self._problem.entropy else None
        if self._problem.linear_bias is not None:
            # All classes may be masked by their bias.
            is_masked = logits_max == -math.inf
            log_sum_exp.masked_fill_(is_masked, -math.inf)
            entropy = None if entropy is None else entropy.masked_fill_(is_masked, 0)
        return Statistics(logits_max, log_sum_exp, predicted, weighted_sum, entropy, tokens)

    def reduce_to_gradient(self, factors: Coefficients, gradient: Tensor, predicted_tokens: bool) -> Statistics:
        """Reduce the logits, and write their gradient, where a chunk :attr:`is_plain` and has no weighted sums."""
        tokens = self.values.argmax(1) if predicted_tokens else None
        temperature = self._problem.options.temperature
        of_log_sum_exp, of_predicted = factors.log_sum_exp / temperature, -factors.predicted / temperature
        of_square = None if factors.square is None else 2 * factors.square / temperature
        statistics = _cpu.write_gradient(
            self.values, self._problem.target[self.rows].contiguous(), of_log_sum_exp, of_predicted, of_square, gradient
        )
        return Statistics(*statistics, predicted_tokens=tokens)

    def mass(self) -> Tensor:
        """Return the sum of each row's target distribution."""
        return self._distribution().sum(1) if self._is_here is None else self._is_here

    def class_weight_sum(self) -> Tensor | int:
        """Return the sum of the class weights."""
        return self.values.shape[1] if self._class_weight is None else self._class_weight.sum()

    def to_softmax(self) -> None:
        """Turn the logits to the softmax."""
        needs_max = self._has_kernels or self._problem.linear_bias is not None
        self._to_softmax(self.values.amax(1) if needs_max else None)

    def _to_softmax(self, logits_max: Tensor | None) -> Tensor | None:
        """Turn the logits to the softmax; return ``log sum exp(z - max)`` where it is found on the way."""
        if self._problem.linear_bias is not None and logits_max is not None:
            # Where the bias masks all classes of a part, any distribution does that is finite: its share is 0.
            is_masked = logits_max == -math.inf
            self.values.masked_fill_(is_masked.unsqueeze(1), 0)
            logits_max = logits_max.masked_fill(is_masked, 0)
        if self._has_kernels and logits_max is not None:
            return _cpu.to_softmax(self.values, logits_max)
        if self.values.device.type == "cpu":
            torch.softmax(self.values, 1, out=self.values)
        else:
            self.values = self.values.softmax(1)
        return None

    def _predicted(self, logits: Tensor, logits_max: Tensor) -> Tensor:
        if self._is_here is None:
            return (self._distribution() * (logits - logits_max.unsqueeze(1))).sum(1)
        at_target = logits.gather(1, self._target).squeeze(1)
        predicted = (at_target - logits_max).masked_fill_(at_target == -math.inf, -math.inf)
        return predicted.masked_fill_(~self._is_here, 0)

    def _weighted(self, logits: Tensor, logits_max: Tensor) -> Tensor:
        sums = logits.sum(1) if self._class_weight is None else logits @ self._class_weight
        return sums - self.class_weight_sum() * logits_max

    def _distribution(self) -> Tensor:
        target = widen(self._target)
        return target if self._class_weight is None else target * self._class_weight

    def to_gradient(self, cotangents: Statistics, entropy: Tensor | None) -> Tensor:
        """Turn the softmax to the gradient of ``input @ weight.T + bias``.

        With probabilities p and the cotangents g of the statistics, the gradient of the logits z is
        ``g_log_sum_exp p + g_predicted Q + g_weighted class_weight - g_entropy p (log p + entropy)``, where Q is the
        target's distribution; ``dz / d(linear) = (1 - tanh^2) / temperature``.
        """
        values, options = self.values, self._problem.options
        _, of_log_sum, of_predicted, of_weighted, of_entropy, _ = (
            None if cotangent is None else cotangent / options.temperature for cotangent in cotangents
        )
        assert of_log_sum is not None and of_predicted is not None
        if of_entropy is not None and entropy is not None:
            surprise = torch.special.entr(values)
            values.mul_((of_log_sum - of_entropy * entropy).unsqueeze(1)).addcmul_(surprise, of_entropy.unsqueeze(1))
        else:
            values.mul_(of_log_sum.unsqueeze(1))
        if self._is_here is None:
            values.addcmul_(self._distribution(), of_predicted.unsqueeze(1))
        else:
            values.scatter_add_(1, self._target, of_predicted.masked_fill(~self._is_here, 0).unsqueeze(1))
        if of_weighted is not None:
            weight, column = self._class_weight, of_weighted.unsqueeze(1)
            values.add_(column) if weight is None else values.addcmul_(weight, column)
        if self._tanh is not None:
            values.mul_(self._tanh.square_().neg_().add_(1))
            self._tanh = None  # before the next chunk makes its own
        return values


def statistics(problem: Problem, weighted: bool = False, predicted_tokens: bool = False) -> Statistics:
    """Reduce the logits of every row; a row that does not count gets zeros, and the predicted token -1."""
    counted = CountedRows(problem)
    plan = counted.problem.plan_statistics()
    head = _head(problem, plan)
    chunks = [_reduced(counted.problem, head, plan, rows, weighted, predicted_tokens) for rows in plan.chunks()]
    *values, tokens = _joined(torch.cat, chunks)
    return Statistics._make((*map(counted.at_all_rows, values), counted.at_all_rows(tokens, -1)))


def _reduced(
    problem: Problem, head: Head, plan: Plan, rows: slice, weighted: bool, predicted_tokens: bool
) -> Statistics:
    """Reduce the logits of some rows, part of the vocabulary by part."""
    buffer = _buffer(problem, head, plan)
    parts, masses, weight_sums = [], [], []
    for classes in plan.parts():
        chunk = _Chunk(problem, head, buffer, rows, classes)
        if len(plan.parts()) == 1:
            return chunk.reduce_alone(weighted, predicted_tokens)
        masses.append(chunk.mass())
        weight_sums.append(chunk.class_weight_sum())
        parts.append(chunk.reduce_alone(weighted, predicted_tokens))
    starts = [classes.start for classes in plan.parts()]
    return combine(Statistics._make(_joined(torch.stack, parts)), torch.stack(masses), starts, weight_sums)


def _joined(join: Callable[[list[Tensor]], Tensor], parts: Sequence[Statistics]) -> Iterator[Any]:
    return (None if of_parts[0] is None else join(list(of_parts)) for of_parts in zip(*parts, strict=True))


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
    counted = CountedRows(problem)
    cotangents = Statistics._make(map(counted.of, cotangents))
    entropy = counted.of(entropy)
    plan = counted.problem.plan(with_gradient=needed[1])
    head = _head(problem, plan)
    total = Gradients(counted.problem.input, head, plan, needed)
    for chunk in _chunks(counted.problem, head, plan, total):
        chunk.to_softmax()
        of_rows = None if entropy is None else entropy[chunk.rows]
        total.add(chunk.to_gradient(_rows_of(cotangents, chunk.rows), of_rows), chunk.input, chunk.rows)
    of_input, *others = total.finish()
    arguments = (problem.input, problem.linear_weight, problem.linear_bias)
    return tuple(
        None if gradient is None or argument is None else gradient.to(argument.dtype)
        for gradient, argument in zip((counted.at_all_rows(of_input), *others), arguments, strict=True)
    )


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
    counted = CountedRows(problem)
    coefficients = Coefficients._make(map(counted.of, coefficients))
    plan = counted.problem.plan(with_gradient=needed[1])
    head = _head(problem, plan)
    total = Gradients(counted.problem.input, head, plan, needed)
    losses, tokens = [], []
    for chunk in _chunks(counted.problem, head, plan, total):
        of_rows = Coefficients._make(None if factor is None else factor[chunk.rows] for factor in coefficients)
        if chunk.is_plain and of_rows.weighted is None:
            gradient = total.place(chunk.rows, chunk.values)
            reduced = chunk.reduce_to_gradient(of_rows, gradient, predicted_tokens)
            loss, _ = _loss_of_rows(reduced, of_rows)
        else:
            reduced = chunk.reduce(of_rows.weighted is not None, predicted_tokens)
            loss, cotangents = _loss_of_rows(reduced, of_rows)
            gradient = chunk.to_gradient(cotangents, None)
        losses.append(loss)
        tokens.append(reduced.predicted_tokens)
        total.add(gradient, chunk.input, chunk.rows)
    loss = torch.cat(losses).sum()
    found = torch.cat([part for part in tokens if part is not None]) if predicted_tokens else None
    of_input, *others = total.finish()
    return loss, (counted.at_all_rows(of_input), *others), counted.at_all_rows(found, -1)


def _loss_of_rows(reduced: Statistics, factors: Coefficients) -> tuple[Tensor, Statistics]:
    """Return the losses of some rows, and their derivatives by the statistics."""
    losses, of_log_sum_exp = cross_entropies(reduced, factors), factors.log_sum_exp
    if factors.square is not None:
        losses = losses + z_losses(reduced, factors)
        of_log_sum_exp = of_log_sum_exp + 2 * factors.square * (reduced.logits_max + reduced.log_sum_exp)
    of_weighted = None if factors.weighted is None else -factors.weighted
    return losses, Statistics(reduced.logits_max, of_log_sum_exp, -factors.predicted, of_weighted)


def _head(problem: Problem, plan: Plan) -> Head:
    # The softcap comes before the temperature.
    scale = 1.0 if problem.options.softcap is not None else 1 / problem.options.temperature
    return Head(problem.linear_weight, problem.linear_bias, scale, plan)


def _buffer(problem: Problem, head: Head, plan: Plan) -> Tensor:
    """Make room for the logits of a chunk."""
    return problem.input.new_empty(_number_of_logits(plan), dtype=head.dtype)


def _number_of_logits(plan: Plan) -> int:
    return min(plan.rows, plan.rows_per_chunk) * plan.classes_per_chunk


def _view(buffer: Tensor, rows: int, classes: int) -> Tensor:
    return buffer[: rows * classes].view(rows, classes)


def _chunks(problem: Problem, head: Head, plan: Plan, total: Gradients) -> Iterator[_Chunk]:
    free = total.free_memory(_number_of_logits(plan))
    buffer = _buffer(problem, head, plan) if free is None else free
    for rows in plan.chunks():
        yield _Chunk(problem, head, buffer, rows, slice(0, plan.classes))


def _rows_of(tensors: Statistics, rows: slice) -> Statistics:
    return Statistics._make(None if tensor is None else tensor[rows] for tensor in tensors)
