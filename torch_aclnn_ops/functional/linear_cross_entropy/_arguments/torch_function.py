"""The arguments of PyTorch's function of the same name: which are supported, and the call of that function."""

from numbers import Real
from typing import NamedTuple

from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops._torch_compat import public
from torch_aclnn_ops._torch_compat.public import Buffer, LinearCrossEntropyOptions
from torch_aclnn_ops.functional._drop_in import (
    call_torch_function,
    float32_autocast_dtype,
    is_ordinary,
    lower_precision_autocast_dtype,
    on_one_device,
    overrides_torch,
    why_left_to_torch,
)

import torch
from torch import Tensor
from torch.nn import Parameter

REDUCTIONS = ("none", "mean", "sum")
_PLAIN_TYPES = (Tensor, Parameter, Buffer, type(None))


class TorchArguments(NamedTuple):
    """The arguments of PyTorch's function, except for ``options``."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    weight: Tensor | None
    reduction: str
    ignore_index: int | None
    label_smoothing: float


def are_plain(*tensors: object) -> bool:
    """Return whether no argument is an instance of a tensor subclass."""
    for tensor in tensors:  # faster than all()
        if type(tensor) not in _PLAIN_TYPES:
            return False
    return True


def to_loss_dtype(input: Tensor, weight: Tensor) -> Tensor:
    """Cast weights of classes or rows to the dtype in which losses are computed."""
    return weight.to(accumulation_dtype(lower_precision_autocast_dtype(input)))


def is_supported(given: TorchArguments, classes: int | None = None) -> bool:
    """Return whether the arguments are supported; PyTorch raises the errors for invalid ones.

    In addition to PyTorch's shapes, the input may have shape (B, T, H), and the head may be a shard of ``classes``.
    """
    input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing = given
    if not _are_supported_tensors(input, linear_weight, target, linear_bias, weight):
        return False
    shape, head_shape = input.shape, linear_weight.shape
    if len(shape) == 0 or len(head_shape) < 2 or shape[-1] != head_shape[-1]:
        return False
    classes = head_shape[0] if classes is None else classes
    positions = head_shape[1:-1]
    if classes == 0 or 0 in positions or (positions and len(shape) != 2):
        return False
    if linear_bias is not None and linear_bias.shape != head_shape[:-1]:
        return False
    if weight is not None and weight.shape != (classes,):
        return False
    if (
        not isinstance(reduction, str)
        or reduction not in REDUCTIONS
        or not isinstance(label_smoothing, Real)
        or not 0 <= label_smoothing <= 1
    ):
        return False
    if ignore_index is not None and not isinstance(ignore_index, int):
        return False
    if weight is not None and not has_loss_dtype(weight, input):
        return False
    if target.shape == (*shape[:-1], classes, *positions):
        return target.is_floating_point() and ignore_index is None
    if weight is not None and weight.requires_grad:
        return False
    return target.shape == (*shape[:-1], *positions) and target.dtype in (torch.int64, torch.uint8)


def _are_supported_tensors(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None
) -> bool:
    """Return whether layouts, devices and dtypes are supported and match."""
    if not isinstance(target, Tensor):
        return False
    plain = are_plain(input, linear_weight, target, linear_bias, weight)
    # The most frequent call, for speed.
    if plain and input is not None and linear_weight is not None and linear_bias is None and weight is None:
        dtype, device = input.dtype, input.device
        if dtype is torch.float32 and linear_weight.dtype is dtype and input.layout is linear_weight.layout:
            if linear_weight.device == device and target.device == device and input.layout is torch.strided:
                return True
    products = [input, linear_weight] if linear_bias is None else [input, linear_weight, linear_bias]
    given = products if weight is None else [*products, weight]
    if not plain and (overrides_torch(target) or not is_ordinary(*given)):
        return False
    for tensor in given:
        if tensor is None or not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return False
    if any([tensor.device != target.device for tensor in given]):
        tensors = {"input": input, "linear_weight": linear_weight, "target": target, "linear_bias": linear_bias}
        return on_one_device("linear_cross_entropy", **tensors, weight=weight)
    if all([tensor.dtype == input.dtype for tensor in products]):
        return True
    return len(set(map(lower_precision_autocast_dtype, products))) == 1


def has_loss_dtype(weight: Tensor, input: Tensor) -> bool:
    """Return whether a class weight has the dtype of the logits or of the loss, or is cast to it by autocast."""
    in_autocast = float32_autocast_dtype(input) != lower_precision_autocast_dtype(input)
    if in_autocast:
        return float32_autocast_dtype(weight) == torch.float32
    return weight.dtype in (input.dtype, accumulation_dtype(input.dtype))


def class_weight_dtypes(input: Tensor) -> str:
    """Return the dtypes that a class weight may have, for an error message."""
    return " or ".join(map(str, dict.fromkeys((input.dtype, accumulation_dtype(input.dtype)))))


def call_torch(given: TorchArguments, torch_options: "LinearCrossEntropyOptions | None" = None) -> Tensor:
    """Call PyTorch's function of the same name, or ``linear`` and ``cross_entropy`` if it does not exist."""
    input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing = given
    if public.linear_cross_entropy is not None:
        return call_torch_function(
            public.linear_cross_entropy,
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            options=torch_options,
        )
    log_call("linear_cross_entropy", Implementation.TORCH, why_left_to_torch)
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
    """Raise for shapes that ``linear`` or ``cross_entropy`` would interpret differently."""
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
