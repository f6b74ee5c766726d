"""Calls of linear_cross_entropy that are torch's, for their result or their error."""

from torch_aclnn_ops import _torch_compat

import torch
from torch import Tensor


def left_to_torch(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
) -> Tensor:
    """Call torch's function of the same name, or the two functions that it stands for where torch has none."""
    if _torch_compat.linear_cross_entropy is not None:
        return _torch_compat.linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    _check_shapes(input, linear_weight, linear_bias)
    shape = (*input.shape[:-1], *linear_weight.shape[:-1])
    if target.shape == shape and ignore_index is not None:
        raise RuntimeError(
            f"linear_cross_entropy: ignore_index must be None with probabilities as target, but it is {ignore_index}"
        )
    head = linear_weight.reshape(-1, linear_weight.shape[-1])
    logits = torch.nn.functional.linear(input, head, None if linear_bias is None else linear_bias.reshape(-1))
    return torch.nn.functional.cross_entropy(
        logits.reshape(shape),
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
    )


def _check_shapes(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    """Refuse shapes that ``linear`` or ``cross_entropy`` would take for something else."""
    if input.dim() not in (1, 2):
        raise RuntimeError(
            f"linear_cross_entropy: input must have shape (H,) or (N, H), but its shape is {list(input.shape)}"
        )
    if linear_weight.dim() < 2 or linear_weight.shape[-1] != input.shape[-1]:
        raise RuntimeError(
            f"linear_cross_entropy: linear_weight must have shape (C, H) or (C, d_1, ..., d_K, H) with H ="
            f" {input.shape[-1]}, as input has, but its shape is {list(linear_weight.shape)}"
        )
    if linear_weight.dim() > 2 and input.dim() != 2:
        raise RuntimeError(
            "linear_cross_entropy: input must have shape (N, H) with a linear_weight of shape"
            f" {list(linear_weight.shape)}, but its shape is {list(input.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        raise RuntimeError(
            f"linear_cross_entropy: linear_bias must have shape {list(linear_weight.shape[:-1])}, as linear_weight has"
            f" without H, but its shape is {list(linear_bias.shape)}"
        )
