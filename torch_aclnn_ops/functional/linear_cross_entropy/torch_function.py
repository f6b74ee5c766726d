"""The arguments of PyTorch's function of the same name: which are left to it, and the call of that function."""

from collections.abc import Sequence

from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops._torch_compat import public
from torch_aclnn_ops._torch_compat.public import Buffer, LinearCrossEntropyOptions
from torch_aclnn_ops.functional._drop_in import (
    call_torch_function,
    float32_autocast_dtype,
    lower_precision_autocast_dtype,
    overrides_torch,
    why_left_to_torch,
)
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call

import torch
from torch import Tensor
from torch.nn import Parameter

_TENSOR_TYPES = (Tensor, Parameter, Buffer, type(None))


def any_subclass(tensors: Sequence[object]) -> bool:
    """Return whether an argument is neither None nor a tensor, or is of a subclass of tensors."""
    for tensor in tensors:  # faster than any()
        if type(tensor) not in _TENSOR_TYPES:
            return True
    return False


def tensors_of(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the tensors that PyTorch's function takes, in the order in which it checks them."""
    return call.input, call.linear_weight, call.target, call.linear_bias, call.weight


def to_loss_dtype(input: Tensor, weight: Tensor) -> Tensor:
    """Cast weights of classes or rows to the dtype in which losses are computed."""
    return weight.to(accumulation_dtype(lower_precision_autocast_dtype(input)))


def is_left_to_torch(call: Call) -> bool:
    """Return whether PyTorch's function takes a call.

    Left to it are tensor subclasses, sparse tensors, a head of no positions, one row with a target of shape (1,), and
    probabilities with class weights of another dtype, to which it promotes. What is no tensor is not: the rules say
    what is accepted.
    """
    are_tensors = True
    for tensor in tensors_of(call):
        if type(tensor) not in _TENSOR_TYPES and _overrides(tensor):
            return True
        if isinstance(tensor, Tensor):
            if tensor.layout is not torch.strided:
                return True
        elif tensor is not None:
            are_tensors = False
    input, head, _, target, weight, *_ = call
    if not are_tensors or input is None or head is None or target is None:
        return False
    if head.dim() > 2 and 0 in head.shape[1:-1]:
        return True
    if target.is_floating_point():
        is_promoted = weight is not None and not has_loss_dtype(weight, input)
        return is_promoted and target.dim() == input.dim() + head.dim() - 2
    return input.dim() == 1 and target.shape == (1,)


def _overrides(value: object) -> bool:
    return overrides_torch(value) if isinstance(value, Tensor) else hasattr(type(value), "__torch_function__")


def has_loss_dtype(weight: Tensor, input: Tensor) -> bool:
    """Return whether a class weight has the dtype of the logits or of the loss, or is cast to it by autocast."""
    in_autocast = float32_autocast_dtype(input) != lower_precision_autocast_dtype(input)
    if in_autocast:
        return float32_autocast_dtype(weight) == torch.float32
    return weight.dtype in (input.dtype, accumulation_dtype(input.dtype))


def class_weight_dtypes(input: Tensor) -> str:
    """Return the dtypes that a class weight may have, for an error message."""
    return " or ".join(map(str, dict.fromkeys((input.dtype, accumulation_dtype(input.dtype)))))


def call_torch(call: Call, torch_options: "LinearCrossEntropyOptions | None" = None) -> Tensor:
    """Call PyTorch's function of the same name, or ``linear`` and ``cross_entropy`` if it does not exist."""
    input, linear_weight, linear_bias, target, weight, _, reduction, ignore_index, label_smoothing, *_ = call
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
    head = linear_weight.reshape(-1, linear_weight.shape[-1])
    logits = torch.nn.functional.linear(input, head, None if linear_bias is None else linear_bias.reshape(-1))
    return torch.nn.functional.cross_entropy(
        logits.reshape(*input.shape[:-1], *linear_weight.shape[:-1]),
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
    )


def flatten_rows(call: Call) -> Call:
    """Return the rows of a batch of sequences, which PyTorch's function does not take."""
    input, target = call.input, call.target
    return call._replace(input=input.flatten(0, -2), target=target.flatten(0, input.dim() - 2))
