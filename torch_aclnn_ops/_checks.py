"""The registry of drop-ins, and shared argument types and checks.

Each error names the operator, the argument, its value and what is accepted.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from types import ModuleType
from typing import Any, Literal, NoReturn, TypeVar

from torch_aclnn_ops import _extension
from torch_aclnn_ops._memory import first_overlap, overlaps_itself
from torch_aclnn_ops._torch_compat.private import is_functorch_wrapped_tensor
from torch_aclnn_ops._torch_compat.public import Buffer, get_proxy_mode, in_jit_trace

import torch
from torch import Tensor
from torch.nn import Parameter

Reduction = Literal["none", "mean", "sum"]
Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Keyed by the name of the PyTorch function.
DROP_INS: dict[str, Callable[..., Any]] = {}


def drop_in(function: _Function) -> _Function:
    """Register a function as a replacement for the function of the same name in :mod:`torch.nn.functional`."""
    DROP_INS[function.__name__] = function
    return function


def describe(value: object) -> str:
    """Describe an argument of the wrong type for an error message."""
    return repr(value) if isinstance(value, (int, float, str, type(None))) else f"of type {type(value).__name__}"


def check_choice(function: str, name: str, value: object, accepted: Sequence[str]) -> None:
    """Check that ``value`` is one of the accepted strings."""
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{function}: {name} must be one of {', '.join(map(repr, accepted))}, but it is {value!r}")


def check_bool(function: str, name: str, value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a bool, but it is {value!r}")


def check_device(operator: str, names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Raise unless all tensors are on the device of the first argument."""
    device = arguments[0].device
    for i, value in enumerate(arguments):
        if isinstance(value, Tensor) and value.device != device:
            raise RuntimeError(
                f"{operator}: {names[i]} must be on {device}, as {names[0]} is, but it is on {value.device}"
            )


def check_reduction(operator: str, reduction: int) -> None:
    """Raise unless ``reduction`` is 0, 1 or 2, the values of ``at::Reduction``."""
    if reduction not in (0, 1, 2):
        raise ValueError(f"{operator}: reduction must be 0 (none), 1 (mean) or 2 (sum), but it is {reduction}")


def check_floating_point(operator: str, **tensors: Tensor | None) -> None:
    """Raise unless each tensor is real floating point or ``None``."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{operator}: {name} must have a floating-point dtype, but it has {tensor.dtype}")


def check_dtype(operator: str, dtypes: Sequence[torch.dtype], reason: str, **tensors: Tensor | None) -> None:
    """Raise unless each tensor's dtype is in ``dtypes``; ``reason`` completes the message, e.g. ``"as self has"``."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in dtypes:
            accepted = " or ".join(str(dtype) for dtype in dtypes)
            clause = f" {reason}" if reason else ""
            raise TypeError(f"{operator}: {name} must have dtype {accepted}{clause}, but it has {tensor.dtype}")


def check_rank(operator: str, rank: int, **tensors: Tensor | None) -> None:
    """Raise unless each tensor has ``rank`` dimensions."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() != rank:
            raise ValueError(f"{operator}: {name} must have {rank} dimensions, but its shape is {list(tensor.shape)}")


def check_shape(operator: str, shape: Sequence[int], meaning: str, **tensors: Tensor | None) -> None:
    """Raise unless each tensor has ``shape``; ``meaning`` names its dimensions in the message, e.g. ``"[BT]"``."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{operator}: {name} must have shape {meaning} = {list(shape)}, but its shape is {list(tensor.shape)}"
            )


def is_expandable(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor expands to ``shape``."""
    offset = len(shape) - tensor.dim()
    return offset >= 0 and all(size in (1, shape[offset + i]) for i, size in enumerate(tensor.shape))


def check_expandable(operator: str, shape: Sequence[int], meaning: str, **tensors: Tensor | None) -> None:
    """Raise unless each tensor expands to ``shape``."""
    for name, tensor in tensors.items():
        if tensor is not None and not is_expandable(tensor, shape):
            raise ValueError(
                f"{operator}: {name} must broadcast to {meaning} {list(shape)}, but its shape is {list(tensor.shape)}"
            )


def broadcast_shape(operator: str, **tensors: Tensor) -> torch.Size:
    """Return the broadcast shape of the tensors; raise ``ValueError`` if they do not broadcast."""
    shapes = [tensor.shape for tensor in tensors.values() if tensor.dim()]
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0] if shapes else torch.Size()
    try:
        shape: torch.Size = torch.broadcast_shapes(*(tensor.shape for tensor in tensors.values()))
        return shape
    except RuntimeError:
        given = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{operator}: the shapes must broadcast together, but they are {given}") from None


def check_in_place(operator: str, written: Mapping[str, Tensor], **read: Tensor) -> None:
    """Raise if tensors that are written in place overlap internally, with each other, or with tensors that are read."""
    if not all(map(_is_real, written.values())):
        return
    for name, tensor in written.items():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{operator}: {name} must not be an inference tensor outside of torch.inference_mode, because it is"
                " written to"
            )
        if overlaps_itself(tensor):
            raise RuntimeError(
                f"{operator}: {name} must not have internal overlap, because it is written to, but it has"
                f" shape {list(tensor.shape)} and strides {list(tensor.stride())}"
            )
    tensors = {name: one for name, one in {**written, **read}.items() if _is_real(one) and one.numel() > 0}
    if first_overlap(list(tensors.values())) is None:
        return
    for name, other in combinations(tensors, 2):
        if name in written and first_overlap([tensors[name], tensors[other]]) is not None:
            raise RuntimeError(f"{operator}: {name} and {other} must not share memory, because {name} is written to")


def _is_real(tensor: Tensor) -> bool:
    """Return whether a tensor has its own memory, unlike tensors that are traced, fake or wrapped by a transform."""
    return (
        type(tensor) in (Tensor, Parameter, Buffer)
        and not torch.compiler.is_compiling()
        and not in_jit_trace()
        and not tensor.is_meta
        and not is_functorch_wrapped_tensor(tensor)
        and get_proxy_mode() is None
    )


def values_are_readable(tensor: Tensor) -> bool:
    """Return whether a check may read values: on an NPU only if checks are enabled, and never while tracing."""
    return (tensor.is_cpu or _extension.checks_values()) and _is_real(tensor)


def raise_for_missing_names(module: str, of_torch: ModuleType) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__``, whose error says where PyTorch has the name."""

    def __getattr__(name: str) -> NoReturn:
        hint = f"; use {of_torch.__name__}.{name}" if name[:1] != "_" and hasattr(of_torch, name) else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)

    return __getattr__
