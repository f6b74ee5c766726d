"""Losses: what weighs a row, how the rows' losses are reduced, and what else a caller may ask for."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch_aclnn_ops._autograd.derivatives import is_jit_tracing
from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops.ops._head.tiling import LogitOptions, Sizes, tile_rows
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import (
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
        log_probabilities: of the target classes, the shape of class indices; 0 for an ignored row.
        entropy: of each row's softmax in nats, the shape of class indices; 0 for an ignored row.
        z_loss: the part of the loss that ``lse_square_scale`` makes, reduced as the loss.
        token_accuracy: share of the rows that are not ignored whose target has the largest logit; with ``"sum"`` their
            number, with ``"none"`` 1 or 0 for each row.
        predicted_tokens: class of the largest logit, int64; -1 for an ignored row.
        logsumexp: of each row's logits, the shape of class indices; 0 for an ignored row.
    """

    loss: Tensor
    log_probabilities: Tensor | None = None
    entropy: Tensor | None = None
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None
    logsumexp: Tensor | None = None


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
        """Whether the loss is a scalar, and no other result has a derivative."""
        return self.reduction != "none" and self.outputs <= {"token_accuracy", "predicted_tokens"}


@dataclass(frozen=True)
class Rows:
    """The rows of a call and the factors of their losses."""

    target: Tensor  # class indices, ``IGNORED`` for an ignored row; or probabilities
    class_weight: Tensor | None  # as far as the statistics need it
    coefficients: Coefficients  # of the sum of the losses
    weight: Tensor  # what a mean of the losses is divided by the sum of
    count: Tensor  # the same for the z-losses
    outside: Tensor  # rows whose target is no class


def rows_of(inputs: Inputs, token_weight: Tensor | None, classes: int, options: LossOptions) -> Rows:
    """Work out the weight of every row."""
    target, class_weight = inputs.target, inputs.class_weight
    smoothing = options.label_smoothing
    count = inputs.input.new_ones(target.shape[0], dtype=accumulation_dtype(inputs.input.dtype))
    if token_weight is not None:
        count = count * token_weight
    if target.is_floating_point():
        share = distribution_sums(target, class_weight, count.dtype)
        weight, outside = count, torch.zeros_like(count, dtype=torch.bool)
    else:
        ignored = target == options.ignore_index
        outside = ~ignored & ((target < 0) | (target >= classes))
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
        smoothed = weighted * (classes if class_weight is None else class_weight.sum())
        log_sum_exp = log_sum_exp + (smoothed if share is not None else smoothed.masked_fill(target == IGNORED, 0))
    square = count * options.lse_square_scale if options.lse_square_scale != 0 else None
    uses_class_weight = weighted is not None or share is not None
    coefficients = Coefficients(log_sum_exp, predicted, weighted, square)
    return Rows(target, class_weight if uses_class_weight else None, coefficients, weight, count, outside)


def check_targets(target: Tensor, rows: Rows) -> None:
    """Raise for a class outside the head, where values can be read; its row has a count of nan."""
    if target.is_floating_point() or not values_are_readable(rows.outside):
        return
    if bool(rows.outside.any()):
        hint = ""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            hint = " If linear_weight is a rank's part of a sharded head, give process_group or fsdp_module."
        raise IndexError(f"Target {int(target[rows.outside][0])} is out of bounds.{hint}")  # torch's words


def distribution_sums(target: Tensor, class_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of each row's probabilities times class weights, in a dtype that is at least as wide as theirs.

    Chunk by chunk, because otherwise another tensor of their size would be made. Compiled code makes none.
    """
    dtype = torch.promote_types(dtype, target.dtype)

    def sums(rows: Tensor) -> Tensor:
        # Not a matrix product, which autocast would make in 16 bits.
        return rows.sum(1, dtype=dtype) if class_weight is None else (rows.to(dtype) * class_weight.to(dtype)).sum(1)

    if torch.compiler.is_compiling() or is_jit_tracing():
        return sums(target)
    tiling = tile_rows(Sizes(target.shape[0], target.shape[1], 1, target.dtype, target.is_cpu), LogitOptions())
    return torch.cat([sums(rows) for rows in target.split(tiling.rows_per_chunk)])


def divisors(rows: Rows, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a mean divides the cross entropies and the z-losses by, and what makes a mean of no rows nan.

    The divisors of no rows are 1, which keeps the gradients 0 there, as torch's are.
    """
    target, count = rows.target, rows.count
    is_ignored = torch.zeros_like(count, dtype=torch.bool) if target.is_floating_point() else target == IGNORED
    is_empty = is_ignored.all()
    nan_if_empty = count.new_zeros(()).masked_fill(is_empty, 0 if options.zero_if_all_ignored else math.nan)
    return rows.weight.sum().masked_fill(is_empty, 1), count.sum().masked_fill(is_empty, 1), nan_if_empty


def assemble(
    statistics: Statistics, rows: Rows, options: LossOptions, shape: tuple[int, ...]
) -> Tensor | LinearCrossEntropyOutput:
    """Make the results of the statistics of all rows; ``shape`` is that of class indices."""
    cross_entropy = cross_entropies(statistics, rows.coefficients)
    z_loss = z_losses(statistics, rows.coefficients)
    if options.reduction == "none":
        loss = (cross_entropy if z_loss is None else cross_entropy + z_loss).reshape(shape)
        z_loss = None if z_loss is None else z_loss.reshape(shape)
    else:
        loss, z_loss = cross_entropy.sum(), None if z_loss is None else z_loss.sum()
        if options.reduction == "mean":
            divisor, count, nan_if_empty = divisors(rows, options)
            loss = loss / divisor + nan_if_empty
            z_loss = None if z_loss is None else z_loss / count + nan_if_empty
        loss = loss if z_loss is None else loss + z_loss
    if not options.outputs:
        return loss
    if z_loss is None and "z_loss" in options.outputs:
        z_loss = torch.zeros_like(loss)
    outside = rows.count.isnan()  # nan for a row whose class is outside the head
    of_rows = {
        "log_probabilities": statistics.predicted - statistics.log_sum_exp,
        "entropy": statistics.entropy,
        "logsumexp": statistics.logits_max + statistics.log_sum_exp,
    }
    others = {
        name: values.masked_fill(outside, math.nan).reshape(shape)
        for name, values in of_rows.items()
        if values is not None
    }
    return with_outputs(loss, statistics.predicted_tokens, rows, options, shape, z_loss=z_loss, **others)


def with_outputs(
    loss: Tensor,
    tokens: Tensor | None,
    rows: Rows,
    options: LossOptions,
    shape: tuple[int, ...],
    **outputs: Tensor | None,
) -> Tensor | LinearCrossEntropyOutput:
    """Add to a loss what is asked for of the results of all rows."""
    if not options.outputs:
        return loss
    if tokens is not None:
        outputs["predicted_tokens"] = tokens.reshape(shape)
        if "token_accuracy" in options.outputs:
            outputs["token_accuracy"] = _token_accuracy(tokens, rows.target, options, shape)
    return LinearCrossEntropyOutput(
        loss, **{name: output for name, output in outputs.items() if name in options.outputs}
    )


def _token_accuracy(tokens: Tensor, target: Tensor, options: LossOptions, shape: tuple[int, ...]) -> Tensor:
    right = ((tokens == target) & (target != IGNORED)).to(torch.float32)
    if options.reduction == "none":
        return right.reshape(shape)
    if options.reduction == "sum":
        return right.sum()
    kept = (target != IGNORED).sum()
    share = right.sum() / kept
    return share.masked_fill(kept == 0, 0) if options.zero_if_all_ignored else share
