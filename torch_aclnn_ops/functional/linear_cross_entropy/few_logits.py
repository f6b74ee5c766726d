"""The loss of few logits: ``cross_entropy(linear(...))``, with float32 logits also for 16-bit inputs."""

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._numerics import HALF_DTYPES, widen, without_autocast
from torch_aclnn_ops._torch_compat.modes import in_dispatch_mode
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LossOptions, check_targets
from torch_aclnn_ops.ops._head import tiling
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs

import torch
from torch import Tensor


def are_few(inputs: Inputs, options: LossOptions) -> bool:
    """Return whether torch computes the same loss, and its logits, with two more tensors of their size, are small."""
    weight, logits = inputs.linear_weight, inputs.options
    if options.lse_square_scale or options.outputs or inputs.target.is_floating_point():
        return False
    if logits.softcap is not None or logits.temperature != 1:
        return False
    if logits.chunk_size is not None or logits.max_memory is not None:
        return False
    rows, classes = inputs.input.shape[0], weight.shape[0]
    number = 3 * rows * classes
    if weight.dtype in HALF_DTYPES:
        if not weight.is_cpu:  # CANN's operators
            return False
        number += rows * weight.shape[1] + weight.numel()
    elif weight.dtype != torch.float32:
        return False
    return 0 < 4 * number <= tiling.LOGITS_BYTES and rows > 0


@without_autocast
def loss_of_few_logits(inputs: Inputs, options: LossOptions) -> Tensor:
    """Compute the loss in torch's functions, which materialize all logits and have every derivative.

    Unlike in torch's, rows that are ignored may hold inf and nan.
    """
    input, target = widen(inputs.input), inputs.target
    if not values_are_readable(target) or in_dispatch_mode():
        return _loss_on_device(input, inputs, options)
    classes, ignore_index = inputs.linear_weight.shape[0], options.ignore_index
    lowest, highest = (int(bound) for bound in target.aminmax())
    if 0 <= lowest and highest < classes and not lowest <= ignore_index <= highest:
        return _cross_entropy(input, inputs, target, options)
    ignored = target == ignore_index
    check_targets(target, ~ignored & ((target < 0) | (target >= classes)), classes, ignore_index)
    kept = ignored.logical_not().nonzero().squeeze(1)
    loss = _cross_entropy(input[kept], inputs, target[kept], options)
    if options.reduction == "none":
        return loss.new_zeros(target.shape).index_put((kept,), loss)
    if options.reduction == "mean" and options.zero_if_all_ignored:
        return loss.masked_fill(ignored.all(), 0)
    return loss


def _loss_on_device(input: Tensor, inputs: Inputs, options: LossOptions) -> Tensor:
    """Compute the loss without reading values: nan for a class index out of range."""
    target = inputs.target
    ignored = target == options.ignore_index
    in_range = target.where(ignored, target.clamp(0, inputs.linear_weight.shape[0] - 1))
    # Divided by 0, the row of an index out of range is not finite, so that its loss is nan.
    input = (input / (in_range == target).unsqueeze(1)).masked_fill(ignored.unsqueeze(1), 0)
    loss = _cross_entropy(input, inputs, in_range, options)
    if options.reduction == "mean" and options.zero_if_all_ignored:
        return loss.masked_fill(ignored.all(), 0)
    return loss


def _cross_entropy(input: Tensor, inputs: Inputs, target: Tensor, options: LossOptions) -> Tensor:
    bias = None if inputs.linear_bias is None else widen(inputs.linear_bias)
    return torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(input, widen(inputs.linear_weight), bias),
        target,
        inputs.class_weight,
        reduction=options.reduction,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
    )
