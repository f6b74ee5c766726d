"""``fused_linear_cross_entropy_loss_grad``: gradients of a shard (aclnnFusedLinearCrossEntropyLossGrad)."""

from collections.abc import Sequence
from typing import Any

from torch_aclnn_ops._autograd.raw_operator import RawOperator
from torch_aclnn_ops._checks import check_dtype, check_floating_point, check_rank, check_shape, values_are_readable
from torch_aclnn_ops._tensors import accumulation_dtype, widen
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import CHIPS, linear_limits, unpack_mask

import torch
from torch import Tensor

_NAME = "fused_linear_cross_entropy_loss_grad"

# Maximum rows and classes of the kernel variant with a softmax argument.
_MAX_SOFTMAX = (65535, 24560)


def _check(
    grad: Tensor, input: Tensor, weight: Tensor, target_mask: Tensor, masked_target: Tensor, *reduced: Tensor | None
) -> None:
    statistics = dict(zip(("logits_max", "sum_exp_logits", "softmax"), reduced, strict=True))
    softmax = statistics.pop("softmax")
    if softmax is not None:
        statistics = {"softmax": softmax}
    for name, tensor in statistics.items():
        if tensor is None:
            raise ValueError(f"{_NAME}: {name} must be given when softmax is None, but it is None")
    check_floating_point(_NAME, input=input)
    wide = accumulation_dtype(input.dtype)
    check_dtype(_NAME, [wide], f"for an input of {input.dtype}", grad=grad, **statistics)
    check_dtype(_NAME, [input.dtype], "as input has", weight=weight)
    check_dtype(_NAME, [torch.uint8, torch.bool], "", target_mask=target_mask)
    check_dtype(_NAME, [torch.int64, torch.int32], "", masked_target=masked_target)
    check_rank(_NAME, 1, grad=grad, target_mask=target_mask)
    check_rank(_NAME, 2, input=input, weight=weight)
    rows, classes = grad.shape[0], weight.shape[0]
    check_shape(_NAME, (rows, input.shape[1]), "[BT, H]", input=input)
    check_shape(_NAME, (classes, input.shape[1]), "[V, H]", weight=weight)
    if target_mask.dtype == torch.bool:
        check_shape(_NAME, (rows,), "[BT]", target_mask=target_mask)
    elif target_mask.shape[0] * 8 < rows:
        raise ValueError(
            f"{_NAME}: target_mask must have at least {(rows + 7) // 8} bytes for {rows} rows,"
            f" but its shape is {list(target_mask.shape)}"
        )
    check_shape(_NAME, (rows,), "[BT]", masked_target=masked_target)
    shape, meaning = ((rows,), "[BT]") if softmax is None else ((rows, classes), "[BT, V]")
    check_shape(_NAME, shape, meaning, **statistics)


def _check_values(
    _grad: Tensor, _input: Tensor, weight: Tensor, target_mask: Tensor, masked_target: Tensor, *_: object
) -> None:
    # The kernel would read out of bounds for such a target.
    if not values_are_readable(masked_target):
        return
    used = masked_target[~unpack_mask(target_mask, masked_target.shape[0])]
    outside = used[(used < 0) | (used >= weight.shape[0])]
    if outside.numel() > 0:
        raise IndexError(
            f"{_NAME}: masked_target must be from 0 to {weight.shape[0] - 1} (rows of weight - 1) where target_mask is"
            f" 0, but one is {int(outside[0])}"
        )


def formula(
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
        assert logits_max is not None and sum_exp_logits is not None  # guaranteed by _check
        softmax = (input @ weight.T).sub_(logits_max.unsqueeze(1)).exp_().div_(sum_exp_logits.unsqueeze(1))
    column = masked_target.masked_fill(masked, 0).long().unsqueeze(1)
    # Not masked.to(softmax.dtype), because torch_npu casts to float32 instead of float64.
    softmax.scatter_add_(1, column, softmax.new_full(column.shape, -1).masked_fill(masked.unsqueeze(1), 0))
    return softmax.mul_(grad.unsqueeze(1))


def _limits(soc: str, _grad: Tensor, input: Tensor, weight: Tensor, *others: Any) -> str | None:
    reason, softmax = linear_limits(soc, input, weight), others[-1]
    if reason is None and softmax is not None and any(map(int.__gt__, (input.shape[0], weight.shape[0]), _MAX_SOFTMAX)):
        return f"softmax has shape {list(softmax.shape)} and CANN's operator supports at most {list(_MAX_SOFTMAX)}"
    return reason


def _fake(_grad: Tensor, input: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), weight.new_empty(weight.shape)


fused_linear_cross_entropy_loss_grad = RawOperator(
    "fused_linear_cross_entropy_loss_grad(Tensor grad, Tensor input, Tensor weight, Tensor target_mask,"
    " Tensor masked_target, Tensor? logits_max=None, Tensor? sum_exp_logits=None, Tensor(a!)? softmax=None)"
    " -> (Tensor input_grad, Tensor weight_grad)",
    cann="aclnnFusedLinearCrossEntropyLossGrad",
    limits=_limits,
    chips=CHIPS,
    check=_check,
    check_values=_check_values,
    formula=formula,
    fake=_fake,
)
