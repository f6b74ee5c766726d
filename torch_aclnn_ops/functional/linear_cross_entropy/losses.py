"""Losses from row statistics: weights of the rows, reduction, and further outputs."""

import math
from typing import Any, Literal, NamedTuple

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops._torch_compat.private import in_dispatch_mode
from torch_aclnn_ops.functional._head.arguments import rows_to_labels
from torch_aclnn_ops.ops._chunks import IGNORED
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call, Coefficients, Statistics, cross_entropies, z_losses

import torch
from torch import Tensor

OutputName = Literal["log_probabilities", "entropy", "z_loss", "token_accuracy", "predicted_tokens", "logsumexp"]
_Optional = Tensor | Any  # for type checkers, which need not see which outputs are requested


class LinearCrossEntropyOutput(NamedTuple):
    """The outputs of :func:`linear_cross_entropy` with ``outputs``; those that are not requested are ``None``.

    Attributes:
        loss: The loss, including the z-loss.
        log_probabilities: Log-probabilities of the target classes, shape of class indices; 0 for ignored rows.
        entropy: Entropy of each row's softmax in nats, shape of class indices; 0 for ignored rows.
        z_loss: The z-loss, reduced like the loss.
        token_accuracy: Fraction of the rows that are not ignored whose target has the largest logit; for ``"sum"``
            their number, for ``"none"`` 1 or 0 for each row.
        predicted_tokens: Class with the largest logit, int64; -1 for ignored rows.
        logsumexp: Log-sum-exp of each row's logits, shape of class indices; 0 for ignored rows.
    """

    loss: Tensor
    log_probabilities: _Optional = None
    entropy: _Optional = None
    z_loss: _Optional = None
    token_accuracy: _Optional = None
    predicted_tokens: _Optional = None
    logsumexp: _Optional = None


class Rows(NamedTuple):
    """The targets and weights of all rows."""

    target: Tensor  # class indices, ``IGNORED`` for ignored rows; or probabilities
    class_weight: Tensor | None  # only if the statistics need it
    coefficients: Coefficients  # of the sum of the losses
    weight: Tensor  # weight of each row in a mean of the cross entropies
    counts: Tensor  # weight of each row in a mean of the z-losses
    outside: Tensor | None  # mask of rows whose class index is out of range, if values can be read
    kept: int | None  # how many rows have a class, if it is known


def rows_of(call: Call, classes: int) -> Rows:
    """Compute the weights of all rows."""
    target, class_weight, token_weight = call.target, call.weight, call.token_weight
    smoothing, ignore_index = call.label_smoothing, call.ignored_class()
    ones = call.input.new_ones(target.shape[0], dtype=accumulation_dtype(call.input.dtype))
    share = outside = None
    is_readable = values_are_readable(target) and not in_dispatch_mode()
    kept: int | None = target.shape[0] if is_readable else None
    if target.is_floating_point():
        count = weight = ones if token_weight is None else token_weight
        share = distribution_sums(target, class_weight, count.dtype)
    elif is_readable and have_classes(target, classes, ignore_index):
        count = ones if token_weight is None else token_weight
        weight = count if class_weight is None else count * class_weight[target]
    else:
        ignored = target == ignore_index
        in_range = target.clamp(0, classes - 1)
        is_in_range = in_range == target
        is_kept = is_in_range & ~ignored if 0 <= ignore_index < classes else is_in_range
        is_valid = is_in_range | ignored
        # Devices do not raise for an index out of range, so the loss of its row is nan: 0 / 0.
        count = ones * is_kept / is_valid
        outside = ~is_valid if values_are_readable(is_valid) else None
        kept = int(is_kept.sum()) if is_readable else None
        if token_weight is not None:
            count = token_weight.where(is_kept, count)
        weight = count
        if class_weight is not None:
            weight = (count * class_weight[in_range]).where(is_kept, count)
        target = in_range.masked_fill(ignored, IGNORED)
    predicted = count if share is not None else weight
    if smoothing > 0:
        predicted = predicted * (1 - smoothing)
    log_sum_exp = predicted if share is None else predicted * share
    weighted = None
    if smoothing > 0:
        weighted = count * (smoothing / classes)
        smoothed = weighted * (classes if class_weight is None else class_weight.sum())
        log_sum_exp = log_sum_exp + (smoothed if share is not None else smoothed.masked_fill(target == IGNORED, 0))
    square = count * call.lse_square_scale if call.lse_square_scale != 0 else None
    uses_class_weight = weighted is not None or share is not None
    coefficients = Coefficients(log_sum_exp, predicted, weighted, square)
    class_weight = class_weight if uses_class_weight else None
    return Rows(target, class_weight, coefficients, weight, count, outside, kept)


def have_classes(target: Tensor, classes: int, ignore_index: int) -> bool:
    """Return whether no row is ignored, or has a class index out of range, where values can be read."""
    if target.shape[0] == 0:
        return False
    bounds = target.aminmax()
    lowest, highest = int(bounds.min), int(bounds.max)
    return 0 <= lowest and highest < classes and not lowest <= ignore_index <= highest


def check_targets(call: Call, outside: Tensor | None, classes: int) -> None:
    """Raise ``IndexError`` for a class index out of range, if values can be read; otherwise its loss is nan."""
    if outside is None or not values_are_readable(outside):
        return
    if bool(outside.any()):
        hint = ""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            hint = " If linear_weight is a shard of the head, pass process_group or fsdp_module."
        # It begins as PyTorch's message.
        raise IndexError(
            f"Target {int(call.target[outside][0])} is out of bounds. linear_cross_entropy: target must be from 0 to"
            f" {classes - 1}, or ignore_index, which is {call.ignored_class()}.{hint}"
        )


def distribution_sums(target: Tensor, class_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of each row's probabilities times class weights, in the promoted dtype."""
    dtype = torch.promote_types(dtype, target.dtype)
    # Not a matrix product, which autocast would compute in 16 bits.
    return target.sum(1, dtype=dtype) if class_weight is None else (target.to(dtype) * class_weight.to(dtype)).sum(1)


def mean_coefficients(rows: Rows, call: Call) -> tuple[Coefficients, Tensor | None]:
    """Return the coefficients of rows, divided for a mean, and a term of the mean that is nan if all rows are ignored.

    If all rows are ignored the divisors are 1, so that the gradients are 0, as in PyTorch.
    """
    target, count = rows.target, rows.counts
    if call.reduction != "mean":
        return rows.coefficients, None
    if rows.kept:
        number = rows.kept if call.token_weight is None else count.sum()
        return rows.coefficients.divided(number if rows.weight is count else rows.weight.sum(), number), None
    # Of probabilities no row is ignored; there may be none.
    is_empty = (torch.zeros_like(count, dtype=torch.bool) if target.is_floating_point() else target == IGNORED).all()
    nan_if_empty = count.new_zeros(()).masked_fill(is_empty, 0 if call.zero_if_all_ignored else math.nan)
    divisor = rows.weight.sum() + is_empty
    number = divisor if count is rows.weight else count.sum() + is_empty
    return rows.coefficients.divided(divisor, number), nan_if_empty


def assemble(statistics: Statistics, rows: Rows, call: Call) -> Tensor | LinearCrossEntropyOutput:
    """Compute the loss and outputs from the statistics of all rows."""
    coefficients, nan_if_empty = mean_coefficients(rows, call)

    def reduced(losses: Tensor) -> Tensor:
        if call.reduction == "none":
            return losses.reshape(call.shape)
        return losses.sum() if nan_if_empty is None else losses.sum() + nan_if_empty

    loss, z_loss = reduced(cross_entropies(statistics, coefficients)), z_losses(statistics, coefficients)
    if z_loss is not None:
        z_loss = reduced(z_loss)
        loss = loss + z_loss
    if not call.outputs:
        return loss
    if z_loss is None and "z_loss" in call.outputs:
        z_loss = torch.zeros_like(loss)
    outside = rows.counts.isnan()  # rows whose class index is out of range
    of_rows = {
        "log_probabilities": statistics.predicted - statistics.log_sum_exp,
        "entropy": statistics.entropy,
        "logsumexp": statistics.logits_max + statistics.log_sum_exp,
    }
    others = {
        name: values.masked_fill(outside, math.nan).reshape(call.shape)
        for name, values in of_rows.items()
        if values is not None
    }
    return with_outputs(loss, statistics.predicted_tokens, rows, call, z_loss=z_loss, **others)


def with_outputs(
    loss: Tensor, tokens: Tensor | None, rows: Rows, call: Call, **outputs: Tensor | None
) -> Tensor | LinearCrossEntropyOutput:
    """Return the loss together with the requested outputs, if any."""
    if not call.outputs:
        return loss
    if tokens is not None:
        outputs["predicted_tokens"] = tokens.reshape(call.shape)
        if "token_accuracy" in call.outputs:
            outputs["token_accuracy"] = _token_accuracy(tokens, rows.target, call)
    return LinearCrossEntropyOutput(loss, **{name: output for name, output in outputs.items() if name in call.outputs})


def shift_results(result: Tensor | LinearCrossEntropyOutput, shift: int) -> Tensor | LinearCrossEntropyOutput:
    """Align the results of rows with their labels; those of ignored rows come first."""
    if isinstance(result, LinearCrossEntropyOutput):
        each = (None if one is None else rows_to_labels(one, shift) for one in result)
        return LinearCrossEntropyOutput._make(each)
    return rows_to_labels(result, shift)


def _token_accuracy(tokens: Tensor, target: Tensor, call: Call) -> Tensor:
    right = ((tokens == target) & (target != IGNORED)).to(torch.float32)
    if call.reduction == "none":
        return right.reshape(call.shape)
    if call.reduction == "sum":
        return right.sum()
    kept = (target != IGNORED).sum()
    share = right.sum() / kept
    return share.masked_fill(kept == 0, 0) if call.zero_if_all_ignored else share
