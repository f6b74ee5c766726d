"""From statistics of rows to losses: what weighs a row, how losses are reduced, and what else a caller may ask for."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch_aclnn_ops.ops._checks import values_are_readable
from torch_aclnn_ops.ops._numerics import accumulation_dtype
from torch_aclnn_ops.ops.linear_cross_entropy._plan import Options, plan_rows
from torch_aclnn_ops.ops.linear_cross_entropy._problem import (
    IGNORED,
    Coefficients,
    Statistics,
    cross_entropies,
    z_losses,
)

import torch
from torch import Tensor


class LinearCrossEntropyOutput(NamedTuple):
    """What :func:`linear_cross_entropy` returns when more than the loss is asked for; the rest is ``None``.

    Attributes:
        loss: as it is returned alone, with the z-loss in it.
        log_probabilities: of the target classes, the shape of class indices; 0 where a row does not count.
        entropy: of each row's softmax in nats, the shape of class indices; 0 where a row does not count.
        z_loss: the part of the loss that ``lse_square_scale`` makes, reduced as the loss.
        token_accuracy: share of the rows that count whose target has the largest logit; with ``"sum"`` their number,
            with ``"none"`` 1 or 0 for each row.
        predicted_tokens: class of the largest logit, int64; -1 where a row does not count.
    """

    loss: Tensor
    log_probabilities: Tensor | None = None
    entropy: Tensor | None = None
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


@dataclass(frozen=True)
class LossOptions:
    """What makes losses of statistics; see :func:`linear_cross_entropy`."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    zero_if_all_ignored: bool
    outputs: frozenset[str]

    @property
    def needs_tokens(self) -> bool:
        """Whether the classes of the largest logits are used."""
        return not self.outputs.isdisjoint(("token_accuracy", "predicted_tokens"))

    @property
    def is_scalar(self) -> bool:
        """Whether the loss is one number, and no other result has a derivative."""
        return self.reduction != "none" and self.outputs <= {"token_accuracy", "predicted_tokens"}


@dataclass(frozen=True)
class Rows:
    """The rows of a call and the factors of their losses.

    Attributes:
        target: class indices, ``IGNORED`` where a row does not count; or probabilities.
        class_weight: as far as the statistics need it.
        coefficients: of the sum of the losses.
        weight: what a mean of the losses is divided by the sum of.
        count: the same for the z-losses.
    """

    target: Tensor
    class_weight: Tensor | None
    coefficients: Coefficients
    weight: Tensor
    count: Tensor


def rows_of(
    input: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    classes: int,
    options: LossOptions,
) -> Rows:
    """Work out the weight of every row.

    Args:
        input: tells dtype and device.
        target: class indices, shape (N,), or probabilities, shape (N, C).
        class_weight: shape (C,).
        token_weight: shape (N,).
        classes: C.
        options: of the loss.
    """
    smoothing = options.label_smoothing
    count = input.new_ones(target.shape[0], dtype=accumulation_dtype(input.dtype))
    if token_weight is not None:
        count = count * token_weight
    if target.is_floating_point():
        share = distribution_sums(target, class_weight, count.dtype)
        weight = count
    else:
        ignored = target == options.ignore_index
        outside = ~ignored & ((target < 0) | (target >= classes))
        _check_indices(target, outside)
        # A device does not stop for a wrong index, so its row shows it.
        count = count.masked_fill(ignored, 0).masked_fill(outside, math.nan)
        weight = count
        if class_weight is not None:
            weight = count * class_weight[target.masked_fill(ignored | outside, 0)].masked_fill(ignored, 0)
        target = target.masked_fill(outside, 0).masked_fill(ignored, IGNORED)
        share = None
    predicted = (count if share is not None else weight) * (1 - smoothing)
    log_sum_exp = predicted if share is None else predicted * share
    weighted = None
    if smoothing > 0:
        weighted = count * (smoothing / classes)
        log_sum_exp = log_sum_exp + weighted * (classes if class_weight is None else class_weight.sum())
    square = count * options.lse_square_scale if options.lse_square_scale != 0 else None
    uses_class_weight = weighted is not None or share is not None
    coefficients = Coefficients(log_sum_exp, predicted, weighted, square)
    return Rows(target, class_weight if uses_class_weight else None, coefficients, weight, count)


def distribution_sums(target: Tensor, class_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of each row's probabilities times class weights, in a dtype that is at least as wide as theirs.

    Chunk by chunk, because otherwise another tensor of their size would be made. Compiled code makes none.
    """
    dtype = torch.promote_types(dtype, target.dtype)

    def sums(rows: Tensor) -> Tensor:
        # Not a matrix product, which autocast would make in 16 bits.
        return rows.sum(1, dtype=dtype) if class_weight is None else (rows.to(dtype) * class_weight.to(dtype)).sum(1)

    if torch.compiler.is_compiling():
        return sums(target)
    plan = plan_rows(target.shape[0], target.new_empty(target.shape[1], 1), Options())
    return torch.cat([sums(rows) for rows in target.split(plan.rows_per_chunk)])


def _check_indices(target: Tensor, outside: Tensor) -> None:
    if values_are_readable(target) and bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


def divisors(rows: Rows, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a mean divides the cross entropies and the z-losses by, and what makes a mean of no rows nan.

    The divisors are 1 where they would be 0, which keeps the gradients 0 there, as torch's are.
    """
    total, count = rows.weight.sum(), rows.count.sum()
    of_nothing = (0 / total).detach()
    if options.zero_if_all_ignored:
        of_nothing = of_nothing.masked_fill(is_without_rows(rows.target), 0)
    return total.masked_fill(total == 0, 1), count.masked_fill(count == 0, 1), of_nothing


def is_without_rows(target: Tensor) -> Tensor:
    """Return whether no row counts, without waiting for a device."""
    if target.is_floating_point():
        return torch.tensor(target.shape[0] == 0, device=target.device)
    return (target == IGNORED).all()


def assemble(
    statistics: Statistics, rows: Rows, options: LossOptions, shape: tuple[int, ...]
) -> Tensor | LinearCrossEntropyOutput:
    """Make the results of the statistics of all rows; ``shape`` is that of class indices."""
    cross_entropy = cross_entropies(statistics, rows.coefficients)
    z_loss = z_losses(statistics, rows.coefficients) if rows.coefficients.square is not None else None
    if options.reduction == "none":
        loss = (cross_entropy if z_loss is None else cross_entropy + z_loss).reshape(shape)
        z_loss = None if z_loss is None else z_loss.reshape(shape)
    else:
        loss, z_loss = cross_entropy.sum(), None if z_loss is None else z_loss.sum()
        if options.reduction == "mean":
            divisor, count, of_nothing = divisors(rows, options)
            loss = loss / divisor + of_nothing
            z_loss = None if z_loss is None else z_loss / count + of_nothing
        loss = loss if z_loss is None else loss + z_loss
    if not options.outputs:
        return loss
    if z_loss is None and "z_loss" in options.outputs:
        z_loss = torch.zeros_like(loss)
    # nan for a row whose class is outside the head.
    outside = rows.count.isnan()
    log_probabilities = (statistics.predicted - statistics.log_sum_exp).masked_fill(outside, math.nan)
    entropy = None if statistics.entropy is None else statistics.entropy.masked_fill(outside, math.nan)
    return with_outputs(loss, z_loss, log_probabilities, entropy, statistics.predicted_tokens, rows, options, shape)


def with_outputs(
    loss: Tensor,
    z_loss: Tensor | None,
    log_probabilities: Tensor | None,
    entropy: Tensor | None,
    tokens: Tensor | None,
    rows: Rows,
    options: LossOptions,
    shape: tuple[int, ...],
) -> LinearCrossEntropyOutput:
    """Add to a loss what is asked for of the results of all rows."""
    asked, accuracy = options.outputs, None
    if "token_accuracy" in asked and tokens is not None:
        accuracy = _token_accuracy(tokens, rows.target, options, shape)
    return LinearCrossEntropyOutput(
        loss,
        log_probabilities.reshape(shape) if "log_probabilities" in asked and log_probabilities is not None else None,
        None if entropy is None else entropy.reshape(shape),
        z_loss if "z_loss" in asked else None,
        accuracy,
        tokens.reshape(shape) if "predicted_tokens" in asked and tokens is not None else None,
    )


def _token_accuracy(tokens: Tensor, target: Tensor, options: LossOptions, shape: tuple[int, ...]) -> Tensor:
    right = ((tokens == target) & (target != IGNORED)).to(torch.float32)
    if options.reduction == "none":
        return right.reshape(shape)
    if options.reduction == "sum":
        return right.sum()
    counted = (target != IGNORED).sum()
    share = right.sum() / counted
    return share.masked_fill(counted == 0, 0) if options.zero_if_all_ignored else share
