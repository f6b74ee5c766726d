"""The calls that are left to PyTorch's function of the same name."""

from collections.abc import Collection, Sequence

from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops._torch_compat import public
from torch_aclnn_ops._torch_compat.public import Buffer, LinearCrossEntropyOptions
from torch_aclnn_ops.functional._drop_in import (
    call_torch_function,
    lower_precision_autocast_dtype,
    overrides_torch,
    why_left_to_torch,
)
from torch_aclnn_ops.functional.linear_cross_entropy.rules import check_arguments, tensors_of
from torch_aclnn_ops.ops.linear_cross_entropy.call import NAME, Call

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


def to_loss_dtype(input: Tensor, weight: Tensor) -> Tensor:
    """Cast weights of classes or rows to the dtype in which losses are computed."""
    return weight.to(accumulation_dtype(lower_precision_autocast_dtype(input)))


def is_left_to_torch(call: Call) -> bool:
    """Return whether PyTorch's function takes a call: tensor subclasses, sparse tensors, heads with more dimensions."""
    for tensor in tensors_of(call):
        if type(tensor) not in _TENSOR_TYPES and _overrides(tensor):
            return True
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            return True
    return isinstance(call.linear_weight, Tensor) and call.linear_weight.dim() > 2


def _overrides(value: object) -> bool:
    return overrides_torch(value) if isinstance(value, Tensor) else hasattr(type(value), "__torch_function__")


def leave_to_torch(call: Call, torch_options: "LinearCrossEntropyOptions | None", own: Collection[str]) -> Tensor:
    """Return the result of PyTorch's function, or of ``linear`` and ``cross_entropy`` if it does not exist.

    Args:
        call: Its arguments; batches of sequences, which it does not take, are flattened.
        torch_options: Its ``options``.
        own: The names of given options that it lacks; it cannot compute them.
    """
    for name in own:
        raise TypeError(
            f"{NAME}: {name} must not be given with arguments that are left to torch's function: tensor subclasses,"
            " sparse tensors and heads of shape (C, d_1, ..., d_K, H)"
        )
    shape = call.input.shape[:-1] if isinstance(call.input, Tensor) else ()
    if len(shape) > 1:
        check_arguments(call)
        target = call.target.flatten(0, len(shape) - 1)
        call = call._replace(input=call.input.flatten(0, -2), target=target)
    loss = _call_torch(call, torch_options)
    return loss.reshape(shape) if len(shape) > 1 and loss.dim() > 0 else loss


def _call_torch(call: Call, torch_options: "LinearCrossEntropyOptions | None") -> Tensor:
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
    log_call(NAME, Implementation.TORCH, why_left_to_torch)
    head = linear_weight.reshape(-1, linear_weight.shape[-1])
    logits = torch.nn.functional.linear(input, head, None if linear_bias is None else linear_bias.reshape(-1))
    return torch.nn.functional.cross_entropy(
        logits.reshape(*input.shape[:-1], *linear_weight.shape[:-1]),
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=call.ignored_class(),
        label_smoothing=label_smoothing,
    )
