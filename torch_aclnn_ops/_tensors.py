"""What every layer needs of tensors: classes, dtypes and autocast, nested structures, and memory that they share."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from torch_aclnn_ops._torch_compat.private import is_any_autocast_enabled, is_autocast_available

import torch
from torch import Tensor
from torch.nn import Parameter

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

HALF_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.float64, *HALF_DTYPES)


def is_plain(value: object) -> bool:
    """Return whether a value is a ``Tensor`` or ``Parameter``, and not of another subclass."""
    return type(value) in (Tensor, Parameter)


def is_dtensor(value: object) -> bool:
    """Return whether a value is a ``DTensor``, without importing them, which takes a second."""
    # getattr of the class, because Dynamo supports neither attributes of a DTensor nor, in torch 2.9, hasattr.
    return type(value) not in (Tensor, Parameter) and getattr(type(value), "to_local", None) is not None


def local(tensor: Any) -> Tensor:
    """Return the local shard of a ``DTensor``, or the tensor itself."""
    shard: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return shard


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype an operator computes in: float64 for float64, else float32, as on the device."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(tensor: Tensor) -> Tensor:
    """Cast to the accumulation dtype, so that 16-bit results are rounded only once, at the end."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def is_autocast_on(tensor: Tensor) -> bool:
    """Return whether autocast is enabled for a tensor's device type."""
    device_type = tensor.device.type
    return (tensor.is_cpu or is_autocast_available(device_type)) and torch.is_autocast_enabled(device_type)


def without_autocast(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function to run with autocast disabled, which would otherwise cast matrix products to 16 bits.

    The device type is that of the first tensor argument, which may be nested in a tuple.
    """

    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if is_any_autocast_enabled():
            tensor = next(arg for arg in leaves(args) if isinstance(arg, Tensor))
            if is_autocast_on(tensor):
                with torch.autocast(tensor.device.type, enabled=False):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of a nested structure with ``function`` applied to each leaf."""
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the class
        for key, one in value.items():
            copied[key] = map_nested(function, one)
        return copied
    if isinstance(value, (list, tuple)):
        mapped = [map_nested(function, one) for one in value]
        return value._make(mapped) if hasattr(value, "_make") else type(value)(mapped)
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a nested structure: whatever is not a list, tuple or dictionary."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is non-overlapping and dense, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to the end of the last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def first_overlap(tensors: Sequence[Tensor], written: int | None = None) -> tuple[int, int] | None:
    """Return the indices of two tensors whose memory overlaps, in order, or ``None``.

    Only the first ``written`` ones are written to, by default all; the others may overlap one another.
    """
    written = len(tensors) if written is None else written
    for cluster in map(sorted, _clusters(tensors)):
        second = _first_overlapping(cluster, tensors, written)
        if second is not None:
            return next((i, second) for i in cluster if _first_overlapping([i, second], tensors, written) is not None)
    return None


def _clusters(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield groups of indices of tensors whose address ranges overlap."""
    by_device = defaultdict(list)
    for i, tensor in enumerate(tensors):
        # Not by their storages, several of which may share memory, through DLPack.
        by_device[tensor.get_device()].append((tensor.data_ptr(), i))
    for members in by_device.values():
        cluster: list[int] = []
        end = 0
        for begin, i in sorted(members):
            if begin >= end:
                if len(cluster) > 1:
                    yield cluster
                cluster = []
            cluster.append(i)
            end = max(end, begin + extent(tensors[i]))
        if len(cluster) > 1:
            yield cluster


def _first_overlapping(cluster: Sequence[int], tensors: Sequence[Tensor], written: int) -> int | None:
    """Return the first member of a cluster that overlaps with an earlier one that is written to, or ``None``."""
    members = [tensors[i] for i in cluster]
    start = min(tensor.data_ptr() for tensor in members)
    end = max(tensor.data_ptr() + extent(tensor) for tensor in members)
    unit = math.gcd(*(tensor.data_ptr() - start for tensor in members), *(tensor.itemsize for tensor in members))
    is_taken = torch.zeros((end - start) // unit, dtype=torch.bool, device="cpu")
    for i, tensor in zip(cluster, members, strict=True):
        units = tensor.itemsize // unit
        sizes = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        strides = [stride * units for stride in tensor.stride()]
        place = is_taken.as_strided((*sizes, units), (*strides, 1), (tensor.data_ptr() - start) // unit)
        if place.any():
            return i
        place.fill_(i < written)
    return None


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor share memory."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                break
            reach += (size - 1) * stride
    else:
        return False  # each stride exceeds the extent of the smaller ones
    places = torch.arange(extent(tensor) // tensor.itemsize, device="cpu").as_strided(tensor.shape, tensor.stride(), 0)
    return int(places.unique().numel()) < places.numel()
