"""Differentiable row statistics, and functions of rows applied chunk by chunk.

Only the logits of one chunk are materialized at a time, in every derivative. First derivatives outside of transforms
use the faster :mod:`torch_aclnn_ops.ops.linear_cross_entropy.chunks`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch_aclnn_ops._autograd.derivatives import TensorFunction, as_function_of, jvp, vjp
from torch_aclnn_ops._numerics import widen, without_autocast
from torch_aclnn_ops.ops._head.tiling import LogitOptions
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import RequestedOutputs
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import IGNORED

import torch
from torch import Tensor


@without_autocast
def statistics_of_rows(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    options: LogitOptions,
    requested: RequestedOutputs,
) -> tuple[Tensor, ...]:
    """Reduce the logits ``z = softcap * tanh((input W^T + bias) / softcap) / temperature`` of every row.

    Returns the requested fields of ``Statistics``; the maximum is detached. Ignored rows give zeros, and the predicted
    token -1.
    """
    ignored = None if target.is_floating_point() else target == IGNORED
    if ignored is not None:
        input = input.masked_fill(ignored.unsqueeze(1), 0)  # keeps inf and nan out of the derivatives
    logits = widen(input) @ widen(linear_weight).T
    if linear_bias is not None:
        logits = logits + widen(linear_bias)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if options.temperature != 1:
        logits = logits / options.temperature
    logits_max = logits.detach().amax(1)
    shifted = logits - logits_max.unsqueeze(1)
    log_sum_exp = shifted.exp().sum(1).log()
    if target.is_floating_point():
        distribution = widen(target) if class_weight is None else widen(target) * class_weight
        predicted = (distribution * shifted).sum(1)
    else:
        predicted = shifted.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(target < 0, 0)
    results = [logits_max, log_sum_exp, predicted]
    if requested.weighted:
        results.append((shifted if class_weight is None else shifted * class_weight).sum(1))
    if requested.entropy:
        # - sum p log p, where p log p is 0 at p = 0.
        probabilities = shifted.softmax(1)
        finite = shifted.masked_fill(probabilities == 0, 0)
        results.append(log_sum_exp - (probabilities * finite).sum(1))
    if ignored is not None:
        results = [result.masked_fill(ignored, 0) for result in results]
    if requested.predicted_tokens:
        tokens = logits.detach().argmax(1)
        results.append(tokens if ignored is None else tokens.masked_fill(ignored, -1))
    return tuple(results)


class RowFunction:
    """Apply a function of rows, its vjp or its jvp to all rows, chunk by chunk.

    Arguments shared by all rows are upcast first, so that sums over the chunks are rounded to 16 bits once, at the end.

    Args:
        function: Takes tensors or ``None``, and returns a tuple of tensors.
        inputs_by_row: For each argument, whether it has one entry per row, or is shared by all rows.
        outputs_by_row: For each output, whether it has one entry per row, or is a sum over the rows.
    """

    def __init__(self, function: TensorFunction, inputs_by_row: Sequence[bool], outputs_by_row: Sequence[bool]) -> None:
        self.function = function
        self.inputs_by_row = inputs_by_row
        self.outputs_by_row = outputs_by_row

    def __call__(self, args: Sequence[Any], chunks: Sequence[slice]) -> tuple[Tensor, ...]:
        """Apply the function to all rows."""
        args = self._widened(args)
        return _combine(
            (self.function(*_rows_of(args, self.inputs_by_row, rows)) for rows in chunks), self.outputs_by_row
        )

    def vjp(
        self, args: Sequence[Any], positions: Sequence[int], cotangents: Sequence[Tensor], chunks: Sequence[slice]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the arguments at ``positions`` for these cotangents, in the arguments' dtypes."""
        widened = self._widened(args)

        def differentiate_chunk(rows: slice) -> tuple[Tensor, ...]:
            function, primals = as_function_of(self.function, _rows_of(widened, self.inputs_by_row, rows), positions)
            outputs, pull_back = vjp(function, *primals)
            chunk_cotangents = _rows_of(cotangents, self.outputs_by_row, rows)
            pairs = zip(chunk_cotangents, outputs, strict=True)
            return pull_back(*(cotangent.to(output.dtype) for cotangent, output in pairs))

        gradients = _combine(map(differentiate_chunk, chunks), [self.inputs_by_row[position] for position in positions])
        return tuple(gradient.to(args[position].dtype) for gradient, position in zip(gradients, positions, strict=True))

    def jvp(
        self, args: Sequence[Any], positions: Sequence[int], tangents: Sequence[Tensor], chunks: Sequence[slice]
    ) -> tuple[Tensor, ...]:
        """Return the tangents of the outputs for these tangents of the arguments at ``positions``."""
        by_row = [self.inputs_by_row[position] for position in positions]
        widened = self._widened(args)

        def differentiate_chunk(rows: slice) -> tuple[Tensor, ...]:
            function, primals = as_function_of(self.function, _rows_of(widened, self.inputs_by_row, rows), positions)
            chunk_tangents = _rows_of(tangents, by_row, rows)
            casted = [tangent.to(primal.dtype) for tangent, primal in zip(chunk_tangents, primals, strict=True)]
            return jvp(function, primals, casted)

        return _combine(map(differentiate_chunk, chunks), self.outputs_by_row)

    def _widened(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            arg if one_per_row or arg is None else widen(arg)
            for arg, one_per_row in zip(args, self.inputs_by_row, strict=True)
        )


def _rows_of(tensors: Sequence[Any], by_row: Sequence[bool], rows: slice) -> tuple[Any, ...]:
    return tuple(
        tensor[rows] if one_per_row and tensor is not None else tensor
        for tensor, one_per_row in zip(tensors, by_row, strict=True)
    )


def _combine(parts: Iterable[Sequence[Tensor]], by_row: Sequence[bool]) -> tuple[Tensor, ...]:
    """Concatenate the chunks of outputs by row, and sum those of the other outputs."""
    joined: list[list[Tensor]] = [[] for _ in by_row]
    for part in parts:
        for tensors, tensor, one_per_row in zip(joined, part, by_row, strict=True):
            if one_per_row or not tensors:
                tensors.append(tensor)
            else:
                tensors[0] = tensors[0] + tensor
    return tuple(torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in joined)
