"""``binary_cross_entropy_backward``: the gradient of the binary cross entropy (aclnnBinaryCrossEntropyBackward)."""

from torch_aclnn_ops._autograd.raw_operator import RawOperator
from torch_aclnn_ops._checks import check_expandable, check_floating_point, check_reduction, why_not_dtype
from torch_aclnn_ops._tensors import HALF_DTYPES, widen

import torch
from torch import Tensor

_NAME = "binary_cross_entropy_backward"

# Lower bound of self * (1 - self); self itself is not clamped.
_EPSILON = 1e-12


def _check(grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> None:
    check_floating_point(_NAME, self=self, grad_output=grad_output, target=target, weight=weight)
    if self.numel() > 0:
        check_expandable(_NAME, self.shape, "self's shape", target=target, weight=weight, grad_output=grad_output)
    check_reduction(_NAME, reduction)


def formula(grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    """Differentiate ``-(target * log(self) + (1 - target) * log(1 - self)) * weight`` with respect to ``self``."""
    if self.numel() == 0:
        return torch.empty_like(self)
    probability = widen(self)
    # d/dx of the loss is -(y / x) + (1 - y) / (1 - x) = (x - y) / (x * (1 - x)).
    gradient = (probability - widen(target)) / (probability * (1 - probability)).clamp(min=_EPSILON)
    if weight is not None:
        gradient = gradient * widen(weight)
    gradient = gradient * widen(grad_output)
    if reduction == 1:
        gradient = gradient / self.numel()
    return gradient.to(self.dtype)


def _limits(
    soc: str, grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, _reduction: int
) -> str | None:
    return why_not_dtype(soc, ("grad_output", "self", "target", "weight"), grad_output, self, target, weight)


def _fake(_grad_output: Tensor, self: Tensor, *_: object) -> Tensor:
    return self.new_empty(self.shape)


def _cpu(grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    are_alike = grad_output.dtype is target.dtype is self.dtype and target.shape == self.shape
    # In 16 bits the native kernel rounds the lower bound of the denominator, to 0 in float16.
    if self.dtype in HALF_DTYPES or not are_alike or (weight is not None and weight.dtype is not self.dtype):
        return formula(grad_output, self, target, weight, reduction)
    native = torch.ops.aten.binary_cross_entropy_backward.default
    gradient: Tensor = native(grad_output, self, target, weight, reduction)
    return gradient


binary_cross_entropy_backward = RawOperator(
    "binary_cross_entropy_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction)"
    " -> Tensor",
    cann="aclnnBinaryCrossEntropyBackward",
    limits=_limits,
    check=_check,
    formula=formula,
    fake=_fake,
    cpu=_cpu,
)
