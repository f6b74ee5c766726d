"""Which tensors share memory."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def first_overlap(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the indices of two tensors whose memory overlaps, or ``None``."""
    for cluster in _clusters(tensors):
        second = _first_overlapping(cluster, tensors)
        if second is not None:
            earlier = cluster[: cluster.index(second)]
            return next((i, second) for i in earlier if _first_overlapping([i, second], tensors) is not None)
    return None


def _clusters(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield groups of indices of tensors whose address ranges overlap."""
    by_device = defaultdict(list)
    for i, tensor in enumerate(tensors):
        # Not by their storages, several of which may share memory, through DLPack.
        by_device[tensor.device].append((tensor.data_ptr(), i))
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


def _first_overlapping(cluster: Sequence[int], tensors: Sequence[Tensor]) -> int | None:
    """Return the first member of a cluster that overlaps with an earlier one, or ``None``."""
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
        place.fill_(True)
    return None


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor share memory."""
    if tensor.numel() == 0:
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
