"""``mse_loss_backward``: the gradient of the squared error (aclnnMseLossBackward)."""

from torch_aclnn_ops._autograd.raw_operator import RawOperator
from torch_aclnn_ops._checks import broadcast_shape, check_dtype, check_floating_point, check_reduction, why_not_dtype
from torch_aclnn_ops._tensors import HALF_DTYPES, widen

import torch
from torch import Tensor

_NAME = "mse_loss_backward"


def _check(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> None:
    check_floating_point(_NAME, self=self)
    check_dtype(_NAME, [self.dtype], "as self has", grad_output=grad_output, target=target)
    check_reduction(_NAME, reduction)
    broadcast_shape(_NAME, grad_output=grad_output, self=self, target=target)


def formula(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Differentiate ``(self - target)**2`` with respect to ``self``."""
    # The mean is over the elements of self, not of the broadcast shape.
    factor = 2.0 / max(self.numel(), 1) if reduction == 1 else 2.0
    return ((widen(self) - widen(target)) * factor * widen(grad_output)).to(self.dtype)


def _fake(grad_output: Tensor, self: Tensor, target: Tensor, *_: object) -> Tensor:
    # The broadcast shape may be larger than self's.
    return self.new_empty(torch.broadcast_shapes(grad_output.shape, self.shape, target.shape))


def _cpu(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    is_one_shape = target.shape == self.shape and (not grad_output.dim() or grad_output.shape == self.shape)
    if self.dtype in HALF_DTYPES or not is_one_shape:
        # In 16 bits the native kernel also rounds 2 / n; its output has self's shape.
        return formula(grad_output, self, target, reduction)
    gradient: Tensor = torch.ops.aten.mse_loss_backward.default(grad_output, self, target, reduction)
    return gradient.contiguous()


def _limits(soc: str, grad_output: Tensor, self: Tensor, target: Tensor, *_: object) -> str | None:
    return why_not_dtype(soc, ("grad_output", "self", "target"), grad_output, self, target)


mse_loss_backward = RawOperator(
    "mse_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction) -> Tensor",
    cann="aclnnMseLossBackward",
    limits=_limits,
    check=_check,
    formula=formula,
    fake=_fake,
    cpu=_cpu,
)
