"""Shared argument checks; each error names the operator, the argument, its value and what is accepted."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops._torch_compat.derivatives import is_functorch_wrapped_tensor
from torch_aclnn_ops._torch_compat.public import Buffer, get_proxy_mode, in_jit_trace

import torch
from torch import Tensor
from torch.nn import Parameter


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
    tensors = {**written, **read}
    memory = {name: _memory_of(tensor) for name, tensor in tensors.items()}
    for i, (name, tensor) in enumerate(tensors.items()):
        if name not in written:
            return
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{operator}: {name} must not be an inference tensor outside of torch.inference_mode, because it is"
                " written to"
            )
        if not memory[name]:
            continue
        if not _is_nested(tensor) and int(_count_elements(tensor, memory[name]).max()) > 1:
            raise RuntimeError(
                f"{operator}: {name} must not have internal overlap, because it is written to, but it has"
                f" shape {list(tensor.shape)} and strides {list(tensor.stride())}"
            )
        for other in list(tensors)[i + 1 :]:
            if _share_memory(tensor, memory[name], tensors[other], memory[other]):
                raise RuntimeError(
                    f"{operator}: {name} and {other} must not share memory, because {name} is written to"
                )


def _memory_of(tensor: Tensor) -> range:
    """Return the range of addresses that a tensor spans."""
    if tensor.numel() == 0 or not _is_real(tensor):
        return range(0)
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (extent + 1) * tensor.element_size())


def _is_nested(tensor: Tensor) -> bool:
    """Return whether each stride exceeds the extent of the smaller ones, which rules out internal overlap."""
    extent = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= extent:
                return False
            extent += (size - 1) * stride
    return True


def _share_memory(first: Tensor, first_memory: range, second: Tensor, second_memory: range) -> bool:
    start = max(first_memory.start, second_memory.start)
    stop = min(first_memory.stop, second_memory.stop)
    if start >= stop:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    # Non-contiguous views may interleave without overlap.
    both = range(min(first_memory.start, second_memory.start), max(first_memory.stop, second_memory.stop))
    counts = (_count_elements(tensor, both).clamp(max=1) for tensor in (first, second))
    return int(torch.stack(list(counts)).sum(0).max()) > 1


def _count_elements(tensor: Tensor, memory: range) -> Tensor:
    """Return, for each byte of a memory range, how many elements of the tensor contain it."""
    counts = torch.zeros(len(memory), dtype=torch.int32, device="cpu")
    size = tensor.element_size()
    places = torch.arange(len(memory), device="cpu").as_strided(
        (*tensor.shape, size),
        (*(stride * size for stride in tensor.stride()), 1),
        tensor.data_ptr() - memory.start,
    )
    places = places.reshape(-1)
    return counts.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))


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
