"""Shared by the backward operators of losses with arguments grad_output, self, target and reduction."""

from torch_aclnn_ops._checks import broadcast_shape, check_dtype, check_floating_point, check_reduction
from torch_aclnn_ops._limits import why_not_dtype

import torch
from torch import Tensor


def check_loss(operator: str, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> None:
    """Raise unless the tensors have the same floating-point dtype and broadcast together."""
    check_floating_point(operator, self=self)
    check_dtype(operator, [self.dtype], "as self has", grad_output=grad_output, target=target)
    check_reduction(operator, reduction)
    broadcast_shape(operator, grad_output=grad_output, self=self, target=target)


def limits(soc: str, grad_output: Tensor, self: Tensor, target: Tensor, *_: object) -> str | None:
    """Return why CANN's operator does not support these arguments, or ``None``."""
    return why_not_dtype(soc, ("grad_output", "self", "target"), grad_output, self, target)


def fake(grad_output: Tensor, self: Tensor, target: Tensor, *_: object) -> Tensor:
    """Return an uninitialized gradient of the broadcast shape, which may be larger than self's."""
    return self.new_empty(torch.broadcast_shapes(grad_output.shape, self.shape, target.shape))


def is_one_shape(grad_output: Tensor, self: Tensor, target: Tensor) -> bool:
    """Return whether PyTorch's kernel, whose output has self's shape, returns the same shape."""
    return target.shape == self.shape and (not grad_output.dim() or grad_output.shape == self.shape)
