"""The PyTorch fallback: kernels that process rows chunk by chunk, in reused buffers.

The logits of a chunk are overwritten in place by their softmax and then by their gradient, or directly by their
gradient in csrc/cpu. Everything is computed in float32 (float64 for float64).
:mod:`torch_aclnn_ops.functional.linear_cross_entropy.row_functions` has the same mathematics in differentiable calls.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_aclnn_ops._numerics import widen, without_autocast
from torch_aclnn_ops.ops._head.products import Gradients, Head, logits_buffer
from torch_aclnn_ops.ops._head.tiling import Tiling
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, kept_rows
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Coefficients, Statistics, combine, losses_of_rows

import torch
from torch import Tensor


class _Chunk:
    """The logits of a range of rows and classes, overwritten in place by the softmax and then by their gradient."""

    def __init__(self, inputs: Inputs, head: Head, buffer: Tensor, rows: slice, classes: slice) -> None:
        self.input, self.target = inputs.input[rows], inputs.target[rows]
        self._inputs = inputs
        self._classes = classes
        self._class_weight = None if inputs.class_weight is None else inputs.class_weight[classes]
        self._has_kernels = head.has_row_kernels
        number, length = classes.stop - classes.start, self.input.shape[0]
        # A bias of -inf may mask all classes of a part of the vocabulary. A row with all classes masked is nan.
        is_part = inputs.options.is_shard or number < inputs.linear_weight.shape[0]
        self._may_be_masked = is_part and inputs.linear_bias is not None
        self.values = head.logits(self.input, classes, buffer[: length * number].view(length, number))
        self._tanh: Tensor | None = None
        softcap = inputs.options.softcap
        if softcap is not None:
            self.values.div_(softcap).tanh_()
            self._tanh = self.values.clone()
            self.values.mul_(softcap / inputs.options.temperature)

    def _is_here(self) -> Tensor:
        here: Tensor = (self.target >= self._classes.start) & (self.target < self._classes.stop)
        return here

    def _column(self) -> Tensor:
        """Return the column of each row's target, shape (rows, 1); arbitrary if the target is in another part."""
        column: Tensor = (self.target - self._classes.start).clamp(0, self.values.shape[1] - 1).unsqueeze(1)
        return column

    def reduce_alone(self) -> Statistics:
        """Reduce the logits, which are not used afterwards."""
        requested = self._inputs.requested
        if not (self._has_kernels and self._inputs.is_plain) or requested.weighted or requested.entropy:
            return self.reduce()
        tokens = self.values.argmax(1) if requested.predicted_tokens else None
        target = self.target - self._classes.start
        kernel = torch.ops.torch_aclnn_ops.linear_cross_entropy_logits_statistics
        statistics: tuple[Tensor, Tensor, Tensor] = kernel(self.values, target)
        return Statistics(*statistics, None, None, tokens)

    def reduce(self) -> Statistics:
        """Reduce the logits, and overwrite them with the softmax."""
        logits, requested = self.values, self._inputs.requested
        logits_max = logits.amax(1)
        shift, is_masked = self._shift(logits_max)
        tokens = logits.argmax(1) if requested.predicted_tokens else None
        weighted_sum = None
        if requested.weighted:
            # Subtract before summing: a sum of logits near the largest number would overflow.
            logits.sub_(shift.unsqueeze(1))
            shift = torch.zeros_like(shift)
            weighted_sum = logits.sum(1) if self._class_weight is None else logits @ self._class_weight
        predicted = self._predicted(logits, shift)
        log_sum_exp = self._to_softmax(shift, is_masked)
        if log_sum_exp is None:
            # The largest probability is exp(max - max) / sum exp(z - max). xlogy is faster than log for few numbers,
            # because log uses MKL, whose threads must be woken up.
            log_sum_exp = -torch.xlogy(1, self.values.amax(1))
        entropy = torch.special.entr(self.values).sum(1) if requested.entropy else None
        if is_masked is not None:
            log_sum_exp.masked_fill_(is_masked, -math.inf)
            entropy = None if entropy is None else entropy.masked_fill_(is_masked, 0)
        return Statistics(logits_max, log_sum_exp, predicted, weighted_sum, entropy, tokens)

    def reduce_to_gradient(self, coefficients: Coefficients, gradient: Tensor) -> Statistics:
        """Reduce the logits, and write the gradient of a plain loss with respect to them, in a single kernel."""
        tokens = self.values.argmax(1) if self._inputs.requested.predicted_tokens else None
        log_sum_exp, predicted, _, square = coefficients
        temperature = self._inputs.options.temperature
        if temperature != 1:
            log_sum_exp, predicted = log_sum_exp / temperature, predicted / temperature
        grad_square = None if square is None else 2 * square / temperature
        kernel = torch.ops.torch_aclnn_ops.linear_cross_entropy_logits_gradient
        statistics: tuple[Tensor, Tensor, Tensor] = kernel(
            self.values, self.target.contiguous(), log_sum_exp.contiguous(), -predicted, grad_square, gradient
        )
        return Statistics(*statistics, None, None, tokens)

    def target_probability_sum(self) -> Tensor:
        """Return the target probability of each row in these classes."""
        return self._distribution().sum(1) if self.target.is_floating_point() else self._is_here()

    def to_softmax(self) -> None:
        """Overwrite the logits with the softmax."""
        needs_max = self._has_kernels or self._may_be_masked
        self._to_softmax(*(self._shift(self.values.amax(1)) if needs_max else (None, None)))

    def _shift(self, logits_max: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the values to subtract from the logits, and the mask of rows whose classes are all masked, if any."""
        if not self._may_be_masked:
            return logits_max, None
        is_masked = logits_max == -math.inf
        return logits_max.masked_fill(is_masked, 0), is_masked

    def _to_softmax(self, shift: Tensor | None, is_masked: Tensor | None) -> Tensor | None:
        """Overwrite the logits with the softmax; return ``log sum exp(z - max)`` if the kernel computes it."""
        if is_masked is not None:
            # Any finite distribution will do: a masked part gets a weight of 0.
            self.values.masked_fill_(is_masked.unsqueeze(1), 0)
        if self._has_kernels and shift is not None:
            log_sum_exp: Tensor = torch.ops.torch_aclnn_ops.linear_cross_entropy_softmax(self.values, shift)
            return log_sum_exp
        if self.values.is_cpu:
            torch.softmax(self.values, 1, out=self.values)
        else:
            self.values = self.values.softmax(1)
        return None

    def _predicted(self, logits: Tensor, shift: Tensor) -> Tensor:
        if self.target.is_floating_point():
            return (self._distribution() * (logits - shift.unsqueeze(1))).sum(1)
        at_target = logits.gather(1, self._column()).squeeze(1)
        return (at_target - shift).masked_fill_(~self._is_here(), 0)

    def _distribution(self) -> Tensor:
        target = widen(self.target[:, self._classes])
        return target if self._class_weight is None else target * self._class_weight

    def to_gradient(self, grad_statistics: Statistics, entropy: Tensor | None) -> Tensor:
        """Overwrite the softmax with the gradient of ``input @ weight.T + bias``.

        With probabilities p and the gradients g of the statistics, the gradient of the logits z is
        ``g_log_sum_exp p + g_predicted Q + g_weighted class_weight - g_entropy p (log p + entropy)``, where Q is the
        target's distribution; ``dz / d(linear) = (1 - tanh^2) / temperature``.
        """
        values, temperature = self.values, self._inputs.options.temperature
        _, grad_log_sum_exp, grad_predicted, grad_weighted, grad_entropy, _ = (
            gradient if gradient is None or temperature == 1 else gradient / temperature for gradient in grad_statistics
        )
        assert grad_log_sum_exp is not None and grad_predicted is not None
        if grad_entropy is not None and entropy is not None:
            surprise = torch.special.entr(values)
            values.mul_((grad_log_sum_exp - grad_entropy * entropy).unsqueeze(1))
            values.addcmul_(surprise, grad_entropy.unsqueeze(1))
        else:
            values.mul_(grad_log_sum_exp.unsqueeze(1))
        if self.target.is_floating_point():
            values.addcmul_(self._distribution(), grad_predicted.unsqueeze(1))
        else:
            values.scatter_add_(1, self._column(), grad_predicted.masked_fill(~self._is_here(), 0).unsqueeze(1))
        if grad_weighted is not None:
            weight, column = self._class_weight, grad_weighted.unsqueeze(1)
            values.add_(column) if weight is None else values.addcmul_(weight, column)
        if self._tanh is not None:
            values.mul_(self._tanh.square_().neg_().add_(1))
            self._tanh = None  # free it before the next chunk
        return values


@without_autocast
def statistics_in_chunks(inputs: Inputs) -> Statistics:
    """Reduce the logits of every row; ignored rows give zeros, and the predicted token -1."""
    kept, inputs = kept_rows(inputs)
    tiling = inputs.tile_statistics()
    head = _head(inputs, tiling)
    chunks = [_reduce_rows(inputs, head, tiling, rows) for rows in tiling.chunks()]
    *values, tokens = _join(torch.cat, chunks)
    return Statistics._make((*map(kept.expand_to_all_rows, values), kept.expand_to_all_rows(tokens, -1)))


def _reduce_rows(inputs: Inputs, head: Head, tiling: Tiling, rows: slice) -> Statistics:
    """Reduce the logits of a range of rows, one part of the vocabulary at a time."""
    buffer, classes_of_parts = logits_buffer(inputs.input, head, tiling), tiling.parts()
    if len(classes_of_parts) == 1:
        return _Chunk(inputs, head, buffer, rows, classes_of_parts[0]).reduce_alone()
    parts, sums = [], []
    for classes in classes_of_parts:
        chunk = _Chunk(inputs, head, buffer, rows, classes)
        sums.append(chunk.target_probability_sum())
        parts.append(chunk.reduce_alone())
    stacked = Statistics._make(_join(torch.stack, parts))
    return combine(stacked, torch.stack(sums), classes_of_parts, inputs.class_weight)


def _join(join: Callable[[list[Tensor]], Tensor], parts: Sequence[Statistics]) -> Iterator[Any]:
    """Join each statistic of the parts, which all have it or all lack it."""
    return (None if column[0] is None else join(list(column)) for column in zip(*parts, strict=True))


@without_autocast
def gradients_in_chunks(
    inputs: Inputs, grad_statistics: Statistics, entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the requested gradients of input, weight and bias, in their dtypes."""
    kept, inputs = kept_rows(inputs)
    grad_statistics, entropy = Statistics._make(map(kept.select, grad_statistics)), kept.select(entropy)
    tiling = inputs.tile_rows()
    head = _head(inputs, tiling)
    total = Gradients(inputs.input, head, tiling, inputs.requested.gradients)
    buffer = logits_buffer(inputs.input, head, tiling, total)
    for rows in tiling.chunks():
        chunk = _Chunk(inputs, head, buffer, rows, slice(0, tiling.classes))
        chunk.to_softmax()
        grad_rows = Statistics._make(None if tensor is None else tensor[rows] for tensor in grad_statistics)
        gradient = chunk.to_gradient(grad_rows, None if entropy is None else entropy[rows])
        total.add(gradient, chunk.input, rows)
    input_grad, *others = total.finish()
    return tuple(
        None if gradient is None or argument is None else gradient.to(argument.dtype)
        for gradient, argument in zip((kept.expand_to_all_rows(input_grad), *others), inputs[:3], strict=True)
    )


@without_autocast
def loss_in_chunks(
    inputs: Inputs, coefficients: Coefficients
) -> tuple[Tensor, tuple[Tensor | None, ...], Tensor | None]:
    """Compute the sum of the losses, the gradients of input, weight and bias, and the predicted tokens.

    This takes three matrix products. The gradients have the accumulation dtype, except that of a bfloat16 head computed
    in a single product.
    """
    kept, inputs = kept_rows(inputs)
    is_plain = inputs.is_plain and coefficients.weighted is None
    tiling = inputs.tile_rows()
    head = _head(inputs, tiling)
    total = Gradients(inputs.input, head, tiling, inputs.requested.gradients)
    coefficients_of_rows = Coefficients._make(map(kept.select, coefficients))
    buffer = logits_buffer(inputs.input, head, tiling, total)
    losses, tokens = [], []
    for rows in tiling.chunks():
        chunk = _Chunk(inputs, head, buffer, rows, slice(0, tiling.classes))
        factors = Coefficients._make(None if factor is None else factor[rows] for factor in coefficients_of_rows)
        if is_plain and head.has_row_kernels:
            gradient = total.output_buffer(rows, chunk.values)
            reduced = chunk.reduce_to_gradient(factors, gradient)
        else:
            reduced = chunk.reduce()
            gradient = chunk.to_gradient(_grad_statistics(reduced, factors), None)
        losses.append(losses_of_rows(reduced, factors))
        tokens.append(reduced.predicted_tokens)
        total.add(gradient, chunk.input, rows)
    loss = torch.cat(losses).sum()
    found = torch.cat([part for part in tokens if part is not None]) if inputs.requested.predicted_tokens else None
    input_grad, weight_grad, bias_grad = total.finish()
    return loss, (kept.expand_to_all_rows(input_grad), weight_grad, bias_grad), kept.expand_to_all_rows(found, -1)


def _grad_statistics(reduced: Statistics, factors: Coefficients) -> Statistics:
    """Return the gradients of the row losses with respect to the statistics."""
    grad_log_sum_exp = factors.log_sum_exp
    if factors.square is not None:
        grad_log_sum_exp = grad_log_sum_exp + 2 * factors.square * (reduced.logits_max + reduced.log_sum_exp)
    grad_weighted = None if factors.weighted is None else -factors.weighted
    return Statistics(reduced.logits_max, grad_log_sum_exp, -factors.predicted, grad_weighted)


def _head(inputs: Inputs, tiling: Tiling) -> Head:
    # The softcap is applied before the temperature.
    scale = 1.0 if inputs.options.softcap is not None else 1 / inputs.options.temperature
    return Head(inputs.linear_weight, inputs.linear_bias, scale, tiling)
