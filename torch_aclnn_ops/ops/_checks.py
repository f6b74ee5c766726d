"""Argument checks that the operators share; each names the operator, the argument, what it was and what is accepted."""

from collections.abc import Sequence
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops._torch_compat import Buffer, get_proxy_mode, is_functorch_wrapped_tensor

import torch
from torch import Tensor
from torch.nn import Parameter

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def check_device(operator: str, names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Accept tensors that are all on the device of the first argument."""
    device = arguments[0].device
    for i, value in enumerate(arguments):
        if isinstance(value, Tensor) and value.device != device:
            raise RuntimeError(
                f"{operator}: {names[i]} must be on {device}, as {names[0]} is, but it is on {value.device}"
            )


def check_reduction(operator: str, reduction: int) -> None:
    """Accept 0, 1 and 2, the values of ``at::Reduction``."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{operator}: reduction must be 0 (none), 1 (mean) or 2 (sum), but it is {reduction}")


def check_floating_point(operator: str, **tensors: Tensor | None) -> None:
    """Accept real floating-point tensors and ``None``."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{operator}: {name} must have a floating-point dtype, but it has {tensor.dtype}")


def check_dtype(operator: str, dtypes: Sequence[torch.dtype], reason: str, **tensors: Tensor | None) -> None:
    """Accept tensors whose dtype is one of ``dtypes``; ``reason`` ends the sentence, for instance ``"as self"``."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in dtypes:
            accepted = " or ".join(str(dtype) for dtype in dtypes)
            clause = f" {reason}" if reason else ""
            raise TypeError(f"{operator}: {name} must have dtype {accepted}{clause}, but it has {tensor.dtype}")


def check_rank(operator: str, rank: int, **tensors: Tensor | None) -> None:
    """Accept tensors with exactly ``rank`` dimensions."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() != rank:
            raise ValueError(f"{operator}: {name} must have {rank} dimensions, but its shape is {list(tensor.shape)}")


def check_shape(operator: str, shape: Sequence[int], meaning: str, **tensors: Tensor | None) -> None:
    """Accept tensors of one shape; ``meaning`` spells the shape in words, for instance ``"[BT]"``."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{operator}: {name} must have shape {meaning} = {list(shape)}, but its shape is {list(tensor.shape)}"
            )


def check_expandable(operator: str, shape: Sequence[int], meaning: str, **tensors: Tensor | None) -> None:
    """Accept tensors that broadcast to ``shape`` without making it larger."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        offset = len(shape) - tensor.dim()
        if offset < 0 or any(size not in (1, shape[offset + i]) for i, size in enumerate(tensor.shape)):
            raise ValueError(
                f"{operator}: {name} must broadcast to {meaning} {list(shape)}, but its shape is {list(tensor.shape)}"
            )


def broadcast_shape(operator: str, **tensors: Tensor) -> torch.Size:
    """Return the shape that the tensors broadcast to, or raise with all their shapes."""
    shapes = [tensor.shape for tensor in tensors.values() if tensor.dim()]
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0] if shapes else torch.Size()
    try:
        shape: torch.Size = torch.broadcast_shapes(*(tensor.shape for tensor in tensors.values()))
        return shape
    except RuntimeError:
        given = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{operator}: the shapes must broadcast together, but they are {given}") from None


def values_are_readable(tensor: Tensor) -> bool:
    """Return whether a check may look at the values: it would wait for a device, and traced values do not exist yet."""
    return (
        (tensor.is_cpu or _extension.checks_values())
        and type(tensor) in (Tensor, Parameter, Buffer)
        and not torch.compiler.is_compiling()
        and not is_functorch_wrapped_tensor(tensor)
        and get_proxy_mode() is None
    )
