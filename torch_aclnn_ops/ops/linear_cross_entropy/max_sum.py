"""``fused_linear_online_max_sum``: reduce a shard's logits (aclnnFusedLinearOnlineMaxSum)."""

from torch_aclnn_ops._autograd.raw_operator import RawOperator
from torch_aclnn_ops._checks import check_dtype, check_floating_point, check_rank, check_shape, values_are_readable
from torch_aclnn_ops._tensors import accumulation_dtype, widen

import torch
from torch import Tensor

_NAME = "fused_linear_online_max_sum"

# Limits of the kernels; CANN's phase one does not check all of them.
CHIPS = ("Ascend910B", "Ascend910_93")
_MIN_CLASSES = 128
_MAX_FEATURES = 65534
_MAX_CLASSES = 2**24  # targets are compared in float32


def linear_limits(_soc: str, input: Tensor, weight: Tensor, *_: object) -> str | None:
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


def _limits(soc: str, input: Tensor, weight: Tensor, *others: object) -> str | None:
    return linear_limits(soc, input, weight) or why_not_classes(weight.shape[0])


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


def _check(
    input: Tensor, weight: Tensor, target: Tensor, vocab_start_index: int, vocab_end_index: int, *_: object
) -> None:
    check_floating_point(_NAME, input=input)
    check_dtype(_NAME, [input.dtype], "as input has", weight=weight)
    check_dtype(_NAME, [torch.int64, torch.int32], "", target=target)
    check_rank(_NAME, 2, input=input, weight=weight)
    if weight.shape[0] == 0:
        raise ValueError(f"{_NAME}: weight must have at least 1 row, but its shape is {list(weight.shape)}")
    check_shape(_NAME, (weight.shape[0], input.shape[1]), "[V, H]", weight=weight)
    check_shape(_NAME, (input.shape[0],), "[BT]", target=target)
    if vocab_start_index < 0:
        raise ValueError(f"{_NAME}: vocab_start_index must be at least 0, but it is {vocab_start_index}")
    if vocab_end_index < vocab_start_index:
        raise ValueError(
            f"{_NAME}: vocab_end_index must be at least vocab_start_index = {vocab_start_index},"
            f" but it is {vocab_end_index}"
        )


def _check_values(
    _input: Tensor, weight: Tensor, target: Tensor, vocab_start_index: int, vocab_end_index: int, *_: object
) -> None:
    # The kernel would read out of bounds for such a target.
    end = vocab_start_index + weight.shape[0]
    if vocab_end_index <= end or not values_are_readable(target):
        return
    beyond = target[(target >= end) & (target < vocab_end_index)]
    if beyond.numel() > 0:
        raise IndexError(
            f"{_NAME}: target must not be from {end} (vocab_start_index + rows of weight) to {vocab_end_index - 1}"
            f" (vocab_end_index - 1), but one is {int(beyond[0])}"
        )


def formula(
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


def _fake(
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
    limits=_limits,
    chips=CHIPS,
    check=_check,
    check_values=_check_values,
    formula=formula,
    fake=_fake,
)
