"""The loss of few logits: ``cross_entropy(linear(...))``, with float32 logits also for 16-bit inputs."""

from typing import Any

from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._numerics import HALF_DTYPES, widen, without_autocast
from torch_aclnn_ops._torch_compat.modes import in_dispatch_mode, is_any_autocast_enabled
from torch_aclnn_ops.functional._drop_in import check_no_tangent, lower_precision_autocast_dtype
from torch_aclnn_ops.functional.linear_cross_entropy.losses import check_targets, have_classes
from torch_aclnn_ops.functional.linear_cross_entropy.torch_function import TorchArguments, to_loss_dtype
from torch_aclnn_ops.ops._head import tiling
from torch_aclnn_ops.ops._head.tiling import LogitOptions
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import log_few_logits

import torch
from torch import Tensor


def are_few(given: TorchArguments, options: LogitOptions) -> bool:
    """Return whether torch computes the same loss, and its logits, with two more tensors of their size, are small."""
    weight, target = given.linear_weight, given.target
    if target.is_floating_point() or weight.dim() > 2 or torch.compiler.is_compiling():
        return False
    if options.chunk_size is not None or options.max_memory is not None:
        return False
    if not weight.is_cpu and (weight.dtype in HALF_DTYPES or is_any_autocast_enabled()):  # CANN's operators
        return False
    rows, classes = target.numel(), weight.shape[0]
    number = 3 * rows * classes
    if weight.dtype in HALF_DTYPES:
        number += rows * weight.shape[1] + weight.numel()
    elif weight.dtype is not torch.float32:
        return False
    return 0 < 4 * number <= tiling.LOGITS_BYTES and rows > 0


def loss_of_few_logits(given: TorchArguments, options: LogitOptions, zero_if_all_ignored: bool) -> Tensor:
    """Compute the loss in torch's functions, which materialize all logits and have every derivative.

    Unlike in torch's, rows that are ignored may hold inf and nan.
    """
    log_few_logits(given.target, lambda: _inputs(given, options))
    if is_any_autocast_enabled():
        given = _cast_by_autocast(given)
    input, target = given.input, given.target
    if given.weight is not None:
        check_no_tangent("linear_cross_entropy", given.weight)
        given = given._replace(weight=to_loss_dtype(input, given.weight))
    if target.dim() != 1 or target.dtype is not torch.int64:
        given = given._replace(input=input.reshape(-1, input.shape[-1]), target=target.reshape(-1).long())
    if any([one is not None and one.is_inference() for one in (given.target, given.weight)]):
        given = given._replace(target=_savable(given.target), weight=_savable(given.weight))
    loss = _loss(given, options, zero_if_all_ignored)
    return loss if loss.dim() == target.dim() or given.reduction != "none" else loss.reshape(target.shape)


def _savable(tensor: Any) -> Any:
    """Return a tensor that autograd can save, which none of inference mode is."""
    return tensor.clone() if tensor is not None and torch.is_grad_enabled() else tensor


def _inputs(given: TorchArguments, options: LogitOptions) -> Inputs:
    input, linear_weight, target, linear_bias, weight, *_ = given
    return Inputs(input, linear_weight, linear_bias, target, weight, options)


def _cast_by_autocast(given: TorchArguments) -> TorchArguments:
    """Round as autocast does, so that the logits of the rounded numbers can be computed in float32."""
    dtype = lower_precision_autocast_dtype(given.input)
    bias = None if given.linear_bias is None else given.linear_bias.to(dtype)
    return given._replace(input=given.input.to(dtype), linear_weight=given.linear_weight.to(dtype), linear_bias=bias)


@without_autocast
def _loss(given: TorchArguments, options: LogitOptions, zero_if_all_ignored: bool) -> Tensor:
    """Compute the loss of rows."""
    target, classes = given.target, given.linear_weight.shape[0]
    ignore_index = -100 if given.ignore_index is None else int(given.ignore_index)
    if not values_are_readable(target) or in_dispatch_mode():
        return _loss_on_device(given, options, ignore_index, zero_if_all_ignored)
    if have_classes(target, classes, ignore_index):
        return _cross_entropy(given, options)
    ignored = target == ignore_index
    check_targets(target, ~ignored & ((target < 0) | (target >= classes)), classes, ignore_index)
    kept = ignored.logical_not().nonzero().squeeze(1)
    loss = _cross_entropy(given._replace(input=given.input[kept], target=target[kept]), options)
    if given.reduction == "none":
        return loss.new_zeros(target.shape).index_put((kept,), loss)
    if given.reduction == "mean" and zero_if_all_ignored:
        return loss.masked_fill(ignored.all(), 0)
    return loss


def _loss_on_device(
    given: TorchArguments, options: LogitOptions, ignore_index: int, zero_if_all_ignored: bool
) -> Tensor:
    """Compute the loss without reading values: nan for a class index out of range."""
    target = given.target
    ignored = target == ignore_index
    in_range = target.where(ignored, target.clamp(0, given.linear_weight.shape[0] - 1))
    # A row whose class is out of range is nan, as its gradient: 0 / 0. Not inf, which a softcap makes finite.
    input = widen(given.input)
    input = input + (ignored / (in_range == target)).to(input.dtype).unsqueeze(1)
    input = input.masked_fill(ignored.unsqueeze(1), 0)
    loss = _cross_entropy(given._replace(input=input, target=in_range), options)
    if given.reduction == "mean" and zero_if_all_ignored:
        return loss.masked_fill(ignored.all(), 0)
    return loss


def _cross_entropy(given: TorchArguments, options: LogitOptions) -> Tensor:
    input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing = given
    if linear_weight.dtype is not torch.float32:
        input, linear_weight = widen(input), widen(linear_weight)
        linear_bias = None if linear_bias is None else widen(linear_bias)
    logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
    softcap = options.without_infinite_softcap(torch.float32).softcap
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * (softcap / options.temperature)
    elif options.temperature != 1:
        logits = logits / options.temperature
    return torch.nn.functional.cross_entropy(
        logits,
        target,
        weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else int(ignore_index),
        label_smoothing=float(label_smoothing),
    )
