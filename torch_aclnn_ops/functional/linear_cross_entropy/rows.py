"""The loss of some rows, and the application of a function of rows to all of them, chunk by chunk.

The logits of a chunk exist while the chunk is worked on, and never those of all rows, in no derivative.
"""

from collections.abc import Callable, Sequence
from typing import Any

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
        return _combine([self.function(*self._rows_of(args, rows)) for rows in chunks], self.outputs_by_row)

    def vjp(
        self, args: Sequence[Any], positions: Sequence[int], cotangents: Sequence[Tensor], chunks: Sequence[slice]
    ) -> tuple[Tensor, ...]:
        """Pull cotangents of the outputs back to the arguments at ``positions``."""
        by_row = [self.inputs_by_row[position] for position in positions]
        return _combine(
            (
                self.linearize(self._rows_of(args, rows), positions)[1](_rows_of(cotangents, self.outputs_by_row, rows))
                for rows in chunks
            ),
            by_row,
        )

    def jvp(
        self, args: Sequence[Any], positions: Sequence[int], tangents: Sequence[Tensor], chunks: Sequence[slice]
    ) -> tuple[Tensor, ...]:
        """Push tangents of the arguments at ``positions`` forward to the outputs."""
        by_row = [self.inputs_by_row[position] for position in positions]
        parts = []
        for rows in chunks:
            outputs, vjp = self.linearize(self._rows_of(args, rows), positions)
            # The vjp is linear in its cotangent; its own vjp, at any cotangent, is the jvp.
            _, jvp, *_ = torch.func.vjp(vjp, tuple(torch.zeros_like(output) for output in outputs))
            parts.append(jvp(_rows_of(tangents, by_row, rows))[0])
        return _combine(parts, self.outputs_by_row)

    def linearize(self, args: Sequence[Any], positions: Sequence[int]) -> tuple[tuple[Tensor, ...], Callable[..., Any]]:
        """Return the outputs for rows of one chunk, and their vjp."""

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            replaced = list(args)
            for position, value in zip(positions, values, strict=True):
                replaced[position] = value
            return self.function(*replaced)

        outputs, vjp, *_ = torch.func.vjp(function, *(args[position] for position in positions))
        return outputs, vjp

    def _rows_of(self, args: Sequence[Any], rows: slice) -> tuple[Any, ...]:
        return _rows_of(args, self.inputs_by_row, rows)


def _rows_of(tensors: Sequence[Any], by_row: Sequence[bool], rows: slice) -> tuple[Any, ...]:
    return tuple(
        tensor[rows] if one_per_row and tensor is not None else tensor
        for tensor, one_per_row in zip(tensors, by_row, strict=True)
    )


def _combine(parts: Any, by_row: Sequence[bool]) -> tuple[Tensor, ...]:
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
