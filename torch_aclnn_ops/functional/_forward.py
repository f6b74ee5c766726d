"""The forward of the losses: torch's own kernel, or the formula where the device's kernel does not take the tensors."""

from torch_aclnn_ops.ops._numerics import widen, without_autocast
from torch_aclnn_ops.ops._paths import why_formula_of_forward

import torch
from torch import Tensor


@without_autocast
def mse_loss_forward(input: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Compute the squared error."""
    if why_formula_of_forward("mse_loss", input=input, target=target) is None:
        loss: Tensor = torch.ops.aten.mse_loss.default(input, target, reduction)
        return loss
    return _reduce((widen(input) - widen(target)).square(), reduction).to(input.dtype)


@without_autocast  # which on some devices refuses this operator
def binary_cross_entropy_forward(input: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    """Compute the binary cross entropy, whose logarithms are not below -100, as torch bounds them."""
    if why_formula_of_forward("binary_cross_entropy", input=input, target=target, weight=weight) is None:
        loss: Tensor = torch.ops.aten.binary_cross_entropy.default(input, target, weight, reduction)
        return loss
    probability, truth = widen(input), widen(target)
    losses = -(truth * probability.log().clamp(min=-100) + (1 - truth) * (-probability).log1p().clamp(min=-100))
    if weight is not None:
        losses = losses * widen(weight)
    return _reduce(losses, reduction).to(input.dtype)


def _reduce(losses: Tensor, reduction: int) -> Tensor:
    if reduction == 0:
        return losses
    return losses.mean() if reduction == 1 else losses.sum()
