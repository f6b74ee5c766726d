"""The loss of rows for the engine of losses on a head, and the reduction of these losses."""

import math
from collections.abc import Sequence

from torch_aclnn_ops._autograd.derivatives import any_differentiated, is_exporting
from torch_aclnn_ops.functional._head.agreement import ROWS, compare_summaries, nan_if, summarize
from torch_aclnn_ops.functional._head.arguments import flat, rounded_by_autocast
from torch_aclnn_ops.functional._head.engine import Engine
from torch_aclnn_ops.functional._head.loss import HeadLoss
from torch_aclnn_ops.functional._head.shards import VocabularyShards, gather_constant
from torch_aclnn_ops.functional.linear_kl_div.call import NAME, Call, check_classes, check_labels
from torch_aclnn_ops.functional.linear_kl_div.chunks import losses_in_chunks
from torch_aclnn_ops.functional.linear_kl_div.formula import losses_of_rows
from torch_aclnn_ops.ops._chunks import IGNORED, HeadGradients, Results

import torch
from torch import Tensor

_OF_ROWS = ("target", "teacher_input", "teacher_values", "teacher_indices")
# Fields that are applied to the losses of rows, and those of a shared vocabulary, which compiled code does not support.
_UNREAD = ("ignore_index", "token_weight", "reduction", "zero_if_all_ignored", "shards", "reduce_input_grad")
# Options that must be the same on all processes.
_AGREED = "reduction divergence beta hard_weight temperature reduce_input_grad zero_if_all_ignored".split()


class _Divergence(HeadLoss):
    def reduce(self, call: Call, factors: Sequence[Tensor | None] | None) -> tuple[Results, HeadGradients]:
        return losses_in_chunks(call, None if factors is None else factors[0])

    def formula(self, call: Call) -> Results:
        return (losses_of_rows(call),)

    def backward_call(self, call: Call, results: Results) -> Call:
        return call._replace(recomputes=True)

    def check_formula(self, call: Call) -> None:
        if call.shards is not None:
            raise NotImplementedError(
                f"{NAME}: with process_group only first derivatives are supported, without transforms of torch.func,"
                " torch.jit.trace, forward-mode AD and batched gradients"
            )


_ENGINE = Engine(_Divergence(NAME, Call, _UNREAD, _OF_ROWS))


def prepare(call: Call) -> Call:
    """Cast for autocast, flatten the rows, and raise for a ``max_memory`` that is too small."""
    student, target = (call.input, call.linear_weight, call.linear_bias), call.target
    input, weight, bias = rounded_by_autocast(*student)
    is_recorded = torch.is_grad_enabled() and not is_exporting()  # an exported call may get inputs that need others
    needed = tuple(is_recorded and one is not None and one.requires_grad for one in student)
    if target is not None:
        # As int64, because a uint8 of 156 equals -100.
        target = target.reshape(-1).long()
        ignored = target == call.ignore_index
        if call.hard_weight:
            # A process that raised alone would leave the others waiting.
            total, may_raise = (weight.shape[0], True) if call.shards is None else (call.shards.total, False)
            target = check_labels(target, ignored, total, may_raise).masked_fill(ignored, IGNORED)
        else:
            target = ignored * IGNORED
    gradients = (needed[0], needed[1], needed[2])
    call = call._replace(input=flat(input), linear_weight=weight, linear_bias=bias, target=target, gradients=gradients)
    if call.max_memory is not None and not torch.compiler.is_compiling():
        call.tile_rows(call.input.shape[0])
    return call


def _check_agreement(call: Call, shards: VocabularyShards, token_weight: Tensor | None) -> Call:
    """Compare the calls of all processes in a collective.

    Returns:
        The call, whose results are nan where the calls differ and values cannot be read.

    Raises:
        ValueError: the calls differ.
    """
    input, student = call.input, (call.input, call.linear_weight, call.linear_bias)
    agreed = {
        ROWS: input.shape[0],
        "the number of features of input": input.shape[1],
        "vocab_sizes": shards.sizes,
        **{name: getattr(call, name) for name in _AGREED},
        "the rows per chunk, from chunk_size or max_memory,": call.tile_rows(input.shape[0]).rows_per_chunk,
        "whether input needs a gradient": call.reduce_input_grad and any_differentiated([input]),
        "whether token_weight is given": token_weight is not None,
        "whether a gradient is needed": any_differentiated(student),
    }
    summary = summarize(agreed, shards.sizes, input, call.linear_weight, call.target, call.loss_dtype())
    summaries = gather_constant(torch.cat(summary.sent), shards.members)
    disagree = compare_summaries(NAME, agreed, summary, summaries, shards.sizes)
    return call if disagree is None else call._replace(input=input * nan_if(disagree, input.dtype))


def compute(call: Call) -> Tensor:
    """Compute the loss of all rows, or with ``"none"`` the loss of each."""
    token_weight, reduction = call.token_weight, call.reduction
    call = call._replace(token_weight=None)  # which the kernels do not need
    if call.shards is not None:
        call = _check_agreement(call, call.shards, token_weight)
    ignored = None if call.target is None else call.target == IGNORED
    counts = _counts(call, ignored, token_weight)
    if reduction == "none":
        losses = _ENGINE.rows(call)[0]
        return losses if counts is None else losses * counts
    nan_if_empty = None
    rows = call.input.shape[0]
    factors = call.input.new_ones(rows, dtype=call.loss_dtype()) if counts is None else counts
    if reduction == "mean" and ignored is None and rows > 0:
        factors = factors / (rows if counts is None else counts.sum())
    elif reduction == "mean":
        is_empty = (torch.zeros_like(factors, dtype=torch.bool) if ignored is None else ignored).all()
        nan_if_empty = factors.new_zeros(()).masked_fill(is_empty, 0 if call.zero_if_all_ignored else math.nan)
        factors = factors / factors.sum().masked_fill(is_empty, 1)
    if any(call.gradients) and not factors.requires_grad and not _ENGINE.needs_formula(call, token_weight):
        (loss,) = _ENGINE.weighted_sum(call, (factors,))
    else:
        loss = (_ENGINE.rows(call)[0] * factors).sum()
    return loss if nan_if_empty is None else loss + nan_if_empty


def _counts(call: Call, ignored: Tensor | None, token_weight: Tensor | None) -> Tensor | None:
    """Return the weight of each row, nan where a class is out of range, or ``None`` if all are 1."""
    if ignored is None and call.teacher_indices is None and token_weight is None:
        return None
    classes = call.linear_weight.shape[0] if call.shards is None else call.shards.total
    counts = call.input.new_ones(call.input.shape[0], dtype=call.loss_dtype())
    labels = call.labels()
    if labels is not None:
        counts = counts.masked_fill(labels == classes, math.nan)
    if call.teacher_indices is not None:
        counts = counts.masked_fill(check_classes(call.teacher_indices, ignored, classes), math.nan)
    if token_weight is not None:
        counts = counts * token_weight.reshape(-1).to(counts.dtype)
    return counts if ignored is None else counts.masked_fill(ignored, 0)
