"""The inputs of the engine, and the reduction of the losses of rows."""

import math

from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops.functional._drop_in import lower_precision_autocast_dtype
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.functional.linear_kl_div._arguments import check_classes, check_labels, flat
from torch_aclnn_ops.functional.linear_kl_div.autograd import ENGINE
from torch_aclnn_ops.functional.linear_kl_div.divergences import Measure
from torch_aclnn_ops.functional.linear_kl_div.inputs import Inputs, Options, Teacher
from torch_aclnn_ops.functional.linear_kl_div.vocab_parallel import check_agreement
from torch_aclnn_ops.ops._head.kept_rows import IGNORED
from torch_aclnn_ops.ops._head.tiling import LogitOptions

import torch
from torch import Tensor


def kind_of(teacher: Teacher, input: Tensor) -> dict[str, int]:
    """Return what determines the sizes of messages between processes."""
    return {
        "the number of classes of teacher_top_k": 0 if teacher.indices is None else teacher.indices.shape[1],
        "whether teacher_weight is given": teacher.weight is not None,
        "whether input is float64": input.dtype == torch.float64,
    }


def prepare(
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: Teacher,
    target: Tensor | None,
    ignore_index: int,
    measure: Measure,
    logits: LogitOptions,
    shards: VocabularyShards | None,
    reduce_input_grad: bool,
) -> Inputs:
    """Cast as autocast asks, flatten the rows, and raise for a ``max_memory`` that is too small."""
    dtype = lower_precision_autocast_dtype(student[0])
    input, weight, bias = (None if one is None else one.to(dtype) for one in student)
    assert input is not None and weight is not None
    needed = tuple(torch.is_grad_enabled() and one is not None and one.requires_grad for one in student)
    if target is not None:
        # As int64, because a uint8 of 156 equals -100.
        target = target.reshape(-1).long()
        ignored = target == ignore_index
        if measure.hard_weight:
            # A process that raised alone would leave the others waiting.
            total, may_raise = (weight.shape[0], True) if shards is None else (shards.total, False)
            target = check_labels(target, ignored, total, may_raise).masked_fill(ignored, IGNORED)
        else:
            target = ignored * IGNORED
    options = Options(measure, logits, (needed[0], needed[1], needed[2]))
    inputs = Inputs(flat(input), weight, bias, teacher, target, options, shards, reduce_input_grad)
    if logits.max_memory is not None and not torch.compiler.is_compiling():
        inputs.tile(inputs.input.shape[0])
    return inputs


def compute(inputs: Inputs, token_weight: Tensor | None, reduction: str, zero_if_all_ignored: bool) -> Tensor:
    """Compute the loss of all rows, or with ``"none"`` the loss of each."""
    if inputs.shards is not None:
        inputs = check_agreement(inputs, inputs.shards, reduction, token_weight, zero_if_all_ignored)
    ignored = None if inputs.target is None else inputs.target == IGNORED
    counts = inputs.input.new_ones(inputs.input.shape[0], dtype=inputs.loss_dtype())
    classes = inputs.linear_weight.shape[0] if inputs.shards is None else inputs.shards.total
    if inputs.target is not None and inputs.options.measure.hard_weight:
        counts = counts.masked_fill(inputs.target == classes, math.nan)
    if inputs.teacher.indices is not None:
        counts = counts.masked_fill(check_classes(inputs.teacher.indices, ignored, classes), math.nan)
    if token_weight is not None:
        counts = counts * token_weight.reshape(-1).to(accumulation_dtype(inputs.input.dtype))
    if ignored is not None:
        counts = counts.masked_fill(ignored, 0)
    if reduction == "none":
        return ENGINE.rows(inputs)[0] * counts
    nan_if_empty = None
    factors = counts
    if reduction == "mean" and ignored is None and counts.shape[0] > 0:
        factors = counts / counts.sum()
    elif reduction == "mean":
        is_empty = (torch.zeros_like(counts, dtype=torch.bool) if ignored is None else ignored).all()
        factors = counts / counts.sum().masked_fill(is_empty, 1)
        nan_if_empty = counts.new_zeros(()).masked_fill(is_empty, 0 if zero_if_all_ignored else math.nan)
    if any(inputs.options.gradients) and not factors.requires_grad and not ENGINE.needs_formula(inputs, token_weight):
        (loss,) = ENGINE.weighted_sum(inputs, (factors,))
    else:
        loss = (ENGINE.rows(inputs)[0] * factors).sum()
    return loss if nan_if_empty is None else loss + nan_if_empty
