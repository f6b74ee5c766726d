"""Backward passes that scale gradients computed in the forward pass."""

from collections.abc import Sequence

from torch_aclnn_ops._autograd.derivatives import is_batched
from torch_aclnn_ops._checks import values_are_readable

from torch import Tensor
from torch.autograd import forward_ad


def scaled(made: Sequence[Tensor | None], grad_loss: Tensor) -> Sequence[Tensor | None]:
    """Multiply gradients by that of the loss: in-place, except under ``vmap`` and in forward-mode AD."""
    if is_batched(grad_loss) or forward_ad.unpack_dual(grad_loss).tangent is not None:
        return [None if gradient is None else gradient * grad_loss for gradient in made]
    if not (values_are_readable(grad_loss) and grad_loss.item() == 1):
        for gradient in made:
            if gradient is not None:
                gradient.mul_(grad_loss)
    return made
