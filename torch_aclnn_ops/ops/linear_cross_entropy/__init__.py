"""The three raw operators of a vocab-parallel linear cross entropy, on which the kernels in this folder are built.

``fused_linear_online_max_sum`` reduces a shard's logits to three numbers per row,
``fused_cross_entropy_loss_with_max_sum`` computes the loss from them, and ``fused_linear_cross_entropy_loss_grad`` the
gradients of the shard's input and weight. Shapes: BT rows, H features, V classes of this shard.
"""

from collections.abc import Sequence
from typing import Any

from torch_aclnn_ops._autograd.raw_operator import RawOperator
from torch_aclnn_ops._checks import (
    check_dtype,
    check_floating_point,
    check_in_place,
    check_rank,
    check_shape,
    values_are_readable,
)
from torch_aclnn_ops._tensors import accumulation_dtype, widen

import torch
from torch import Tensor

_MAX_SUM = "fused_linear_online_max_sum"
_LOSS = "fused_cross_entropy_loss_with_max_sum"
_GRAD = "fused_linear_cross_entropy_loss_grad"

# Limits of the kernels; CANN's phase one does not check all of them.
_CHIPS = ("Ascend910B", "Ascend910_93")
_MIN_CLASSES = 128
_MAX_FEATURES = 65534
_MAX_CLASSES = 2**24  # targets are compared in float32
_MAX_SOFTMAX = (65535, 24560)  # rows and classes of the kernel variant with a softmax argument


def _linear_limits(input: Tensor, weight: Tensor) -> str | None:
    """Return why the operators that multiply input and weight do not support them on an NPU, or ``None``."""
    for name, tensor in (("input", input), ("weight", weight)):
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            return f"{name} is {tensor.dtype} and CANN's operator supports torch.float16 and torch.bfloat16"
        if tensor.dim() != 2:
            return f"{name} has {tensor.dim()} dimensions and CANN's operator supports 2"
    classes, features = weight.shape
    if classes < _MIN_CLASSES:
        return why_not_classes(classes)
    if features > _MAX_FEATURES:
        return f"weight has {features} features and CANN's operator supports at most {_MAX_FEATURES}"
    return None


def why_not_classes(classes: int) -> str | None:
    """Return why the operator does not support a shard of this many classes on an NPU, or ``None``."""
    if classes < _MIN_CLASSES:
        return f"weight has {classes} classes and CANN's operator supports {_MIN_CLASSES} or more"
    if classes > _MAX_CLASSES:
        return f"weight has {classes} classes and CANN's operator supports at most {_MAX_CLASSES}"
    return None


def _limits_of_max_sum(_soc: str, input: Tensor, weight: Tensor, *_: object) -> str | None:
    return _linear_limits(input, weight) or why_not_classes(weight.shape[0])


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a boolean vector into bytes, least significant bit first; its length must be a multiple of 8."""
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (mask.reshape(-1, 8).to(torch.uint8) << places).sum(1, dtype=torch.uint8)


def unpack_mask(target_mask: Tensor, rows: int) -> Tensor:
    """Unpack a mask to one boolean per row; a boolean mask is returned unchanged."""
    if target_mask.dtype == torch.bool:
        return target_mask
    places = torch.arange(8, dtype=torch.uint8, device=target_mask.device)
    return ((target_mask.unsqueeze(1) >> places) & 1).reshape(-1)[:rows].bool()


def _check_max_sum(
    input: Tensor, weight: Tensor, target: Tensor, vocab_start_index: int, vocab_end_index: int, *_: object
) -> None:
    check_floating_point(_MAX_SUM, input=input)
    check_dtype(_MAX_SUM, [input.dtype], "as input has", weight=weight)
    check_dtype(_MAX_SUM, [torch.int64, torch.int32], "", target=target)
    check_rank(_MAX_SUM, 2, input=input, weight=weight)
    if weight.shape[0] == 0:
        raise ValueError(f"{_MAX_SUM}: weight must have at least 1 row, but its shape is {list(weight.shape)}")
    check_shape(_MAX_SUM, (weight.shape[0], input.shape[1]), "[V, H]", weight=weight)
    check_shape(_MAX_SUM, (input.shape[0],), "[BT]", target=target)
    if vocab_start_index < 0:
        raise ValueError(f"{_MAX_SUM}: vocab_start_index must be at least 0, but it is {vocab_start_index}")
    if vocab_end_index < vocab_start_index:
        raise ValueError(
            f"{_MAX_SUM}: vocab_end_index must be at least vocab_start_index = {vocab_start_index},"
            f" but it is {vocab_end_index}"
        )


def _check_values_of_max_sum(
    _input: Tensor, weight: Tensor, target: Tensor, vocab_start_index: int, vocab_end_index: int, *_: object
) -> None:
    # The kernel would read out of bounds for such a target.
    end = vocab_start_index + weight.shape[0]
    if vocab_end_index <= end or not values_are_readable(target):
        return
    beyond = target[(target >= end) & (target < vocab_end_index)]
    if beyond.numel() > 0:
        raise IndexError(
            f"{_MAX_SUM}: target must not be from {end} (vocab_start_index + rows of weight) to {vocab_end_index - 1}"
            f" (vocab_end_index - 1), but one is {int(beyond[0])}"
        )


def _max_sum(
    input: Tensor, weight: Tensor, target: Tensor, vocab_start_index: int, vocab_end_index: int, return_logits: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reduce the logits to the maximum, the sum of exponentials, and the target's logit minus the maximum."""
    logits = widen(input) @ widen(weight).T
    logits_max = logits.amax(1)
    sum_exp_logits = (logits - logits_max.unsqueeze(1)).exp().sum(1)
    # Padding bits in the last byte of the mask are those of a target of 0.
    rows = target.shape[0]
    padded = torch.nn.functional.pad(target, (0, -rows % 8))
    masked = (padded < vocab_start_index) | (padded >= vocab_end_index)
    masked_target = (target - vocab_start_index).masked_fill(masked[:rows], 0)
    predicted = logits.gather(1, masked_target.long().unsqueeze(1)).squeeze(1) - logits_max
    return (
        logits_max,
        sum_exp_logits,
        predicted.masked_fill(masked[:rows], 0),
        pack_mask(masked),
        masked_target,
        logits.to(input.dtype) if return_logits else input.new_empty(0),
    )


def _fake_max_sum(
    input: Tensor, weight: Tensor, target: Tensor, _start: int, _end: int, return_logits: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = input.shape[0]
    logits_max = input.new_empty(rows, dtype=accumulation_dtype(input.dtype))
    return (
        logits_max,
        torch.empty_like(logits_max),
        torch.empty_like(logits_max),
        target.new_empty((rows + 7) // 8, dtype=torch.uint8),
        target.new_empty(rows),
        input.new_empty(rows, weight.shape[0]) if return_logits else input.new_empty(0),
    )


fused_linear_online_max_sum = RawOperator(
    "fused_linear_online_max_sum(Tensor input, Tensor weight, Tensor target, int vocab_start_index,"
    " int vocab_end_index, bool return_logits=False) -> (Tensor logits_max, Tensor sum_exp_logits,"
    " Tensor predicted_logits, Tensor target_mask, Tensor masked_target, Tensor logits)",
    cann="aclnnFusedLinearOnlineMaxSum",
    limits=_limits_of_max_sum,
    chips=_CHIPS,
    check=_check_max_sum,
    check_values=_check_values_of_max_sum,
    formula=_max_sum,
    fake=_fake_max_sum,
)


def _check_loss(logits_max: Tensor, sum_exp_logits: Tensor, predicted_logits: Tensor, logits: Tensor | None) -> None:
    others = {"sum_exp_logits": sum_exp_logits, "predicted_logits": predicted_logits}
    check_dtype(_LOSS, [torch.float32, torch.float64], "", logits_max=logits_max)
    check_dtype(_LOSS, [logits_max.dtype], "as logits_max has", **others)
    check_floating_point(_LOSS, logits=logits)
    check_rank(_LOSS, 1, logits_max=logits_max)
    check_shape(_LOSS, logits_max.shape, "[BT]", **others)
    if logits is not None:
        check_rank(_LOSS, 2, logits=logits)
        check_shape(_LOSS, (logits_max.shape[0], logits.shape[1]), "[BT, V]", logits=logits)


def _loss(
    logits_max: Tensor, sum_exp_logits: Tensor, predicted_logits: Tensor, logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the softmax if ``logits`` is given."""
    # -log softmax(z)[target] = -(z[target] - max - log sum exp(z - max)), and predicted_logits = z[target] - max.
    loss = sum_exp_logits.log() - predicted_logits
    if logits is None:
        return loss, loss.new_empty(0)
    shifted = logits.to(loss.dtype) - logits_max.unsqueeze(1)
    return loss, shifted.exp() / sum_exp_logits.unsqueeze(1)


def _limits_of_loss(_soc: str, logits_max: Tensor, *_: object) -> str | None:
    if logits_max.dtype != torch.float32:
        return f"logits_max is {logits_max.dtype} and CANN's operator supports torch.float32"
    return None


def _fake_loss(
    logits_max: Tensor, sum_exp_logits: Tensor, predicted_logits: Tensor, logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    softmax_shape = (0,) if logits is None else logits.shape
    return logits_max.new_empty(logits_max.shape), logits_max.new_empty(softmax_shape)


fused_cross_entropy_loss_with_max_sum = RawOperator(
    "fused_cross_entropy_loss_with_max_sum(Tensor logits_max, Tensor sum_exp_logits, Tensor predicted_logits,"
    " Tensor? logits=None) -> (Tensor loss, Tensor softmax)",
    cann="aclnnFusedCrossEntropyLossWithMaxSum",
    limits=_limits_of_loss,
    chips=("Ascend910B", "Ascend910_93", "Ascend950"),
    check=_check_loss,
    formula=_loss,
    fake=_fake_loss,
)


def _check_grad(
    grad: Tensor, input: Tensor, weight: Tensor, target_mask: Tensor, masked_target: Tensor, *reduced: Tensor | None
) -> None:
    statistics = dict(zip(("logits_max", "sum_exp_logits", "softmax"), reduced, strict=True))
    softmax = statistics.pop("softmax")
    if softmax is not None:
        statistics = {"softmax": softmax}
    for name, tensor in statistics.items():
        if tensor is None:
            raise ValueError(f"{_GRAD}: {name} must be given when softmax is None, but it is None")
    check_floating_point(_GRAD, input=input)
    wide = accumulation_dtype(input.dtype)
    check_dtype(_GRAD, [wide], f"for an input of {input.dtype}", grad=grad, **statistics)
    check_dtype(_GRAD, [input.dtype], "as input has", weight=weight)
    check_dtype(_GRAD, [torch.uint8, torch.bool], "", target_mask=target_mask)
    check_dtype(_GRAD, [torch.int64, torch.int32], "", masked_target=masked_target)
    check_rank(_GRAD, 1, grad=grad, target_mask=target_mask)
    check_rank(_GRAD, 2, input=input, weight=weight)
    rows, classes = grad.shape[0], weight.shape[0]
    check_shape(_GRAD, (rows, input.shape[1]), "[BT, H]", input=input)
    check_shape(_GRAD, (classes, input.shape[1]), "[V, H]", weight=weight)
    if target_mask.dtype == torch.bool:
        check_shape(_GRAD, (rows,), "[BT]", target_mask=target_mask)
    elif target_mask.shape[0] * 8 < rows:
        raise ValueError(
            f"{_GRAD}: target_mask must have at least {(rows + 7) // 8} bytes for {rows} rows,"
            f" but its shape is {list(target_mask.shape)}"
        )
    check_shape(_GRAD, (rows,), "[BT]", masked_target=masked_target)
    shape, meaning = ((rows,), "[BT]") if softmax is None else ((rows, classes), "[BT, V]")
    check_shape(_GRAD, shape, meaning, **statistics)
    if softmax is not None:
        check_in_place(_GRAD, {"softmax": softmax}, grad=grad, input=input, weight=weight)


def _check_values_of_grad(
    _grad: Tensor, _input: Tensor, weight: Tensor, target_mask: Tensor, masked_target: Tensor, *_: object
) -> None:
    # The kernel would read out of bounds for such a target.
    if not values_are_readable(masked_target):
        return
    used = masked_target[~unpack_mask(target_mask, masked_target.shape[0])]
    outside = used[(used < 0) | (used >= weight.shape[0])]
    if outside.numel() > 0:
        raise IndexError(
            f"{_GRAD}: masked_target must be from 0 to {weight.shape[0] - 1} (rows of weight - 1) where target_mask is"
            f" 0, but one is {int(outside[0])}"
        )


def _grad(
    grad: Tensor, input: Tensor, weight: Tensor, target_mask: Tensor, masked_target: Tensor, *reduced: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of input and weight; a given softmax is overwritten by the gradient of the logits."""
    wide_input, wide_weight = widen(input), widen(weight)
    masked = unpack_mask(target_mask, grad.shape[0])
    grad_logits = _grad_logits(wide_input, wide_weight, grad, masked, masked_target, reduced)
    return (grad_logits @ wide_weight).to(input.dtype), (grad_logits.T @ wide_input).to(weight.dtype)


def _grad_logits(
    input: Tensor, weight: Tensor, grad: Tensor, masked: Tensor, masked_target: Tensor, reduced: Sequence[Tensor | None]
) -> Tensor:
    """Return the gradient of the logits, ``grad * (softmax - onehot)``, computed in place in a given softmax."""
    logits_max, sum_exp_logits, softmax = reduced
    if softmax is None:
        assert logits_max is not None and sum_exp_logits is not None  # guaranteed by _check_grad
        softmax = (input @ weight.T).sub_(logits_max.unsqueeze(1)).exp_().div_(sum_exp_logits.unsqueeze(1))
    column = masked_target.masked_fill(masked, 0).long().unsqueeze(1)
    # Not masked.to(softmax.dtype), because torch_npu casts to float32 instead of float64.
    softmax.scatter_add_(1, column, softmax.new_full(column.shape, -1).masked_fill(masked.unsqueeze(1), 0))
    return softmax.mul_(grad.unsqueeze(1))


def _limits_of_grad(_soc: str, _grad: Tensor, input: Tensor, weight: Tensor, *others: Any) -> str | None:
    reason, softmax = _linear_limits(input, weight), others[-1]
    if reason is None and softmax is not None and any(map(int.__gt__, (input.shape[0], weight.shape[0]), _MAX_SOFTMAX)):
        return f"softmax has shape {list(softmax.shape)} and CANN's operator supports at most {list(_MAX_SOFTMAX)}"
    return reason


def _fake_grad(_grad: Tensor, input: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), weight.new_empty(weight.shape)


fused_linear_cross_entropy_loss_grad = RawOperator(
    "fused_linear_cross_entropy_loss_grad(Tensor grad, Tensor input, Tensor weight, Tensor target_mask,"
    " Tensor masked_target, Tensor? logits_max=None, Tensor? sum_exp_logits=None, Tensor(a!)? softmax=None)"
    " -> (Tensor input_grad, Tensor weight_grad)",
    cann="aclnnFusedLinearCrossEntropyLossGrad",
    limits=_limits_of_grad,
    chips=_CHIPS,
    check=_check_grad,
    check_values=_check_values_of_grad,
    formula=_grad,
    fake=_fake_grad,
)
