"""The loss of some rows, and the application of a function of rows to all of them, chunk by chunk.

The logits of a chunk exist while the chunk is worked on, and never those of all rows, in no derivative.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch_aclnn_ops.ops._derivatives import jvp, vjp
from torch_aclnn_ops.ops._numerics import widen, without_autocast
from torch_aclnn_ops.ops.linear_cross_entropy._rows import row_chunks

import torch
from torch import Tensor


@without_autocast
def losses_of_rows(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    target_weight: Tensor,
    smoothing_weight: Tensor | None,
    class_weight: Tensor | None,
) -> tuple[Tensor]:
    """Compute ``-sum_v Q_v log softmax(z)_v`` for every row of logits ``z = input W^T + bias``.

    With indices as targets ``Q = target_weight * onehot(target) + smoothing_weight * class_weight``; with probabilities
    ``Q = (target_weight * target + smoothing_weight) * class_weight``. Weights that are ``None`` are left out.
    """
    logits = widen(input) @ widen(linear_weight).T
    if linear_bias is not None:
        logits = logits + widen(linear_bias)
    log_probabilities = logits.log_softmax(1)
    if target.is_floating_point():
        distribution = target * target_weight.unsqueeze(1)
        if smoothing_weight is not None:
            distribution = distribution + smoothing_weight.unsqueeze(1)
        if class_weight is not None:
            distribution = distribution * class_weight
        return (-(distribution * log_probabilities).sum(1),)
    log_probability = log_probabilities.gather(1, target.unsqueeze(1)).squeeze(1)
    loss = -weighted(log_probability, target_weight)
    if smoothing_weight is not None:
        if class_weight is not None:
            log_probabilities = log_probabilities * class_weight
        loss = loss - weighted(log_probabilities.sum(1), smoothing_weight)
    return (loss,)


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Multiply rows by weights; an ignored row, of weight 0, gives 0 even if its hidden state is not finite."""
    return torch.where(weights == 0, 0, values * weights)


class RowFunction:
    """A function of rows, its vjp and its jvp, applied to all rows chunk by chunk.

    Arguments that are the same for all rows are widened first, so that what is summed over the chunks is rounded to 16
    bits once, at the end.

    Args:
        function: takes tensors (or ``None``) and returns a tuple of tensors.
        inputs_by_row: for each argument, whether it has one entry per row (or is the same for all rows).
        outputs_by_row: for each output, whether it has one entry per row (or is a sum over the rows).
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], inputs_by_row: Sequence[bool], outputs_by_row: Sequence[bool]
    ) -> None:
        self.function = function
        self.inputs_by_row = inputs_by_row
        self.outputs_by_row = outputs_by_row

    def __call__(self, args: Sequence[Any], chunks: Sequence[slice]) -> tuple[Tensor, ...]:
        """Apply the function."""
        args = self._widened(args)
        return _combine((self.function(*self._rows_of(args, rows)) for rows in chunks), self.outputs_by_row)

    def vjp(
        self, args: Sequence[Any], positions: Sequence[int], cotangents: Sequence[Tensor], chunks: Sequence[slice]
    ) -> tuple[Tensor, ...]:
        """Pull cotangents of the outputs back to the arguments at ``positions``, in these arguments' dtypes."""
        widened = self._widened(args)

        def of_chunk(rows: slice) -> tuple[Tensor, ...]:
            outputs, pull_back = self.linearize(self._rows_of(widened, rows), positions)
            of_rows = _rows_of(cotangents, self.outputs_by_row, rows)
            return pull_back(*(cotangent.to(output.dtype) for cotangent, output in zip(of_rows, outputs, strict=True)))

        gradients = _combine(map(of_chunk, chunks), [self.inputs_by_row[position] for position in positions])
        return tuple(gradient.to(args[position].dtype) for gradient, position in zip(gradients, positions, strict=True))

    def jvp(
        self, args: Sequence[Any], positions: Sequence[int], tangents: Sequence[Tensor], chunks: Sequence[slice]
    ) -> tuple[Tensor, ...]:
        """Push tangents of the arguments at ``positions`` forward to the outputs."""
        by_row = [self.inputs_by_row[position] for position in positions]
        widened = self._widened(args)

        def of_chunk(rows: slice) -> tuple[Tensor, ...]:
            function, primals = self._function_of(self._rows_of(widened, rows), positions)
            of_rows = _rows_of(tangents, by_row, rows)
            return jvp(
                function, primals, [tangent.to(primal.dtype) for tangent, primal in zip(of_rows, primals, strict=True)]
            )

        return _combine(map(of_chunk, chunks), self.outputs_by_row)

    def linearize(
        self, args: Sequence[Any], positions: Sequence[int]
    ) -> tuple[tuple[Tensor, ...], Callable[..., tuple[Tensor, ...]]]:
        """Return the outputs for rows of one chunk, and the map from their cotangents to the arguments'."""
        function, primals = self._function_of(args, positions)
        return vjp(function, *primals)

    def _function_of(
        self, args: Sequence[Any], positions: Sequence[int]
    ) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
        """Return the function of the arguments at ``positions`` alone, and these arguments."""

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            replaced = list(args)
            for position, value in zip(positions, values, strict=True):
                replaced[position] = value
            return self.function(*replaced)

        return function, [args[position] for position in positions]

    def _widened(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            arg if one_per_row or arg is None else widen(arg)
            for arg, one_per_row in zip(args, self.inputs_by_row, strict=True)
        )

    def _rows_of(self, args: Sequence[Any], rows: slice) -> tuple[Any, ...]:
        return _rows_of(args, self.inputs_by_row, rows)


def _rows_of(tensors: Sequence[Any], by_row: Sequence[bool], rows: slice) -> tuple[Any, ...]:
    return tuple(
        tensor[rows] if one_per_row and tensor is not None else tensor
        for tensor, one_per_row in zip(tensors, by_row, strict=True)
    )


def _combine(parts: Iterable[Sequence[Tensor]], by_row: Sequence[bool]) -> tuple[Tensor, ...]:
    """Join the chunks of outputs by row; add up those of the others as they come."""
    joined: list[list[Tensor]] = [[] for _ in by_row]
    for part in parts:
        for tensors, tensor, one_per_row in zip(joined, part, by_row, strict=True):
            if one_per_row or not tensors:
                tensors.append(tensor)
            else:
                tensors[0] = tensors[0] + tensor
    return tuple(torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in joined)


def chunks_of(rows: int, classes: int, chunk_size: int | None) -> list[slice]:
    """Cut rows into chunks of ``chunk_size``, or so that a chunk's logits stay small; no rows are a chunk too."""
    return list(row_chunks(rows, classes, chunk_size)) or [slice(0, 0)]
