"""``mse_loss_backward``: the gradient of the squared error (aclnnMseLossBackward)."""

from torch_aclnn_ops._autograd.raw_operator import RawOperator
from torch_aclnn_ops._numerics import HALF_DTYPES, widen
from torch_aclnn_ops.ops._loss_gradients import check_loss, fake, is_one_shape, limits

import torch
from torch import Tensor

_NAME = "mse_loss_backward"


def _check(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> None:
    check_loss(_NAME, grad_output, self, target, reduction)


def formula(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Differentiate ``(self - target)**2`` with respect to ``self``."""
    # The mean is over the elements of self, not of the broadcast shape.
    factor = 2.0 / max(self.numel(), 1) if reduction == 1 else 2.0
    return ((widen(self) - widen(target)) * factor * widen(grad_output)).to(self.dtype)


def _cpu(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    if self.dtype in HALF_DTYPES or not is_one_shape(grad_output, self, target):
        # In 16 bits the native kernel also rounds 2 / n.
        return formula(grad_output, self, target, reduction)
    gradient: Tensor = torch.ops.aten.mse_loss_backward.default(grad_output, self, target, reduction)
    return gradient.contiguous()


mse_loss_backward = RawOperator(
    "mse_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction) -> Tensor",
    cann="aclnnMseLossBackward",
    limits=limits,
    check=_check,
    formula=formula,
    fake=fake,
    cpu=_cpu,
)
