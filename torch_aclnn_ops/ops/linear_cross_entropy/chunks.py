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


class _Rows:
    """The logits of some rows and classes, overwritten in place by the softmax and then by their gradient."""

    def __init__(self, inputs: Inputs, logits: Tensor, rows: slice, classes: slice) -> None:
        self.values, self.target = logits, inputs.target[rows]
        self._inputs = inputs
        self._classes = classes
        self._class_weight = None if inputs.class_weight is None else inputs.class_weight[classes]
        # A bias of -inf may mask all classes of a part of the vocabulary. A row with all classes masked is nan.
        is_part = inputs.options.is_shard or logits.shape[1] < inputs.linear_weight.shape[0]
        self._may_be_masked = is_part and inputs.linear_bias is not None
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
        self._to_softmax(is_masked)
        # The largest probability is exp(max - max) / sum exp(z - max). xlogy is faster than log for few numbers,
        # because log uses MKL, whose threads must be woken up.
        log_sum_exp = -torch.xlogy(1, self.values.amax(1))
        entropy = torch.special.entr(self.values).sum(1) if requested.entropy else None
        if is_masked is not None:
            log_sum_exp.masked_fill_(is_masked, -math.inf)
            entropy = None if entropy is None else entropy.masked_fill_(is_masked, 0)
        return Statistics(logits_max, log_sum_exp, predicted, weighted_sum, entropy, tokens)

    def target_probability_sum(self) -> Tensor:
        """Return the target probability of each row in these classes."""
        return self._distribution().sum(1) if self.target.is_floating_point() else self._is_here()

    def to_softmax(self) -> None:
        """Overwrite the logits with the softmax."""
        self._to_softmax(self._shift(self.values.amax(1))[1] if self._may_be_masked else None)

    def _shift(self, logits_max: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the values to subtract from the logits, and the mask of rows whose classes are all masked, if any."""
        if not self._may_be_masked:
            return logits_max, None
        is_masked = logits_max == -math.inf
        return logits_max.masked_fill(is_masked, 0), is_masked

    def _to_softmax(self, is_masked: Tensor | None) -> None:
        if is_masked is not None:
            # Any finite distribution will do: a masked part gets a weight of 0.
            self.values.masked_fill_(is_masked.unsqueeze(1), 0)
        if self.values.is_cpu:
            torch.softmax(self.values, 1, out=self.values)
        else:
            self.values = self.values.softmax(1)

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
    buffer = logits_buffer(inputs.input, head, tiling)
    chunks = [_reduce_chunk(inputs, head, tiling, buffer, rows) for rows in tiling.chunks()]
    *values, tokens = _join(torch.cat, chunks)
    return Statistics._make((*map(kept.expand_to_all_rows, values), kept.expand_to_all_rows(tokens, -1)))


def _reduce_chunk(inputs: Inputs, head: Head, tiling: Tiling, buffer: Tensor, rows: slice) -> Statistics:
    """Reduce the logits of a range of rows, one part of the vocabulary at a time."""
    parts, sums, classes_of_parts = [], [], tiling.parts()
    for classes in classes_of_parts:
        logits = _logits(inputs, head, buffer, rows, classes)
        blocks = [_Rows(inputs, logits[_within(rows, block)], block, classes) for block in inputs.blocks(rows, logits)]
        if len(classes_of_parts) > 1:
            sums.append(torch.cat([block.target_probability_sum() for block in blocks]))
        parts.append(Statistics._make(_join(torch.cat, [block.reduce() for block in blocks])))
    if len(parts) == 1:
        return parts[0]
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

    def write_gradient(part: _Rows, rows: slice) -> Tensor:
        part.to_softmax()
        grad_rows = Statistics._make(None if tensor is None else tensor[rows] for tensor in grad_statistics)
        return part.to_gradient(grad_rows, None if entropy is None else entropy[rows])

    input_grad, *others = _gradients(inputs, write_gradient)
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
    coefficients_of_rows = Coefficients._make(map(kept.select, coefficients))
    losses: list[Tensor] = []
    tokens: list[Tensor] = []

    def write_gradient(part: _Rows, rows: slice) -> Tensor:
        factors = Coefficients._make(None if factor is None else factor[rows] for factor in coefficients_of_rows)
        reduced = part.reduce()
        losses.append(losses_of_rows(reduced, factors))
        if reduced.predicted_tokens is not None:
            tokens.append(reduced.predicted_tokens)
        return part.to_gradient(_grad_statistics(reduced, factors), None)

    input_grad, weight_grad, bias_grad = _gradients(inputs, write_gradient)
    found = torch.cat(tokens) if tokens else None
    gradients = kept.expand_to_all_rows(input_grad), weight_grad, bias_grad
    return torch.cat(losses).sum(), gradients, kept.expand_to_all_rows(found, -1)


def _gradients(
    inputs: Inputs, write_gradient: Callable[[_Rows, slice], Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias, where ``write_gradient`` returns that of the logits of rows.

    It overwrites the logits, except on a device, where all rows of a chunk are a single block.
    """
    tiling = inputs.tile_rows()
    head, all_classes = _head(inputs, tiling), slice(0, tiling.classes)
    total = Gradients(inputs.input, head, tiling, inputs.requested.gradients)
    buffer = logits_buffer(inputs.input, head, tiling, total)
    for rows in tiling.chunks():
        logits = _logits(inputs, head, buffer, rows, all_classes)
        gradient = logits
        for block in inputs.blocks(rows, logits):
            written = write_gradient(_Rows(inputs, logits[_within(rows, block)], block, all_classes), block)
            gradient = logits if logits.is_cpu else written
        total.add(gradient, inputs.input[rows], rows)
    return total.finish()


def _logits(inputs: Inputs, head: Head, buffer: Tensor, rows: slice, classes: slice) -> Tensor:
    shape = (rows.stop - rows.start, classes.stop - classes.start)
    return head.logits(inputs.input[rows], classes, buffer[: shape[0] * shape[1]].view(shape))


def _within(rows: slice, block: slice) -> slice:
    """Return the place of a block in a chunk of rows."""
    return slice(block.start - rows.start, block.stop - rows.start)


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
